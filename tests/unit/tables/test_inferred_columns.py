"""Columns inferred from payloads do not depend on the limits of batches."""

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.tables.delta_table import FollowedDeltaTable
from waltz_core.tables.followed_log import compute_changes_inferring_columns
from waltz_core.tables.follower import Follower, TableProgress
from waltz_core.tables.inferred_columns import COLUMNS_MAX, with_inferred_columns
from waltz_core.tables.row_changes import ChangeRules, parse_condition
from waltz_core.tables.table_marks import LogState, MarkMap, TableMarks

KEY = "00112233445566778899aabbccddeeff"
NONE = pa.schema([])


def log_rows(*payloads: Any, first: int = 0) -> pa.Table:
    """Return transactions with JSON payloads."""
    count = len(payloads)
    return pa.table(
        {
            "partition": pa.array([0] * count, pa.int32()),
            "transaction_id": pa.array(range(first, first + count), pa.int64()),
            "header": pa.array([0] * count, pa.int32()),
            "data": pa.array([json.dumps(payload).encode() for payload in payloads], pa.binary()),
        }
    )


def columns_of(*payloads: Any, known: pa.Schema = NONE) -> pa.Table:
    found = with_inferred_columns(log_rows(*payloads), known, "json")
    return found.select(found.schema.names[3:])


def test_the_first_value_determines_the_type_of_a_column():
    columns = columns_of(
        {"id": 1, "text": None, "flag": True},
        {"id": 2, "text": "a", "list": [None, 1.5], "map": {"a": None, "b": [{"c": 1}]}},
        {"map": {"d": "x"}, "list": []},
    )
    assert columns.schema == pa.schema(
        [
            ("id", pa.int64()),
            ("flag", pa.bool_()),
            ("text", pa.string()),
            ("list", pa.list_(pa.float64())),
            (
                "map",
                pa.struct([("b", pa.list_(pa.struct([("c", pa.int64())]))), ("d", pa.string())]),
            ),
        ]
    )
    assert columns["map"].to_pylist() == [
        None,
        {"b": [{"c": 1}], "d": None},
        {"b": None, "d": "x"},
    ]
    assert columns["list"].to_pylist() == [None, [None, 1.5], []]


