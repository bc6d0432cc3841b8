"""The number and the hash of a write's rows: by these, a finished write recognizes its rows.

The record of a finished write keeps what is computed here for days, so the hash has one definition,
and it must not change.

Rules (docs/spark.md, "A write ID identifies its rows"):
    1. What identifies a row is what finds it in the log (`row_keys.py`): its partition, unless the
       row is in it only because it was its turn; header and payload; or the columns of option
       `identityColumns`. Locks and marks do not count: a run that is repeated may compute them from
       a newer state, and the log does not keep them.
    2. The hash of a row is 64 bits, mixed from the CRC-32 and the length of its payload, partition
       and header. That of several rows is the sum modulo 2**64: neither the order of the rows, nor
       the tasks and batches that they come in, change it.
    3. The hash detects mistakes, not malice: whoever writes rows chooses the write ID, too.
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
from waltz_spark.rows import pack
from waltz_spark.writer.columns import Shaped

U64 = npt.NDArray[np.uint64]

_ANY_PARTITION = -1


class RowSum(NamedTuple):
    """How many rows there are, and the sum of their hashes modulo 2**64."""

    rows: int = 0
    digest: int = 0

    def plus(self, other: Self) -> "RowSum":
        """Return the sum of these rows and others."""
        return RowSum(self.rows + other.rows, (self.digest + other.digest) % (1 << 64))

    @property
    def hex(self) -> str:
        """The hash as 16 hexadecimal digits."""
        return f"{self.digest:016x}"

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a summary that say which rows a write had."""
        return {"rows": self.rows, "rows_hash": self.hex}

    def check_same(self, write: str, summary: Mapping[str, Any], *, hint: str) -> None:
        """Return if these are the rows of a finished write, or its summary does not say.

        Raises:
            BadRequest: they are other rows; both counts are named.
        """
        rows, digest = summary.get("rows"), summary.get("rows_hash")
        if digest is None or (rows, digest) == (self.rows, self.hex):
            return
        hashes = ""
        if rows == self.rows:
            hashes = f"; the counts are equal, the hashes differ: {digest} and {self.hex}"
        raise BadRequest(
            f"write {write!r} was finished with {_count(rows)}, and this run has "
            f"{_count(self.rows)}: the same write ID with different rows{hashes}. Hint: {hint}"
        )


def row_sum(batch: pa.RecordBatch, shaped: Shaped, options: WriteOptions) -> RowSum:
    """Return the sum of some rows, given as they came and as they are appended (rules 1 and 2)."""
    headers = shaped.append.column("header").to_numpy()
    data, crcs = shaped.append.column("data"), shaped.append.column("crc")
    names = options.identity_columns
    if names:
        data = pack([batch.column(name) for name in names], names, "msgpack")
        headers, crcs = np.zeros_like(headers), data_crcs(data)
    places = np.where(shaped.is_free, np.int32(_ANY_PARTITION), shaped.partitions)
    lengths = pc.binary_length(data).to_numpy()
    hashes = _mixed(_joined(crcs.to_numpy(), lengths))
    hashes = _mixed(hashes ^ _joined(places, headers))
    return RowSum(len(hashes), int(hashes.sum()))


def _joined(low: npt.NDArray[np.integer], high: npt.NDArray[np.integer]) -> U64:
    """Return two columns of 32 bits as one of 64."""
    return low.astype(np.uint32).astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def _mixed(values: U64) -> U64:
    """Return values of which each bit depends on all bits of the old one (SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _count(rows: object) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"
