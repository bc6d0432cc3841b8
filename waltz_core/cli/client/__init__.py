"""`waltz-core client`: append, read, watch and export transactions, and validate a log.

`client_command.py` contains the subcommands for the log, `client_export.py` writes a log to files,
and `client_check.py` checks the log's guarantees. `follow_command.py` is `waltz-core follow`, which
applies the log to tables, and `followed_tables.py` parses the options of these tables.
`payload_columns.py` declares the columns of `export` and `follow`. `gateway_run.py` is `waltz-core
gateway run`.
"""
