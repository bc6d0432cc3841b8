"""The loop of a follower, with a table and a log in memory."""

import logging
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.tables.fake_table import (
    Changes,
    Killed,
    LogInMemory,
    OpenTable,
    StoredVersions,
    Version,
)
from waltz_core.errors import (
    BadConfig,
    BadFormat,
    ClusterKeyMismatch,
    DataLoss,
    Superseded,
    Unavailable,
)
from waltz_core.tables.follower import (
    CONFLICTS_MAX,
    MARKS_COMMIT_INTERVAL_S,
    Follower,
    TableProgress,
)
from waltz_core.tables.table_marks import StoredRules, TableMarks, decode_marks

KEY = "00112233445566778899aabbccddeeff"
NAME = TableMarks("f", KEY, {})


def follower(log, table, name=NAME, count_max=2, **rest) -> Follower[Changes]:
    return follower_of(log, [progress(table, name, **rest)], count_max)


def progress(table, name=NAME, location="t", clock_s=time.monotonic) -> TableProgress[Changes]:
    opened = OpenTable(table) if isinstance(table, StoredVersions) else table
    return TableProgress(opened, location, name, clock_s)


def follower_of(log, tables, count_max=2, **rest) -> Follower[Changes]:
    return Follower(log, tables, batch_transactions=count_max, **rest)


def marks_of(table: StoredVersions) -> list[dict[int, int] | None]:
    found = [decode_marks(each.metadata) for each in table]
    return [None if each is None else dict(each.marks) for each in found]


def until_now(log: LogInMemory) -> dict[int, int]:
    return dict(log.state().marks)


def test_a_new_table_has_a_version_with_its_start_and_a_version_for_each_batch():
    log = LogInMemory([("a", 1), ("b", 2), ("a", None)], [("c", 3)])
    table = StoredVersions()
    steps: list[tuple[int, int]] = []
    loop = follower_of(log, [progress(table)], on_progress=lambda *each: steps.append(each))
    [last] = loop.run(until_now(log))
    assert marks_of(table) == [{0: -1, 1: -1}, {0: 1, 1: -1}, {0: 2, 1: 0}]
    assert table[-1].rows == {"b": 2, "c": 3}
    assert [each.versions[NAME.application] for each in table] == [0, 2, 4]
    assert last == TableMarks("f", KEY, {0: 2, 1: 0})
    assert steps == [(0, 4), (2, 4), (4, 4)]
    assert [starts for starts, _ in log.read] == [{0: -1, 1: -1}, {0: 1, 1: -1}]


def test_a_rerun_without_transactions_commits_nothing():
    log, table = LogInMemory([("a", 1)] * 3), StoredVersions()
    follower(log, table).run(until_now(log))
    versions = list(table)
    follower(log, table).run(until_now(log))
    assert table == versions
    log.partitions[0].append(("b", 4))
    follower(log, table).run(until_now(log))
    assert log.read[-1] == ({0: 2}, {0: 3})
    assert marks_of(table)[-1] == {0: 3}


def test_a_run_ends_at_its_marks_even_if_the_log_continues():
    log, table = LogInMemory([("a", 1), ("a", 2), ("a", 3)], [("b", 1)]), StoredVersions()
    follower(log, table).run({0: 1, 1: -1})
    assert marks_of(table)[-1] == {0: 1, 1: -1}
    follower(log, table).run({0: 0, 1: -1})  # before the table marks
    assert marks_of(table)[-1] == {0: 1, 1: -1}


def test_a_batch_without_changes_writes_no_version_and_is_not_read_again():
    log, table = LogInMemory([("a", None)] * 4 + [("b", 1)]), StoredVersions()
    follower(log, table).run(until_now(log))
    assert [ends[0] for _, ends in log.read] == [1, 3, 4]
    assert marks_of(table) == [{0: -1}, {0: 4}]


def test_advanced_marks_are_committed_at_the_end_of_a_run():
    log, table = LogInMemory([("a", None)] * 3), StoredVersions()
    follower(log, table).run(until_now(log))
    assert marks_of(table) == [{0: -1}, {0: 2}]
    assert table[-1].rows == {}


