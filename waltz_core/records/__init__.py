"""Transactions as bytes: records, Arrow batches, lock blocks, and their checksums.

`record.py` declares the identifiers that every layer uses, and the bytes of one record.
`raw_records.py` processes many records in one buffer. `batches.py` converts between Arrow batches
and records; `arrow_buffers.py` builds Arrow arrays without copying. `lock_blocks.py` encodes the
locks that the transactions of one batch have written. `unpacking.py` converts payloads to Arrow
columns; `payload_types.py` and `typed_values.py` define the accepted types and values.
`byte_layout.py` declares structures of bytes. `checksum.py` and `strict_json.py` contain functions
for all these modules.
"""
