"""`waltz-core disk`: print and verify the files of a storage that is not running.

Rules:
    1. Only `repair-index` writes.
    2. `verify` and `repair-index` need exclusive access to the directory, and fail while a storage
       runs on it. The others only read, and may see a log that is being written.
"""
