"""Computes the rows of a change feed: each change of a row, with the row's previous content.

    transactions of a partition, in order, and the feed state before them -> rows, the next state

Rules (docs/decisions/049-tables-that-follow-the-log.md, "Change feed"):
    1. An upsert of an absent key causes the row `insert`. An upsert of a present key causes two
       adjacent rows, `update_preimage` and `update_postimage`. A delete of a present key causes the
       row `delete`. A delete of an absent key causes no row.
    2. In `update_preimage` and `delete`, the payload columns have the values of the key's previous
       change. In all rows, the columns of the log have the values of the transaction that causes
       the row.
    3. A transaction is a change if its payload fits the schema and its key has no null. A delete
       needs only the key. With `mode=FAILFAST`, any other transaction is an error; with
       `DROPMALFORMED`, it is ignored. So the rows depend only on the log, not on the start of a
       read.
    4. To limit memory, each step computes the rows for a part of a batch. A step has about 8 MiB of
       previous payloads, and at most the new payloads of one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.batches import READ_SCHEMA
from waltz_core.records.unpacking import Decode, Unpacker, columns_matching
from waltz_core.tables.row_changes import ChangeRules, check_rules, compute_changes, delete_mask
from waltz_spark.datasource.feed_state import KEY_DIGEST_BYTES, FeedState, StoredRow
from waltz_spark.options import CHANGE_COLUMN, ERROR_COLUMN, CorruptPayloadMode, ReadOptions
from waltz_spark.payload_encryption import decrypt_batch, decryption_of
from waltz_spark.payload_schemas import payload_decoder
from waltz_spark.rows import is_case_sensitive, pack_rows
from waltz_spark.spark_version import arrow_schema

PREVIOUS_BYTES_MAX = 8 * 1024 * 1024
_REQUIRED_LOG_COLUMNS = ("partition", "transaction_id", "header", "data")
_CHANGE_TYPES = pa.array(["insert", "update_preimage", "update_postimage", "delete"])
_INSERT, _UPDATE_PREIMAGE, _UPDATE_POSTIMAGE, _DELETE = range(len(_CHANGE_TYPES))
_NO_ROW = -1
_EMPTY_MAP_PAYLOADS = {"msgpack": b"\x80", "json": b"{}"}
# Replaces null payloads, because payloads of formats with schemas are never empty.
_NULL_REPLACEMENT = b""


def resolve_rule_columns(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Return the options of a change feed; its rules spell columns as the schema does.

    Raises:
        BadConfig: the schema lacks a column of the rules, or such a column has a type that the
            rules exclude.
    """
    rules = options.change_feed_rules
    assert rules is not None
    payload = payload_fields(options, schema)
    names = [each.name for each in payload]
    key = [_resolve_column(each, names, "key") for each in rules.key]
    condition = rules.delete_where
    if condition is not None:
        column = _resolve_column(condition.column, [*names, *READ_SCHEMA.names], "deleteWhere")
        condition = condition._replace(column=column)
    checked = replace(rules, key=tuple(key), delete_where=condition)
    check_rules(checked, pa.schema([*payload, *READ_SCHEMA]))
    return replace(options, change_feed_rules=checked)


def _resolve_column(column: str, names: Sequence[str], option: str) -> str:
    matches = columns_matching(column, names)
    if len(matches) != 1:
        raise BadConfig(
            f"option {option!r}: expected columns of your schema ({first_names_text(names, 20)}), "
            f"found {column!r}"
        )
    return matches[0]


def payload_fields(options: ReadOptions, schema: StructType) -> list[pa.Field]:
    """Return the fields of a schema that are not columns of the log."""
    return [part for part in arrow_schema(schema) if part.name not in options.log_columns]