def test_advanced_marks_are_committed_after_ten_minutes():
    log, table = LogInMemory([("a", None)] * 3), StoredVersions()
    now_s = 0.0
    waits: list[int] = []

    def wait() -> None:
        nonlocal now_s
        waits.append(len(table))
        if len(waits) == 4:
            raise Killed
        now_s += MARKS_COMMIT_INTERVAL_S / 2

    log.on_wait = wait
    with pytest.raises(Killed):
        follower(log, table, clock_s=lambda: now_s).run()
    assert waits == [0, 0, 2, 2]
    assert marks_of(table) == [{0: -1}, {0: 2}]


def test_advanced_marks_are_committed_even_if_the_log_is_never_idle():
    log, table = LogInMemory([("a", None)]), StoredVersions()
    now_s = 0.0
    replayed = log.replayed

    def grow(starts, ends):
        nonlocal now_s
        if len(log.partitions[0]) == 8:
            raise Killed
        log.partitions[0].append(("a", None))
        now_s += MARKS_COMMIT_INTERVAL_S / 2
        return replayed(starts, ends)

    log.replayed = grow
    log.on_wait = lambda: None
    with pytest.raises(Killed):
        follower(log, table, count_max=1, clock_s=lambda: now_s).run()
    assert marks_of(table) == [{0: -1}, {0: 1}, {0: 3}, {0: 5}]


def test_the_interval_between_commits_of_marks_begins_with_the_last_commit():
    log, table = LogInMemory([]), StoredVersions()
    now_s = 0.0
    at: list[tuple[float, int]] = []

    def wait() -> None:
        nonlocal now_s
        at.append((now_s / MARKS_COMMIT_INTERVAL_S, len(table)))
        if len(at) == 6:
            raise Killed
        log.partitions[0].append(("a", 1) if len(at) == 2 else ("b", None))
        now_s += MARKS_COMMIT_INTERVAL_S * 0.4

    log.on_wait = wait
    with pytest.raises(Killed):
        follower(log, table, clock_s=lambda: now_s).run()
    assert [versions for _, versions in at] == [0, 0, 2, 2, 2, 3]


def test_without_an_end_the_follower_waits_after_it_has_reached_the_end_of_the_log():
    """This holds even if there are more transactions: the interval limits the versions."""
    log, table = LogInMemory([("a", 1)] * 4), StoredVersions()
    log.on_wait = lambda: log.partitions[0].append(("b", 1))
    changes = log.changes

    def append_and_read(starts, ends):
        log.partitions[0].append(("c", 1))
        if len(log.read) == 4:
            raise Killed
        return changes(starts, ends)

    log.changes = append_and_read
    with pytest.raises(Killed):
        follower(log, table, count_max=3).run()
    assert [ends[0] for _, ends in log.read] == [2, 4, 6, 8]


def test_without_an_end_the_follower_waits_for_transactions():
    log, table = LogInMemory([]), StoredVersions()

    def wait() -> None:
        if len(log.partitions[0]) == 3:
            raise Killed
        log.partitions[0].append(("a", len(log.partitions[0])))

    log.on_wait = wait
    with pytest.raises(Killed):
        follower(log, table).run()
    assert marks_of(table) == [{0: -1}, {0: 0}, {0: 1}, {0: 2}]


def test_without_an_end_an_unavailable_log_is_read_again(caplog):
    log, table = LogInMemory([("a", 1)]), StoredVersions()
    state, failures = log.state, [Unavailable("no server"), Unavailable("no server")]

    def failing_state():
        if failures:
            raise failures.pop()
        return state()

    log.state = failing_state
    with pytest.raises(Unavailable):
        follower(log, table).run({0: 0})
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            raise Killed

    log.on_wait = wait
    with pytest.raises(Killed):
        follower(log, table).run()
    assert "follow.unavailable reason=no server" in caplog.text
    assert marks_of(table)[-1] == {0: 0}


