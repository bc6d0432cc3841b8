"""Transactions as bytes: records, Arrow batches, lock blocks, and their checksums.

`record.py` has the identifiers that every layer uses, and the bytes of one record. `raw_records.py`
processes many records in one buffer. `batches.py` converts between Arrow batches and records;
`arrow_buffers.py` builds the Arrow arrays without copying. `lock_blocks.py` stores the locks that
the transactions of one batch have written. `unpacking.py` converts payloads to Arrow columns.
`payload_types.py` and `typed_values.py` define which types and values it accepts. `byte_layout.py`
declares structures of bytes. `checksum.py` and `strict_json.py` serve all modules above.
"""
