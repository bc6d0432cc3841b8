"""Computes the rows of a change feed: each change of a row, with the row's previous content.

    transactions of a partition, in order, and the feed state before them -> rows, the next state

Rules (docs/decisions/049-tables-that-follow-the-log.md, "Change feed"):
    1. An upsert of an absent key is `insert`. An upsert of a present key is `update_preimage` and
       `update_postimage`, next to each other; a delete of a present key is `delete`. A delete of an
       absent key has no row.
    2. `update_preimage` and `delete` have the payload's columns from the previous change of the
       key. The columns of the log are always those of the transaction that causes the row.
    3. A transaction is a change if its payload fits the schema and its key has no null. A delete
       needs only the key. With `mode=FAILFAST`, any other transaction is an error; with
       `DROPMALFORMED`, it is not a change. So the rows depend on the log, not on the start of a
       read.
    4. A step of the state has about 8 MiB of previous payloads, and at most one batch of new ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from waltz_core.config.settings import shown_names
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.batches import READ_SCHEMA
from waltz_core.records.unpacking import Decode, Unpacker, columns_named
from waltz_core.tables.row_changes import ChangeRules, changes_of, check_rules, deletes_in
from waltz_spark.datasource.feed_state import KEY_BYTES, FeedState, StoredRow
from waltz_spark.options import CHANGE_COLUMN, ERROR_COLUMN, OnCorrupt, ReadOptions
from waltz_spark.payload_encryption import decrypt_batch, decryption_of
from waltz_spark.payload_schemas import payload_decoder
from waltz_spark.rows import is_case_sensitive, pack
from waltz_spark.spark_version import arrow_schema

PREVIOUS_BYTES_MAX = 8 * 1024 * 1024
_NEEDED = ("partition", "transaction_id", "header", "data")
_KINDS = pa.array(["insert", "update_preimage", "update_postimage", "delete"])
_INSERT, _BEFORE, _AFTER, _DELETE = range(len(_KINDS))
_ABSENT = -1
_EMPTY_MAPS = {"msgpack": b"\x80", "json": b"{}"}
# Replaces a payload that is null; no payload of a format with schemas is empty.
_NO_PAYLOAD = b""


def with_checked_rules(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Return the options of a change feed; the columns in its rules are spelled as in the schema.

    Raises:
        BadConfig: the schema lacks a column of the rules, or the column has a type that they
            exclude.
    """
    rules = options.feed
    assert rules is not None
    payload = payload_fields(options, schema)
    names = [each.name for each in payload]
    key = [_column(each, names, "key") for each in rules.key]
    where = rules.delete_where
    if where is not None:
        column = _column(where.column, [*names, *READ_SCHEMA.names], "deleteWhere")
        where = where._replace(column=column)
    checked = replace(rules, key=tuple(key), delete_where=where)
    check_rules(checked, pa.schema([*payload, *READ_SCHEMA]))
    return replace(options, feed=checked)


def _column(wanted: str, names: Sequence[str], option: str) -> str:
    found = columns_named(wanted, names)
    if len(found) != 1:
        raise BadConfig(
            f"option {option!r}: expected columns of your schema ({shown_names(names, 20)}), "
            f"found {wanted!r}"
        )
    return found[0]


def payload_fields(options: ReadOptions, schema: StructType) -> list[pa.Field]:
    """Return the fields of a schema that are not columns of the log."""
    return [part for part in arrow_schema(schema) if part.name not in options.log_columns]


class _Transactions(NamedTuple):
    """Transactions with their payloads, unpacked if they fit the schema."""

    log: dict[str, pa.Array]
    stored: pa.Array  # the payloads as they are in the log, encrypted or not
    payload: list[pa.Array]
    is_whole: npt.NDArray[np.bool_]

    def filter(self, chosen: pa.Array) -> "_Transactions":
        return _Transactions(
            {name: column.filter(chosen) for name, column in self.log.items()},
            self.stored.filter(chosen),
            [column.filter(chosen) for column in self.payload],
            self.is_whole[chosen.to_numpy(zero_copy_only=False)],
        )


@dataclass(slots=True)
class _Changes:
    """The changes of a batch, in the order of the log."""

    found: _Transactions
    deleted: npt.NDArray[np.bool_]
    keys: list[bytes]


@dataclass(slots=True)
class _Step:
    """Changes `start` to `stop` of a batch, each with the previous change of its key.

    `before` has an index for each change: that of the previous change of its key in the batch or,
    after the last index of the batch, in `previous`. It is `_ABSENT` if there is no previous
    change.
    """

    start: int
    stop: int
    before: list[int]
    previous: list[StoredRow]
    first: list[tuple[bytes, StoredRow | None]]  # for each key in the step, the row before the step
    last: dict[bytes, int]  # for each key, the index of its last change; `_ABSENT` for a delete


