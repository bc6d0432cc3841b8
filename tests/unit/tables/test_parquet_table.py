"""A followed table of Parquet files: after any kill, complete batches are a replay of the log."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs as arrow_fs

from tests.unit.tables.fake_object_store import store_with_answer
from waltz_core.archive.store import ArchiveStore, StoreSink
from waltz_core.errors import BadConfig, BadRequest, Superseded, Unavailable
from waltz_core.tables.follower import Follower, TableProgress, TableState
from waltz_core.tables.inferred_columns import with_inferred_columns
from waltz_core.tables.parquet_table import FollowedParquetTable
from waltz_core.tables.row_changes import ChangeRules, parse_condition, reduce_batches
from waltz_core.tables.table_marks import (
    LogState,
    StoredRules,
    TableMarks,
    decode_marks,
    encode_marks,
)

KEY = "00112233445566778899aabbccddeeff"
START = TableMarks("f", KEY, {0: -1})
NEW = START._replace(marks={})
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
RULES = ChangeRules(())
LOG = [(number % 3, f"t{number}") for number in range(7)]
READ = pa.schema([("partition", pa.int32()), ("transaction_id", pa.int64()), *SCHEMA])


class Killed(BaseException):
    """Simulates a killed process."""


class ArrowLog:
    """A log with one partition, given as an Arrow table (`FollowedLog`)."""

    def __init__(self, rows: list[tuple], rules: ChangeRules = RULES) -> None:
        self.rows, self.rules = rows, rules

    def state(self) -> LogState:
        return LogState({0: len(self.rows) - 1}, {0: 0})

    def changes(self, starts: Sequence[dict[int, int]], ends: dict[int, int]) -> Sequence[pa.Table]:
        return [self.of(starts[0], ends)]

    def of(self, starts: dict[int, int], ends: dict[int, int]) -> pa.Table:
        found = [
            {
                "partition": 0,
                "transaction_id": row_id,
                "id": self.rows[row_id][0],
                "text": self.rows[row_id][1],
            }
            for row_id in range(starts[0] + 1, ends[0] + 1)
        ]
        # In two parts, as in a long batch.
        parts = [pa.RecordBatch.from_pylist(each, READ) for each in (found[:1], found[1:])]
        return reduce_batches(parts, self.rules, READ)

    def wait(self) -> None:
        raise AssertionError("the log has an end")


@pytest.fixture(params=["directory", "s3"])
def uri(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a table: in a directory whose name must be escaped, or in an imitation of S3."""
    if request.param == "directory":
        yield str(tmp_path / "a %table")
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1"}
    arrow_fs.S3FileSystem(**options, allow_bucket_creation=True).create_dir("lake")
    # The objects remain after the server has stopped.
    yield f"s3://lake/{tmp_path.name}/table?" + "&".join(
        f"{key}={value}" for key, value in options.items()
    )
    server.stop()


def open_table(uri: str, schema: pa.Schema | None = SCHEMA) -> FollowedParquetTable:
    return FollowedParquetTable(uri, schema, RULES)


def follow(uri: str, rows: list[tuple], name: TableMarks = NEW) -> TableMarks:
    log = ArrowLog(rows)
    table = TableProgress(open_table(uri), uri, name)
    return Follower(log, [table], batch_transactions=3).run(dict(log.state().marks))[0]


def complete(uri: str) -> dict[int, list[str]]:
    """Return the Parquet files of each complete batch, as a reader lists them."""
    store = ArchiveStore(uri if "://" in uri else Path(uri).as_uri())
    names = store.list_names("")
    done = [
        found[0] for found in map(re.compile("batch=[0-9]+(?=/_waltz.json)").match, names) if found
    ]
    return {
        int(folder.removeprefix("batch=")): [
            name
            for name in names
            if name.startswith(f"{folder}/") and not name.endswith("_waltz.json")
        ]
        for folder in done
    }


def content(uri: str) -> list[tuple]:
    """Return the rows of the complete batches."""
    store = ArchiveStore(uri if "://" in uri else Path(uri).as_uri())
    rows = []
    for names in complete(uri).values():
        for name in names:
            with store.open(name) as file:
                rows += pa.parquet.read_table(file.native).to_pylist()
    return sorted((row["_transaction_id"], row["id"], row["text"]) for row in rows)


def replayed(rows: list[tuple]) -> list[tuple]:
    return [(index, *row) for index, row in enumerate(rows)]


