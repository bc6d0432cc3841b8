"""`waltz-core client`: append, read and watch transactions, and validate a log.

`client_command.py` has the verbs for the log, `client_check.py` those that check its guarantees.
"""
