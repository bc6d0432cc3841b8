"""The files of a storage: their layout, and code that reads and writes each kind of file.

`format.py` declares all bytes. `segment.py`, `index.py` and `segments.py` have the records,
`control_file.py` has identity and marks, and `lock_file.py` has the lock blocks. `record_search.py`
finds records without an index, `batch_checks.py` verifies batches, and `id_ranges.py` has lists of
damaged ranges. `disk_space.py` rejects appends when the disk is full.
"""
