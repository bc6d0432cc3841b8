"""Finds the rows of a task that earlier attempts have appended.

The module handles the rows of an exactly-once write; the client handles the attempts (`TaskClaim`).

Rules (docs/spark.md, "Exactly once"):
    1. The log is read after the client has mounted all partitions of the write. From then on, no
       earlier attempt of this task can append, so the result stays valid.
    2. Rows are compared with records by partition, and by header and data (or `identityColumns`).
       The order does not matter, because an attempt may have the rows in another order. A row with
       a round-robin partition matches in any partition. If several rows differ only in locks or
       mark, a record in the log could belong to any of them. So the write fails.
    3. If no row matches a record, the input has changed, so the write fails.
    4. If a row of this task matches a record that another task of an earlier run has appended, the
       write fails. The row may be in the log already, because the earlier run has split the input
       into tasks differently. Or the record may belong to another row with the same content. The
       two cases cannot be distinguished.
    5. Nothing is appended until rules 2 to 4 have been checked; until then, rows are stored in a
       file. So a run that fails because of these rules does not change the log, and a correct run
       can continue.
"""

import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from waltz_core.client import Encryption, RangeForm, RowOutcomeCode, WaltzClient
from waltz_core.errors import BadRequest
from waltz_core.records import raw_records
from waltz_spark.payload_encryption import KEY_ID_COLUMN
from waltz_spark.writer.appender import FinalRows
from waltz_spark.writer.columns import LOCK_COLUMNS, MARK_COLUMN, ConvertedRows
from waltz_spark.writer.row_keys import RowKeys


class EarlierRecord(NamedTuple):
    """A record that an earlier attempt of this task has appended."""

    partition: int
    transaction_id: int


class EarlierRows:
    """The rows of a task that are already in the log.

    Args:
        own: the records of earlier attempts of this task, by row key. Each record has two keys: one
            with its partition, one without.
        others: the row keys of records from other tasks of earlier runs, of both kinds.
        next_sequences: by partition, the request number after the highest one in the log.
        keys: computes the keys of rows, in the same way as the keys of the records.
    """

    def __init__(
        self,
        own_records: Mapping[bytes, Iterable[EarlierRecord]] | None = None,
        other_keys: frozenset[bytes] = frozenset(),
        next_sequences: Mapping[int, int] | None = None,
        keys: RowKeys | None = None,
    ) -> None:
        self._keys = keys or RowKeys()
        self._own_records = {
            key: deque(sorted(records)) for key, records in (own_records or {}).items()
        }
        self._unmatched_records = {
            record for waiting in self._own_records.values() for record in waiting
        }
        self._record_count = len(self._unmatched_records)
        self._other_keys = other_keys
        self._locks: dict[bytes, tuple[object, ...]] = {}
        self.next_sequences = dict(next_sequences or {})

    @property
    def is_empty(self) -> bool:
        """Whether the log has no record that a row could match."""
        return not self._own_records and not self._other_keys

    @property
    def count(self) -> int:
        """The number of records that no row has matched so far."""
        return len(self._unmatched_records)

    def split(self, converted: ConvertedRows) -> tuple[ConvertedRows | None, list[FinalRows]]:
        """Return the rows to append, and the outcomes of the rows that are in the log.

        Raises:
            BadRequest: rule 2 or rule 4 is violated.
        """
        if self.is_empty:
            return converted, []
        missing: list[int] = []
        found_rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, key in enumerate(self._keys.keys_of_rows(converted)):
            # A round-robin row has no locks, but rows can differ in their encryption keys.
            needs_lock_check = (
                not converted.is_round_robin[row] or KEY_ID_COLUMN in converted.append.schema.names
            )
            if key in self._own_records and needs_lock_check:
                self._check_same_locks(key, converted, row)
            record = self._take_record(key)
            if record is not None:
                found_rows[record.partition].append((row, record.transaction_id))
            elif key in self._other_keys:
                raise _split_differently_error(int(converted.partitions[row]))
            else:
                missing.append(row)
        answers = [
            _committed_rows(converted, partition, rows)
            for partition, rows in sorted(found_rows.items())
        ]
        if not found_rows:
            return converted, []
        return (_select_rows(converted, missing) if missing else None), answers

    def _take_record(self, key: bytes) -> EarlierRecord | None:
        waiting = self._own_records.get(key)
        while waiting:
            record = waiting.popleft()
            if (
                record in self._unmatched_records
            ):  # otherwise a row has matched the record by its other key
                self._unmatched_records.remove(record)
                return record
        return None

    @property
    def may_append(self) -> bool:
        """Whether only the locks of a later row can still make the write fail (rule 5)."""
        return not self._other_keys and self.count == 0

    def missing_rows(
        self, batches: Iterable[ConvertedRows], found_rows: list[FinalRows]
    ) -> Iterator[ConvertedRows]:
        """Yield the rows to append; add the outcomes of all other rows to `found_rows` (rule 5).

        Raises:
            BadRequest: one of the rules 2 to 4 is violated.
        """
        rows = 0
        with RowSpool() as spool:
            for converted in batches:
                rows += converted.append.num_rows
                unmatched, answers = self.split(converted)
                found_rows.extend(answers)
                if self.may_append:
                    yield from spool.take()
                    if unmatched is not None:
                        yield unmatched
                elif unmatched is not None:
                    spool.put(unmatched)
            self._check_all_matched(rows)
            yield from spool.take()

    def _check_all_matched(self, rows: int) -> None:
        """Raise BadRequest if a record has no matching row (rule 3)."""
        if self._unmatched_records:
            partition, transaction_id = min(self._unmatched_records)
            raise BadRequest(
                f"an earlier attempt of this task has appended {self._record_count} rows, but "
                f"{self.count} of them are not among the {rows} rows that the task has "
                f"now (first missing row: transaction {transaction_id} of partition {partition}). "
                "This attempt has appended nothing. Hint: run the write again with the same rows: "
                "sort the input, write from a checkpointed DataFrame, or split it into the "
                f"same tasks as before{self._keys.hint}. Use another writeId for other rows."
            )

    def _check_same_locks(self, key: bytes, converted: ConvertedRows, row: int) -> None:
        names = [*LOCK_COLUMNS, MARK_COLUMN, *self._keys.additional_equal_columns]
        if KEY_ID_COLUMN in converted.append.schema.names:
            names.append(KEY_ID_COLUMN)
        columns = [converted.append.column(name) for name in names]
        locks = tuple(str(column[row].as_py()) for column in columns)
        if self._locks.setdefault(key, locks) != locks:
            raise BadRequest(
                f"partition {converted.partitions[row]}: several rows of this task have the "
                f"same {self._keys.text}, but different locks, marks or encryption keys. An "
                "earlier attempt has appended one of them, and it is unknown which one. "
                f"Hint: give each row another {self._keys.text}."
            )


