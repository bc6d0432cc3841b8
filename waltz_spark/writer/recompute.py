"""Computes refused rows anew, in the task, by the user's own function.

It is where a lock failure becomes a new execution, never a resend of a stale payload, and nothing
else of a write calls a user's code.

Rules:
    1. The function gets refused rows of one mark, and all transactions of their partition since
       that mark, up to one that has the transactions which won.
    2. A new row stays in its partition and has that mark: what the function has not seen refuses
       it.
    3. `waltz_row` tells which row a new one stands for; each stands for its own row alone, with its
       identity columns. A row that is left out stays refused.
    4. Rows whose mark lies so far back that what came since would not fit in memory are not
       computed anew.
    5. A transaction that does not fit the input's columns is shown as far as it does, and marked.
"""

import dataclasses
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadRequest
from waltz_core.records import batches
from waltz_core.records.record import PartitionId
from waltz_spark.options import LOG_COLUMNS, WriteOptions
from waltz_spark.unpacking import Unpacker, is_case_sensitive
from waltz_spark.writer.columns import (
    CONFLICT_COLUMN,
    MARK_COLUMN,
    ROW_COLUMN,
    WRITE_COLUMNS,
    Shaped,
    Shaper,
)

if TYPE_CHECKING:
    from random import Random

_log = logging.getLogger("waltz")

# Whether a transaction's payload fits the input's columns.
WHOLE_COLUMN = "waltz_whole"
# The writer's own: whatever the function makes of them has no effect.
_SET_HERE = ("partition", MARK_COLUMN)
PAUSE_MS_MAX = 5_000
# What has been committed since a mark is held in memory, as a table.
SINCE_TRANSACTIONS_MAX = 1_000_000
SINCE_BYTES_MAX = 256 * 1024 * 1024

Function = Callable[[pa.Table, pa.Table], pa.Table]


class RefusedRows(NamedTuple):
    """Rows of one partition that locks refused, as they were sent."""

    partition: int
    source: pa.RecordBatch
    marks: npt.NDArray[np.int64]
    conflicting: npt.NDArray[np.int64]

    def take(self, places: npt.NDArray[np.intp]) -> "RefusedRows":
        """Return some of them."""
        source = self.source.take(pa.array(places))
        return RefusedRows(self.partition, source, self.marks[places], self.conflicting[places])


class Anew(NamedTuple):
    """Rows computed anew, and which of the refused ones they stand for."""

    shaped: Shaped
    rows: npt.NDArray[np.int64]