class _Transactions(NamedTuple):
    """Transactions with their payloads, unpacked if they fit the schema."""

    log_columns: dict[str, pa.Array]
    stored_payloads: pa.Array  # the payloads as they are in the log, encrypted or not
    payload_columns: list[pa.Array]
    fits_schema: npt.NDArray[np.bool_]

    def filter(self, mask: pa.Array) -> "_Transactions":
        return _Transactions(
            {name: column.filter(mask) for name, column in self.log_columns.items()},
            self.stored_payloads.filter(mask),
            [column.filter(mask) for column in self.payload_columns],
            self.fits_schema[mask.to_numpy(zero_copy_only=False)],
        )


@dataclass(slots=True)
class _Changes:
    """The changes of a batch, in the order of the log."""

    transactions: _Transactions
    is_delete: npt.NDArray[np.bool_]
    key_digests: list[bytes]


@dataclass(slots=True)
class _FeedStep:
    """The changes from index `start` up to `stop` of a batch, with the rows that they replace.

    For each change, `previous_indexes` has the index of the previous change of its key. Indexes
    past the end of the batch refer to `previous_rows`. `_NO_ROW` means that there is no previous
    change.
    """

    start: int
    stop: int
    previous_indexes: list[int]
    previous_rows: list[StoredRow]
    rows_before: list[tuple[bytes, StoredRow | None]]  # for each key, its row before the step
    last_indexes: dict[bytes, int]  # for each key, its last change; `_NO_ROW` for a delete