def test_each_batch_is_a_directory_with_its_marks(uri: str):
    assert follow(uri, LOG).marks == {0: 6}
    assert sorted(complete(uri)) == [0, 1, 2, 3]
    assert [len(names) for _, names in sorted(complete(uri).items())] == [0, 1, 1, 1]
    assert content(uri) == replayed(LOG)
    state = open_table(uri).marks(START)
    assert decode_marks(state.metadata) == START._replace(marks={0: 6})
    assert (state.version, state.other_commits) == (7, [])
    assert open_table(uri).columns() == SCHEMA


def test_a_repeated_run_writes_no_batch_and_a_later_run_continues(uri: str):
    follow(uri, LOG)
    before = complete(uri)
    assert follow(uri, LOG).marks == {0: 6}
    assert complete(uri) == before
    follow(uri, [*LOG, (9, "more")])
    assert content(uri) == replayed([*LOG, (9, "more")])


def kill_at_call(monkeypatch: pytest.MonkeyPatch, fatal: int, moment: str) -> None:
    """Kill the process before or after a call that changes the store; calls are counted from 0."""
    numbers = count()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any) -> Any:
            is_fatal = next(numbers) == fatal
            if is_fatal and moment == "before":
                raise Killed
            result = method(*args)
            if is_fatal:
                raise Killed
            return result

        return called

    for name in ("delete", "delete_folder", "move", "write", "open_sink"):
        monkeypatch.setattr(ArchiveStore, name, counted(getattr(ArchiveStore, name)))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_follower_that_is_killed_at_any_change_of_the_store_continues(
    uri: str, monkeypatch: pytest.MonkeyPatch, moment: str
):
    for fatal in count():
        table = uri.replace("table", f"table{fatal}", 1)
        with monkeypatch.context() as patch:
            kill_at_call(patch, fatal, moment)
            with suppress(Killed):
                follow(table, LOG[:5])
                break
        found = content(table)
        assert found == replayed(LOG)[: len(found)]
        if found and Path(table).exists():  # readers do not see incomplete batches
            read = ds.dataset(table, format="parquet", partitioning="hive").to_table()
            assert sorted(read["_transaction_id"].to_pylist()) == [row[0] for row in found]
        follow(table, LOG)
        assert content(table) == replayed(LOG)
    assert fatal > 10, "the run had too few calls"


def test_files_of_a_batch_that_is_not_complete_are_removed(uri: str):
    follow(uri, LOG[:3])
    store = ArchiveStore(uri if "://" in uri else Path(uri).as_uri())
    store.write("batch=2/part.parquet", b"of a killed process")
    assert content(uri) == replayed(LOG[:3])
    follow(uri, LOG)
    assert "batch=2/part.parquet" not in store.list_names("batch=2")
    assert content(uri) == replayed(LOG)


def test_a_second_follower_does_not_repeat_batches(tmp_path: Path):
    uri = str(tmp_path)
    follow(uri, LOG[:3])
    first, second = open_table(uri), open_table(uri)
    log = ArrowLog(LOG)
    for each in (first, second):
        assert each.marks(START).version == 3
    changes = log.of({0: 2}, {0: 5})
    assert first.apply(changes, START._replace(marks={0: 5}))
    with pytest.raises(Superseded, match="another program has committed batch=2"):
        second.apply(changes, START._replace(marks={0: 5}))
    assert second.marks(START).version == 6
    assert second.apply(None, START._replace(marks={0: 6}))
    assert first.marks(START).version == 7
    assert content(uri) == replayed(LOG[:6])


@pytest.mark.parametrize("is_start_only", [True, False])
def test_a_second_follower_that_starts_at_any_time_leaves_the_table_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_start_only: bool
):
    turns = count()
    for turn in turns:
        uri = str(tmp_path / f"table{turn}")
        left = turn

        def start(patch: pytest.MonkeyPatch, uri: str = uri) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                patch.undo()
                if is_start_only:
                    open_table(uri).marks(START)
                else:
                    follow(uri, LOG)

        with monkeypatch.context() as patch:
            before_each_call(patch, partial(start, patch))
            follow(uri, LOG)
        assert content(uri) == replayed(LOG)
        assert not (tmp_path / uri / "_removed").exists()
        if left >= 0:
            break
    assert next(turns) > 30, "the run had too few calls"


def before_each_call(monkeypatch: pytest.MonkeyPatch, hook: Callable[[], None]) -> None:
    """Call a function before each call of the store and of its sinks."""
    calls = [(ArchiveStore, name) for name in ("delete", "delete_folder", "move", "list_names")]
    calls += [(ArchiveStore, name) for name in ("open", "read", "write", "open_sink")]
    for kind, name in [*calls, (StoreSink, "write")]:
        method = getattr(kind, name)

        @wraps(method)
        def called(*args: Any, method: Callable[..., Any] = method) -> Any:
            hook()
            return method(*args)

        monkeypatch.setattr(kind, name, called)


