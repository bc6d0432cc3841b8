"""A log in memory for change feeds, and a reference implementation of their rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pyarrow as pa
from pyspark.sql.types import StructType

from waltz_core.records.batches import READ_SCHEMA
from waltz_spark.datasource.change_feed import ChangeFeed, resolve_rule_columns
from waltz_spark.datasource.feed_read import FeedReader, FeedSpan
from waltz_spark.options import ReadOptions, parse_read

PARTITION = 3
DELETE_HEADER = 9
SCHEMA = (
    StructType()
    .add("id", "long")
    .add("op", "string")
    .add("amount", "long")
    .add("_change_type", "string")
    .add("transaction_id", "long")
)
OPTIONS = {
    "path": "zk:2181/w/x",
    "dataFormat": "msgpack",
    "changeFeed": "true",
    "key": "id",
    "deleteHeaders": str(DELETE_HEADER),
    "deleteWhere": "op = 'D'",
}


class Transaction(NamedTuple):
    """The header and payload of a transaction."""

    header: int
    data: bytes


def transaction_with(header: int = 0, **columns: object) -> Transaction:
    """Return a transaction with these columns as payload."""
    return Transaction(header, msgpack.packb(columns))


def options_of(schema: StructType = SCHEMA, **options: str) -> ReadOptions:
    return resolve_rule_columns(parse_read(OPTIONS | options), schema)


class Log:
    """A partition of a log; `reads` has the ranges that were read."""

    def __init__(self, transactions: Sequence[Transaction], batch_rows: int = 8192) -> None:
        self.transactions = transactions
        self.batch_rows = batch_rows
        self.reads: list[tuple[int, int]] = []

    @property
    def mark(self) -> int:
        return len(self.transactions) - 1

    def read(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        assert 0 <= first <= last + 1 <= len(self.transactions)
        self.reads.append((first, last))
        for start in range(first, last + 1, self.batch_rows):
            yield self._batch(range(start, min(start + self.batch_rows, last + 1)))

    def _batch(self, ids: range) -> pa.RecordBatch:
        chosen = [self.transactions[transaction_id] for transaction_id in ids]
        count = len(chosen)
        columns = {
            "partition": pa.array([PARTITION] * count, pa.int32()),
            "transaction_id": pa.array(ids, pa.int64()),
            "header": pa.array([each.header for each in chosen], pa.int32()),
            "request_id": pa.nulls(count, READ_SCHEMA.field("request_id").type),
            "commit_time": pa.array(
                [transaction_id * 1000 for transaction_id in ids],
                READ_SCHEMA.field("commit_time").type,
            ),
            "data": pa.array([each.data for each in chosen], pa.binary()),
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def reader(
    log: Log,
    begin: int,
    end: int,
    file: Path | None = None,
    *,
    first: int = 0,
    schema: StructType = SCHEMA,
    **options: str,
) -> FeedReader:
    feed = ChangeFeed(options_of(schema, **options), schema, PARTITION)
    return FeedReader(feed, log.read, FeedSpan(first, begin, end), file)


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Return the rows as tuples in the order of the schema."""
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def expected_rows(transactions: Sequence[Transaction], first: int = 0) -> list[tuple[Any, ...]]:
    """Return the rows of a feed with `SCHEMA` and `OPTIONS`, computed by the definition.

    A payload that does not fit is no change, as with `mode=DROPMALFORMED`.
    """
    state: dict[int, dict[str, Any]] = {}
    rows: list[tuple[Any, ...]] = []

    def add(kind: str, payload: dict[str, Any], at: int) -> None:
        rows.append((payload["id"], payload.get("op"), payload.get("amount"), kind, at))

    for at, (header, data) in enumerate(transactions):
        payload = unpack(data)
        key = payload.get("id") if isinstance(payload, dict) else None
        is_delete = header == DELETE_HEADER or (key is not None and payload.get("op") == "D")
        fits = key is not None and (is_delete or not isinstance(payload.get("amount"), str))
        if at < first or not fits:
            continue
        before = state.pop(key, None)
        if is_delete and before is not None:
            add("delete", before, at)
        if not is_delete:
            if before is not None:
                add("update_preimage", before, at)
            add("insert" if before is None else "update_postimage", payload, at)
            state[key] = payload
    return rows


def unpack(data: bytes) -> Any:
    """Return a payload; None if it is damaged."""
    try:
        return msgpack.unpackb(data)
    except (msgpack.UnpackException, ValueError):  # ValueError for an empty payload
        return None


def rows_between(rows: list[tuple[Any, ...]], begin: int, end: int) -> list[tuple[Any, ...]]:
    """Return the rows of transactions after `delete_replaced_rows`, up to `end`."""
    return [row for row in rows if begin < row[-1] <= end]
