"""The files of a storage: their bytes, and reading and writing each kind of them.

`format.py` has every byte. `segment.py`, `index.py` and `segments.py` hold the records,
`control_file.py` the identity and marks, `lock_file.py` the lock blocks. `record_search.py` finds
records without an index, `batch_checks.py` verifies batches, `id_ranges.py` keeps damaged ranges,
and `space.py` rejects appends when the disk is full.
"""
