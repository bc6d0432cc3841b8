"""The log of a follower, read with a `WaltzClient`; changes are Arrow tables.

Rules:
    1. Marks are linearizable: a server that has lost a partition reports none that decrease.
    2. Changes are reduced part by part, so a batch needs memory for a part of 32 MiB, and for
       the last change of each key.
    3. The server selects transactions by header; without headers, all.
    4. With keys, a payload that cannot be decrypted is an error: its row cannot be known.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from waltz_core.client import ReplicaSet, WaltzClient
from waltz_core.client.api.scanning import ERROR_FIELD, ArrowSchema, DataFormat, ScanColumns
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.batches import READ_SCHEMA
from waltz_core.tables.found_columns import LOG_COLUMNS, with_found_columns
from waltz_core.tables.row_changes import (
    ArrowTable,
    ChangeRules,
    check_rules,
    no_changes,
    parts_of,
    reduced,
    with_changes,
)
from waltz_core.tables.table_marks import LogState, MarkMap
from waltz_core.wire.messages import RangeForm


class LogPosition:
    """The marks of the log now, and the pauses between requests for them.

    Args:
        client: an open client.
        interval_s: the pause of `wait`.
    """

    def __init__(self, client: WaltzClient, *, interval_s: float) -> None:
        self._client = client
        self._interval_s = interval_s
        self.sources: Mapping[int, ReplicaSet] = {}

    def state(self) -> LogState:
        """Return the marks and the first available IDs (rule 1).

        Raises:
            Unavailable: a partition does not answer.
        """
        self.sources = self._client.replica_sets(linearizable=True)
        firsts = {
            partition: int(source.archived.first) if source.archived else 0
            for partition, source in self.sources.items()
        }
        marks = {partition: int(each.high_water_mark) for partition, each in self.sources.items()}
        return LogState(marks, firsts)

    def wait(self) -> None:
        """Wait until the next request is due."""
        time.sleep(self._interval_s)


class ClientLog:
    """The log and the changes in it.

    Args:
        client: an open client.
        position: the marks of the log.
        schema: the declared columns; those that the log does not have are of the payload. Or, to
            find the columns in payloads, a function that returns those of the table so far.
        rules: how transactions become changes.
        data_format: the format of the payloads.
        headers: the headers of the transactions of the table; without any, all transactions are.
        has_keys: whether the client decrypts payloads.

    Raises:
        BadConfig: the rules do not fit the schema, deletes have a header that is not selected, or
            columns cannot be found in the format.
        BadRequest: a column of the log has another type, or the format is unknown.
    """

    def __init__(  # noqa: PLR0913 - a user states four of them
        self,
        client: WaltzClient,
        position: LogPosition,
        *,
        schema: ArrowSchema | Callable[[], ArrowSchema],
        rules: ChangeRules,
        data_format: DataFormat = "msgpack",
        headers: Sequence[int] = (),
        has_keys: bool = False,
    ) -> None:
        self._known = schema if callable(schema) else None
        if callable(schema) and not isinstance(data_format, str):
            raise BadConfig(
                "columns are found in msgpack and JSON only. Hint: declare the columns."
            )
        declared = pa.schema([READ_SCHEMA.field("data")]) if callable(schema) else schema
        log = [READ_SCHEMA.field(name) for name in LOG_COLUMNS if name not in declared.names]
        rows = pa.schema([*log, *declared])
        if self._known is None:
            check_rules(rules, rows)
        if headers and (unread := set(rules.delete_headers) - set(headers)):
            raise BadConfig(
                f"delete_headers: header {min(unread)} is not one of the headers of the table, "
                f"{sorted(headers)}. Hint: add it to them."
            )
        self._rows = rows
        self._columns = _columns(rows, data_format, has_keys=has_keys)
        self._client, self._position = client, position
        self._found_format = str(data_format)
        self._rules, self._headers = rules, tuple(headers)

    def state(self) -> LogState:
        """Return the marks and the first available IDs; raises Unavailable."""
        return self._position.state()

    def wait(self) -> None:
        """Wait until the next request is due."""
        self._position.wait()

    def changes(self, starts: MarkMap, ends: MarkMap) -> ArrowTable:
        """Return the last change of each key after `starts` up to `ends` (rule 2).

        Raises:
            BadFormat: a payload does not fit, or a key is null.
            BadRequest: a key has changes in two partitions, or the changes function is wrong.
            BeforeLogStart: transactions have expired.
            Unavailable: a partition does not answer.
        """
        batches = self._batches(starts, ends)
        if self._known is not None:
            return changes_in(parts_of(batches), self._rules, self._known(), self._found_format)
        return reduced(batches, self._rules, self._rows)

    def _batches(self, starts: MarkMap, ends: MarkMap) -> Iterator[pa.RecordBatch]:
        for partition, end in sorted(ends.items()):
            if end <= starts[partition]:
                continue
            chunks = self._client.read_range(
                partition,
                starts[partition] + 1,
                end,
                form=self._columns.form,
                header_values=self._headers,
                replicas=self._position.sources.get(partition),
            )
            with closing(chunks):  # a traceback would keep the range open
                for chunk in chunks:
                    for batch in self._columns.batches(chunk, partition):
                        check_decrypted(batch)
                        yield batch.select(self._rows.names)


def _columns(rows: ArrowSchema, data_format: DataFormat, *, has_keys: bool) -> ScanColumns:
    """Return the columns of the reads: those of the rows, and with keys the reasons (rule 4)."""
    found = ScanColumns(rows, data_format, has_keys=has_keys)
    if not has_keys or found.form is RangeForm.HEADERS:
        return found
    if ERROR_FIELD.name in rows.names:
        raise BadConfig(
            f"column {ERROR_FIELD.name!r}: this name is reserved if payloads are decrypted. Hint: "
            "use a payload without this field."
        )
    return ScanColumns(rows.append(ERROR_FIELD), data_format, has_keys=True)


def check_decrypted(batch: pa.RecordBatch) -> None:
    """Raise BadFormat for the first payload that could not be decrypted (rule 4)."""
    if ERROR_FIELD.name not in batch.schema.names:
        return
    errors = batch[ERROR_FIELD.name]
    if errors.null_count == len(errors):
        return
    row = errors.is_valid().index(True).as_py()
    place = ", ".join(f"{name.removesuffix('_id')} {batch[name][row]}" for name in LOG_COLUMNS[:2])
    raise BadFormat(
        f"{place}: {errors[row]}. Hint: follow with all keys, or select the transactions of the "
        "table by header."
    )


def changes_in(
    parts: Iterable[ArrowTable], rules: ChangeRules, known: ArrowSchema, data_format: str
) -> ArrowTable:
    """Return the last changes in parts of a batch whose columns are found in the payloads.

    Args:
        parts: transactions with the columns `LOG_COLUMNS` and `data`.
        rules: how they become changes; a column that no payload has is null.
        known: the columns of the table so far; the result has them and the found ones.
        data_format: the format of the payloads.

    Raises:
        BadConfig: the rules do not fit the columns.
        BadFormat: a payload does not fit, or a key is null.
        BadRequest: a key has changes in two partitions.
    """
    found = no_changes(pa.schema([*map(READ_SCHEMA.field, LOG_COLUMNS), *known]))
    for part in parts:
        rows = with_found_columns(part, known, data_format)
        known = pa.schema(list(rows.schema)[len(LOG_COLUMNS) :])
        if missing := [name for name in rules.key if name not in known.names]:
            place = (part[name][0].as_py() for name in LOG_COLUMNS[:2])
            raise BadFormat(
                "partition {}, transaction {}: expected a value in key column {!r}, found none. "
                "Hint: correct the key, or select the transactions of the table by header.".format(
                    *place, missing[0]
                )
            )
        where = rules.delete_where
        if where is not None and where.column not in known.names:
            applied = replace(rules, delete_where=None)
        else:
            applied = rules
        check_rules(applied, rows.schema)
        found = with_changes(found, rows, applied)
    return found
