"""The number and the hash of a write's rows, to compare them with a finished write.

ZooKeeper stores number and hash for days in the summary of a finished write. So the definition of
both must not change.

Rules (docs/spark.md, "A write ID identifies its rows"):
    1. A row is identified as in the log (`row_keys.py`): by header and payload, or by
       `identityColumns`. Its partition also identifies it, unless the partition was chosen
       round-robin. Locks and marks are not compared: a repeated run may compute them from a newer
       state, and the log does not store them.
    2. The hash of a row has 64 bits, mixed from the CRC-32 and the length of its payload, its
       partition and its header. The hash of several rows is the sum of their hashes modulo 2**64.
       The sum does not depend on the order, tasks or batches of the rows.
    3. The hash detects mistakes, not attacks: the writer of the rows also chooses the write ID.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.errors import BadRequest
from waltz_core.records.batches import data_crcs
from waltz_spark.options import WriteOptions
from waltz_spark.rows import pack_rows
from waltz_spark.writer.columns import ConvertedRows

Uint64Array = npt.NDArray[np.uint64]

_ANY_PARTITION = -1


class RowsHash(NamedTuple):
    """The number of rows, and the sum of their hashes modulo 2**64."""

    rows: int = 0
    digest: int = 0

    def plus(self, other: Self) -> "RowsHash":
        """Return the sum of two row hashes."""
        return RowsHash(self.rows + other.rows, (self.digest + other.digest) % (1 << 64))

    @property
    def hex(self) -> str:
        """The hash as 16 hexadecimal digits."""
        return f"{self.digest:016x}"

    def as_fields(self) -> dict[str, Any]:
        """Return the fields for the summary of a write."""
        return {"rows": self.rows, "rows_hash": self.hex}

    def check_equal(self, write: str, summary: Mapping[str, Any], *, hint: str) -> None:
        """Check that these are the rows of a finished write, if its summary has a hash.

        Raises:
            BadRequest: the finished write had other rows; the error has both counts.
        """
        rows, digest = summary.get("rows"), summary.get("rows_hash")
        if digest is None or (rows, digest) == (self.rows, self.hex):
            return
        hashes = ""
        if rows == self.rows:
            hashes = f"; the counts are equal, the hashes differ: {digest} and {self.hex}"
        raise BadRequest(
            f"the write ID was used with different rows: write {write!r} was completed with "
            f"{_rows_text(rows)}, but this run has {_rows_text(self.rows)}{hashes}. Hint: {hint}"
        )


def hash_rows(batch: pa.RecordBatch, converted: ConvertedRows, options: WriteOptions) -> RowsHash:
    """Return the count and hash of a batch, from its input and append columns (rules 1 and 2)."""
    headers = converted.append.column("header").to_numpy()
    data, crcs = converted.append.column("data"), converted.append.column("crc")
    names = options.identity_columns
    if names:
        data = pack_rows([batch.column(name) for name in names], names, "msgpack")
        headers, crcs = np.zeros_like(headers), data_crcs(data)
    positions = np.where(converted.is_round_robin, np.int32(_ANY_PARTITION), converted.partitions)
    lengths = pc.binary_length(data).to_numpy()
    hashes = _mix_bits(_join_halves(crcs.to_numpy(), lengths))
    hashes = _mix_bits(hashes ^ _join_halves(positions, headers))
    return RowsHash(len(hashes), int(hashes.sum()))


def _join_halves(
    low_halves: npt.NDArray[np.integer], high_halves: npt.NDArray[np.integer]
) -> Uint64Array:
    """Combine two columns of 32-bit values into one column of 64-bit values."""
    return low_halves.astype(np.uint32).astype(np.uint64) | high_halves.astype(
        np.uint64
    ) << np.uint64(32)


def _mix_bits(values: Uint64Array) -> Uint64Array:
    """Mix the bits of values, so that each bit depends on all others (SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _rows_text(rows: object) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"