class ChangeFeed:
    """Computes the rows of a change feed for one partition.

    A `ChangeFeed` contains encryption keys, so only tasks create one.

    Args:
        options: the options of the read, with rules from `resolve_rule_columns`.
        schema: Spark's schema of the rows.
        partition: the partition of the log.
    """

    def __init__(self, options: ReadOptions, schema: StructType, partition: int) -> None:
        assert options.change_feed_rules is not None
        assert options.data_format is not None
        self._options = options
        self._rules: ChangeRules = options.change_feed_rules
        self._partition = partition
        self._arrow_schema = arrow_schema(schema)
        self._fields = payload_fields(options, schema)
        self._empty_map = _EMPTY_MAP_PAYLOADS.get(options.data_format, _NULL_REPLACEMENT)
        self._decode = _decoder_with_empty_maps(options)
        self._unpacker = self._create_unpacker(self._fields, options.required_columns)
        self._encryption = decryption_of(options)
        condition = self._rules.delete_where
        needed_columns = [
            *self._arrow_schema.names,
            *([] if condition is None else [condition.column]),
        ]
        needed_log_columns = [name for name in needed_columns if name in READ_SCHEMA.names]
        self.columns = list(dict.fromkeys([*_REQUIRED_LOG_COLUMNS, *needed_log_columns]))

    def _create_unpacker(
        self, fields: Sequence[pa.Field], required: Sequence[str] = ()
    ) -> Unpacker:
        return Unpacker(
            fields,
            self._options.data_format or "",
            decode=self._decode,
            required=required,
            is_case_sensitive=is_case_sensitive(),
        )

    # ---- transactions to changes

    def _changes_of(self, batch: pa.RecordBatch) -> _Changes:
        """Return the changes of transactions (rule 3).

        Raises:
            BadFormat: `mode` is `FAILFAST`, and a transaction is not a change; the error names it.
        """
        transactions = self._unpack_transactions(batch)
        table = self._as_table(transactions)
        deleted = delete_mask(table, self._rules)
        is_change = transactions.fits_schema | deleted
        for name in self._rules.key:
            is_change &= table[name].is_valid().to_numpy()
        if not is_change.all():
            if self._options.corrupt_payload_mode is CorruptPayloadMode.FAIL:
                row = int(np.argmin(is_change))
                self._raise_not_a_change(transactions, row, is_delete=bool(deleted[row]))
            transactions, deleted = transactions.filter(pa.array(is_change)), deleted[is_change]
        return _Changes(transactions, deleted, self._key_digests(transactions))

    def _unpack_transactions(self, batch: pa.RecordBatch) -> _Transactions:
        if self._encryption is None:
            log = {name: batch.column(name) for name in batch.schema.names}
        else:
            log = decrypt_batch(batch, self._encryption)
        data = log["data"]
        payload, fits_schema = self._unpacker.columns_with_nulls(data.fill_null(self._empty_map))
        fits_schema &= data.is_valid().to_numpy(zero_copy_only=False)
        return _Transactions(log, batch.column("data"), payload, fits_schema)

    def _as_table(self, transactions: _Transactions) -> pa.Table:
        names = [part.name for part in self._fields]
        return pa.table(
            transactions.log_columns | dict(zip(names, transactions.payload_columns, strict=True))
        )

    def _key_digests(self, transactions: _Transactions) -> list[bytes]:
        """Return digests of keys: they have a fixed size, and a file with them contains no keys."""
        names = [part.name for part in self._fields]
        columns = [transactions.payload_columns[names.index(name)] for name in self._rules.key]
        keys = pack_rows(columns, self._rules.key, "msgpack").to_pylist()
        return [blake2b(key, digest_size=KEY_DIGEST_BYTES).digest() for key in keys]

    def _raise_not_a_change(
        self, transactions: _Transactions, row: int, *, is_delete: bool
    ) -> NoReturn:
        """Raise an error with the reason why a transaction is not a change."""
        transaction_id = transactions.log_columns["transaction_id"][row]
        position = f"partition {self._partition}, transaction {transaction_id}"
        if not transactions.log_columns["data"][row].is_valid:
            reason = transactions.log_columns[ERROR_COLUMN][row]
            raise BadFormat(
                f"{position}: the payload cannot be decrypted ({reason}). Hint: mode=DROPMALFORMED "
                "ignores such transactions."
            )
        unpacker = self._unpacker
        if is_delete:
            keys = [part for part in self._fields if part.name in self._rules.key]
            unpacker = self._create_unpacker(keys)
        unpacker.columns(transactions.log_columns["data"].slice(row, 1), lambda _: position)
        compute_changes(
            self._as_table(transactions).slice(row, 1), self._rules
        )  # raises for a null in the key
        raise AssertionError(f"{position}: found no reason why the transaction is not a change")

    # ---- changes to rows

    def apply_to_state(self, batch: pa.RecordBatch, state: FeedState) -> None:
        """Apply the changes of a batch to the state, without computing rows."""
        changes = self._changes_of(batch)
        positions = np.where(
            changes.is_delete, _NO_ROW, np.arange(len(changes.key_digests))
        ).tolist()
        _store_last_changes(changes, dict(zip(changes.key_digests, positions, strict=True)), state)

    def rows(self, batch: pa.RecordBatch, state: FeedState) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Apply a batch to the state, step by step; yield the last ID and the rows of each step.

        Raises:
            BadFormat: a payload does not fit the schema (rule 3).
            sqlite3.Error: the state cannot be read or written.
        """
        changes = self._changes_of(batch)
        start = 0
        while start < len(changes.key_digests):
            step = _next_step(changes, start, state)
            payload, before = self._with_previous_payloads(changes, step)
            state.save_replaced_rows(step.rows_before)
            _store_last_changes(changes, step.last_indexes, state)
            last = changes.transactions.log_columns["transaction_id"][step.stop - 1].as_py()
            yield last, self._rows_of_step(changes, step, payload, before)
            start = step.stop

    def _with_previous_payloads(
        self, changes: _Changes, step: _FeedStep
    ) -> tuple[list[pa.Array], npt.NDArray[np.int64]]:
        """Return the payload columns, with the previous payloads appended, and `previous_indexes`.

        If a previous payload is unreadable, its index is replaced by `_NO_ROW`.
        """
        before = np.array(step.previous_indexes, np.int64)
        if not step.previous_rows:
            return changes.transactions.payload_columns, before
        headers, ids, payloads = zip(*step.previous_rows, strict=True)
        previous = self._unpack_transactions(
            pa.RecordBatch.from_arrays(
                [
                    pa.array([self._partition] * len(ids), pa.int32()),
                    pa.array(ids, pa.int64()),
                    pa.array(headers, pa.int32()),
                    pa.array(payloads, pa.binary()),
                ],
                names=list(_REQUIRED_LOG_COLUMNS),
            )
        )
        if (
            not previous.fits_schema.all()
        ):  # the encryption key of a previous payload has been deleted
            if self._options.corrupt_payload_mode is CorruptPayloadMode.FAIL:
                self._raise_not_a_change(
                    previous, int(np.argmin(previous.fits_schema)), is_delete=False
                )
            is_kept = np.concatenate(
                [np.ones(len(changes.key_digests), np.bool_), previous.fits_schema]
            )
            before[(before >= 0) & ~is_kept[before]] = _NO_ROW
        pairs = zip(changes.transactions.payload_columns, previous.payload_columns, strict=True)
        return [pa.concat_arrays(pair) for pair in pairs], before

    def _rows_of_step(
        self,
        changes: _Changes,
        step: _FeedStep,
        payload: list[pa.Array],
        before: npt.NDArray[np.int64],
    ) -> pa.RecordBatch:
        """Return the rows of a step (rules 1 and 2)."""
        own_indexes = np.arange(step.start, step.stop)
        deleted, is_known = changes.is_delete[own_indexes], before != _NO_ROW
        # Each change has up to two rows: one with the previous payload, and one with its own
        # payload.
        has_row = np.stack([is_known, ~deleted], axis=1)
        kinds = np.stack(
            [
                np.where(deleted, _DELETE, _UPDATE_PREIMAGE),
                np.where(is_known, _UPDATE_POSTIMAGE, _INSERT),
            ],
            axis=1,
        )
        source = pa.array(np.stack([before, own_indexes], axis=1)[has_row])
        cause = pa.array(np.stack([own_indexes, own_indexes], axis=1)[has_row])
        result_columns = {
            part.name: column.take(source)
            for part, column in zip(self._fields, payload, strict=True)
        }
        log = changes.transactions.log_columns
        for part in self._arrow_schema:
            if part.name == CHANGE_COLUMN:
                result_columns[CHANGE_COLUMN] = _CHANGE_TYPES.take(pa.array(kinds[has_row])).cast(
                    part.type
                )
            elif part.name in log:
                result_columns[part.name] = log[part.name].take(cause)
        return pa.RecordBatch.from_arrays(
            [result_columns[part.name] for part in self._arrow_schema], schema=self._arrow_schema
        )


def _decoder_with_empty_maps(options: ReadOptions) -> Decode | None:
    """Return the decoder of a format with schemas; it decodes an empty payload as an empty map."""
    decode = payload_decoder(options)
    if decode is None:
        return None
    return lambda data: decode(data) if data else {}


def _next_step(changes: _Changes, start: int, state: FeedState) -> _FeedStep:
    """Return the next step of changes, beginning at index `start` (rule 4)."""
    count, size = len(changes.key_digests), 0
    deleted = changes.is_delete.tolist()
    step = _FeedStep(start, start, [], [], [], {})
    while step.stop < count and size < PREVIOUS_BYTES_MAX:
        position, key = step.stop, changes.key_digests[step.stop]
        before = step.last_indexes.get(key)
        if before is None:
            row = state.find_row(key)
            step.rows_before.append((key, row))
            before = _NO_ROW
            if row is not None:
                before = count + len(step.previous_rows)
                step.previous_rows.append(row)
                size += len(row.data)
        step.previous_indexes.append(before)
        step.last_indexes[key] = _NO_ROW if deleted[position] else position
        step.stop += 1
    return step


def _store_last_changes(changes: _Changes, last: dict[bytes, int], state: FeedState) -> None:
    """Write the last change of each key to the state."""
    upserts = {key: position for key, position in last.items() if position != _NO_ROW}
    positions = pa.array(upserts.values(), pa.int64())
    columns = [
        changes.transactions.log_columns["header"],
        changes.transactions.log_columns["transaction_id"],
    ]
    values = [
        column.take(positions).to_pylist()
        for column in (*columns, changes.transactions.stored_payloads)
    ]
    state.write(
        zip(upserts, map(StoredRow, *values), strict=True),
        [key for key, position in last.items() if position == _NO_ROW],
    )
