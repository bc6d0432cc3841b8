"""Recomputes rejected rows, in the task, with the user's function.

After a lock failure, a row is computed again; a stale payload is never sent again.

Rules:
    1. The function receives rejected rows that have the same mark, and all transactions of their
       partition from this mark to a later mark. These transactions include the conflicting ones.
    2. A recomputed row stays in its partition and has the later mark of rule 1. So only a
       transaction that the function has not received can cause another rejection.
    3. `waltz_row` is the number of the row that a recomputed row replaces. Each recomputed row
       replaces one row, and has the identity columns of that row. An omitted row stays rejected.
    4. Rows are not recomputed if the transactions since their mark would not fit into memory.
    5. If a payload does not fit the input's columns, these columns are null, and a column marks the
       transaction. The same applies to a payload that cannot be decrypted; the payload is null,
       too.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from waltz_core.client import Encryption, WaltzClient
from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadRequest
from waltz_core.records import batches
from waltz_core.records.record import PartitionId
from waltz_core.records.unpacking import Unpacker
from waltz_core.user_functions import load_function
from waltz_spark.options import LOG_COLUMNS, WriteOptions
from waltz_spark.payload_encryption import decrypt_batch, decryption_of
from waltz_spark.payload_schemas import payload_decoder
from waltz_spark.rows import is_case_sensitive
from waltz_spark.writer.columns import (
    CONFLICT_COLUMN,
    MARK_COLUMN,
    ROW_NUMBER_COLUMN,
    WRITE_COLUMNS,
    ConvertedRows,
    RowConverter,
)

if TYPE_CHECKING:
    from random import Random

_log = logging.getLogger("waltz")

# A boolean column: whether a transaction's payload fits the input's columns.
PAYLOAD_FITS_COLUMN = "waltz_whole"
# Columns that the writer sets. If the function returns values for these columns, the values have no
# effect.
_COLUMNS_SET_BY_WRITER = ("partition", MARK_COLUMN)
PAUSE_MS_MAX = 5_000
# Limits for the transactions since a mark. These transactions are in memory as a table.
NEWER_TRANSACTIONS_MAX = 1_000_000
NEWER_BYTES_MAX = 256 * 1024 * 1024

RecomputeFunction = Callable[[pa.Table, pa.Table], pa.Table]


class RejectedRows(NamedTuple):
    """Rows of one partition that locks rejected, as they were sent."""

    partition: int
    source: pa.RecordBatch
    marks: npt.NDArray[np.int64]
    conflicting: npt.NDArray[np.int64]

    def take(self, indexes: npt.NDArray[np.intp]) -> "RejectedRows":
        """Return the rows at these indexes."""
        source = self.source.take(pa.array(indexes))
        return RejectedRows(self.partition, source, self.marks[indexes], self.conflicting[indexes])


class RecomputedRows(NamedTuple):
    """Recomputed rows, and the numbers of the rejected rows that they replace."""

    converted: ConvertedRows
    rows: npt.NDArray[np.int64]


def load_recompute_function(name: str) -> RecomputeFunction:
    """Return the function that option `recompute` names.

    Raises:
        BadConfig: the function does not exist. It is raised on the driver, before any task.
    """
    function: RecomputeFunction = load_function(
        name,
        "option 'recompute'",
        "It must be a function in a module that the driver and every worker can import, not in a "
        "notebook. Hint: put the function into a file, and distribute it with "
        "spark.addArtifact(..., pyfile=True) or --py-files.",
    )
    return function


class Recomputer:
    """Calls the user's function for the rows of one task.

    Args:
        client: reads the transactions since the marks.
        options: the options of the write.
        converter: converts recomputed rows to append columns, like the input rows.
        random: varies the delays.
    """

    def __init__(
        self, client: WaltzClient, options: WriteOptions, converter: RowConverter, random: "Random"
    ) -> None:
        assert options.recompute_function is not None
        self._client = client
        self._options = options
        self._converter = converter
        self._random = random
        self._encryption = decryption_of(options)
        self._function = load_recompute_function(options.recompute_function)
        self.retries_max = options.retries_max

    def pause_s(self, retries: int) -> float:
        """Return the delay in seconds after `retries` recomputations, with jitter."""
        pause_ms = min(self._options.backoff_ms << min(retries, 20), PAUSE_MS_MAX)
        return pause_ms * (1 - self._random.random() / 2) / 1_000

    def recompute(self, rejected: RejectedRows) -> RecomputedRows:
        """Recompute rejected rows; the function may omit some or all of them.

        Raises:
            BadRequest: the result of the function is not valid.
        """
        partition = rejected.partition
        mark = int(self._client.high_water_mark(partition))
        if mark < int(rejected.conflicting.max()):  # from a server that has just lost the partition
            mark = int(self._client.high_water_mark(partition, linearizable=True))
        rows: list[int] = []
        parts = [rejected.source.slice(0, 0)]
        marks, newer_transactions = self._load_newer_transactions(rejected, mark)
        for old_mark in marks:
            indexes = np.flatnonzero(rejected.marks == old_mark)
            newer = newer_transactions.slice(old_mark - marks[0])  # ids are dense
            row_numbers, part = self._call_function(rejected.take(indexes), newer)
            rows.extend(indexes[row_numbers].tolist())
            parts.append(part)
        return self._convert_recomputed_rows(_concatenate_batches(parts), partition, mark, rows)

    def _call_function(
        self, rejected: RejectedRows, newer_transactions: pa.Table
    ) -> tuple[list[int], pa.RecordBatch]:
        name = self._options.recompute_function or ""
        try:
            answer = self._function(_rejected_table(rejected), newer_transactions)
        except Exception as error:
            error.add_note(f"raised by {name}, the function of option 'recompute'")
            raise
        return _check_result(answer, rejected.source, name, self._options.identity_columns)

    def _load_newer_transactions(
        self, rejected: RejectedRows, last: int
    ) -> tuple[list[int], pa.Table]:
        """Return the rows' marks, ascending, and the transactions after the lowest of these marks.

        If there are too many transactions after a mark, leave this mark out.
        """
        marks = sorted({int(mark) for mark in rejected.marks})
        while marks:
            newer_transactions = self._read_transactions(
                rejected.partition, marks[0] + 1, last, rejected.source.schema
            )
            if newer_transactions is not None:
                return marks, newer_transactions
            _log.warning(
                "spark.recompute_over_limit partition=%d rows=%d mark=%d",
                rejected.partition,
                int((rejected.marks == marks[0]).sum()),
                marks[0],
            )
            del marks[0]
        return [], pa.table({})

    def _convert_recomputed_rows(
        self, batch: pa.RecordBatch, partition: int, mark: int, rows: list[int]
    ) -> RecomputedRows:
        """Return recomputed rows as append columns, and also with the input's columns (rule 2)."""
        count = batch.num_rows
        columns_by_name = {name: batch.column(name) for name in batch.schema.names}
        position_columns = {
            "partition": pa.array(np.full(count, partition, np.int32)),
            MARK_COLUMN: pa.array(np.full(count, mark, np.int64)),
        }
        converted = self._converter.convert(
            pa.RecordBatch.from_pydict(columns_by_name | position_columns)
        )
        # The rows with the input's columns, which may lack `partition` and the mark.
        for name, column in position_columns.items():
            if name in columns_by_name:
                columns_by_name[name] = column.cast(batch.schema.field(name).type)
        source = pa.RecordBatch.from_arrays(list(columns_by_name.values()), schema=batch.schema)
        identity = self._converter.identity(source)
        converted = dataclasses.replace(converted, source=source, identity=identity)
        return RecomputedRows(converted, np.array(rows, np.int64))

    def _read_transactions(
        self, partition: int, first: int, last: int, schema: pa.Schema
    ) -> pa.Table | None:
        """Return transactions first..last, unpacked like the input; None: too many (rule 4)."""
        unpacker, names = self._create_unpacker(schema)
        transaction_batches: list[pa.RecordBatch] = []
        size = 0
        if last - first >= NEWER_TRANSACTIONS_MAX:
            return None
        for chunk in self._client.read_range(partition, first, last) if first <= last else ():
            for batch in batches.range_to_arrow(
                chunk.records,
                chunk.lengths,
                chunk.stamps,
                list(LOG_COLUMNS),
                partition_id=PartitionId(partition),
            ):
                size += batch.nbytes
                decrypted = (
                    batch if self._encryption is None else _decrypt_batch(batch, self._encryption)
                )
                transaction_batches.append(_unpack_payloads(decrypted, unpacker, names))
            if size > NEWER_BYTES_MAX:
                return None
        log_fields = [batches.READ_SCHEMA.field(name) for name in LOG_COLUMNS]
        fields = [pa.field(name, schema.field(name).type) for name in names]
        fits_field = [pa.field(PAYLOAD_FITS_COLUMN, pa.bool_())] if names else []
        return pa.Table.from_batches(
            transaction_batches, schema=pa.schema([*log_fields, *fields, *fits_field])
        )

    def _create_unpacker(self, schema: pa.Schema) -> tuple[Unpacker | None, list[str]]:
        if self._options.data_format is None:
            return None, []
        reserved_names = {*WRITE_COLUMNS, *LOG_COLUMNS}
        fields = [part for part in schema if part.name not in reserved_names]
        unpacker = Unpacker(
            fields,
            self._options.data_format,
            decode=payload_decoder(self._options),
            is_case_sensitive=is_case_sensitive(),
        )
        return unpacker, [part.name for part in fields]


