"""`waltz-core client`: append, read, watch and export transactions, and validate a log.

`client_command.py` has the subcommands for the log, `client_export.py` writes it to files, and
`client_check.py` has the subcommands that check its guarantees. `follow_command.py` is `waltz-core
follow`, which keeps tables equal to the log, and `followed_tables.py` their options.
`payload_columns.py` declares the columns of `export` and `follow`. `gateway_run.py` is `waltz-core
gateway run`.
"""