def load_function(name: str) -> Function:
    """Return the function that option `recompute` names.

    Raises:
        BadConfig: there is none; on the driver, before any task.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise BadConfig(
            f"option 'recompute': {name!r} cannot be imported ({error}); it is to be a function of "
            "a module that the driver and every worker can import, not of a notebook: put it in a "
            "file and hand that over with spark.addArtifact(..., pyfile=True) or --py-files"
        ) from None
    if not callable(function):
        raise BadConfig(f"option 'recompute': {name!r} is no function but {function!r}")
    checked: Function = function
    return checked


class Recomputer:
    """Calls the user's function for the rows of one task.

    Args:
        client: reads what came since.
        options: the write's.
        shaper: makes append columns of the new rows, as of those that came first.
        random: for the pauses.
    """

    def __init__(
        self, client: WaltzClient, options: WriteOptions, shaper: Shaper, random: "Random"
    ) -> None:
        assert options.recompute is not None
        self._client = client
        self._options = options
        self._shaper = shaper
        self._random = random
        self._function = load_function(options.recompute)
        self.retries_max = options.retries_max

    def pause_s(self, retries: int) -> float:
        """Return how long rows wait that were computed anew so often already: half to all of it."""
        doubled = min(self._options.backoff_ms << min(retries, 20), PAUSE_MS_MAX)
        return doubled * (1 - self._random.random() / 2) / 1_000

    def again(self, refused: RefusedRows) -> Anew:
        """Return rows anew; fewer than were refused, or none.

        Raises:
            BadRequest: the function's answer is not what it is to be.
        """
        partition = refused.partition
        mark = int(self._client.high_water_mark(partition))
        if mark < int(refused.conflicting.max()):  # told by an owner that is none any more
            mark = int(self._client.high_water_mark(partition, linearizable=True))
        rows: list[int] = []
        parts = [refused.source.slice(0, 0)]
        marks, since = self._since_of_marks(refused, mark)
        for own in marks:
            places = np.flatnonzero(refused.marks == own)
            newer = since.slice(own - marks[0])  # ids are dense
            found, part = self._call(refused.take(places), newer)
            rows.extend(places[found].tolist())
            parts.append(part)
        return self._anew(_one_batch(parts), partition, mark, rows)

    def _call(self, refused: RefusedRows, since: pa.Table) -> tuple[list[int], pa.RecordBatch]:
        name = self._options.recompute or ""
        try:
            answer = self._function(_question(refused), since)
        except Exception as error:
            error.add_note(f"raised by {name}, the function of option 'recompute'")
            raise
        return _checked(answer, refused.source, name, self._options.identity_columns)

    def _since_of_marks(self, refused: RefusedRows, last: int) -> tuple[list[int], pa.Table]:
        """Return the marks from which rows are computed anew, and what came since the first."""
        marks = sorted({int(mark) for mark in refused.marks})
        while marks:
            since = self._since(refused.partition, marks[0] + 1, last, refused.source.schema)
            if since is not None:
                return marks, since
            _log.warning(
                "waltz: partition %d: %d refused rows are not computed anew: too much has come "
                "since their mark %d",
                refused.partition,
                int((refused.marks == marks[0]).sum()),
                marks[0],
            )
            del marks[0]
        return [], pa.table({})

    def _anew(self, batch: pa.RecordBatch, partition: int, mark: int, rows: list[int]) -> Anew:
        """Return append columns of new rows, and the rows as the input has them (rule 2)."""
        count = batch.num_rows
        found = {name: batch.column(name) for name in batch.schema.names}
        placed = {
            "partition": pa.array(np.full(count, partition, np.int32)),
            MARK_COLUMN: pa.array(np.full(count, mark, np.int64)),
        }
        shaped = self._shaper.shape(pa.RecordBatch.from_pydict(found | placed))
        # As the input has them, which need not have these two.
        for name, column in placed.items():
            if name in found:
                found[name] = column.cast(batch.schema.field(name).type)
        source = pa.RecordBatch.from_arrays(list(found.values()), schema=batch.schema)
        identity = self._shaper.identity(source)
        shaped = dataclasses.replace(shaped, source=source, identity=identity)
        return Anew(shaped, np.array(rows, np.int64))

    def _since(self, partition: int, first: int, last: int, schema: pa.Schema) -> pa.Table | None:
        """Return transactions first..last, unpacked as the input is; None: too many (rule 4)."""
        unpacker, names = self._unpacker(schema)
        found: list[pa.RecordBatch] = []
        size = 0
        if last - first >= SINCE_TRANSACTIONS_MAX:
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
                found.append(_unpacked(batch, unpacker, names))
            if size > SINCE_BYTES_MAX:
                return None
        plain = [batches.READ_SCHEMA.field(name) for name in LOG_COLUMNS]
        fields = [pa.field(name, schema.field(name).type) for name in names]
        whole = [pa.field(WHOLE_COLUMN, pa.bool_())] if names else []
        return pa.Table.from_batches(found, schema=pa.schema([*plain, *fields, *whole]))

    def _unpacker(self, schema: pa.Schema) -> tuple[Unpacker | None, list[str]]:
        if self._options.data_format is None:
            return None, []
        taken = {*WRITE_COLUMNS, *LOG_COLUMNS}
        fields = [part for part in schema if part.name not in taken]
        unpacker = Unpacker(
            fields, self._options.data_format, is_case_sensitive=is_case_sensitive()
        )
        return unpacker, [part.name for part in fields]


def _unpacked(batch: pa.RecordBatch, unpacker: Unpacker | None, names: list[str]) -> pa.RecordBatch:
    """Add the payload's columns, null where a transaction is of another kind (rule 5)."""
    if unpacker is None:
        return batch
    columns, is_whole = unpacker.piecemeal(batch.column("data"))
    found = {name: batch.column(name) for name in batch.schema.names}
    found |= dict(zip(names, columns, strict=True))
    found[WHOLE_COLUMN] = pa.array(is_whole)
    return pa.RecordBatch.from_pydict(found)