def _decrypt_batch(batch: pa.RecordBatch, encryption: Encryption) -> pa.RecordBatch:
    """Return a batch with decrypted payloads; a payload that cannot be decrypted is null."""
    columns_by_name = decrypt_batch(batch, encryption)
    columns = [columns_by_name[name] for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _unpack_payloads(
    batch: pa.RecordBatch, unpacker: Unpacker | None, names: list[str]
) -> pa.RecordBatch:
    """Add the payload's columns; if a payload does not fit, they are null (rule 5)."""
    if unpacker is None:
        return batch
    columns, fits_schema = unpacker.columns_with_nulls(batch.column("data"))
    columns_by_name = {name: batch.column(name) for name in batch.schema.names}
    columns_by_name |= dict(zip(names, columns, strict=True))
    columns_by_name[PAYLOAD_FITS_COLUMN] = pa.array(fits_schema)
    return pa.RecordBatch.from_pydict(columns_by_name)


def _concatenate_batches(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    fields = [pa.field(part.name, part.type) for part in parts[0].schema]
    schema = pa.schema(fields)
    return pa.concat_batches(
        [pa.RecordBatch.from_arrays(part.columns, schema=schema) for part in parts]
    )


def _rejected_table(rejected: RejectedRows) -> pa.Table:
    """Return the rejected rows with their number, partition, mark and conflicting transaction."""
    source = rejected.source
    count = source.num_rows
    writer_columns: dict[str, Any] = {
        ROW_NUMBER_COLUMN: pa.array(np.arange(count)),
        "partition": pa.array(np.full(count, rejected.partition, np.int32)),
        MARK_COLUMN: pa.array(rejected.marks),
        CONFLICT_COLUMN: pa.array(rejected.conflicting),
    }
    input_columns = {
        name: source.column(name) for name in source.schema.names if name not in writer_columns
    }
    return pa.table(input_columns | writer_columns)


def _check_result(
    answer: object, source: pa.RecordBatch, name: str, identity: tuple[str, ...]
) -> tuple[list[int], pa.RecordBatch]:
    """Return the numbers of the replaced rows, and the recomputed rows with the input's columns.

    Raises:
        BadRequest: the function's result violates rule 3; the error has the expected and the found
            value.
    """
    if isinstance(answer, pa.RecordBatch):
        answer = pa.Table.from_batches([answer])
    if not isinstance(answer, pa.Table):
        raise _wrong_result_error(
            f"expected {name} to return a pyarrow.Table, found {type(answer).__name__}"
        )
    names = answer.column_names
    missing_columns = {ROW_NUMBER_COLUMN, *source.schema.names} - {*_COLUMNS_SET_BY_WRITER, *names}
    if missing_columns:
        raise _wrong_result_error(
            f"expected {name} to return a table with the columns of the rejected rows, found "
            f"a table without {', '.join(sorted(missing_columns))}"
        )
    if len(set(names)) != len(names):
        raise _wrong_result_error(
            f"expected {name} to return a table with unique column names, found {names}"
        )
    rows = answer.column(ROW_NUMBER_COLUMN).to_pylist()
    count = source.num_rows
    are_rows_valid = all(type(row) is int and 0 <= row < count for row in rows)
    if not are_rows_valid or len(set(rows)) != len(rows):
        raise _wrong_result_error(
            f"expected {name} to return distinct row numbers in column {ROW_NUMBER_COLUMN!r}, 0 to "
            f"{count - 1}, found {first_names_text(list(map(str, rows)), 20)}"
        )
    fields = [part.with_nullable(nullable=True) for part in source.schema]
    try:
        arrays = [_result_column(answer, part) for part in fields]
    except (pa.ArrowException, ValueError) as error:
        raise _wrong_result_error(
            f"expected {name} to return columns with the types of the input, found other types "
            f"({error})"
        ) from None
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    for each in identity:
        if not batch.column(each).equals(source.column(each).take(pa.array(rows, pa.int64()))):
            raise _wrong_result_error(
                f"expected {name} to leave identity column {each!r} unchanged, found other "
                "values in it"
            )
    return rows, batch


def _wrong_result_error(text: str) -> BadRequest:
    return BadRequest(f"option 'recompute': {text}")


def _result_column(answer: pa.Table, part: pa.Field) -> pa.Array:
    if part.name in _COLUMNS_SET_BY_WRITER:
        return pa.nulls(answer.num_rows, part.type)
    column = answer.column(part.name).cast(part.type)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], part.type)
