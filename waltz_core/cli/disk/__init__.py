"""`waltz-core disk`: print and verify the files of a storage that is not running.

`disk_control.py` prints the control files, `disk_segment.py` segments, both with `disk_text.py`;
`disk_verify.py` verifies a directory and rebuilds indexes.

Rules:
    1. Only `repair-index` writes.
    2. `verify` and `repair-index` need exclusive access to the directory, and fail while a storage
       runs on it. The others only read, and may see a log that is being written.
"""