def test_the_rename_of_a_directory_decides_between_two_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uri = str(tmp_path)
    follow(uri, LOG[:3])
    first, second = open_table(uri), open_table(uri)
    first.marks(START)
    second.marks(START)
    move = ArchiveStore.move

    def later(store: ArchiveStore, name: str, target: str) -> None:
        if target == "batch=2":
            monkeypatch.setattr(ArchiveStore, "move", move)
            assert second.apply(None, START._replace(marks={0: 3}))
        move(store, name, target)

    monkeypatch.setattr(ArchiveStore, "move", later)
    with pytest.raises(Superseded, match="another program has committed batch=2"):
        first.apply(None, START._replace(marks={0: 4}))
    assert decode_marks(first.marks(START).metadata).marks == {0: 3}


def test_a_second_follower_needs_starting_marks_and_the_first_follower_sees_its_commits(
    tmp_path: Path,
):
    uri = str(tmp_path)
    follow(uri, LOG[:3])
    other = START._replace(follower="g")
    with pytest.raises(BadConfig, match=r"no marks of follower 'g'\. Hint: pass the marks"):
        follow(uri, LOG, other._replace(marks={}))
    follow(uri, LOG[:5], other._replace(marks={0: 2}))
    assert content(uri) == replayed(LOG[:5])
    state = open_table(uri).marks(START)
    assert decode_marks(state.metadata).marks == {0: 2}
    assert {other_commit.follower for other_commit in state.other_commits} == {"g"}


def test_another_follower_must_use_the_rules_of_the_table(tmp_path: Path):
    uri, other = str(tmp_path), START._replace(follower="g", marks={0: 2})
    follow(uri, LOG[:3], NEW._replace(rules=StoredRules(headers=(1,))))
    with pytest.raises(BadConfig, match=r"headers: expected 1, as in .* found 2"):
        follow(uri, LOG[:5], other._replace(rules=StoredRules(headers=(2,))))
    follow(uri, LOG[:5], other._replace(rules=StoredRules(headers=(1,))))
    assert content(uri) == replayed(LOG[:5])


def test_the_newest_batches_may_be_deleted(tmp_path: Path):
    """Rows and marks of the batches are deleted together, so the follower writes them again."""
    uri = str(tmp_path)
    follow(uri, LOG)
    for file in (*tmp_path.glob("batch=3/*"), *tmp_path.glob("batch=2/*")):
        file.unlink()
    assert content(uri) == replayed(LOG[:3])
    follow(uri, LOG)
    assert content(uri) == replayed(LOG)


def test_columns_may_be_added_and_keep_their_types(tmp_path: Path):
    uri = str(tmp_path)
    follow(uri, LOG[:3])
    wide = pa.schema([*SCHEMA, ("more", pa.float64())])
    table = open_table(uri, wide)
    table.marks(START)
    changes = ArrowLog(LOG).of({0: 2}, {0: 3})
    table.apply(changes.append_column("more", pa.array([0.5])), START._replace(marks={0: 3}))
    for schema, message in (
        (SCHEMA, "column 'more' of the table is not declared"),
        (
            pa.schema([*SCHEMA, ("more", pa.int64())]),
            "has type double in the table, but is declared as int64",
        ),
    ):
        with pytest.raises(BadConfig, match=message):
            open_table(uri, schema).marks(START)
    # As in docs/tables.md.
    query = f"FROM read_parquet('{uri}/batch=*/*.parquet', union_by_name = true)"
    rows = duckdb.sql(f"SELECT _transaction_id, more {query} ORDER BY 1").fetchall()
    assert rows == [(0, None), (1, None), (2, None), (3, 0.5)]
    newest = pa.parquet.read_schema(next(tmp_path.glob("batch=2/*.parquet")))
    assert pd.read_parquet(uri, schema=newest)["more"].tolist()[-1] == 0.5


def test_columns_are_found_in_payloads(tmp_path: Path):
    table = open_table(str(tmp_path), None)
    table.create(START)
    assert table.columns() == pa.schema([])
    payloads = [b'{"id": 1}', b'{"id": 2, "new": {"x": 1}}']
    for index, payload in enumerate(payloads):
        row = {"partition": [0], "transaction_id": [index], "header": [0], "data": [payload]}
        log = pa.table(
            row,
            pa.schema(
                [READ.field(0), READ.field(1), ("header", pa.int32()), ("data", pa.binary())]
            ),
        )
        rows = with_inferred_columns(log, table.columns(), "json")
        changes = reduce_batches(rows.to_batches(), RULES, rows.schema)
        assert table.apply(changes, START._replace(marks={0: index}))
        table.marks(START)
    assert open_table(str(tmp_path), None).columns().names == ["id", "new"]


