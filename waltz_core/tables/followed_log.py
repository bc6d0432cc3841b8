"""The log of a follower, read with a `WaltzClient`; the changes are Arrow tables.

Rules:
    1. The reads of marks are linearizable. Therefore marks never decrease, even if an earlier owner
       of the partition still answers.
    2. A batch is read in parts of 32 MiB. After each part, only the last change of each key is
       kept. So a batch needs memory for one part, and for the last change of each key.
    3. The server filters transactions by header. If a table selects no headers, the server returns
       all transactions. For several tables, one read returns the transactions of all tables, and
       each table decodes only its own transactions.
    4. If the client has encryption keys, a payload that cannot be decrypted is an error, because
       the row in this payload is unknown.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import pyarrow as pa

from waltz_core.client import RangeChunk, RangeForm, ReplicaSet, WaltzClient
from waltz_core.client.api.scanning import ERROR_FIELD, ArrowSchema, DataFormat, ScanColumns
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.batches import READ_SCHEMA
from waltz_core.tables.follower import errors_of_table
from waltz_core.tables.inferred_columns import LOG_COLUMNS, with_inferred_columns
from waltz_core.tables.row_changes import (
    DELETED_COLUMN,
    PART_BYTES,
    ArrowTable,
    ChangeRules,
    add_changes,
    check_rules,
    empty_changes,
    select_transactions,
)
from waltz_core.tables.table_marks import LogState, MarkMap, StoredRules


class LogStateReader:
    """Requests the current high-water marks of the log, and waits between requests.

    Args:
        client: an open client.
        interval_s: the pause of `wait`, in seconds.
    """

    def __init__(self, client: WaltzClient, *, interval_s: float) -> None:
        self._client = client
        self._interval_s = interval_s
        self.replica_sets: Mapping[int, ReplicaSet] = {}

    def state(self) -> LogState:
        """Return the log's high-water marks and first available IDs (rule 1).

        Raises:
            Unavailable: a partition does not answer.
        """
        self.replica_sets = self._client.replica_sets(linearizable=True)
        first_ids = {
            partition: int(replica_set.archived.first) if replica_set.archived else 0
            for partition, replica_set in self.replica_sets.items()
        }
        marks = {
            partition: int(replica_set.high_water_mark)
            for partition, replica_set in self.replica_sets.items()
        }
        return LogState(marks, first_ids)

    def wait(self) -> None:
        """Wait until the next request is due."""
        time.sleep(self._interval_s)


class ChangeDecoder:
    """Decodes chunks of the log into the changes of one followed table.

    The decoder selects the transactions of the table, decodes their payloads, and applies the
    rules.

    Args:
        location: the name or the path of the table, for errors.
        schema: the declared columns; the columns that the log does not have are in the payload. To
            infer the columns from payloads, pass a function that returns the columns that the table
            has so far.
        rules: how transactions become changes.
        data_format: the format of the payloads.
        headers: the headers of the table's transactions; if empty, all transactions belong to it.
        has_keys: whether the client decrypts payloads.

    Raises:
        BadConfig: the rules do not fit the schema, deletes have a header that is not selected, or
            columns cannot be inferred from the format.
        BadRequest: a column of the log has another type, or the format is unknown.
    """

    def __init__(
        self,
        location: str,
        *,
        schema: ArrowSchema | Callable[[], ArrowSchema],
        rules: ChangeRules,
        data_format: DataFormat = "msgpack",
        headers: Sequence[int] = (),
        has_keys: bool = False,
    ) -> None:
        self.location, self.headers = location, tuple(headers)
        self._known_columns = schema if callable(schema) else None
        if callable(schema) and not isinstance(data_format, str):
            raise BadConfig(
                "schema: expected declared columns for payloads in "
                f"{type(data_format).__name__}, found none. Hint: declare the columns; they are "
                "derived from the payloads only for msgpack and json."
            )
        declared_columns = pa.schema([READ_SCHEMA.field("data")]) if callable(schema) else schema
        rows = transactions_schema(declared_columns)
        with errors_of_table(location):
            if self._known_columns is None:
                check_rules(rules, rows)
            if headers and (unread_headers := set(rules.delete_headers) - set(headers)):
                raise BadConfig(
                    f"delete_headers: header {min(unread_headers)} is not in the parameter "
                    f"`headers`, {sorted(headers)}. Hint: add it there."
                )
            self._scan_columns = _scan_columns(rows, data_format, has_keys=has_keys)
        self._rows = rows
        self._inferred_format = str(data_format)
        self._rules = rules

    @property
    def stored_rules(self) -> StoredRules:
        """The rules in the form in which the table stores them."""
        return self._rules.stored_rules(self.headers)

    @property
    def form(self) -> RangeForm:
        """The form in which ranges are read: headers only, or whole transactions with payloads."""
        return self._scan_columns.form

    def empty_changes(self) -> ArrowTable:
        """Return an empty table of changes, the start of a batch."""
        schema = self._rows
        if self._known_columns is not None:
            schema = transactions_schema(self._known_columns())
        return empty_changes(schema, self._rules)

    def add_part(
        self, changes: ArrowTable, chunks: Sequence[tuple[int, RangeChunk]], starts: MarkMap
    ) -> ArrowTable:
        """Add the changes in one more part of a batch; return the last change of each key.

        Args:
            changes: the last change of each key in the earlier parts.
            chunks: the chunks of the part with their partitions. They may contain transactions of
                other tables.
            starts: the marks of the table.

        Raises:
            BadFormat: a payload does not fit, or a key is null.
            BadRequest: a key has changes in two partitions, or the changes function has failed.
        """
        with errors_of_table(self.location):
            batches = []
            for partition, chunk in chunks:
                select = partial(select_transactions, after=starts[partition], headers=self.headers)
                for batch in self._scan_columns.batches(chunk, partition, select):
                    check_decrypted(batch)
                    batches.append(batch.select(self._rows.names))
            part = pa.Table.from_batches(batches, schema=self._rows)
            if self._known_columns is not None:
                return add_changes_inferring_columns(
                    changes, part, self._rules, self._inferred_format
                )
            return add_changes(changes, part, self._rules)


def transactions_schema(declared_columns: ArrowSchema) -> ArrowSchema:
    """Return the columns of decoded transactions: those of the log, then the declared ones."""
    log = [READ_SCHEMA.field(name) for name in LOG_COLUMNS if name not in declared_columns.names]
    return pa.schema([*log, *declared_columns])


class ClientFollowedLog:
    """The log and the changes in it (implements `FollowedLog`).

    Args:
        client: an open client.
        state_reader: provides the high-water marks of the log.
        tables: the tables that are read together.
    """

    def __init__(
        self, client: WaltzClient, state_reader: LogStateReader, tables: Sequence[ChangeDecoder]
    ) -> None:
        self._client, self._state_reader = client, state_reader
        self._tables = list(tables)
        range_forms = {table.form for table in tables}
        self._form = RangeForm.WHOLE if RangeForm.WHOLE in range_forms else RangeForm.HEADERS
        self._headers: tuple[int, ...] = ()
        if all(table.headers for table in tables):
            self._headers = tuple(sorted({header for table in tables for header in table.headers}))

    def state(self) -> LogState:
        """Return the log's high-water marks and first available IDs; raises Unavailable."""
        return self._state_reader.state()

    def wait(self) -> None:
        """Wait until the next request is due."""
        self._state_reader.wait()

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> list[ArrowTable]:
        """Return, for each table, the last change of each key between start and end (rule 2).

        Raises:
            BadFormat: a payload does not fit, or a key is null.
            BadRequest: a key has changes in two partitions, or the changes function has failed.
            BeforeLogStart: transactions have expired.
            Unavailable: a partition does not answer.
        """
        changes_by_table = [followed_table.empty_changes() for followed_table in self._tables]
        for part in self._read_parts(starts, ends):
            for index, (table, start) in enumerate(zip(self._tables, starts, strict=True)):
                changes_by_table[index] = table.add_part(changes_by_table[index], part, start)
        return changes_by_table

    def _read_parts(
        self, starts: Sequence[MarkMap], ends: MarkMap
    ) -> Iterator[list[tuple[int, RangeChunk]]]:
        """Yield the transactions after the lowest start in parts of about `PART_BYTES`."""
        part: list[tuple[int, RangeChunk]] = []
        size = 0
        for partition, end in sorted(ends.items()):
            start = min(start_marks[partition] for start_marks in starts)
            if end <= start:
                continue
            chunks = self._client.read_range(
                partition,
                start + 1,
                end,
                form=self._form,
                header_values=self._headers,
                replicas=self._state_reader.replica_sets.get(partition),
            )
            with closing(chunks):  # otherwise the traceback of an error would keep the range open
                for chunk in chunks:
                    part.append((partition, chunk))
                    size += len(chunk.records)
                    if size >= PART_BYTES:
                        yield part
                        part, size = [], 0
        if part:
            yield part