@pytest.mark.parametrize("step", ["marks", "create", "apply", "committed"])
@pytest.mark.parametrize("at", range(6))
def test_a_follower_that_is_killed_at_any_step_continues(step, at):
    log = LogInMemory([("a", 1), ("b", 2), ("a", None), ("c", 1), ("b", 3)], [("d", 1), ("d", 2)])
    table = StoredVersions()
    left = at

    def kill(name: str) -> None:
        nonlocal left
        left -= name == step
        if left < 0:
            raise Killed

    with suppress(Killed):
        follower(log, OpenTable(table, kill)).run(until_now(log))
    follower(log, table).run(until_now(log))
    assert table[-1].rows == {"b": 3, "c": 1, "d": 2}
    check_versions(log, table)


def check_versions(log: LogInMemory, table: StoredVersions) -> None:
    """Check that each version is a replay up to its marks."""
    for version, marks in zip(table, marks_of(table), strict=True):
        changes = log.replayed(dict.fromkeys(marks, -1), marks)
        assert version.rows == {key: value for key, value in changes.items() if value is not None}


KEYS = st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 9))


@given(
    st.lists(KEYS, max_size=12),
    st.lists(st.none() | st.tuples(st.integers(1, 4), st.integers(0, 11)), max_size=6),
)
@example([("a", 1), ("a", 2), ("a", 3)], [(3, 2)])
def test_concurrent_followers_leave_the_same_rows_as_a_replay_of_the_log(partition, turns):
    """Before each commit of one follower, the other may run with any batch size up to any mark."""
    log, table = LogInMemory(partition), StoredVersions()
    order = iter(turns)

    def run_the_other(step: str) -> None:
        if step == "apply" and (turn := next(order, None)) is not None:
            count_max, end = turn
            follower(log, table, count_max=count_max).run({0: min(end, len(partition) - 1)})

    follower(log, OpenTable(table, run_the_other)).run(until_now(log))
    check_versions(log, table)
    marks = [mark[0] for mark in marks_of(table)]
    assert marks == sorted(marks)
    assert marks[-1] == len(partition) - 1


def test_a_conflict_with_maintenance_repeats_the_batch():
    log, table = LogInMemory([("a", 1)]), StoredVersions()
    follower(log, table).run({0: -1})
    steps = iter(["OPTIMIZE", "VACUUM END"])

    def optimize(step: str) -> None:
        if step == "apply" and (operation := next(steps, None)):
            table.commit(operation)

    follower(log, OpenTable(table, optimize)).run({0: 0})
    assert [each.operation for each in table] == ["CREATE", "OPTIMIZE", "VACUUM END", "MERGE"]
    assert table[-1].rows == {"a": 1}


def test_a_follower_fails_after_too_many_consecutive_conflicts():
    log, table = LogInMemory([("a", 1)]), StoredVersions()
    follower(log, table).run({0: -1})

    def optimize(step: str) -> None:
        if step == "apply":
            table.commit("OPTIMIZE")

    with pytest.raises(Superseded, match="another commit came first"):
        follower(log, OpenTable(table, optimize)).run({0: 0})
    assert len(table) == CONFLICTS_MAX + 2


@pytest.mark.parametrize("is_running", [True, False])
def test_a_restore_after_the_last_commit_is_an_error(is_running):
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    follower(log, table).run({0: 1})
    if not is_running:
        table.commit("RESTORE", {})

    def restore(step: str) -> None:
        if is_running and step == "apply":
            table.commit("RESTORE", {})

    with pytest.raises(BadFormat, match=r"version 2 of the table is a RESTORE .* Hint: build the"):
        follower(log, OpenTable(table, restore)).run({0: 2})
    again = TableMarks("again", KEY, {0: -1})
    follower(log, table, again).run({0: 2})
    assert table[-1].rows == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    "operation", ["CREATE OR REPLACE TABLE AS SELECT", "REPLACE TABLE", "Restore", "CLONE"]
)
def test_a_commit_that_replaces_the_rows_is_an_error(operation: str):
    log, table = LogInMemory([("a", 1), ("b", 2)]), StoredVersions()
    follower(log, table).run({0: 0})
    table.commit(operation, {})
    with pytest.raises(BadFormat, match=f"is a {operation.upper()} after the last commit"):
        follower(log, table).run({0: 1})
    assert table[-1].operation == operation