def _one_batch(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    fields = [pa.field(part.name, part.type) for part in parts[0].schema]
    schema = pa.schema(fields)
    return pa.concat_batches(
        [pa.RecordBatch.from_arrays(part.columns, schema=schema) for part in parts]
    )


def _question(refused: RefusedRows) -> pa.Table:
    """Return the refused rows with their number, partition, mark, and the transaction that won."""
    source = refused.source
    count = source.num_rows
    own: dict[str, Any] = {
        ROW_COLUMN: pa.array(np.arange(count)),
        "partition": pa.array(np.full(count, refused.partition, np.int32)),
        MARK_COLUMN: pa.array(refused.marks),
        CONFLICT_COLUMN: pa.array(refused.conflicting),
    }
    kept = {name: source.column(name) for name in source.schema.names if name not in own}
    return pa.table(kept | own)


def _checked(
    answer: object, source: pa.RecordBatch, name: str, identity: tuple[str, ...]
) -> tuple[list[int], pa.RecordBatch]:
    """Return which rows the new ones stand for, and the new ones as the input has them (rule 3).

    Raises:
        BadRequest: says what was expected and what was found.
    """
    if isinstance(answer, pa.RecordBatch):
        answer = pa.Table.from_batches([answer])
    if not isinstance(answer, pa.Table):
        raise _wrong(f"{name} is to return a pyarrow.Table; found {type(answer).__name__}")
    names = answer.column_names
    lost = {ROW_COLUMN, *source.schema.names} - {*_SET_HERE, *names}
    if lost:
        raise _wrong(
            f"the table that {name} returns is to have the columns of the refused rows; it has no "
            f"{', '.join(sorted(lost))}"
        )
    if len(set(names)) != len(names):
        raise _wrong(f"the table that {name} returns has two columns of one name: {names}")
    rows = answer.column(ROW_COLUMN).to_pylist()
    count = source.num_rows
    is_fit = all(type(row) is int and 0 <= row < count for row in rows)
    if not is_fit or len(set(rows)) != len(rows):
        raise _wrong(
            f"each row that {name} returns is to stand for another refused row by the number in "
            f"{ROW_COLUMN!r}, 0 to {count - 1}; found {rows[:20]}"
        )
    fields = [part.with_nullable(nullable=True) for part in source.schema]
    try:
        arrays = [_column(answer, part) for part in fields]
    except (pa.ArrowException, ValueError) as error:
        raise _wrong(
            f"the rows that {name} returns are not of the input's types: {error}"
        ) from None
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    for each in identity:
        if not batch.column(each).equals(source.column(each).take(pa.array(rows, pa.int64()))):
            raise _wrong(f"{name} is to leave identity column {each!r} as it is, row by row")
    return rows, batch


def _wrong(text: str) -> BadRequest:
    return BadRequest(f"option 'recompute': {text}")


def _column(answer: pa.Table, part: pa.Field) -> pa.Array:
    if part.name in _SET_HERE:
        return pa.nulls(answer.num_rows, part.type)
    column = answer.column(part.name).cast(part.type)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], part.type)