def _scan_columns(rows: ArrowSchema, data_format: DataFormat, *, has_keys: bool) -> ScanColumns:
    """Return the columns to read; with keys, also the column for decryption errors (rule 4)."""
    columns = ScanColumns(rows, data_format, has_keys=has_keys)
    if not has_keys or columns.form is RangeForm.HEADERS:
        return columns
    if ERROR_FIELD.name in rows.names:
        raise BadConfig(
            f"column {ERROR_FIELD.name!r}: this name is reserved if payloads are decrypted. Hint: "
            "use a payload without this field."
        )
    return ScanColumns(rows.append(ERROR_FIELD), data_format, has_keys=True)


def check_decrypted(batch: pa.RecordBatch) -> None:
    """Raise BadFormat for the first payload that was not decrypted (rule 4)."""
    if ERROR_FIELD.name not in batch.schema.names:
        return
    errors = batch[ERROR_FIELD.name]
    if errors.null_count == len(errors):
        return
    row = errors.is_valid().index(True).as_py()
    position = ", ".join(
        f"{name.removesuffix('_id')} {batch[name][row]}" for name in LOG_COLUMNS[:2]
    )
    raise BadFormat(
        f"{position}: {errors[row]}. Hint: use a client with all encryption keys, or select the "
        "transactions of the table by header."
    )


