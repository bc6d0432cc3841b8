"""`waltz-core follow` against a local cluster: the table equals a plain replay of the log."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import msgpack
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from tests.changes_functions import PAIRS_FUNCTION, pair_changes
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.archiving import (
    STORAGES,
    ClusterArchive,
    append_and_archive,
    archiving_cluster,
    oldest_segment_first_id,
    read_archived_mark,
)
from tests.integration.killed_follower import KILL_STEPS
from tests.ports import free_port
from tests.schema_registry import run_schema_registry
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from tests.written_log import (
    DELETE_HEADER,
    OTHER_HEADER,
    WrittenLog,
    check_versions,
    end_marks,
    marks_by_version,
    read_table,
    running_log,
)
from waltz_core.client import Avro, WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.tables.table_marks import decode_marks

AVRO_HEADER = 6
LOG_COLUMNS = ("_partition", "_transaction_id")
SECRET_HEADER = 7
STRUCT_HEADER = 8


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenLog]:
    with running_log(tmp_path_factory.mktemp("cluster") / "local") as log:
        yield log


@pytest.fixture(scope="module")
def client(written: WrittenLog) -> Iterator[WaltzClient]:
    with WaltzClient(written.connect, PATIENT_CLIENT) as opened:
        yield opened


def follow(written: WrittenLog, table: Path, *more: str) -> dict[int, int]:
    """Run the command up to the end of the log; return the marks that it prints."""
    result = run_command(*written.command(table, "--until", "now", "--json", *more))
    assert result.returncode == 0, result.stderr
    return {int(partition): mark for partition, mark in json.loads(result.stdout)["marks"].items()}


def test_the_table_equals_a_replay_of_the_log(written: WrittenLog, tmp_path: Path):
    table = tmp_path / "table"
    assert follow(written, table) == end_marks(written)
    check_versions(written, table)
    assert len(marks_by_version(table)) > 3
    assert read_table(table) == written.replayed(end_marks(written))
    assert read_table(table)


def test_columns_are_found_in_payloads(written: WrittenLog, tmp_path: Path):
    table = tmp_path / "table"
    words = written.command(table, "--until", "now", columns=())
    for _ in range(2):
        result = run_command(*words)
        assert result.returncode == 0, result.stderr
    check_versions(written, table)
    names = DeltaTable(table).schema().to_arrow().names
    assert sorted(names) == ["_partition", "_transaction_id", "id", "op", "value"]


def test_a_repeated_command_writes_no_commit(written: WrittenLog, tmp_path: Path):
    table = tmp_path / "table"
    follow(written, table)
    version = DeltaTable(table).version()
    assert follow(written, table) == end_marks(written)
    assert DeltaTable(table).version() == version


# Kills in a later batch, when the table exists. `tests/chaos/test_table_kills.py` has more of them,
# at random points.
LATER_KILLS = [
    pytest.param(step, 2, marks=[] if step in ("in apply", "after apply") else [pytest.mark.slow])
    for step in KILL_STEPS
]


@pytest.mark.parametrize(("step", "passes"), [*((step, 0) for step in KILL_STEPS), *LATER_KILLS])
def test_a_follower_continues_after_a_kill_at_any_step(
    written: WrittenLog, tmp_path: Path, step: str, passes: int
):
    table = tmp_path / "table"
    command = [sys.executable, "-m", "tests.integration.killed_follower", step, str(passes)]
    command += written.command(table, "--until", "now")
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    if table.exists():
        check_versions(written, table)
    follow(written, table)
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))


def test_a_follower_continues_after_a_kill_between_a_schema_change_and_its_batch(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    table = tmp_path / "table"
    words = ["follow", str(table), "--connect", written.connect, "--key", "n", "--until", "now"]
    words += ["--header", str(STRUCT_HEADER)]

    def append(*rows: dict) -> None:
        for row in rows:
            client.append(msgpack.packb(row), partition=0, header=STRUCT_HEADER).result()
            written.log[0].append((OTHER_HEADER, {"other": True}))

    def state() -> tuple[int, str, list[dict]]:
        delta = DeltaTable(table)
        rows = delta.to_pyarrow_table().select(["n", "at"]).sort_by("n").to_pylist()
        return delta.version(), delta.history(1)[0]["userMetadata"], rows

    append({"n": 0, "at": {"x": 1}}, {"n": 1, "at": {"x": 2}})
    assert run_command(*words).returncode == 0
    version, marks, _ = state()
    append({"n": 1, "at": {"x": 3}}, {"n": 2, "at": {"y": 4}})
    command = [sys.executable, "-m", "tests.integration.killed_follower", "before _merge", "0"]
    killed = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    rows = [{"n": 0, "at": {"x": 1, "y": None}}, {"n": 1, "at": {"x": 2, "y": None}}]
    assert state() == (version + 1, marks, rows)
    for _ in range(2):
        assert run_command(*words).returncode == 0
        after, marks, rows = state()
        assert after == version + 2, "one commit of the batch, and none of the repeated command"
        assert dict(decode_marks(marks).marks) == end_marks(written)
        assert [row["at"] for row in rows] == [
            {"x": 1, "y": None},
            {"x": 3, "y": None},
            {"x": None, "y": 4},
        ]


def test_a_table_with_a_changes_function_equals_a_replay(written: WrittenLog, tmp_path: Path):
    table = tmp_path / "table"
    words = ["follow", str(table), "--connect", written.connect, "--key", "id", "--until", "now"]
    words += ["--column", "id:int64", "--column", "op:string", "--column", "value:int64"]
    words += ["--batch-transactions", "50", "--changes", PAIRS_FUNCTION]
    assert run_command(*words).returncode == 0
    check_versions(written, table, pair_changes)
    assert read_table(table) == written.replayed(end_marks(written), pair_changes)
    assert DeltaTable(table).schema().to_arrow().names == ["id", "value", *LOG_COLUMNS]
    other = run_command(*words[:-1], "tests.changes_functions:raise_key_error")
    assert (
        "changes: expected tests.changes_functions:return_pairs, as in the commits of the table"
        in other.stderr
    )
    words[1] = str(tmp_path / "other")
    failed = run_command(*words[:-1], "tests.changes_functions:raise_key_error")
    assert failed.returncode == 1
    assert re.search(
        r"changes function tests.changes_functions:raise_key_error \(first transaction: "
        r"partition 0, transaction 0\): .* the function raised KeyError: 'none' "
        r"\(.*tests/changes_functions.py, line \d+\)",
        failed.stderr,
    )


@pytest.fixture
def tables(written: WrittenLog, tmp_path: Path) -> Path:
    """Return a file with three tables: with rules, with a function, and with inferred columns."""
    columns = 'columns = ["id:int64", "op:string", "value:int64"]'
    headers = f"headers = [1, {DELETE_HEADER}]\ndelete_headers = [{DELETE_HEADER}]"
    rules = f"""{headers}\ndelete_where = "op = 'D'\""""
    sections = {
        "rules": f"{columns}\n{rules}",
        "pairs": f'{columns}\nchanges = "{PAIRS_FUNCTION}"',
        "found": rules,
    }
    file = tmp_path / "tables.toml"
    file.write_text(
        "".join(f'["{tmp_path}/{name}"]\nkey = "id"\n{lines}\n' for name, lines in sections.items())
    )
    return file


