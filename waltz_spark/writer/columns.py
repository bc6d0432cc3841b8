"""Converts the columns of a DataFrame to append columns: payload, locks, partition, mark.

The module rejects invalid columns: on the driver by type (`check_schema`), on the executor by value
(`RowConverter`).

Rules:
    1. The module processes whole columns: Python code runs for each row only to pack payloads and
       hash strings.
    2. The append columns keep the order of the rows.
"""

import difflib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from waltz_core.encryption.key_ids import check_key_id
from waltz_core.errors import BadRequest, TooLarge
from waltz_core.records.batches import data_crcs
from waltz_core.records.record import BEFORE_FIRST, LOCKS_MAX, TRANSACTION_BYTES_MAX
from waltz_spark.options import WriteOptions
from waltz_spark.payload_encryption import ADDED_BYTES_MAX, KEY_ID_COLUMN
from waltz_spark.payload_schemas import payload_encoder
from waltz_spark.planning import first_items_text
from waltz_spark.rows import check_packed_type, pack_rows

LOCK_COLUMNS = ("write_locks", "read_locks", "append_locks")
MARK_COLUMN = "client_high_water_mark"
# Columns with a special meaning; with `dataFormat`, all other columns are packed into the payload.
WRITE_COLUMNS = ("data", "header", "partition", *LOCK_COLUMNS, MARK_COLUMN)
# The columns of results with the outcome of a row. `partition` also is a column of a DataFrame.
RESULT_COLUMNS = (
    "status",
    "transaction_id",
    "attempts",
    "lock_failure_transaction_id",
    "retry_high_water_mark",
)
# Columns that are added to rejected rows for the function of option `recompute`.
ROW_NUMBER_COLUMN, CONFLICT_COLUMN = "waltz_row", "lock_failure_transaction_id"
_INTEGER_TYPES = (IntegerType, LongType, ShortType)
_GOLDEN_RATIO = np.uint32(0x9E3779B1)


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Reject a DataFrame that cannot be written, before any task starts.

    Raises:
        BadRequest: the error names the column, its expected and its found type.
    """
    types = {field.name: field.dataType for field in schema.fields}
    _check_spelling(types)
    if options.recompute_function is not None:
        _check_names_for_recompute(types)
    _check_payload(types, options)
    for name in LOCK_COLUMNS:
        if name in types:
            _check_locks(name, types[name])
    for name in ("header", "partition"):
        if name in types and not isinstance(types[name], IntegerType | ShortType):
            raise BadRequest(
                f"column {name!r}: expected type int, found {types[name].simpleString()}"
            )
    if MARK_COLUMN in types and not isinstance(types[MARK_COLUMN], _INTEGER_TYPES):
        found_type = types[MARK_COLUMN].simpleString()
        raise BadRequest(f"column {MARK_COLUMN!r}: expected type long, found {found_type}")
    _check_options(types, options)
    _check_no_unused_columns(types, options)


def _check_spelling(types: Mapping[str, DataType]) -> None:
    """Reject misspelled names of log columns: a misspelled lock column would lock nothing."""
    for name, kind in types.items():
        if name in WRITE_COLUMNS:
            continue
        nearest = [name.lower()] if name.lower() in WRITE_COLUMNS else []
        if isinstance(kind, ArrayType) and isinstance(kind.elementType, IntegerType):
            nearest = nearest or difflib.get_close_matches(
                name.lower(), LOCK_COLUMNS, n=1, cutoff=0.85
            )
        if nearest:
            raise BadRequest(
                f"the log has no column {name!r}; did you mean {nearest[0]!r}? Hint: rename the "
                f"column to {nearest[0]!r}; if it has other data, choose a less similar name."
            )


def _check_names_for_recompute(types: Mapping[str, DataType]) -> None:
    for name in (ROW_NUMBER_COLUMN, CONFLICT_COLUMN):
        if name in types:
            raise BadRequest(
                f"column {name!r}: option 'recompute' reserves this name. Hint: drop or rename the "
                "column."
            )


def _check_no_unused_columns(types: Mapping[str, DataType], options: WriteOptions) -> None:
    """Reject columns that would have no effect, for example a misspelled lock column."""
    if options.data_format is not None or options.recompute_function is not None:
        return  # the columns are packed, or the function may need them
    used_columns = {*WRITE_COLUMNS, options.partition_by, options.encryption_key_column}
    if options.results_path is not None:
        used_columns.update(types if options.result_columns is None else options.result_columns)
    unused_columns = [name for name in types if name not in used_columns]
    if not unused_columns:
        return
    names = ", ".join(repr(name) for name in unused_columns)
    nearest = difflib.get_close_matches(unused_columns[0].lower(), WRITE_COLUMNS, n=1, cutoff=0.75)
    suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise BadRequest(
        f"the log does not have column{'s' * (len(unused_columns) > 1)} {names}{suggestion}: "
        "expected the "
        f"columns {', '.join(WRITE_COLUMNS)}. Hint: use option dataFormat=msgpack without "
        f"column 'data' to pack other columns into the payload, or use .drop({names})."
    )


def _check_options(types: Mapping[str, DataType], options: WriteOptions) -> None:
    for name in options.result_columns or ():
        if name not in types:
            raise BadRequest(f"option 'resultColumns': the input has no column {name!r}")
        if name in RESULT_COLUMNS:
            raise BadRequest(
                f"option 'resultColumns': the results already have a column {name!r}. Hint: "
                "rename the column of the input."
            )
    for name in options.identity_columns:
        if name not in types or name in WRITE_COLUMNS:
            raise BadRequest(
                "option 'identityColumns': expected a column that dataFormat packs into the "
                f"payload, found {name!r}"
            )
    if options.encryption_key_column is not None:
        _check_key_column(types.get(options.encryption_key_column), options.encryption_key_column)
    if options.partition_by is not None:
        kind = types.get(options.partition_by)
        if kind is None:
            raise BadRequest(
                f"option 'partitionBy': the input has no column {options.partition_by!r}"
            )
        if not isinstance(kind, (*_INTEGER_TYPES, StringType)):
            raise BadRequest(
                f"option 'partitionBy', column {options.partition_by!r}: expected an integer or "
                f"a string, found {kind.simpleString()}. Hint: for other types use a column of "
                f"hashes: .withColumn('key', xxhash64({options.partition_by!r})), "
                "partitionBy=key."
            )


def _check_key_column(kind: DataType | None, name: str) -> None:
    if kind is None:
        raise BadRequest(f"option 'encryptionKeyIdColumn': the input has no column {name!r}")
    if not isinstance(kind, StringType):
        raise BadRequest(
            f"option 'encryptionKeyIdColumn', column {name!r}: expected a string, found "
            f"{kind.simpleString()}. Hint: .withColumn('key', concat(lit('customer-'), "
            f"{name!r}))."
        )


def _check_payload(types: Mapping[str, DataType], options: WriteOptions) -> None:
    data = types.get("data")
    if data is None and options.data_format is None:
        raise BadRequest(
            "the input has no column 'data' (binary or string). Hint: add it, or use option "
            "dataFormat=msgpack, which packs all other columns by name."
        )
    if data is not None and options.data_format is not None:
        raise BadRequest(
            "expected either column 'data' or option 'dataFormat', found both. Hint: "
            "'dataFormat' packs the other columns into the payload."
        )
    if data is not None and not isinstance(data, BinaryType | StringType):
        raise BadRequest(
            f"column 'data': expected type binary or string, found {data.simpleString()}"
        )
    if options.data_format is None:
        return
    payload_types = {name: kind for name, kind in types.items() if name not in WRITE_COLUMNS}
    if not payload_types:
        raise BadRequest("option 'dataFormat': the input has no column to pack into the payload")
    for name, kind in payload_types.items():
        check_packed_type(name, kind)


def _check_locks(name: str, kind: DataType) -> None:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, IntegerType):
        raise BadRequest(
            f"column {name!r}: expected type array<int>, found {kind.simpleString()}. Hint: "
            "use lock hashes of waltz_spark.functions.lock(name, key): array(lock('account', "
            "col('id')))."
        )


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """Rows to send: the log partition of each row, the append columns, the result columns.

    `is_round_robin` is true for rows whose partition is arbitrary. `source` has the input rows if
    they may be recomputed.
    """

    partitions: npt.NDArray[np.int32]
    # header, data, its crc, three lock lists, client_high_water_mark; encryption_key_id with
    # `encryptionKeyIdColumn`
    append: pa.RecordBatch
    identity: pa.RecordBatch | None
    is_round_robin: npt.NDArray[np.bool_]
    source: pa.RecordBatch | None = None


class RowConverter:
    """Converts the record batches of one task to append columns.

    Args:
        options: the options of the write.
        partition_count: the number of partitions of the log.
        marks: by partition, the mark for rows that have no mark of their own.
        keeps_input_columns: whether to keep the input columns for the results.
        first_round_robin_index: the index of the first round-robin partition. It is the number of
            the task, so that tasks with few rows use different partitions.
    """

    def __init__(
        self,
        options: WriteOptions,
        partition_count: int,
        marks: Mapping[int, int],
        *,
        keeps_input_columns: bool,
        first_round_robin_index: int = 0,
    ) -> None:
        self._options = options
        self._partition_count = partition_count
        self._marks = np.array(
            [marks.get(partition, int(BEFORE_FIRST)) for partition in range(partition_count)],
            np.int64,
        )
        self._keeps_input_columns = keeps_input_columns
        chosen_partitions = options.partitions
        self._allowed_partitions = np.array(
            range(partition_count) if chosen_partitions is None else chosen_partitions, np.int64
        )
        self._next_round_robin_index = first_round_robin_index % len(self._allowed_partitions)
        self._encode = payload_encoder(options)
        # The number of rows in earlier batches. Errors name a row by its position in the task.
        self._row_count = 0

    def convert(self, batch: pa.RecordBatch) -> ConvertedRows:
        """Return the append columns of a batch.

        Raises:
            BadRequest: a value is null where this is not allowed, or a partition does not exist.
            TooLarge: a payload or the locks of a row are over the limit.
        """
        batch = _with_nullable_columns(batch)
        count = batch.num_rows
        locks = [self._lock_column(batch, name) for name in LOCK_COLUMNS]
        partitions, is_round_robin = self._choose_partitions(batch, locks, count)
        marks = self._marks_of_rows(batch, partitions)
        data = self._payload_column(batch)
        columns = [
            self._header_column(batch, count),
            data,
            data_crcs(data),
            *locks,
            pa.array(marks),
        ]
        names = ["header", "data", "crc", *LOCK_COLUMNS, MARK_COLUMN]
        if self._options.encryption_key_column is not None:
            columns.append(self._key_id_column(batch, self._options.encryption_key_column))
            names.append(KEY_ID_COLUMN)
        append = pa.RecordBatch.from_arrays(columns, names)
        source = None if self._options.recompute_function is None else batch
        self._row_count += count
        return ConvertedRows(partitions, append, self.identity(batch), is_round_robin, source)

    def identity(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the input columns that the results contain; None without results."""
        if not self._keeps_input_columns:
            return None
        names = self._options.result_columns
        if names is None:
            names = tuple(name for name in batch.schema.names if name != "data")
        return batch.select(list(names))

    def _payload_column(self, batch: pa.RecordBatch) -> pa.Array:
        if self._options.data_format is None:
            data = batch.column("data").cast(pa.binary())
            if data.null_count:
                raise BadRequest(
                    f"column 'data' is null in {self._describe_row(batch, data.is_null())}, but a "
                    "transaction needs a payload. Hint: filter such rows with .where('data "
                    "is not null')."
                )
        else:
            names = [name for name in batch.schema.names if name not in WRITE_COLUMNS]
            packed_columns = [batch.column(name) for name in names]
            data = pack_rows(packed_columns, names, self._options.data_format, self._encode)
        largest_bytes = pc.max(pc.binary_length(data)).as_py() or 0
        encryption_bytes = 0 if self._options.encryption_keys is None else ADDED_BYTES_MAX
        if largest_bytes > TRANSACTION_BYTES_MAX - encryption_bytes:
            limit = f"limit of {TRANSACTION_BYTES_MAX - encryption_bytes:,}"
            limit += " with encryption" * bool(encryption_bytes)
            raise TooLarge(
                f"a payload of {largest_bytes:,} bytes is over the {limit}. Hint: store large "
                "objects elsewhere and write their address."
            )
        return data

    def _key_id_column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """Return the key ID of each row, from the column of option `encryptionKeyIdColumn`."""
        keys = batch.column(name).cast(pa.string())
        if keys.null_count:
            raise BadRequest(
                f"option 'encryptionKeyIdColumn': expected a key ID in column {name!r}, found "
                f"null in {self._describe_row(batch, keys.is_null())}"
            )
        for key_id in pc.unique(keys).to_pylist():
            check_key_id(key_id, f"option 'encryptionKeyIdColumn', column {name!r}")
        return keys

    def _describe_row(self, batch: pa.RecordBatch, is_wrong: pa.Array) -> str:
        """Return a text for the first wrong row: its position in the task, and its values."""
        index = pc.index(is_wrong, True).as_py()
        row_values = {
            name: batch.column(name)[index].as_py() for name in batch.schema.names if name != "data"
        }
        values_text = f" ({str(row_values)[:200]})" if row_values else ""
        return f"row {self._row_count + index} (counted from 0) of the task{values_text}"

    @staticmethod
    def _header_column(batch: pa.RecordBatch, count: int) -> pa.Array:
        if "header" not in batch.schema.names:
            return pa.array(np.zeros(count, np.int32))
        return pc.fill_null(batch.column("header").cast(pa.int32()), 0)

    @staticmethod
    def _lock_column(batch: pa.RecordBatch, name: str) -> pa.Array:
        kind = pa.list_(pa.int32())
        if name not in batch.schema.names:
            offsets = pa.array(np.zeros(batch.num_rows + 1, np.int32))
            return pa.ListArray.from_arrays(offsets, pa.array([], pa.int32()))
        column = batch.column(name).cast(kind)
        # A null lock (`lock()` of a null key) is no lock; a null list is an empty one.
        if column.null_count or column.flatten().null_count:
            locks_by_row = [
                [lock for lock in row or [] if lock is not None] for row in column.to_pylist()
            ]
            column = pa.array(locks_by_row, kind)
        lock_count_max = pc.max(pc.list_value_length(column)).as_py() or 0
        if lock_count_max > LOCKS_MAX:
            raise TooLarge(
                f"column {name!r}: expected at most {LOCKS_MAX:,} locks of a kind in a row, "
                f"found {lock_count_max:,}"
            )
        return column

    def _choose_partitions(
        self, batch: pa.RecordBatch, locks: Sequence[pa.Array], count: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        partitions, is_round_robin = self._default_partitions(batch, locks, count)
        is_given = np.zeros(count, dtype=np.bool_)
        if "partition" in batch.schema.names:
            given_partitions = batch.column("partition").cast(pa.int32())
            is_given = np.asarray(given_partitions.is_valid())
            partitions = np.where(
                is_given, np.asarray(pc.fill_null(given_partitions, 0)), partitions
            )
            is_round_robin = is_round_robin & ~is_given
            invalid_partitions = partitions[
                (partitions < 0) | (partitions >= self._partition_count)
            ]
            if len(invalid_partitions):
                raise BadRequest(
                    "column 'partition': expected a partition in "
                    f"0..{self._partition_count - 1}, found {int(invalid_partitions[0])}"
                )
        if len(self._allowed_partitions) < self._partition_count:
            self._check_allowed_partitions(batch, partitions, is_given)
        return partitions.astype(np.int32), is_round_robin

    def _check_allowed_partitions(
        self,
        batch: pa.RecordBatch,
        partitions: npt.NDArray[np.int64],
        is_named: npt.NDArray[np.bool_],
    ) -> None:
        """Reject a row whose partition is not in option `partitions`."""
        is_wrong = ~np.isin(partitions, self._allowed_partitions)
        if not is_wrong.any():
            return
        row = int(np.flatnonzero(is_wrong)[0])
        found_text = (
            f"partition {partitions[row]} in {self._describe_row(batch, pa.array(is_wrong))}"
        )
        allowed = first_items_text(self._allowed_partitions.tolist())
        expected = f"expected one of the partitions {allowed} (option 'partitions'), found"
        if is_named[row]:
            raise BadRequest(f"column 'partition': {expected} {found_text}")
        by = self._options.partition_by
        cause = "the first lock" if by is None else f"column {by!r}"
        raise BadRequest(
            f"{cause} chooses the partition: {expected} {found_text}. Hint: set a partition in "
            "column 'partition', the same for all rows with the same "
            f"{'lock' if by is None else 'key'}."
        )

    def _default_partitions(
        self, batch: pa.RecordBatch, locks: Sequence[pa.Array], count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        round_robin_partitions = self._allowed_partitions[
            (self._next_round_robin_index + np.arange(count, dtype=np.int64))
            % len(self._allowed_partitions)
        ]
        self._next_round_robin_index = (self._next_round_robin_index + count) % len(
            self._allowed_partitions
        )
        if self._options.partition_by is not None:
            hashes = _hash_column(batch.column(self._options.partition_by))
            return self._partitions_of_hashes(hashes), np.zeros(count, dtype=np.bool_)
        partitions, is_round_robin = round_robin_partitions, np.ones(count, dtype=np.bool_)
        # The first lock of a row: the first of its write locks, then read locks, then append locks.
        for column in reversed(locks):
            offsets = np.asarray(column.offsets)
            has_lock = offsets[1:] > offsets[:-1]
            if has_lock.any():
                values = np.asarray(column.values)
                first = values[np.minimum(offsets[:-1], max(len(values) - 1, 0))]
                partitions = np.where(
                    has_lock, self._partitions_of_hashes(first.astype(np.uint32)), partitions
                )
                is_round_robin &= ~has_lock
        return partitions, is_round_robin

    def _partitions_of_hashes(self, hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Compute `record.spread` for a whole column."""
        mixed_hashes = (hashes * _GOLDEN_RATIO).astype(np.uint64)
        return ((mixed_hashes * np.uint64(self._partition_count)) >> np.uint64(32)).astype(np.int64)

    def _marks_of_rows(
        self, batch: pa.RecordBatch, partitions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        marks = self._marks[partitions]
        if MARK_COLUMN in batch.schema.names:
            given_marks = batch.column(MARK_COLUMN).cast(pa.int64())
            is_wrong = pc.fill_null(pc.less(given_marks, int(BEFORE_FIRST)), False)  # noqa: FBT003
            if pc.any(is_wrong).as_py():
                first_wrong_mark = given_marks.filter(is_wrong)[0]
                raise BadRequest(
                    f"column {MARK_COLUMN!r}: expected a transaction ID, or -1 (before "
                    f"the first transaction), found {first_wrong_mark} in "
                    f"{self._describe_row(batch, is_wrong)}"
                )
            marks = np.where(
                np.asarray(given_marks.is_valid()), np.asarray(pc.fill_null(given_marks, 0)), marks
            )
        return marks


def _with_nullable_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with all columns nullable, so that batches can be concatenated."""
    fields = [pa.field(part.name, part.type) for part in batch.schema]
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


def _hash_column(column: pa.Array) -> npt.NDArray[np.uint32]:
    """Compute `record.lock_hash("", key)` for a column; null counts as key 0."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        # Hash bytes, not text: a Spark string may not be valid UTF-8.
        kind = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        keys = np.array(
            [0 if text is None else zlib.crc32(text) for text in column.cast(kind).to_pylist()],
            np.uint64,
        )
    else:
        keys = np.asarray(pc.fill_null(column.cast(pa.int64()), 0)).view(np.uint64)
    folded_keys: npt.NDArray[np.uint64] = keys ^ (keys >> np.uint64(32))
    return folded_keys.astype(np.uint32)