def compute_changes_inferring_columns(
    parts: Iterable[ArrowTable], rules: ChangeRules, known_columns: ArrowSchema, data_format: str
) -> ArrowTable:
    """Return the last change of each key in a batch; infer the columns from the payloads.

    Args:
        parts: the parts of the batch: transactions with the columns `LOG_COLUMNS` and `data`.
        rules: how transactions become changes. A column in the rules that no payload has is null.
        known_columns: the columns that the table has so far; the result has these and the
            inferred ones.
        data_format: the format of the payloads.

    Raises:
        The errors of `add_changes_inferring_columns`.
    """
    changes = empty_changes(transactions_schema(known_columns), rules)
    for part in parts:
        changes = add_changes_inferring_columns(changes, part, rules, data_format)
    return changes


def add_changes_inferring_columns(
    changes: ArrowTable, part: ArrowTable, rules: ChangeRules, data_format: str
) -> ArrowTable:
    """Infer the columns of one more part; return the last change of each key, with all columns.

    `changes` are the last changes in the earlier parts.

    Raises:
        BadConfig: the rules do not fit the columns.
        BadFormat: a payload does not fit, or a key is null.
        BadRequest: a key has changes in two partitions.
    """
    if not part.num_rows:
        return changes
    reserved = (*LOG_COLUMNS, DELETED_COLUMN)
    known_columns = pa.schema([field for field in changes.schema if field.name not in reserved])
    rows = with_inferred_columns(part, known_columns, data_format)
    known_columns = pa.schema(list(rows.schema)[len(LOG_COLUMNS) :])
    if missing := [name for name in rules.key if name not in known_columns.names]:
        position = (part[name][0].as_py() for name in LOG_COLUMNS[:2])
        raise BadFormat(
            "partition {}, transaction {}: expected a value in key column {!r}, found none. "
            "Hint: correct the key, or read only transactions of this table with a filter by "
            "header.".format(*position, missing[0])
        )
    condition = rules.delete_where
    if condition is not None and condition.column not in known_columns.names:
        applied = replace(rules, delete_where=None)
    else:
        applied = rules
    check_rules(applied, rows.schema)
    return add_changes(changes, rows, applied)