def follow_all(written: WrittenLog, file: Path) -> list[str]:
    words = ["follow", "--tables", str(file), "--connect", written.connect, "--until", "now"]
    return [*words, "--batch-transactions", "50", "--json"]


def check_all(written: WrittenLog, directory: Path) -> None:
    for name, changes in (("rules", None), ("pairs", pair_changes), ("found", None)):
        check_versions(written, directory / name, changes)
        assert read_table(directory / name) == written.replayed(end_marks(written), changes)


def test_tables_can_be_added_to_a_follower(written: WrittenLog, tables: Path, tmp_path: Path):
    follow(written, tmp_path / "rules")
    before = marks_by_version(tmp_path / "rules")
    result = run_command(*follow_all(written, tables))
    assert result.returncode == 0, result.stderr
    marks = {"marks": {str(partition): mark for partition, mark in end_marks(written).items()}}
    paths = [str(tmp_path / name) for name in ("rules", "pairs", "found")]
    assert json.loads(result.stdout) == {"tables": dict.fromkeys(paths, marks)}
    assert marks_by_version(tmp_path / "rules") == before
    check_all(written, tmp_path)


@pytest.mark.parametrize(("step", "passes"), [("after apply", 1), ("after apply", 4)])
def test_a_follower_continues_after_a_kill_between_the_commits_of_its_tables(
    written: WrittenLog, tables: Path, tmp_path: Path, step: str, passes: int
):
    command = [sys.executable, "-m", "tests.integration.killed_follower", step, str(passes)]
    killed = subprocess.run(
        [*command, *follow_all(written, tables)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    marks = [
        max(marks_by_version(tmp_path / name).items()) if (tmp_path / name).exists() else None
        for name in ("rules", "pairs", "found")
    ]
    assert marks[0] == marks[1] != marks[2]
    result = run_command(*follow_all(written, tables))
    assert result.returncode == 0, result.stderr
    check_all(written, tmp_path)


def test_an_interrupt_ends_a_follower(written: WrittenLog, client: WaltzClient, tmp_path: Path):
    written.append_changes(client)
    table = tmp_path / "table"
    command = [sys.executable, "-m", "waltz_core", *written.command(table)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as follower:
        wait_until(
            "the end of the log in the table",
            lambda: (
                DeltaTable.is_deltatable(str(table))
                and end_marks(written) in marks_by_version(table).values()
            ),
        )
        follower.send_signal(signal.SIGINT)
        _, error = follower.communicate(timeout=TEST_TIMEOUT_S)
    assert follower.returncode == 130
    assert "Traceback" not in error
    check_versions(written, table)


def test_two_concurrent_followers_apply_each_batch_once(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    table = tmp_path / "table"
    command = [sys.executable, "-m", "waltz_core", *written.command(table)]
    paths = [tmp_path / name for name in "ab"]
    seeds = count()

    def log_lines(event: str) -> list[int]:
        return [path.read_text().count(event) for path in paths]

    def has_conflict() -> bool:
        written.append(client, 25, next(seeds))
        return any(log_lines("follow.commit_conflict"))

    with ExitStack() as stack:
        logs = [stack.enter_context(path.open("w")) for path in paths]
        for log in logs:
            follower = stack.enter_context(subprocess.Popen(command, stderr=log))
            stack.callback(follower.kill)
        wait_until("both followers", lambda: log_lines("follow.started") == [1, 1])
        wait_until("a conflict of their commits", has_conflict)
        written.append_changes(client)
        end = end_marks(written)
        wait_until(
            "the end of the log in the table", lambda: end in marks_by_version(table).values()
        )
    check_versions(written, table)


def test_batches_without_changes_are_committed_once_at_the_end(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    table = tmp_path / "table"
    follow(written, table)
    before = DeltaTable(table).version()
    for _ in range(60):
        written.log[0].append((OTHER_HEADER, {"other": True}))
        client.append(msgpack.packb({"other": True}), partition=0, header=OTHER_HEADER).result()
    assert follow(written, table) == end_marks(written)
    assert DeltaTable(table).version() == before + 1
    check_versions(written, table)


def test_after_a_table_restore_a_new_follower_continues_from_the_restored_marks(
    written: WrittenLog, tmp_path: Path
):
    table = tmp_path / "table"
    follow(written, table)
    restored = marks_by_version(table)[2]
    assert restored != end_marks(written)
    DeltaTable(table).restore(2)
    failed = run_command(*written.command(table, "--until", "now"))
    assert failed.returncode == 1
    assert "is a RESTORE after the last commit of follower 'follow'" in failed.stderr
    assert read_table(table) == written.replayed(restored)
    marks = json.dumps({str(partition): mark for partition, mark in restored.items()})
    assert follow(written, table, "--follower", "again", "--start-marks", marks) == end_marks(
        written
    )
    assert read_table(table) == written.replayed(end_marks(written))
    follow(written, table, "--follower", "again")


@pytest.mark.parametrize(
    ("old", "new"),
    [("id", "value"), ("op = 'D'", "op = 'U'"), ("--delete-header", "--header")],
)
def test_changed_rules_for_an_existing_table_are_an_error(
    written: WrittenLog, tmp_path: Path, old: str, new: str
):
    table = tmp_path / "table"
    follow(written, table)
    version = DeltaTable(table).version()
    words = [new if word == old else word for word in written.command(table, "--until", "now")]
    result = run_command(*words)
    assert result.returncode == 1
    assert "as in the commits of the table, found " in result.stderr
    assert DeltaTable(table).version() == version


def test_a_table_can_start_at_marks_or_at_a_time(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    marks = {number: len(log) // 2 for number, log in enumerate(written.log)}
    text = json.dumps({str(partition): mark for partition, mark in marks.items()})
    table = tmp_path / "marks"
    follow(written, table, "--start-marks", text)
    assert marks_by_version(table)[0] == marks
    again = run_command(*written.command(table, "--until", "now", "--start-marks", text))
    assert again.returncode == 1
    assert (
        "start time were given, but follower 'follow' has already written the table" in again.stderr
    )
    first = written.log[0][marks[0]]
    stamps = client.scan(
        0, start=marks[0], schema=pa.schema([("commit_time", pa.timestamp("us", "UTC"))])
    )
    since = stamps.read_all()["commit_time"][0].as_py()
    table = tmp_path / "time"
    follow(written, table, "--start-time", since.isoformat())
    assert marks_by_version(table)[0][0] < marks[0], first


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a bucket in a separate process, because deltalake holds the GIL."""
    port = free_port()
    names = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
    names |= {"ALLOW_HTTP": "true", "ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    for name, value in names.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    serve = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    endpoint = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http", "region": "us-east-1"}
    store = fs.S3FileSystem(allow_bucket_creation=True, **endpoint)

    def is_created() -> bool:
        with suppress(OSError):
            store.create_dir("lake")
            return True
        return False

    with subprocess.Popen([sys.executable, "-c", serve], stderr=subprocess.DEVNULL) as server:
        wait_until("a bucket", is_created)
        yield "s3://lake"
        server.kill()


def test_a_table_in_an_object_store_equals_a_replay(written: WrittenLog, s3: str):
    table = f"{s3}/table"
    command = [sys.executable, "-m", "waltz_core", *written.command(table, "--until", "now")]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))


@pytest.mark.slow
def test_a_table_starts_at_the_first_available_transaction(tmp_path: Path):
    url = f"file://{tmp_path}/archive"
    with archiving_cluster(tmp_path, url) as cluster:
        count_all = len(append_and_archive(cluster, ClusterArchive(url)))
        before = str(min(oldest_segment_first_id(cluster, storage) for storage in STORAGES))
        connect = ["--connect", cluster.connect]
        result = run_command(
            "archive", "expire", *connect, "--before", before, "--partition", "0", "--yes"
        )
        assert result.returncode == 0, result.stderr
        first = read_archived_mark(cluster).first
        words = ["follow", str(tmp_path / "table"), *connect, "--key", "transaction_id"]
        words += ["--column", "transaction_id", "--column", "header", "--until", "now"]
        expired = run_command(*words, "--start-marks", json.dumps({"0": first - 2}))
        assert expired.returncode == 1
        assert f"first available one in the log is {first}: " in expired.stderr
        result = run_command(*words, "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == {"marks": {"0": count_all - 1}}
    rows = DeltaTable(tmp_path / "table").to_pyarrow_table()["transaction_id"].to_pylist()
    assert sorted(rows) == list(range(first, count_all))


def test_follow_reads_avro_payloads_with_a_registry_if_their_columns_are_declared(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    fields = [{"name": "id", "type": "long"}, {"name": "owner", "type": ["null", "string"]}]
    record = {"type": "record", "name": "account", "fields": fields}
    with run_schema_registry() as registry:
        accounts = Avro(registry.url, subject="accounts-value", schema=record)
        for row in ({"id": 1, "owner": "Anna"}, {"id": 2, "owner": None}):
            written.log[0].append((OTHER_HEADER, {"other": True}))
            client.append(accounts.serialize(row), partition=0, header=AVRO_HEADER).result()
        words = ["follow", str(tmp_path / "table"), "--connect", written.connect, "--key", "id"]
        words += ["--header", str(AVRO_HEADER), "--until", "now"]
        words += ["--data-format", "avro", "--schema-registry", registry.url]
        found = run_command(*words)
        assert (found.returncode, found.stdout) == (1, "")
        assert "schema: expected declared columns for payloads in" in found.stderr
        words += ["--column", "id:int64", "--column", "owner:string"]
        result = run_command(*words)
        assert result.returncode == 0, result.stderr
    other = f"http://127.0.0.1:{free_port()}"  # schemas of the first URL are cached
    words[1] = str(tmp_path / "other")
    result = run_command(*(other if word == registry.url else word for word in words))
    assert result.returncode == 1
    assert f"{other} cannot be read: Connection refused. Hint: check its" in result.stderr
    rows = DeltaTable(tmp_path / "table").to_pyarrow_table().select(["id", "owner"]).to_pylist()
    assert sorted(row["owner"] or "" for row in rows) == ["", "Anna"]


def test_encrypted_payloads_need_all_keys(written: WrittenLog, tmp_path: Path):
    """An unreadable payload is no row of nulls, even if the table's key is a column of the log."""
    keys, fewer = tmp_path / "keys", tmp_path / "fewer"
    for directory, names in ((keys, ("a", "b")), (fewer, ("a",))):
        directory.mkdir()
        for name in names:
            (directory / name).write_text(name * 64)
    with WaltzClient(written.connect, ClientConfig(encryption_keys=str(keys))) as client:
        for name in ("a", "b"):
            data = msgpack.packb({"id": ord(name)})
            sent = client.append(data, partition=0, header=SECRET_HEADER, encryption_key_id=name)
            written.log[0].append((OTHER_HEADER, {}))
            last = sent.result()
    words = ["follow", str(tmp_path / "table"), "--connect", written.connect, "--until", "now"]
    words += ["--key", "transaction_id", "--column", "transaction_id", "--column", "id:int64"]
    words += ["--header", str(SECRET_HEADER)]
    for more, reason in (
        ([], "expected a payload in msgpack"),
        (
            ["--encryption-keys", str(fewer)],
            f"transaction {last}: the key 'b' does not exist. Hint",
        ),
        (["--encryption-keys", str(tmp_path / "no")], str(tmp_path / "no")),
    ):
        result = run_command(*words, *more)
        assert result.returncode == 1
        assert reason in result.stderr
        assert not (tmp_path / "table").exists()
    result = run_command(*words, "--encryption-keys", str(keys), "--require-encryption")
    assert result.returncode == 0, result.stderr
    rows = DeltaTable(tmp_path / "table").to_pyarrow_table()["id"].to_pylist()
    assert sorted(rows) == [ord("a"), ord("b")]
    words[1] = str(tmp_path / "other")
    words[words.index("id:int64")] = "value:int64"
    words[words.index(str(SECRET_HEADER))] = "1"
    result = run_command(*words, "--encryption-keys", str(keys), "--require-encryption")
    assert "the payload is not encrypted. Hint: " in result.stderr


def test_a_payload_whose_type_differs_from_its_column_ends_the_command(
    written: WrittenLog, client: WaltzClient, tmp_path: Path
):
    words = written.command(tmp_path / "table", "--until", "now")
    words[words.index("value:int64")] = "value:string"
    result = run_command(*words)
    assert result.returncode == 1
    assert "column 'value': expected string, found" in result.stderr
    assert not (tmp_path / "table").exists(), "another run may declare another type"
