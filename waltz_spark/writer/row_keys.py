"""Row keys find the rows of a write in the log: a row and its record have the same key.

Rules:
    1. A row key is a digest of partition, header and data. With option `identityColumns`, it is a
       digest of the partition and these columns. A recomputed row keeps these columns.
    2. Each record has two keys: one with its partition, and one for rows that may be in any
       partition.
"""

import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from waltz_core.records.unpacking import packed_identity
from waltz_spark.options import WriteOptions
from waltz_spark.payload_schemas import row_key_decoder
from waltz_spark.writer.columns import ConvertedRows

_KEY_BYTES = 16
_PARTITION_AND_HEADER = struct.Struct(">ii")
_ANY_PARTITION = -1  # in place of the partition, for a row that may be in any partition


class RowKeys:
    """Computes the keys of rows and records of a write.

    Args:
        options: the options of the write; None: without identity columns.
    """

    def __init__(self, options: WriteOptions | None = None) -> None:
        self._identity_columns = () if options is None else options.identity_columns
        self._decode = (
            row_key_decoder(options) if options is not None and self._identity_columns else None
        )
        self._has_recompute = options is not None and options.recompute_function is not None

    @property
    def additional_equal_columns(self) -> tuple[str, ...]:
        """The append columns, besides locks and mark, that rows with equal keys must share."""
        return ("header", "data") if self._identity_columns else ()

    @property
    def text(self) -> str:
        """The parts of a row key, for error messages."""
        return ", ".join(self._identity_columns) if self._identity_columns else "header and data"

    @property
    def hint(self) -> str:
        """An additional hint for the error about records without a matching row."""
        if self._identity_columns or not self._has_recompute:
            return ""
        return "; to find recomputed rows, set option identityColumns (with dataFormat)"

    def keys_of_rows(self, converted: ConvertedRows) -> Iterator[bytes]:
        """Yield the key of each row."""
        headers = converted.append.column("header").to_pylist()
        data = converted.append.column("data").to_pylist()
        partitions = np.where(
            converted.is_round_robin, _ANY_PARTITION, converted.partitions
        ).tolist()
        for partition, header, each in zip(partitions, headers, data, strict=True):
            yield self._compute_key(partition, header, each)

    def keys_of_record(
        self, partition: int, header: int, data: bytes | memoryview
    ) -> tuple[bytes, bytes]:
        """Return the keys of a record with its partition, and without a partition (rule 2)."""
        return self._compute_key(partition, header, data), self._compute_key(
            _ANY_PARTITION, header, data
        )

    def _compute_key(self, partition: int, header: int, data: bytes | memoryview) -> bytes:
        if self._decode is not None:
            identity = packed_identity(bytes(data), self._identity_columns, self._decode)
            if identity is not None:
                header, data = 0, identity
        digest = hashlib.blake2b(
            _PARTITION_AND_HEADER.pack(partition, header), digest_size=_KEY_BYTES
        )
        digest.update(data)
        return digest.digest()