class RowSpool:
    """A temporary file with converted rows, in order, until they may be appended."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._is_prefix_stored: dict[str, bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, converted: ConvertedRows) -> None:
        """Write rows to the file."""
        parts = {"p": pa.array(converted.partitions), "f": pa.array(converted.is_round_robin)}
        self._is_prefix_stored = {
            "i": converted.identity is not None,
            "s": converted.source is not None,
        }
        for kind, batch in (
            ("a", converted.append),
            ("i", converted.identity),
            ("s", converted.source),
        ):
            if batch is not None:
                parts |= {f"{kind}{name}": batch.column(name) for name in batch.schema.names}
        row_batch = pa.RecordBatch.from_pydict(parts)
        if self._writer is None:
            self._file = tempfile.TemporaryFile(prefix="waltz-spool-")  # noqa: SIM115 - see __exit__
            self._writer = pa.ipc.new_stream(self._file, row_batch.schema)
        self._writer.write_batch(row_batch)

    def take(self) -> Iterator[ConvertedRows]:
        """Yield all rows from the file, once."""
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.seek(0)
        for row_batch in pa.ipc.open_stream(self._file):
            yield ConvertedRows(
                row_batch.column("p").to_numpy(),
                _columns_with_prefix(row_batch, "a"),
                _columns_with_prefix(row_batch, "i") if self._is_prefix_stored["i"] else None,
                row_batch.column("f").to_numpy(zero_copy_only=False),
                _columns_with_prefix(row_batch, "s") if self._is_prefix_stored["s"] else None,
            )
        self._file.close()
        self._file = self._writer = None


def _columns_with_prefix(row_batch: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    names = [name for name in row_batch.schema.names if name.startswith(kind) and len(name) > 1]
    return row_batch.select(names).rename_columns([name[1:] for name in names])


def read_earlier_rows(
    client: WaltzClient,
    marks: Mapping[int, int],
    *,
    own_client_id: int,
    other_client_ids: set[int],
    keys: RowKeys | None = None,
    encryption: Encryption | None = None,
) -> EarlierRows:
    """Read the records that the clients of a write have appended since its starting marks (rule 1).

    The write uses only the partitions in `marks`.

    Raises:
        BadRequest: a payload cannot be decrypted, so its row cannot be compared.
    """
    keys = keys or RowKeys()
    records: dict[bytes, list[EarlierRecord]] = defaultdict(list)
    foreign_keys: set[bytes] = set()
    sequences: dict[int, int] = {}
    client_ids = np.array(sorted({own_client_id, *other_client_ids}), dtype=np.int64)
    for partition, last in client.mount(marks).items():
        first = marks[partition] + 1
        for record in _read_records(client, partition, (first, int(last)), client_ids):
            data: bytes | memoryview = record.data
            if encryption is not None:
                data = _decrypt(record, encryption)
            keys_of_both_kinds = keys.keys_of_record(partition, record.header, data)
            if record.client_id == own_client_id:
                for key in keys_of_both_kinds:
                    records[key].append(record.position)
                sequences[partition] = max(sequences.get(partition, 0), record.sequence + 1)
            else:
                foreign_keys.update(keys_of_both_kinds)
    return EarlierRows(records, frozenset(foreign_keys), sequences, keys)


def _decrypt(record: "_Record", encryption: Encryption) -> bytes:
    partition, transaction_id = record.position
    payload = encryption.decrypt(bytes(record.data), partition=partition, header=record.header)
    if payload.data is None:
        raise BadRequest(
            f"partition {partition}: cannot compare the rows of this write with transaction "
            f"{transaction_id}, which an earlier attempt has appended: its payload cannot be "
            f"read: {payload.error}"
        )
    return payload.data


class _Record(NamedTuple):
    """The parts of one record that are needed to match it with a row."""

    client_id: int
    sequence: int
    position: EarlierRecord
    header: int
    data: memoryview


def _read_records(
    client: WaltzClient, partition: int, span: tuple[int, int], client_ids: npt.NDArray[np.int64]
) -> Iterator[_Record]:
    """Yield the records of the wanted clients; data is read only for chunks with such records."""
    for chunk in client.read_range(partition, *span, form=RangeForm.HEADERS):
        headers = np.frombuffer(chunk.records, dtype=raw_records.HEADER_DTYPE)
        positions = np.flatnonzero(
            np.isin(headers["req_id"]["client_id"].astype(np.int64), client_ids)
        )
        if not positions.size:
            continue
        low, high = int(chunk.first) + int(positions[0]), int(chunk.first) + int(positions[-1])
        yield from _read_whole_records(client, partition, (low, high), set(client_ids.tolist()))


def _read_whole_records(
    client: WaltzClient, partition: int, span: tuple[int, int], client_ids: set[int]
) -> Iterator[_Record]:
    for chunk in client.read_range(partition, *span):
        records, lengths = memoryview(chunk.records), chunk.lengths
        req_ids = raw_records.req_ids_of(records, lengths)
        headers = raw_records.application_headers_of(records, lengths).tolist()
        starts = raw_records.offsets_of(lengths).tolist()
        for row, client_id in enumerate(req_ids["client_id"].tolist()):
            if client_id in client_ids:
                data = records[
                    starts[row] + _BYTES_BEFORE_DATA : starts[row + 1] - _BYTES_AFTER_DATA
                ]
                yield _Record(
                    client_id,
                    int(req_ids["sequence"][row]),
                    EarlierRecord(partition, int(chunk.first) + row),
                    headers[row],
                    data,
                )


# The number of bytes in a record before and after its data (docs/design/disk-format.md 4).
_BYTES_BEFORE_DATA, _BYTES_AFTER_DATA = raw_records.PREFIX_DTYPE.itemsize, 4


def _select_rows(converted: ConvertedRows, rows: list[int]) -> ConvertedRows:
    index = pa.array(rows, pa.int64())
    identity = None if converted.identity is None else converted.identity.take(index)
    source = None if converted.source is None else converted.source.take(index)
    return ConvertedRows(
        converted.partitions[rows],
        converted.append.take(index),
        identity,
        converted.is_round_robin[rows],
        source,
    )


def _committed_rows(
    converted: ConvertedRows, partition: int, rows: list[tuple[int, int]]
) -> FinalRows:
    ids = np.array([transaction_id for _, transaction_id in rows], dtype=np.int64)
    index = pa.array([row for row, _ in rows], pa.int64())
    return FinalRows(
        partition=partition,
        identity=None if converted.identity is None else converted.identity.take(index),
        transaction_ids=ids,
        reasons=np.full(len(rows), int(RowOutcomeCode.COMMITTED), dtype=np.uint8),
        conflicting=np.full(len(rows), -1, dtype=np.int64),
        high_water_mark=int(ids.max()),
        attempt=1,
    )


def _split_differently_error(partition: int) -> BadRequest:
    return BadRequest(
        f"partition {partition}: in an earlier run of this write, another task has appended "
        "a row of this task. Hint: if the input is split into other tasks than before, run "
        "the write again with the same tasks. If rows are equal, make each one unique in 'data'."
    )