class ChangeFeed:
    """Computes the rows for one partition. It contains encryption keys, so only tasks create it.

    Args:
        options: the options of the read, with rules from `with_checked_rules`.
        schema: Spark's schema of the rows.
        partition: the partition of the log.
    """

    def __init__(self, options: ReadOptions, schema: StructType, partition: int) -> None:
        assert options.feed is not None
        assert options.data_format is not None
        self._options = options
        self._rules: ChangeRules = options.feed
        self._partition = partition
        self._arrow = arrow_schema(schema)
        self._fields = payload_fields(options, schema)
        self._empty_map = _EMPTY_MAPS.get(options.data_format, _NO_PAYLOAD)
        self._decode = _decoder(options)
        self._unpacker = self._unpacker_of(self._fields, options.required_columns)
        self._encryption = decryption_of(options)
        where = self._rules.delete_where
        wanted = [*self._arrow.names, *([] if where is None else [where.column])]
        own = [name for name in wanted if name in READ_SCHEMA.names]
        self.columns = list(dict.fromkeys([*_NEEDED, *own]))

    def _unpacker_of(self, fields: Sequence[pa.Field], required: Sequence[str] = ()) -> Unpacker:
        return Unpacker(
            fields,
            self._options.data_format or "",
            decode=self._decode,
            required=required,
            is_case_sensitive=is_case_sensitive(),
        )

    # ---- transactions to changes

    def _changes(self, batch: pa.RecordBatch) -> _Changes:
        """Return the changes of transactions (rule 3).

        Raises:
            BadFormat: `mode` is `FAILFAST`, and a transaction is not a change; the error names it.
        """
        found = self._transactions(batch)
        table = self._table(found)
        deleted = deletes_in(table, self._rules)
        is_change = found.is_whole | deleted
        for name in self._rules.key:
            is_change &= table[name].is_valid().to_numpy()
        if not is_change.all():
            if self._options.on_corrupt is OnCorrupt.FAIL:
                row = int(np.argmin(is_change))
                self._fail(found, row, is_delete=bool(deleted[row]))
            found, deleted = found.filter(pa.array(is_change)), deleted[is_change]
        return _Changes(found, deleted, self._digests(found))

    def _transactions(self, batch: pa.RecordBatch) -> _Transactions:
        if self._encryption is None:
            log = {name: batch.column(name) for name in batch.schema.names}
        else:
            log = decrypt_batch(batch, self._encryption)
        data = log["data"]
        payload, is_whole = self._unpacker.columns_with_nulls(data.fill_null(self._empty_map))
        is_whole &= data.is_valid().to_numpy(zero_copy_only=False)
        return _Transactions(log, batch.column("data"), payload, is_whole)

    def _table(self, found: _Transactions) -> pa.Table:
        names = [part.name for part in self._fields]
        return pa.table(found.log | dict(zip(names, found.payload, strict=True)))

    def _digests(self, found: _Transactions) -> list[bytes]:
        """Return a digest of each key: its size is fixed, and a file with it contains no keys."""
        names = [part.name for part in self._fields]
        columns = [found.payload[names.index(name)] for name in self._rules.key]
        keys = pack(columns, self._rules.key, "msgpack").to_pylist()
        return [blake2b(each, digest_size=KEY_BYTES).digest() for each in keys]

    def _fail(self, found: _Transactions, row: int, *, is_delete: bool) -> NoReturn:
        """Raise an error with the reason why a transaction is not a change."""
        place = f"partition {self._partition}, transaction {found.log['transaction_id'][row]}"
        if not found.log["data"][row].is_valid:
            raise BadFormat(
                f"{place}: the payload cannot be decrypted ({found.log[ERROR_COLUMN][row]}). "
                "Hint: mode=DROPMALFORMED ignores such transactions."
            )
        unpacker = self._unpacker
        if is_delete:
            keys = [part for part in self._fields if part.name in self._rules.key]
            unpacker = self._unpacker_of(keys)
        unpacker.columns(found.log["data"].slice(row, 1), lambda _: place)
        changes_of(self._table(found).slice(row, 1), self._rules)  # raises for a null in the key
        raise AssertionError(f"{place}: it is a change")

    # ---- changes to rows

    def skip(self, batch: pa.RecordBatch, state: FeedState) -> None:
        """Apply the changes of a batch to the state, without computing rows."""
        changes = self._changes(batch)
        places = np.where(changes.deleted, _ABSENT, np.arange(len(changes.keys))).tolist()
        _store(changes, dict(zip(changes.keys, places, strict=True)), state)

    def rows(self, batch: pa.RecordBatch, state: FeedState) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Apply a batch to the state, step by step; yield the last ID and the rows of each step.

        Raises:
            BadFormat: a payload does not fit the schema (rule 3).
            sqlite3.Error: the state cannot be read or written.
        """
        changes = self._changes(batch)
        start = 0
        while start < len(changes.keys):
            step = _step(changes, start, state)
            payload, before = self._with_previous(changes, step)
            state.keep(step.first)
            _store(changes, step.last, state)
            last = changes.found.log["transaction_id"][step.stop - 1].as_py()
            yield last, self._batch(changes, step, payload, before)
            start = step.stop

    def _with_previous(
        self, changes: _Changes, step: _Step
    ) -> tuple[list[pa.Array], npt.NDArray[np.int64]]:
        """Append previous payloads to the payload columns; return these columns, and `before`."""
        before = np.array(step.before, np.int64)
        if not step.previous:
            return changes.found.payload, before
        headers, ids, payloads = zip(*step.previous, strict=True)
        found = self._transactions(
            pa.RecordBatch.from_arrays(
                [
                    pa.array([self._partition] * len(ids), pa.int32()),
                    pa.array(ids, pa.int64()),
                    pa.array(headers, pa.int32()),
                    pa.array(payloads, pa.binary()),
                ],
                names=list(_NEEDED),
            )
        )
        if not found.is_whole.all():  # the encryption key of a previous payload has been deleted
            if self._options.on_corrupt is OnCorrupt.FAIL:
                self._fail(found, int(np.argmin(found.is_whole)), is_delete=False)
            is_kept = np.concatenate([np.ones(len(changes.keys), np.bool_), found.is_whole])
            before[(before >= 0) & ~is_kept[before]] = _ABSENT
        pairs = zip(changes.found.payload, found.payload, strict=True)
        return [pa.concat_arrays(pair) for pair in pairs], before

    def _batch(
        self,
        changes: _Changes,
        step: _Step,
        payload: list[pa.Array],
        before: npt.NDArray[np.int64],
    ) -> pa.RecordBatch:
        """Return the rows of a step (rules 1 and 2)."""
        own = np.arange(step.start, step.stop)
        deleted, is_known = changes.deleted[own], before != _ABSENT
        # Each change has a row with the previous payload and a row with its own; either may be
        # missing.
        has_row = np.stack([is_known, ~deleted], axis=1)
        kinds = np.stack(
            [np.where(deleted, _DELETE, _BEFORE), np.where(is_known, _AFTER, _INSERT)], axis=1
        )
        source = pa.array(np.stack([before, own], axis=1)[has_row])
        cause = pa.array(np.stack([own, own], axis=1)[has_row])
        found = {
            part.name: column.take(source)
            for part, column in zip(self._fields, payload, strict=True)
        }
        log = changes.found.log
        for part in self._arrow:
            if part.name == CHANGE_COLUMN:
                found[CHANGE_COLUMN] = _KINDS.take(pa.array(kinds[has_row])).cast(part.type)
            elif part.name in log:
                found[part.name] = log[part.name].take(cause)
        return pa.RecordBatch.from_arrays(
            [found[part.name] for part in self._arrow], schema=self._arrow
        )


def _decoder(options: ReadOptions) -> Decode | None:
    """Return the decoder of a format with schemas, extended: an empty payload is an empty map."""
    decode = payload_decoder(options)
    if decode is None:
        return None
    return lambda data: decode(data) if data else {}


def _step(changes: _Changes, start: int, state: FeedState) -> _Step:
    """Return the next step of changes, beginning at index `start` (rule 4)."""
    count, size = len(changes.keys), 0
    deleted = changes.deleted.tolist()
    step = _Step(start, start, [], [], [], {})
    while step.stop < count and size < PREVIOUS_BYTES_MAX:
        place, key = step.stop, changes.keys[step.stop]
        before = step.last.get(key)
        if before is None:
            row = state.find(key)
            step.first.append((key, row))
            before = _ABSENT
            if row is not None:
                before = count + len(step.previous)
                step.previous.append(row)
                size += len(row.data)
        step.before.append(before)
        step.last[key] = _ABSENT if deleted[place] else place
        step.stop += 1
    return step


def _store(changes: _Changes, last: dict[bytes, int], state: FeedState) -> None:
    """Write the last change of each key to the state."""
    upserts = {key: place for key, place in last.items() if place != _ABSENT}
    places = pa.array(upserts.values(), pa.int64())
    columns = [changes.found.log["header"], changes.found.log["transaction_id"]]
    values = [column.take(places).to_pylist() for column in (*columns, changes.found.stored)]
    state.write(
        zip(upserts, map(StoredRow, *values), strict=True),
        [key for key, place in last.items() if place == _ABSENT],
    )