def test_a_run_over_an_empty_log_still_commits_the_table_marks():
    table = StoredVersions()
    follower(LogInMemory([]), table).run({0: -1})
    assert marks_of(table) == [{0: -1}]


def test_commits_of_other_programs_are_logged_once(caplog):
    log, table = LogInMemory([("a", 1)] * 3), StoredVersions()
    follower(log, table).run({0: 1})
    for operation in ("OPTIMIZE", "DELETE", "SET TBLPROPERTIES"):
        table.commit(operation)
    with caplog.at_level(logging.WARNING):
        follower(log, table).run({0: 2})
    assert caplog.messages == ["follow.foreign_commit table=t version=3 operation=DELETE"]


def test_a_start_is_only_accepted_for_a_table_without_marks():
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    start = TableMarks("f", KEY, {0: 0})
    follower(log, table, start).run({0: 0})
    assert (marks_of(table), table[0].rows) == ([{0: 0}], {})
    follower(log, table, start).run({0: 2})  # the follower has not applied transactions yet
    assert table[-1].rows == {"b": 2, "c": 3}
    with pytest.raises(
        BadConfig,
        match=r"start marks or a start time were given, but .* up to 0:2. Hint: omit the st",
    ):
        follower(log, table, start).run({0: 2})


def test_a_start_is_stored_in_an_existing_table_without_transactions():
    log = LogInMemory([("a", 1), ("b", 2)])
    table = StoredVersions([Version({}, {}, "CREATE TABLE")])
    follower(log, table, TableMarks("f", KEY, {0: 1})).run({0: 1})
    for _ in range(2):
        follower(log, table).run({0: 1})
        assert (marks_of(table), table[-1].rows) == ([None, {0: 1}], {})


@pytest.mark.parametrize(
    ("step", "end"), [("create", 2), ("marks", 2), ("apply", 2), ("finish", -1)]
)
def test_a_start_is_not_ignored_if_another_follower_creates_the_table_first(step: str, end: int):
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    steps: list[str] = []

    def create(name: str) -> None:
        steps.append(name)
        if name == step and "create" in steps and not table:
            follower(log, table).run({0: 1})

    start = TableMarks("f", KEY, {0: 0})
    with pytest.raises(
        BadConfig,
        match=r"start marks or a start time were given, but .* up to 0:1. Hint: omit the st",
    ):
        follower(log, OpenTable(table, create), start).run({0: end})
    assert marks_of(table)[-1] == {0: 1}


def test_a_start_requires_a_mark_for_each_partition():
    log = LogInMemory([("a", 1)], [("b", 1)])
    with pytest.raises(BadConfig, match=r"each partition of \[0, 1\], found marks of \[0\]"):
        follower(log, StoredVersions(), TableMarks("f", KEY, {0: 0})).run({0: 0})


def test_a_start_outside_of_the_log_is_data_loss():
    log, table = LogInMemory([("a", 1)] * 3), StoredVersions()
    for mark, match in ((3, "the log ends at 2"), (0, "first available one in the log is 2")):
        log.firsts = {0: 2}
        with pytest.raises(DataLoss, match=match):
            follower(log, table, TableMarks("f", KEY, {0: mark})).run({0: 2})
    assert not table, "no table with such a start is created"


def test_a_new_table_starts_at_the_first_available_transaction():
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    log.firsts = {0: 2}
    follower(log, table).run({0: 2})
    assert (marks_of(table), table[-1].rows) == ([{0: 1}, {0: 2}], {"c": 3})


def test_transactions_that_expired_after_the_table_marks_are_data_loss():
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    follower(log, table).run({0: 0})
    log.firsts = {0: 2}
    with pytest.raises(DataLoss, match="the first available one in the log is 2"):
        follower(log, table).run({0: 2})


