"""Feed states: files in any state that a task may find, killed tasks, and the directory."""

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.spark.feeds import (
    SCHEMA,
    Log,
    expected_rows,
    options_of,
    reader,
    rows_between,
    rows_of,
    transaction_with,
)
from waltz_core.errors import Unavailable
from waltz_spark.datasource import feed_read, feed_state
from waltz_spark.datasource.feed_read import feed_state_file
from waltz_spark.datasource.feed_state import (
    FeedState,
    StoredRow,
    create_private_state,
    open_cached_state,
    state_file_path,
)

COUNT = 40
PAGE_BYTES = 4096
LOG = [transaction_with(id=n % 6, op="UID"[n % 5 % 3], amount=n) for n in range(COUNT)]
ROWS = expected_rows(LOG)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


def micro_batch(file: Path, begin: int, end: int) -> list[tuple[int, int]]:
    """Run a micro-batch, check its rows, and return the ranges of the log that it has read."""
    log = Log(LOG, batch_rows=4)
    assert rows_of(reader(log, begin, end, file).rows()) == rows_between(ROWS, begin, end)
    return log.reads


def stored_marks(file: Path) -> tuple[int, int]:
    state = open_cached_state(file)
    assert state is not None
    found = state.mark, state.previous_mark
    state.close()
    return found


def test_an_absent_state_is_built_and_continues_from_its_mark(file: Path) -> None:
    assert micro_batch(file, 9, 19) == [(0, 9), (10, 19)]
    assert stored_marks(file) == (19, 9)
    assert micro_batch(file, 19, 24) == [(20, 24)]
    assert stored_marks(file) == (24, 19)


def test_a_state_at_an_earlier_mark_catches_up(file: Path) -> None:
    micro_batch(file, 9, 19)
    assert micro_batch(file, 29, 34) == [(20, 29), (30, 34)]
    assert stored_marks(file) == (34, 29)


def test_a_micro_batch_repeated_with_another_end_is_read_from_its_start(file: Path) -> None:
    micro_batch(file, -1, 9)
    for end in (19, 25, 12):
        assert micro_batch(file, 9, end) == [(10, end)]
        assert stored_marks(file) == (end, 9)


def test_a_state_at_a_later_mark_is_rolled_back_to_its_previous_mark_and_catches_up(
    file: Path,
) -> None:
    micro_batch(file, 9, 19)
    assert micro_batch(file, 14, 16) == [(10, 14), (15, 16)]


def test_a_state_without_its_previous_mark_is_rebuilt(file: Path) -> None:
    micro_batch(file, 29, 34)
    assert micro_batch(file, 9, 19) == [(0, 9), (10, 19)]
    assert stored_marks(file) == (19, 9)


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, bytes(8192)])
def test_an_invalid_state_file_is_replaced(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert micro_batch(file, 9, 19) == [(0, 9), (10, 19)]
    assert stored_marks(file) == (19, 9)


def test_a_file_of_another_version_is_replaced(file: Path) -> None:
    micro_batch(file, 9, 19)
    content = bytearray(file.read_bytes())
    content[60:64] = (0x575A_0000).to_bytes(4)  # SQLite's user version
    file.write_bytes(content)
    assert micro_batch(file, 19, 24) == [(0, 19), (20, 24)]


@pytest.mark.parametrize("page", range(4))
@pytest.mark.parametrize("is_short", [False, True])
def test_a_file_that_lacks_a_page_does_not_change_the_rows(
    file: Path, page: int, *, is_short: bool
) -> None:
    micro_batch(file, 9, 19)
    content = bytearray(file.read_bytes())
    assert len(content) == 4 * PAGE_BYTES
    first = page * PAGE_BYTES
    if is_short:
        del content[first:]
    else:
        content[first : first + PAGE_BYTES] = bytes(PAGE_BYTES)
    file.write_bytes(content)
    micro_batch(file, 19, 24)
    micro_batch(file, 24, COUNT - 1)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM place",
        "INSERT INTO place VALUES (1, 1)",
        "UPDATE place SET previous = 'x'",
        "DROP TABLE replaced",
        "UPDATE latest SET data = CAST(x'ff' AS TEXT)",
        "UPDATE latest SET header = NULL",
    ],
)
def test_a_file_with_other_tables_does_not_change_the_rows(file: Path, change: str) -> None:
    micro_batch(file, 9, 19)
    database = sqlite3.connect(file, isolation_level=None)
    database.execute(change)
    database.close()
    micro_batch(file, 19, 24)


