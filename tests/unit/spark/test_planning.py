"""Ranges of IDs are split into tasks without overlap, gaps or IDs beyond the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadConfig, DataLoss
from waltz_spark.option_table import Purpose
from waltz_spark.options import parse_read
from waltz_spark.planning import (
    TransactionRange,
    check_order,
    check_partitions_of_marks,
    chosen_partitions,
    plan_spans,
    resolve_ends,
    resolve_starts,
    split_spans,
)


def read(**options: str):
    return parse_read({"path": "zk:2181/w/x", **options})


def test_starts_are_exclusive_and_ends_inclusive() -> None:
    marks = {0: 9, 1: 4}
    options = read(
        startingHighWaterMarks='{"0": 4, "1": -1}', endingHighWaterMarks='{"0": 6, "1": 4}'
    )
    starts, ends = resolve_starts(options, marks), resolve_ends(options, marks)
    assert plan_spans(starts, ends) == [TransactionRange(0, 5, 6), TransactionRange(1, 0, 4)]


@pytest.mark.parametrize("name", ["startingHighWaterMarks", "endingHighWaterMarks"])
def test_a_mark_of_an_unknown_partition_is_rejected(name: str) -> None:
    check_partitions_of_marks(read(**{name: '{"3": 1}'}), 4)
    with pytest.raises(BadConfig, match=f"option '{name}': expected partitions in 0..3, found 4"):
        check_partitions_of_marks(read(**{name: '{"4": 1}'}), 4)


@pytest.mark.parametrize(
    ("name", "resolve", "use"),
    [
        ("startingHighWaterMarks", resolve_starts, Purpose.BATCH),
        ("startingHighWaterMarks", resolve_starts, Purpose.STREAM),
        ("endingHighWaterMarks", resolve_ends, Purpose.BATCH),
    ],
)
def test_marks_are_required_for_each_partition(name, resolve, use) -> None:
    options = parse_read({"path": "zk:2181/w/x", name: '{"0": 4, "2": 3}'}, use)
    assert resolve(options, {0: 9, 2: 3}) == {0: 4, 2: 3}
    with pytest.raises(
        BadConfig, match=f"'{name}' has no high-water mark for partition 1, 3: .* Hint: "
    ):
        resolve(options, {0: 9, 1: 5, 2: 3, 3: 3})


@pytest.mark.parametrize("starting", ['{"0": 5, "1": 7}', "latest"])
def test_a_start_after_the_end_is_rejected(starting: str) -> None:
    marks = {0: 9, 1: 7}
    options = read(startingHighWaterMarks=starting, endingHighWaterMarks='{"0": 9, "1": 6}')
    with pytest.raises(
        BadConfig,
        match="partition 1: the read starts after transaction 7, but ends at transaction 6",
    ):
        check_order(options, resolve_starts(options, marks), resolve_ends(options, marks))
    check_order(options, {0: 9, 1: 6}, {0: 9, 1: 6})
    since = read(startingTimestamp="2026-11-21", endingHighWaterMarks='{"0": 9, "1": 6}')
    check_order(since, {0: 9, 1: 7}, resolve_ends(since, marks))


def test_an_empty_log_gives_no_task() -> None:
    options = read()
    assert plan_spans(resolve_starts(options, {0: -1}), resolve_ends(options, {0: -1})) == []
    assert split_spans([], task_count_min=4, per_task_max=10) == []


def test_an_ending_mark_past_the_end_of_the_log_is_data_loss_by_default() -> None:
    wanted = '{"0": 10}'
    with pytest.raises(DataLoss, match="10 of partition 0, but its log ends at transaction 9:"):
        resolve_ends(read(endingHighWaterMarks=wanted), {0: 9})
    allowed = read(endingHighWaterMarks=wanted, failOnDataLoss="false")
    assert resolve_ends(allowed, {0: 9}) == {0: 9}


def test_ranges_of_ids_apply_to_every_partition() -> None:
    found = plan_spans({0: -1, 1: -1}, {0: 99, 1: 15}, [(10, 19), (15, 30)])
    assert found == [
        TransactionRange(0, 10, 19),
        TransactionRange(0, 20, 30),
        TransactionRange(1, 10, 15),
    ]


def test_the_error_names_a_missing_partition() -> None:
    with pytest.raises(BadConfig, match=r"expected partitions in 0..3, found 7"):
        chosen_partitions(read(partitions="0,7"), 4)
    assert chosen_partitions(read(partitions="2,0"), 4) == [0, 2]


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    task_count_min=st.integers(1, 20),
    per_task_max=st.integers(1, 120),
)
def test_tasks_cover_exactly_the_requested_transactions(
    counts: list[int], task_count_min: int, per_task_max: int
) -> None:
    whole = [TransactionRange(p, 7, 6 + count) for p, count in enumerate(counts) if count]
    tasks = split_spans(whole, task_count_min=task_count_min, per_task_max=per_task_max)
    covered = [(t.partition, i) for t in tasks for i in range(t.first, t.last + 1)]
    assert covered == [(s.partition, i) for s in whole for i in range(s.first, s.last + 1)]
    assert all(t.last - t.first < per_task_max for t in tasks)
    assert len(tasks) >= min(task_count_min, sum(counts))