def test_a_table_of_another_cluster_is_not_continued():
    log, table = LogInMemory([("a", 1)]), StoredVersions()
    follower(log, table).run({0: 0})
    other = TableMarks("f", KEY[::-1], {})
    with pytest.raises(ClusterKeyMismatch):
        follower(log, table, other).run({0: 0})


def test_a_table_with_other_rules_is_not_continued():
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    name = NAME._replace(rules=StoredRules(("id",)))
    other = NAME._replace(rules=StoredRules(("other",)))
    follower(log, table, name).run({0: 0})
    assert decode_marks(table[-1].metadata).rules == name.rules
    versions = list(table)
    with pytest.raises(BadConfig, match=r"key: expected id, as in .* found other"):
        follower(log, table, other).run({0: 1})
    assert table == versions

    def create(step: str) -> None:
        if step == "create":
            follower(log, second, other).run({0: 0})

    second = StoredVersions()
    with pytest.raises(BadConfig, match=r"key: expected other, as in .* found id"):
        follower(log, OpenTable(second, create), name).run({0: 1})


def test_a_follower_with_another_name_must_use_the_rules_of_the_table():
    log, table = LogInMemory([("a", 1), ("b", 2)]), StoredVersions()
    follower(log, table, NAME._replace(rules=StoredRules(("id",)))).run({0: 0})
    again = TableMarks("again", KEY, {0: 0}, StoredRules(("other",)))
    with pytest.raises(BadConfig, match=r"key: expected id, as in .* found other"):
        follower(log, table, again).run({0: 1})
    follower(log, table, again._replace(rules=StoredRules(("id",)))).run({0: 1})


def test_lost_marks_must_be_given_as_the_start():
    log, table = LogInMemory([("a", 1), ("b", 2), ("c", 3)]), StoredVersions()
    follower(log, table).run({0: 1})
    table[:] = [table[-1]._replace(metadata=None, operation="OPTIMIZE")]
    with pytest.raises(BadFormat, match="Hint: pass the marks"):
        follower(log, table).run({0: 2})
    with pytest.raises(BadFormat, match="for version 2, found none"):
        follower(log, table, TableMarks("f", KEY, {0: 0})).run({0: 2})
    follower(log, table, TableMarks("f", KEY, {0: 1})).run({0: 2})
    assert log.read[-1] == ({0: 1}, {0: 2})
    assert marks_of(table) == [None, {0: 2}]


def test_a_table_with_rows_of_another_program_needs_starting_marks():
    log, table = LogInMemory([("a", 1), ("b", 2)]), StoredVersions()
    follower(log, table).run({0: 0})
    other = TableMarks("other", KEY, {})
    with pytest.raises(
        BadConfig, match="the table has rows, or marks of another follower, but no marks"
    ):
        follower(log, table, other).run({0: 1})
    follower(log, table, other._replace(marks={0: 0})).run({0: 1})
    assert table[-1].rows == {"a": 1, "b": 2}


def test_a_table_with_marks_of_another_follower_needs_starting_marks_even_without_rows():
    log, table = LogInMemory([("a", 1), ("a", None)]), StoredVersions()
    follower(log, table).run({0: 1})
    with pytest.raises(BadConfig, match="the table has rows, or marks of another follower"):
        follower(log, table, TableMarks("other", KEY, {})).run({0: 1})


def test_a_follower_ends_after_a_commit_of_a_follower_with_another_name():
    log, table = LogInMemory([("a", 1), ("a", 2), ("b", 3), ("a", 4)]), StoredVersions()
    follower(log, table).run({0: 2})
    other = TableMarks("other", KEY, {0: -1})
    follower(log, table, other, count_max=1).run({0: 0})  # would replace a newer row by an old row
    with pytest.raises(BadFormat, match=r"version 3 .* by follower 'other' .* has one follower"):
        follower(log, table).run({0: 3})
    follower(log, table, other._replace(marks={})).run({0: 3})
    assert table[-1].rows == {"a": 4, "b": 3}


