"""`waltz-core disk`: print and verify the files of a storage that is not running.

`disk_control.py` prints the control files, and `disk_segment.py` prints segments; both use
`disk_text.py`. `disk_verify.py` verifies a directory and rebuilds indexes.

Rules:
    1. Only `repair-index` writes files.
    2. `verify` and `repair-index` need exclusive access to the directory, and fail while a storage
       uses it. The other commands only read, and may see a log that is being written.
"""