def test_keys_and_deletes_are_rejected(tmp_path: Path):
    for rules in (
        ChangeRules(["id"]),
        ChangeRules((), [9]),
        ChangeRules((), (), parse_condition("a")),
    ):
        with pytest.raises(BadConfig, match=r"is append-only: .*\. Hint: use a Delta table"):
            FollowedParquetTable(str(tmp_path), SCHEMA, rules)
    table = open_table(str(tmp_path))
    table.create(START)
    changes = ArrowLog(LOG, ChangeRules((), (), parse_condition("text = 't1'"))).of({0: -1}, {0: 2})
    with pytest.raises(BadRequest, match="partition 0, transaction 1: found a delete"):
        table.apply(changes, START)
    assert list(tmp_path.glob("batch=*")) == [], "a failed first batch creates no table"
    table.finish()
    assert complete(str(tmp_path)) == {0: []}


def test_a_column_with_a_reserved_name_is_rejected(tmp_path: Path):
    for name in ("Batch", "_partition", "ID"):
        with pytest.raises(BadConfig, match=f"column '{name}': the name '.*' is already used"):
            open_table(str(tmp_path), pa.schema([*SCHEMA, (name, pa.int64())]))


@pytest.mark.parametrize("kind", [pa.struct([]), pa.list_(pa.month_day_nano_interval())])
def test_a_type_that_parquet_does_not_support_is_rejected(tmp_path: Path, kind: pa.DataType):
    with pytest.raises(BadConfig, match=r"column 'c': Parquet has no type .* Hint: declare "):
        open_table(str(tmp_path), pa.schema([*SCHEMA, ("c", kind)]))


def test_a_permanent_error_is_not_reported_as_unavailable(tmp_path: Path):
    """If the error were `Unavailable`, a follower without an end would repeat the batch forever."""
    table = open_table("/sys/waltz_table")  # no user may write there
    table.create(START)
    with pytest.raises(BadConfig, match=r"^table /sys/waltz_table: cannot write .* Hint: the user"):
        table.finish()
    changes = ArrowLog(LOG).of({0: -1}, {0: 2})
    narrow = open_table(str(tmp_path), pa.schema([("id", pa.int8()), ("text", pa.string())]))
    narrow.create(START)
    wide = changes.set_column(changes.schema.get_field_index("id"), "id", pa.array([999] * 3))
    with pytest.raises(BadRequest, match=f"^table {tmp_path}: Integer value 999 not in range"):
        narrow.apply(wide, START)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "AccessDenied", BadConfig),
        (403, "InvalidAccessKeyId", BadConfig),
        (401, "Unauthorized", BadConfig),
        (404, "NoSuchBucket", Unavailable),
        (500, "InternalError", Unavailable),
    ],
)
def test_denied_access_to_an_object_store_is_permanent(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, error: type[Exception]
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with store_with_answer(status, code) as url:
        host = url.removeprefix("http://")
        uri = f"s3://lake/table?scheme=http&region=us-east-1&endpoint_override={host}"
        with pytest.raises(error) as caught:
            open_table(uri).marks(START)
    assert str(caught.value).startswith(f"table {uri}: cannot ")
    assert ("Hint: " in str(caught.value)) is (error is BadConfig)


def test_the_creation_of_a_table_is_pending_until_a_finish_succeeds(tmp_path: Path):
    table = open_table(str(tmp_path))
    table.create(START)
    assert table.marks(START).is_creation_pending
    (tmp_path / "_writing").touch()  # so the store reports an error
    with pytest.raises(Unavailable, match="Not a directory"):
        table.finish()
    (tmp_path / "_writing").unlink()
    assert table.marks(START).is_creation_pending
    table.finish()
    assert not table.marks(START).is_creation_pending
    assert complete(str(tmp_path)) == {0: []}


def test_a_table_is_created_in_an_empty_directory(tmp_path: Path):
    (tmp_path / "other.csv").touch()
    with pytest.raises(BadConfig, match=r"expected an empty directory .*, found other\.csv"):
        open_table(str(tmp_path)).create(START)
    first, second = open_table(str(tmp_path / "table")), open_table(str(tmp_path / "table"))
    for each in (first, second):
        each.create(START)
        assert each.marks(START) == TableState(encode_marks(START), 0, (), has_rows=False)
    first.finish()
    with pytest.raises(Superseded, match="another program has committed batch=0"):
        second.finish()
    assert second.marks(START).has_rows