def test_a_table_that_is_removed_is_not_created_again():
    log, table = LogInMemory([("a", 1)]), StoredVersions()

    def remove(step: str) -> None:
        if step == "committed" and len(table) == 2:
            table.clear()

    with pytest.raises(BadFormat, match="the table was removed"):
        follower(log, OpenTable(table, remove)).run({0: 0})


def test_a_limit_of_zero_transactions_in_a_batch_is_rejected():
    with pytest.raises(BadConfig, match="batch_transactions: expected 1 or more, found 0"):
        follower(LogInMemory([]), StoredVersions(), count_max=0)


def test_one_read_serves_several_tables_with_separate_marks():
    log = LogInMemory([("a", 1), ("b", 2), ("a", None), ("c", 4)], [("d", 1)])
    old, new = StoredVersions(), StoredVersions()
    follower(log, old, count_max=3).run({0: 1, 1: 0})
    before = list(old)
    log.read.clear()
    # A table that is added later lags, so the other table waits for it.
    steps: list[tuple[int, int]] = []
    loop = follower_of(
        log, [progress(old), progress(new)], on_progress=lambda *each: steps.append(each)
    )
    result = loop.run(until_now(log))
    assert [dict(each.marks) for each in result] == [until_now(log)] * 2
    assert [starts for starts, _ in log.read] == [{0: -1, 1: -1}, {0: 1, 1: -1}, {0: 2, 1: 0}]
    assert steps[-1] == (5, 5)
    assert old[: len(before)] == before
    assert len(old) == len(before) + 2
    for table in (old, new):
        check_versions(log, table)
        assert table[-1].rows == {"b": 2, "c": 4, "d": 1}
        marks = [mark[0] for mark in marks_of(table)]
        assert marks == sorted(marks)


@pytest.mark.parametrize("killed", range(2))
@pytest.mark.parametrize("step", ["marks", "create", "apply", "committed"])
@pytest.mark.parametrize("at", range(4))
def test_a_follower_of_several_tables_that_is_killed_at_any_step_continues(killed, step, at):
    log = LogInMemory([("a", 1), ("b", 2), ("a", None), ("c", 1), ("b", 3)], [("d", 1), ("d", 2)])
    tables = [StoredVersions(), StoredVersions()]
    left = at

    def kill(name: str) -> None:
        nonlocal left
        left -= name == step
        if left < 0:
            raise Killed

    opened = [OpenTable(each, kill if at == killed else None) for at, each in enumerate(tables)]
    with suppress(Killed):
        follower_of(log, list(map(progress, opened))).run(until_now(log))
    follower_of(log, list(map(progress, tables))).run(until_now(log))
    for table in tables:
        assert table[-1].rows == {"b": 3, "c": 1, "d": 2}
        check_versions(log, table)


def test_a_conflict_of_one_table_does_not_stop_the_other_one():
    log = LogInMemory([("a", 1)])
    tables = [StoredVersions(), StoredVersions()]
    follower(log, tables[0]).run({0: -1})

    def optimize(step: str) -> None:
        if step == "apply":
            tables[0].commit("OPTIMIZE")

    loop = follower_of(
        log, [progress(OpenTable(tables[0], optimize), location="x"), progress(tables[1])]
    )
    with pytest.raises(Superseded, match="table x: another commit came first"):
        loop.run({0: 0})
    assert marks_of(tables[1]) == [{0: -1}, {0: 0}]


def test_an_error_names_its_table():
    log, tables = LogInMemory([("a", 1), ("b", 2)]), [StoredVersions(), StoredVersions()]
    both = [progress(tables[0], location="x"), progress(tables[1], location="y")]
    follower_of(log, both).run({0: 0})
    tables[1].commit("RESTORE", {})
    both = [progress(tables[0], location="x"), progress(tables[1], location="y")]
    with pytest.raises(BadFormat, match=r"^table y: version 2 of the table is a RESTORE"):
        follower_of(log, both).run({0: 1})
    log.firsts = {0: 2}
    log.partitions[0] += [("c", 3)]
    with pytest.raises(DataLoss, match=r"^table x: the table has transactions .* have expired"):
        follower_of(log, [progress(tables[0], location="x")]).run({0: 2})
