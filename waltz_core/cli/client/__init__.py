"""`waltz-core client`: append, read and watch transactions, and validate a log."""
