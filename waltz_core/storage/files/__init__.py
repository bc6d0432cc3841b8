"""The files of a storage: their layout, and code that reads and writes each kind of file.

`format.py` declares the layout of all bytes. `segment.py`, `index.py` and `segments.py` store
records and batches, `control_file.py` stores promises and marks, and `lock_block_file.py` stores
lock blocks. `record_search.py` finds records without an index, `batch_checks.py` verifies batches,
and `id_ranges.py` computes lists of damaged ranges. `disk_space.py` rejects appends when the disk
is full.
"""
