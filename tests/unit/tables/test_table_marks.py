"""Marks of a table: format in a commit, and the next batch that a table needs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadConfig, BadFormat, ClusterKeyMismatch, DataLoss
from waltz_core.tables.table_marks import (
    LogState,
    StoredRules,
    TableMarks,
    decode_marks,
    divide_by_lag,
    encode_marks,
    marks_to_continue_from,
    next_batch_marks,
)

KEY = "00112233445566778899aabbccddeeff"
MARKS = st.dictionaries(st.integers(0, 40), st.integers(-1, 10**9), min_size=1)


def metadata(**parts: object) -> str:
    body = {"follower": "f", "cluster": KEY, "marks": {"0": 41}, "rules": {}} | parts
    return json.dumps({"waltz": body})


@given(
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.dictionaries(st.integers(0, 2**31 - 1), st.integers(-1, 2**63 - 1)),
    st.builds(
        StoredRules,
        st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
        st.none() | st.lists(st.integers(-1, 2**31)).map(tuple),
        st.lists(st.integers(-1, 2**31)).map(tuple),
        st.none() | st.text(st.characters(codec="utf-8")),
    ),
)
def test_marks_and_rules_survive_a_commit(follower, marks, rules):
    table = TableMarks(follower, KEY, marks, rules)
    assert decode_marks(encode_marks(table)) == table


def test_a_follower_name_is_checked():
    with pytest.raises(BadConfig, match="follower: expected a name, found ''"):
        encode_marks(TableMarks("", KEY, {}))


def test_the_form_of_marks_is_stable():
    rules = '{"key":["a","b"],"headers":[],"delete_headers":[9],"delete_where":"c = 1",'
    rules += '"changes":"m:f"}'
    body = f'{{"follower":"f","cluster":"{KEY}","marks":{{"0":41,"10":-1}},"rules":{rules}}}'
    marks = TableMarks("f", KEY, {10: -1, 0: 41}, StoredRules(("a", "b"), (), (9,), "c = 1", "m:f"))
    assert encode_marks(marks) == f'{{"waltz":{body}}}'


@pytest.mark.parametrize("text", [None, "", "null", "nightly load", "[1]", '{"job": 7}', "NaN"])
def test_metadata_of_another_program_has_no_marks(text):
    assert decode_marks(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"waltz": 1}',
        '{"waltz": {}}',
        json.dumps({**json.loads(metadata()), "more": 1}),
        metadata(more=1),
        metadata(follower=""),
        metadata(follower=1),
        metadata(cluster=KEY.upper()),
        metadata(cluster=KEY[1:]),
        metadata(marks=[41]),
        metadata(marks={"0": 41.0}),
        metadata(marks={"0": True}),
        metadata(marks={"0": -2}),
        metadata(marks={"0": 2**63}),
        metadata(marks={"00": 41}),
        metadata(marks={"-1": 41}),
        metadata(marks={"2147483648": 41}),
        metadata(rules=[]),
        metadata(rules={"keys": ["id"]}),
        metadata(rules={"key": [["id"]]}),
        metadata(rules={"headers": [1.0]}),
        metadata(rules={"delete_where": {}}),
    ],
)
def test_marks_in_another_form_are_an_error(text):
    with pytest.raises(BadFormat, match=r"metadata of the table: expected .* found .* Hint: "):
        decode_marks(text)


def test_a_table_continues_from_its_marks_and_a_new_one_from_the_start():
    start = TableMarks("f", KEY, {0: 9})
    table = TableMarks("f", KEY, {0: 41, 1: -1})
    assert (table.version, table.application) == (42, f"waltz/{KEY}/f")
    assert marks_to_continue_from(None, None, start) == start
    assert marks_to_continue_from(encode_marks(table), 42, start) == table


def test_a_table_without_its_marks_does_not_start_from_the_beginning():
    with pytest.raises(BadFormat, match=r"follower 'f': expected .* for version 42, found none"):
        marks_to_continue_from(None, 42, TableMarks("f", KEY, {}))


def test_marks_are_accepted_with_an_equal_or_earlier_transaction_version():
    for version in (1, 41, 42):
        assert marks_to_continue_from(metadata(), version, TableMarks("f", KEY, {})).marks == {
            0: 41
        }


@pytest.mark.parametrize("version", [None, 43])
def test_marks_with_a_missing_or_later_transaction_version_are_an_error(version):
    start = TableMarks("f", KEY, {})
    with pytest.raises(BadFormat, match=f"version {version} of the table has no .*, version 42"):
        marks_to_continue_from(metadata(), version, start)


def test_a_table_of_another_cluster_or_follower_is_not_continued():
    with pytest.raises(ClusterKeyMismatch, match=f"follows cluster {KEY}"):
        marks_to_continue_from(metadata(), 42, TableMarks("f", KEY[::-1], {}))
    with pytest.raises(BadFormat, match=r"follower 'g': version .* of follower 'f'"):
        marks_to_continue_from(metadata(), 42, TableMarks("g", KEY, {}))


RULES = StoredRules(("a", "b"), (1, 9), (9,), "c = 1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (RULES._replace(key=("a",)), r"key: expected a, b, as in .*, found a\. Hint: "),
        (RULES._replace(headers=()), "headers: expected 1, 9, as in .*, found none"),
        (RULES._replace(delete_headers=(1, 9)), "delete_headers: expected 9, .* found 1, 9"),
        (RULES._replace(delete_where=None), "delete_where: expected c = 1, as .* found none"),
    ],
)
def test_rules_that_differ_from_the_stored_rules_are_rejected(given, message):
    table = TableMarks("f", KEY, {0: 41}, RULES)
    assert marks_to_continue_from(encode_marks(table), 42, table._replace(marks={})) == table
    with pytest.raises(BadConfig, match=message):
        marks_to_continue_from(encode_marks(table), 42, table._replace(rules=given))


@pytest.mark.parametrize("headers", [None, (1, 9)])
def test_selected_headers_are_not_compared_with_stored_rules(headers):
    stored = TableMarks("f", KEY, {0: 41}, RULES._replace(headers=headers))
    other = (1, 9) if headers is None else None
    given = stored._replace(rules=RULES._replace(headers=other))
    assert marks_to_continue_from(encode_marks(stored), 42, given).rules == RULES


def test_a_log_that_ends_below_the_table_marks_is_data_loss():
    with pytest.raises(DataLoss, match="of partition 1 up to 5, but the log ends at 4:"):
        next_batch_marks({0: 1, 1: 5}, LogState({0: 9, 1: 4}, {}), 10)
    with pytest.raises(DataLoss, match="of partition 1 up to 5, but the log ends at -1:"):
        next_batch_marks({1: 5}, LogState({0: 9}, {}), 10)


def test_transactions_that_expired_after_the_table_marks_are_data_loss():
    log = LogState({0: 9}, {0: 6})
    assert next_batch_marks({0: 5}, log, 10) == {0: 9}
    with pytest.raises(DataLoss, match="up to 4, but the first available one in the log is 6:"):
        next_batch_marks({0: 4}, log, 10)


def test_a_partition_without_a_mark_is_read_from_its_first_transaction():
    assert next_batch_marks({0: 3}, LogState({0: 3, 1: 7}, {}), 5) == {0: 3, 1: 4}


@given(MARKS, st.data(), st.integers(1, 10**9))
def test_batches_cover_the_log_without_a_gap(marks, data, count_max):
    ends = {partition: mark + data.draw(st.integers(0, 10**4)) for partition, mark in marks.items()}
    found = next_batch_marks(marks, LogState(ends, {}), count_max)
    assert all(marks[partition] <= found[partition] <= ends[partition] for partition in ends)
    assert (found == marks) == (ends == marks)
    assert sum(found.values()) - sum(marks.values()) <= count_max


@given(MARKS, st.data(), st.integers(1, 10**9))
def test_a_batch_limit_is_fully_used_and_distributed_by_lag(starts, data, count_max):
    ends = {
        partition: mark + data.draw(st.integers(0, 10**6)) for partition, mark in starts.items()
    }
    found = divide_by_lag(starts, ends, count_max)
    total = sum(ends.values()) - sum(starts.values())
    assert found.keys() == starts.keys()
    assert all(starts[partition] <= found[partition] <= ends[partition] for partition in starts)
    assert sum(found.values()) - sum(starts.values()) == min(total, count_max)
    if total > count_max:
        for partition in starts:
            share = (ends[partition] - starts[partition]) * count_max / total
            assert abs(found[partition] - starts[partition] - share) <= 1


def test_a_partition_whose_end_is_before_its_start_has_no_lag():
    assert divide_by_lag({0: 9, 1: 0}, {0: 4, 1: 30}, 10) == {0: 9, 1: 10}