def test_a_stored_row_with_a_wrong_payload_is_detected_when_it_is_read(file: Path) -> None:
    micro_batch(file, -1, 19)
    content = file.read_bytes()
    for each in LOG[14:20]:
        content = content.replace(each.data, each.data[:-1] + b"\x01")
    file.write_bytes(content)
    reads = micro_batch(file, 19, 24)
    assert reads == [(20, 24), (0, 19), (20, 24)]
    assert not file.exists()
    assert micro_batch(file, 24, 30) == [(0, 24), (25, 30)]


def test_rows_yielded_before_damage_is_found_are_not_repeated(file: Path) -> None:
    micro_batch(file, -1, 19)
    log = Log(LOG, batch_rows=1)
    rows = reader(log, 19, 30, file).rows()
    found = rows_of(iter([next(rows), next(rows)]))
    content = file.read_bytes()
    assert LOG[16].data in content
    state = rows.gi_frame.f_locals["state"]  # type: ignore[attr-defined]
    state._database.execute("UPDATE latest SET sum = sum + 1")
    assert found + rows_of(rows) == rows_between(ROWS, 19, 30)
    done = log.reads[1][1]
    assert log.reads == [(20, 30), (0, done), (done + 1, 30)]


def test_a_failed_commit_of_the_state_does_not_change_the_rows(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_state: FeedState, _mark: int, *, previous_mark: int) -> None:
        raise sqlite3.OperationalError(f"database or disk is full, {previous_mark}")

    micro_batch(file, -1, 19)
    monkeypatch.setattr(FeedState, "commit", fail)
    assert micro_batch(file, 19, 30) == [(20, 30)]
    assert not file.exists()


def test_a_state_file_in_use_is_not_changed(file: Path) -> None:
    micro_batch(file, 9, 19)
    other = open_cached_state(file)
    assert other is not None
    assert micro_batch(file, 19, 24) == [(0, 19), (20, 24)]
    other.close()
    assert stored_marks(file) == (19, 9)


def test_an_incomplete_task_keeps_the_previous_mark(file: Path) -> None:
    micro_batch(file, -1, 19)
    for begin in (19, -1):  # continue, and return to an earlier mark
        rows = reader(Log(LOG, batch_rows=1), begin, 30, file).rows()
        next(rows)
        rows.close()  # type: ignore[attr-defined]
        assert stored_marks(file) == (19, -1)
    micro_batch(file, 19, 30)


