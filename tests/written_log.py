"""A log of changes of rows, and the expected content of a table that follows it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pyarrow as pa
from deltalake import DeltaTable

from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster
from waltz_core.tables.table_marks import decode_marks

PARTITION_COUNT = 2
TRANSACTION_COUNT = 120  # the transactions of one `append`
KEY_COUNT = 12
DELETE_HEADER = 9
OTHER_HEADER = 5
COLUMNS = ("id:int64", "op:string", "value:int64")
TableRows = dict[int, tuple[Any, int, int]]  # ID -> value, partition, transaction
# Returns the changes of a transaction: for each ID, a value or None.
ChangesFunction = Callable[[int, dict], list[tuple[int, int | None]]]


class WrittenLog(NamedTuple):
    """The transactions of a test, by partition: header and payload."""

    connect: str
    log: list[list[tuple[int, dict]]]

    def append(self, client: WaltzClient, seed: int, count: int = TRANSACTION_COUNT) -> None:
        """Append upserts, deletes by header and by payload, and transactions of other kinds."""
        rng = random.Random(seed)
        futures = []
        for _ in range(count):
            key = rng.randrange(KEY_COUNT)
            header = rng.choice((1, 1, 1, DELETE_HEADER, OTHER_HEADER))
            row = {"id": key, "op": rng.choice("UUUD"), "value": rng.randrange(1000)}
            if header == DELETE_HEADER:
                row = {"id": key}
            elif header == OTHER_HEADER:
                row = {"other": True}
            self.log[key % PARTITION_COUNT].append((header, row))
            payload = msgpack.packb(row)
            futures.append(client.append(payload, partition=key % PARTITION_COUNT, header=header))
        for future in futures:
            future.result()

    def append_changes(self, client: WaltzClient) -> None:
        """Append a changed row to each partition, so that followers commit the end at once.

        A follower commits marks without changed rows only after ten minutes.
        """
        for partition, log in enumerate(self.log):
            row = {"id": partition, "op": "U", "value": len(log)}
            log.append((1, row))
            client.append(msgpack.packb(row), partition=partition, header=1).result()

    def replayed(self, marks: dict[int, int], changes: ChangesFunction | None = None) -> TableRows:
        """Return the table by its definition, with the changes of each transaction."""
        rows: TableRows = {}
        for partition, mark in marks.items():
            for place, (header, row) in enumerate(self.log[partition][: mark + 1]):
                for key, value in (changes or _changes_by_rules)(header, row):
                    if value is None:
                        rows.pop(key, None)
                    else:
                        rows[key] = (value, partition, place)
        return rows

    def command(self, table: Path | str, *more: str, columns: Sequence[str] = COLUMNS) -> list[str]:
        return [
            *["follow", str(table), "--connect", self.connect, "--key", "id"],
            *[word for column in columns for word in ("--column", column)],
            *["--header", "1", "--header", str(DELETE_HEADER)],
            *["--delete-header", str(DELETE_HEADER), "--delete-where", "op = 'D'"],
            *["--batch-transactions", "25", "--interval-s", "0.05", *more],
        ]


def _changes_by_rules(header: int, row: dict) -> list[tuple[int, int | None]]:
    """Return the changes of a transaction by the rules of `Written.command`."""
    if header == OTHER_HEADER:
        return []
    is_deleted = header == DELETE_HEADER or row["op"] == "D"
    return [(row["id"], None if is_deleted else row["value"])]


@contextmanager
def running_log(place: Path) -> Iterator[WrittenLog]:
    """Run a local cluster in a directory, and append the first transactions."""
    options = {"storage_count": 1, "server_count": 1, "partition_count": PARTITION_COUNT}
    with running_cluster(place, **options) as cluster:
        written = WrittenLog(cluster.connect, [[] for _ in range(PARTITION_COUNT)])
        with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
            written.append(client, 1)
        yield written


def end_marks(written: WrittenLog) -> dict[int, int]:
    return {number: len(log) - 1 for number, log in enumerate(written.log)}


def read_table(table: Path | str, version: int | None = None) -> TableRows:
    rows = pa.table(DeltaTable(table, version=version).to_pyarrow_table()).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    place = ("_partition", "_transaction_id")
    return {
        row["id"]: (_without_nulls(row["value"]), *(row[name] for name in place)) for row in rows
    }


def _without_nulls(value: object) -> object:
    """Return the value of a column without the fields that its payload lacks."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def marks_by_version(table: Path | str) -> dict[int, dict[int, int]]:
    commits = DeltaTable(table).history()
    return {
        commit["version"]: dict(decode_marks(commit["userMetadata"]).marks) for commit in commits
    }


def check_versions(
    written: WrittenLog, table: Path | str, changes: ChangesFunction | None = None
) -> None:
    """Check that each version has the rows up to its marks, and that marks never decrease."""
    before = dict.fromkeys(range(PARTITION_COUNT), -1)
    for version, marks in sorted(marks_by_version(table).items()):
        assert read_table(table, version) == written.replayed(marks, changes)
        assert all(mark >= before.get(partition, -1) for partition, mark in marks.items())
        before = marks