def test_known_columns_are_kept_and_extended():
    known = pa.schema([("a", pa.int64()), ("b", pa.struct([("x", pa.int64())])), ("c", pa.int32())])
    columns = columns_of({"b": {"y": 1}, "d": "x", "c": 7}, known=known)
    grown = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    assert columns.schema.names == ["a", "b", "c", "d"]
    assert (columns.schema.field("b").type, columns.schema.field("c").type) == (grown, pa.int32())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (1, "a", "column 'v': expected an integer, found text"),
        (1.5, 1, "column 'v': expected a double, found an integer"),
        (True, 1, "column 'v': expected a boolean, found an integer"),
        ([1], ["a"], r"column 'v\[\]': expected an integer, found text"),
        ([1], {"a": 1}, "column 'v': expected a list, found a map"),
        ({"a": 1}, {"a": "x"}, "column 'v.a': expected an integer, found text"),
        ({"a": 1}, 7, "column 'v': expected a map, found an integer"),
        (None, [], "column 'v': expected a value, found a list without elements"),
        (None, [None], "column 'v': expected a value, found a list without elements"),
        (None, {}, "column 'v': expected a value, found a map without entries"),
        (1, 2**63, "column 'v': expected int64, found 9223372036854775808"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_transaction(
    first: object, second: object, message: str
):
    with pytest.raises(BadFormat, match=f"partition 0, transaction 1, {message}"):
        columns_of({"v": first}, {"v": second})


@pytest.mark.parametrize("name", ["partition", "Header", "_PARTITION", "_deleted"])
def test_a_reserved_name_of_the_log_or_the_table_is_an_error(name: str):
    with pytest.raises(BadFormat, match=rf"transaction 0, column '{name}': .* Hint: declare the"):
        columns_of({name: 1})


def test_a_log_with_too_many_different_column_names_is_an_error():
    half = {f"c{number}": 1 for number in range(COLUMNS_MAX // 2)}
    assert len(columns_of(half).schema.names) == COLUMNS_MAX // 2
    nested = {"map": {f"f{number}": 1 for number in range(COLUMNS_MAX // 2)}}
    with pytest.raises(BadFormat, match=r"transaction 1, column 'map': expected at most 1000 col"):
        columns_of(half, nested)
    with pytest.raises(BadFormat, match=r"transaction 1000, column 'c1000': .* Hint: declare the"):
        columns_of(*({f"c{number}": 1} for number in range(COLUMNS_MAX + 1)))


class FoundLog:
    """A log of payloads in one partition."""

    def __init__(self, payloads: list[dict], table: FollowedDeltaTable) -> None:
        self._payloads, self._table = payloads, table
        self.rules = ChangeRules(["id"], delete_where=parse_condition("op = 'D'"))

    def state(self) -> LogState:
        return LogState({0: len(self._payloads) - 1}, {})

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> list[pa.Table]:
        start = starts[0][0] + 1
        rows = log_rows(*self._payloads[start : ends[0] + 1], first=start)
        parts = [rows.slice(offset, 2) for offset in range(0, rows.num_rows, 2)]
        return [compute_changes_inferring_columns(parts, self.rules, self._table.columns(), "json")]

    def wait(self) -> None:
        raise AssertionError("the log has an end")


def follow_in_batches(path: Path, payloads: list[dict], ends: list[int]) -> list[dict]:
    """Follow a log in batches; return the rows, by key."""
    for end in ends:
        table = FollowedDeltaTable(str(path), None, ["id"])
        log = FoundLog(payloads, table)
        name = TableMarks("f", KEY, {})
        Follower(log, [TableProgress(table, "t", name)], batch_transactions=100).run({0: end})
    rows = pa.table(DeltaTable(path).to_pyarrow_table())
    names = sorted(rows.schema.names)
    return [{name: _sorted(row[name]) for name in names} for row in rows.sort_by("id").to_pylist()]


def _sorted(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, dict) else value


PAYLOADS = st.fixed_dictionaries(
    {"id": st.integers(0, 2)},
    optional={
        "op": st.sampled_from("UD"),
        "a": st.none() | st.integers(0, 3),
        "b": st.text("xy", max_size=2),
        "c": st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), min_size=1),
        "d": st.lists(st.integers(0, 3), min_size=1, max_size=2),
    },
)


# The merge of deltalake replaces the struct in transaction 1 by null (rule 8 of delta_table.py).
STRUCT_GROWS = [{"id": 0}, {"id": 1, "c": {"y": 0}}, {"id": 0, "c": {"x": 0}}]


@settings(max_examples=15, deadline=None)
@example(STRUCT_GROWS, {1})
@given(st.lists(PAYLOADS, min_size=1, max_size=8), st.sets(st.integers(0, 7), max_size=4))
def test_the_table_does_not_depend_on_the_limits_of_batches(payloads: list[dict], cuts: set[int]):
    last = len(payloads) - 1
    with tempfile.TemporaryDirectory() as directory:
        whole = follow_in_batches(Path(directory, "whole"), payloads, [last])
        ends = sorted({min(each, last) for each in cuts} | {last})
        assert follow_in_batches(Path(directory, "parts"), payloads, ends) == whole
        schemas = [
            DeltaTable(Path(directory, each)).schema().to_arrow() for each in ("whole", "parts")
        ]
        assert sorted(schemas[0].names) == sorted(schemas[1].names)
    assert all(first <= second for first, second in pairwise(row["id"] for row in whole))


@pytest.mark.parametrize("wrapped", [lambda value: value, lambda value: [value]])
def test_a_commit_that_adds_struct_fields_keeps_the_values_and_the_marks(
    wrapped: Callable[[object], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    payloads = [{**each, "c": wrapped(each["c"])} if "c" in each else each for each in STRUCT_GROWS]
    path = tmp_path / "t"
    follow_in_batches(path, payloads, [1])
    with monkeypatch.context() as patch:
        patch.setattr(FollowedDeltaTable, "_merge", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            follow_in_batches(path, payloads, [2])
    marks = [commit.get("userMetadata") for commit in DeltaTable(path).history(2)]
    assert marks[0] == marks[1], "the commit of the fields has the marks of the table"
    assert [row["c"] for row in follow_in_batches(path, payloads, [2])] == [
        wrapped({"y": None, "x": 0}),
        wrapped({"y": 0, "x": None}),
    ]
    assert DeltaTable(path).version() == 3, "create, a batch, the fields, a batch"


def test_a_batch_rejected_after_its_new_fields_were_added_changes_no_rows_or_marks(tmp_path: Path):
    path = tmp_path / "t"
    payloads = [{**row, "v": 0} for row in STRUCT_GROWS] + [{"id": 1, "v": -1}]
    rows = follow_in_batches(path, payloads, [1])
    marks = DeltaTable(path).history(1)[0]["userMetadata"]
    DeltaTable(path).alter.add_constraint({"positive": "v >= 0"})
    for _ in range(2):  # another attempt writes no version
        with pytest.raises(BadRequest, match="Hint: drop the constraint"):
            follow_in_batches(path, payloads, [3])
        assert DeltaTable(path).version() == 3, "create, a batch, the constraint, the fields"
    assert DeltaTable(path).history(1)[0]["userMetadata"] == marks
    kept = DeltaTable(path).to_pyarrow_table().sort_by("id").to_pylist()
    assert [row["_transaction_id"] for row in kept] == [row["_transaction_id"] for row in rows]
    assert [row["c"] for row in kept] == [None, {"y": 0, "x": None}]
    DeltaTable(path).alter.drop_constraint("positive")
    assert follow_in_batches(path, payloads, [3]) == follow_in_batches(
        tmp_path / "whole", payloads, [3]
    )
    assert DeltaTable(path).version() == 5


def test_new_columns_are_committed_without_row_changes(tmp_path: Path):
    payloads = [{"id": 1, "op": "U"}, {"id": 2, "new": 7}, {"id": 2, "op": "D"}]
    assert follow_in_batches(tmp_path / "t", payloads, [0, 2]) == [
        {"_partition": 0, "_transaction_id": 0, "id": 1, "new": None, "op": "U"}
    ]


def test_a_transaction_without_a_key_is_an_error(tmp_path: Path):
    with pytest.raises(BadFormat, match=r"partition 0, transaction 0: .* key column 'id'"):
        follow_in_batches(tmp_path / "t", [{"other": 1}], [0])


def test_a_column_name_that_delta_does_not_permit_is_an_error(tmp_path: Path):
    with pytest.raises(BadConfig, match="column 'a b': Delta does not permit this name"):
        follow_in_batches(tmp_path / "t", [{"id": 1, "a b": 1}], [0])


def test_a_new_key_for_a_table_with_rows_is_an_error(tmp_path: Path):
    follow_in_batches(tmp_path / "t", [{"id": 1, "other": 1}], [0])
    table = FollowedDeltaTable(str(tmp_path / "t"), None, ["new"])
    log = FoundLog([{"id": 1, "other": 1}, {"id": 1, "new": 2}], table)
    log.rules = ChangeRules(["new"])
    progress = TableProgress(table, "t", TableMarks("f", KEY, {}))
    with pytest.raises(
        BadConfig, match="expected key column 'new' in the table, found the columns id, other"
    ):
        Follower(log, [progress], batch_transactions=9).run({0: 1})


@pytest.mark.parametrize("nest", [lambda value: [value], lambda value: {"x": value}])
def test_too_many_levels_are_an_error(tmp_path: Path, nest: Callable[[object], object]):
    value: object = 1
    for _ in range(400):
        value = nest(value)
    with pytest.raises(BadFormat, match=r"transaction 0, column 'v.* at most 32 levels of lists"):
        follow_in_batches(tmp_path / "t", [{"id": 1, "v": value}], [0])