def test_a_killed_task_keeps_the_previous_mark(file: Path) -> None:
    """SQLite has written pages of the transaction to the file already."""
    micro_batch(file, -1, 19)
    script = f"""
        import sys
        from pathlib import Path
        from waltz_spark.datasource import feed_state
        feed_state._SET_PAGE_CACHE = "PRAGMA cache_size = -16"
        state = feed_state.open_cached_state(Path({str(file)!r}))
        rows = [(bytes([n % 256] * 12) + n.to_bytes(4), feed_state.StoredRow(0, n, bytes(1000)))
                for n in range(3000)]
        state.save_replaced_rows((key, row) for key, row in rows)
        state.write(rows, [])
        print("written", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        assert file.stat().st_size > 2_000_000
        child.kill()
    assert stored_marks(file) == (19, -1)
    assert micro_batch(file, 19, 30) == [(20, 30)]


def test_a_task_with_a_deleted_file_does_not_change_the_new_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in `killed`, made during a SQLite transaction, is like the files after a kill."""
    monkeypatch.setattr(feed_state, "_SET_PAGE_CACHE", "PRAGMA cache_size = -16")
    paused = open_cached_state(file)
    assert paused is not None
    paused.write([(bytes(16), StoredRow(0, 1, b"d"))], [])
    file.unlink()
    micro_batch(file, -1, 19)
    running = open_cached_state(file)
    assert running is not None
    running.write([(n.to_bytes(16), StoredRow(0, n, bytes(1000))) for n in range(300)], [])
    paused.commit(1, previous_mark=-1)
    paused.close()
    killed = file.parent / "killed"
    killed.mkdir()
    for each in (file, Path(f"{file}-journal")):
        shutil.copy(each, killed)
    running.close()
    assert stored_marks(killed / file.name) == (19, -1)
    database = sqlite3.connect(killed / file.name)
    assert (
        database.execute("SELECT count(*) FROM latest WHERE length(data) = 1000").fetchone()[0] == 0
    )
    database.close()


def test_a_long_catch_up_is_committed_in_steps(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_read, "TRANSACTIONS_PER_COMMIT", 5)
    log = Log(LOG, batch_rows=1)
    fail_at = 18
    good = log.read

    def read(first: int, last: int):
        for batch in good(first, last):
            if batch["transaction_id"][0].as_py() == fail_at:
                raise ConnectionError
            yield batch

    log.read = read  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        rows_of(reader(log, 29, 34, file).rows())
    assert stored_marks(file) == (14, 14)
    assert micro_batch(file, 29, 34) == [(15, 19), (20, 24), (25, 29), (30, 34)]


def test_a_log_is_read_from_its_first_available_id(file: Path) -> None:
    log = Log(LOG)
    rows = rows_of(reader(log, 14, 20, file, first=15).rows())
    assert rows == rows_between(expected_rows(LOG, first=15), 14, 20)
    assert log.reads == [(15, 20)]
    assert rows_of(reader(log, 14, 22, file, first=15).rows())[: len(rows)] == rows
    # An earlier state lacks the expired transactions, as does the feed.
    assert rows_of(reader(log, 34, 36, file, first=30).rows())
    assert log.reads[2:] == [(30, 34), (35, 36)]


def test_rows_of_expired_transactions_are_unknown_despite_a_stored_state(
    file: Path,
) -> None:
    micro_batch(file, 9, 19)
    log = Log(LOG)
    for begin, end in ((19, 22), (19, 26), (26, 39)):  # the second one runs again
        expected = rows_between(expected_rows(LOG, first=17), begin, end)
        assert rows_of(reader(log, begin, end, file, first=17).rows()) == expected
        assert rows_of(reader(log, begin, end, first=17).rows()) == expected
    assert log.reads[0] == (20, 22)


def test_the_error_for_a_full_disk_names_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_state, "_SET_PAGE_CACHE", "PRAGMA max_page_count = 8")
    log = Log([transaction_with(id=n, text="x" * 1000) for n in range(100)])
    with pytest.raises(Unavailable, match=r"feed state .* is full\. Hint: free space there"):
        rows_of(reader(log, -1, 99).rows())


