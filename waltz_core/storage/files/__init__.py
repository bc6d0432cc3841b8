"""The files of a storage: their bytes, and reading and writing each kind of them.

`format.py` declares all bytes. `segment.py`, `index.py` and `segments.py` have the records,
`control_file.py` the identity and marks, `lock_file.py` the lock blocks. `record_search.py` finds
records without an index, `batch_checks.py` verifies batches, `id_ranges.py` has lists of damaged
ranges, and `disk_space.py` rejects appends when the disk is full.
"""
