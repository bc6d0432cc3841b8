"""Transactions as bytes: records, Arrow batches of them, lock blocks, and their checksums.

`record.py` has the identifiers that every layer uses and the bytes of one record. `raw_records.py`
works on many records in one buffer. `batches.py` converts between Arrow batches and records, over
the memory of `arrow_buffers.py`. `lock_blocks.py` has the locks that one batch wrote.
`unpacking.py` converts payloads to Arrow columns, with the types of `payload_types.py` and the
values of `typed_values.py`.
`byte_layout.py` declares structures of bytes, `checksum.py` and `strict_json.py` are used by all.
"""
