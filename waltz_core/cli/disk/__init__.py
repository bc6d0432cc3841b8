"""`waltz-core disk`: print and verify the files of a storage that is not running.

Rules:
    1. Nothing here writes but `repair-index`.
    2. `verify` and `repair-index` need the directory to themselves, and say so when a storage runs
       on it. The others only look, and may see a log that is being written.
"""