def test_memory_does_not_grow_with_the_number_of_keys() -> None:
    """40 MB of keys and payloads, with a page cache of 1 MiB."""
    script = """
        import resource
        from tests.unit.spark import feeds
        from waltz_spark.datasource import feed_state
        feed_state._SET_PAGE_CACHE = "PRAGMA cache_size = -1024"
        class Long(feeds.Log):
            def read(self, first, last):
                for start in range(first, last + 1, 4000):
                    ids = range(start, min(start + 4000, last + 1))
                    self.transactions = {
                        n: feeds.transaction_with(id=n % 80_000, op="x" * 500) for n in ids
                    }
                    yield self._batch(ids)
        peaks = []
        rows = 0
        for batch in feeds.reader(Long([]), 79_999, 99_999).rows():
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            rows += batch.num_rows
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(rows, peaks[0] // 1024)
    """

    def run(keys: int) -> tuple[int, int]:
        text = textwrap.dedent(script).replace("80_000", str(keys)).replace("79_999", str(keys - 1))
        text = text.replace("99_999", str(keys + 19_999))
        done = subprocess.run(
            [sys.executable, "-c", text], check=True, capture_output=True, text=True
        )
        rows, peak_mib = map(int, done.stdout.split())
        return rows, peak_mib

    few, many = run(4_000), run(80_000)
    assert few[0] == many[0] == 40_000
    assert many[1] - few[1] < 20


# ---- the file and its directory


def test_the_file_name_depends_on_the_inputs_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_state.tempfile, "gettempdir", lambda: str(tmp_path))

    def name(
        query: str | None = "q",
        cluster: bytes = b"c",
        partition: int = 0,
        schema=SCHEMA,
        **options: str,
    ):
        return feed_state_file(query, cluster, partition, options_of(schema, **options), schema)

    plain = name()
    assert name(None) is None
    assert plain == name(failOnDataLoss="false", maxTransactionsPerTrigger="5", partitions="0")
    wider = type(SCHEMA)(SCHEMA.fields[:]).add("more", "string")
    others = [
        name("r"),
        name(cluster=b"d"),
        name(partition=1),
        name(schema=wider),
        name(key="id,op"),
        name(headers="1,9"),
        name(deleteHeaders="8"),
        name(deleteWhere="op = 'X'"),
        name(mode="DROPMALFORMED"),
        name(requiredColumns="op"),
        name(dataFormat="json"),
        name(encryptionKeys="/keys"),
        name(encryptionKeys="/keys", requireEncryption="true"),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_the_state_directory_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(feed_state.tempfile, "gettempdir", lambda: str(tmp_path))
    path = state_file_path("x")
    assert path is not None
    directory = path.parent
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    assert state_file_path("x") is None
    assert "spark.feed_state_not_cached" in caplog.text
    directory.rmdir()
    directory.symlink_to(tmp_path)
    assert state_file_path("x") is None


def test_without_a_temporary_directory_the_state_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory")  # also raised for a full disk

    monkeypatch.setattr(feed_state.tempfile, "gettempdir", fail)
    assert state_file_path("x") is None
    assert "no usable temporary directory" in caplog.text


def test_states_that_were_not_used_for_8_days_are_deleted(file: Path) -> None:
    names = ("old", "new")
    for name in names:
        micro_batch(file.with_name(f"{name}.sqlite"), -1, 9)
    old = file.with_name("old.sqlite")
    used = file.stat().st_mtime if file.exists() else old.stat().st_mtime
    os.utime(old, (used, used - feed_state.UNUSED_S_MAX - 60))
    orphan = file.with_name("orphan.sqlite-journal")
    orphan.write_bytes(b"")
    for journal in (orphan, *(file.with_name(f"{name}.sqlite-journal") for name in names)):
        assert journal.exists()
        os.utime(journal, (used, used - feed_state.UNUSED_S_MAX - 60))
    micro_batch(file, -1, 9)
    names = (name for each in ("new.sqlite", file.name) for name in (each, f"{each}-journal"))
    assert sorted(path.name for path in file.parent.iterdir()) == list(names)


def test_a_private_state_stores_no_previous_rows() -> None:
    state = create_private_state()
    state.save_replaced_rows([(b"k", None)])
    state.write([(b"k", StoredRow(1, 2, b"d"))], [b"other"])
    assert state.find_row(b"k") == StoredRow(1, 2, b"d")
    state.return_to_previous_mark()
    assert state.find_row(b"k") is not None
    state.close()
