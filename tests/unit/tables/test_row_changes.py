"""Changes of rows: deletes, keys, changes functions, and the last change of each key."""

import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.tables import row_changes
from waltz_core.tables.row_changes import (
    DELETED_COLUMN,
    ChangeRules,
    ChangesFunction,
    DeleteCondition,
    changes_function,
    check_rules,
    compute_changes,
    last_changes,
    parse_condition,
    reduce_batches,
    transactions_after,
)
from waltz_core.tables.table_marks import StoredRules


def log(*rows: tuple, partition: int = 0) -> pa.Table:
    """Return decoded transactions, each given as header, id, op and value."""
    count = len(rows)
    headers, ids, ops, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.table(
        {
            "partition": pa.array([partition] * count, pa.int32()),
            "transaction_id": pa.array(range(count), pa.int64()),
            "header": pa.array(headers, pa.int32()),
            "id": pa.array(ids, pa.int64()),
            "op": pa.array(ops, pa.string()),
            "value": pa.array(values, pa.float64()),
        }
    )


def deletes_of(rows: pa.Table, **rules: object) -> list[bool]:
    checked = ChangeRules(["id"], **rules)
    check_rules(checked, rows.schema)
    return compute_changes(rows, checked)[DELETED_COLUMN].to_pylist()


def test_a_transaction_is_a_delete_by_its_header_or_by_the_condition():
    rows = log((1, 1, "I", 0.5), (2, 1, "U", 0.5), (1, 1, "D", None), (1, 1, None, 0.5))
    assert deletes_of(rows) == [False] * 4
    assert deletes_of(rows, delete_headers=[2]) == [False, True, False, False]
    both = deletes_of(rows, delete_headers=[2], delete_where=parse_condition("op = 'D'"))
    assert both == [False, True, True, False]
    assert deletes_of(rows, delete_where=parse_condition("value < 1")) == [True, True, False, True]
    assert deletes_of(rows, delete_where=parse_condition("header >= 2")) == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("op = 'D'", DeleteCondition("op", "=", "D")),
        (" op<>'it''s' ", DeleteCondition("op", "<>", "it's")),
        ("`the op` != ''", DeleteCondition("the op", "!=", "")),
        ("amount <= -1.50", DeleteCondition("amount", "<=", Decimal("-1.50"))),
        ("closed = TRUE", DeleteCondition("closed", "=", True)),
        ("closed", DeleteCondition("closed")),
    ],
)
def test_a_condition_compares_a_column_with_a_literal(text, found):
    assert parse_condition(text) == found
    assert str(parse_condition(str(found))) == str(found)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("closed", "closed = true"),
        (" `closed`=TRUE", "closed = true"),
        ("op<>'it''s'", "op != 'it''s'"),
        ("`the op` > +1.50", "`the op` > 1.5"),
        ("amount<100", "amount < 100"),
    ],
)
def test_equivalent_rules_are_stored_in_the_same_form(text, shown):
    rules = ChangeRules(["b", "a"], [9, 1, 9], parse_condition(text))
    assert rules.stored_rules([2, 1, 9, 1]) == StoredRules(("a", "b"), (1, 2, 9), (1, 9), shown)
    assert rules.stored_rules(None).headers is None


@pytest.mark.parametrize(
    "text", ["", "op =", "'D' = op", "a = b", "a = 1 AND b = 2", "NOT a", "a == 1", "a = 1e3", "1"]
)
def test_conditions_other_than_column_operator_literal_are_rejected(text):
    with pytest.raises(BadConfig, match=r"condition for deletes: expected .* Hint: "):
        parse_condition(text)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.bool_(), True, "c"),
        (pa.bool_(), True, "c = true"),
        (pa.int8(), 7, "c = 7"),
        (pa.decimal128(5, 2), Decimal("1.00"), "c = 1"),
        (pa.float32(), 0.5, "c = 0.5"),
        (pa.date32(), date(2020, 1, 2), "c = '2020-01-02'"),
        (pa.timestamp("us", "UTC"), datetime(2020, 1, 2, tzinfo=UTC), "c = '2020-01-02T00:00:00Z'"),
        (pa.large_string(), "D", "c = 'D'"),
    ],
)
def test_a_literal_has_the_type_of_its_column(kind, value, text):
    rows = log((0, 1, "", 0.0), (0, 2, "", 0.0)).append_column("c", pa.array([value, None], kind))
    assert deletes_of(rows, delete_where=parse_condition(text)) == [True, False]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.string(), "c"),
        (pa.string(), "c = 1"),
        (pa.int8(), "c = '1'"),
        (pa.int8(), "c = 300"),
        (pa.int64(), "c = 1.5"),
        (pa.int64(), "c = 100000000000000000000"),
        (pa.bool_(), "c = 1"),
        (pa.date32(), "c = 'today'"),
        (pa.list_(pa.int64()), "c = 1"),
    ],
)
def test_a_literal_of_another_type_is_rejected(kind, text):
    schema = log().schema.append(pa.field("c", kind))
    with pytest.raises(BadConfig, match=r"for deletes: expected a literal of type .* column 'c'"):
        check_rules(ChangeRules(["id"], delete_where=parse_condition(text)), schema)


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.int64()), pa.time32("s")])
def test_a_key_column_requires_a_type_with_equality(kind):
    schema = log().schema.append(pa.field("c", kind))
    with pytest.raises(
        BadConfig, match=f"key column 'c': expected .* found {kind}".replace("[", r"\[")
    ):
        check_rules(ChangeRules(["id", "c"]), schema)


def test_rules_must_name_existing_columns():
    schema = log().schema
    for rules in (
        ChangeRules(["no"]),
        ChangeRules(["id"], delete_where=DeleteCondition("no")),
    ):
        with pytest.raises(
            BadConfig, match=r"expected exactly one column 'no', found .* Hint: declare the column"
        ):
            check_rules(rules, schema)
    with pytest.raises(BadConfig, match="expected column names, each once"):
        ChangeRules(["id", "id"])
    function = ChangesFunction("shop:changes", schema)
    with pytest.raises(BadConfig, match="expected either the changes function shop:changes or"):
        ChangeRules(["id"], delete_headers=[1], function=function)


@pytest.mark.parametrize("op", ["U", "D"])
def test_the_error_for_a_null_in_a_key_names_the_transaction(op):
    rows = log((0, 1, "U", 0.0), (0, None, op, 0.0), partition=3)
    rules = ChangeRules(["id"], delete_where=parse_condition("op = 'D'"))
    with pytest.raises(BadFormat, match=r"partition 3, transaction 1: .* key column 'id'"):
        compute_changes(rows, rules)


def test_the_last_transaction_determines_the_change_of_a_key():
    rows = log((0, 1, "U", 1.0), (0, 2, "U", 2.0), (0, 1, "D", None), (0, 3, "U", 3.0))
    changes = compute_changes(rows, ChangeRules(["id"], delete_where=parse_condition("op = 'D'")))
    backwards = changes.take([3, 2, 1, 0])
    for order in (changes, backwards):
        last = last_changes(order, ["id"])
        assert last["transaction_id"].to_pylist() == [1, 2, 3]
        assert last["id"].to_pylist() == [2, 1, 3]
        assert last[DELETED_COLUMN].to_pylist() == [False, True, False]


def test_a_column_of_a_key_may_have_any_name():
    rows = log((0, 1, "", 0.0), (0, 2, "", 0.0), (0, 1, "", 0.0))
    names = ["partition", "row_number", "row_number_max", "key1"]
    key = pa.table(dict.fromkeys(names[1:], rows["id"]))
    for name in key.schema.names:
        rows = rows.append_column(name, key[name])
    last = last_changes(compute_changes(rows, ChangeRules(names)), names)
    assert last["transaction_id"].to_pylist() == [1, 2]


def test_the_error_for_a_key_in_two_partitions_names_both_transactions():
    rows = pa.concat_tables(
        [log((0, 1, "", 0.0), (0, 7, "", 0.0)), log((0, 7, "", 0.0), partition=2)]
    )
    found = (
        "the key id = 7 has changes in two partitions, partition 0, transaction 1 and partition 2"
    )
    with pytest.raises(BadRequest, match=found):
        last_changes(compute_changes(rows, ChangeRules(["id"])), ["id"])


def test_changes_without_an_effect_on_the_table_are_dropped():
    rows = pa.concat_tables(
        [log(*[(0, 1, "", 0.0)] * 3, partition=partition) for partition in range(3)]
    )
    left = transactions_after(rows, {0: 1, 1: 2, 9: 5})
    found = zip(left["partition"].to_pylist(), left["transaction_id"].to_pylist(), strict=True)
    assert list(found) == [(0, 2), (2, 0), (2, 1), (2, 2)]


def test_reduce_batches_works_in_parts_and_skips_rows_up_to_the_table_marks(monkeypatch):
    rules = ChangeRules(["id"], delete_where=parse_condition("op = 'D'"))
    rows = log(*((1, number % 5, "UUD"[number % 3], 0.5) for number in range(40)))
    whole = last_changes(compute_changes(rows, rules), ["id"])
    for part_bytes in (1, 500, 1 << 20):
        monkeypatch.setattr(row_changes, "PART_BYTES", part_bytes)
        assert reduce_batches(rows.to_batches(max_chunksize=3), rules, rows.schema) == whole
    after = reduce_batches(rows.to_batches(max_chunksize=3), rules, rows.schema, {0: 37})
    assert after["transaction_id"].to_pylist() == [38, 39]
    assert reduce_batches([], rules, rows.schema).schema == whole.schema


Function = Callable[[pa.Table], object]


@pytest.fixture
def rules_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Function], ChangeRules]:
    """Return rules with a changes function, which is added to this module."""

    def rules(function: Function) -> ChangeRules:
        monkeypatch.setattr(sys.modules[__name__], "changed", function, raising=False)
        return ChangeRules(["id"], function=changes_function(NAME, log().schema, ["id"]))

    return rules


NAME = f"{__name__}:changed"


def test_the_changes_of_a_transaction_are_applied_in_the_order_that_the_function_returns(
    rules_with,
):
    def function(rows: pa.Table) -> pa.Table:
        """Return a delete of the row and an insert, for each transaction."""
        duplicated = pa.concat_tables([rows, rows]).select(["id", "partition", "transaction_id"])
        flags = [True] * rows.num_rows + [False] * rows.num_rows
        return duplicated.append_column(DELETED_COLUMN, pa.array(flags, pa.bool_()))

    rules = rules_with(function)
    assert rules.function.columns.names == ["id"]
    changes = compute_changes(log((0, 1, "", 0.0), (0, 2, "", 0.0)), rules)
    assert changes.num_rows == 4
    assert last_changes(changes, ["id"])[DELETED_COLUMN].to_pylist() == [False, False]
    assert reduce_batches([], rules, log().schema).schema.names == changes.schema.names
    assert compute_changes(log(), rules) == reduce_batches([], rules, log().schema)


def _with(rows: pa.Table, name: str, values: list, kind: pa.DataType) -> pa.Table:
    """Return rows with an added or replaced column; `values` has the value of one row."""
    column = pa.array(values * rows.num_rows, kind)
    return rows.drop_columns([name] if name in rows.schema.names else []).append_column(
        name, column
    )


PREFIX = f"result of the changes function {NAME}: expected "
FILE = "test_row_changes.py"
ROWS_PREFIX = (
    rf"result of the changes function {NAME} \(first transaction: partition 0, transaction 0\)"
)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows.to_pylist(), f"{PREFIX}a pyarrow.Table, found list"),
        (
            lambda rows: rows.drop_columns(["partition"]),
            f"{PREFIX}a column 'partition' of type int32, found the columns header, id, op,",
        ),
        (
            lambda rows: _with(rows, "transaction_id", [0], pa.int32()),
            f"{PREFIX}a column 'transaction_id' of type int64, found int32",
        ),
        (
            lambda rows: rows.append_column("id", rows["id"]),
            f"{PREFIX}different names of columns, found",
        ),
        (
            lambda rows: _with(rows, DELETED_COLUMN, [1], pa.int8()),
            f"{PREFIX}true or false in column '_deleted', found int8",
        ),
        (
            lambda rows: rows.select(["partition", "transaction_id"]),
            f"the changes function {NAME} for an input without transactions: expected columns of",
        ),
        (
            lambda rows: _with(rows, "transaction_id", [1], pa.int64()),
            f"{ROWS_PREFIX}: expected changes only for .* found partition 0, transaction 1",
        ),
        (
            lambda rows: _with(rows, "transaction_id", [None], pa.int64()),
            f"{ROWS_PREFIX}: expected partition and transaction_id in each row, found a null",
        ),
        (
            lambda rows: _with(rows, DELETED_COLUMN, [None], pa.bool_()),
            f"{ROWS_PREFIX}: expected true or false in column '_deleted'",
        ),
        (
            lambda rows: rows if not rows.num_rows else rows.drop_columns(["op"]),
            f"{ROWS_PREFIX}: expected the columns _deleted, .*, op, .*, found",
        ),
        (
            lambda rows: rows if not rows.num_rows else _with(rows, "op", [5], pa.int64()),
            f"{ROWS_PREFIX}: expected type string of column 'op', found int64",
        ),
        (
            lambda rows: rows.slice(0, 0 if not rows.num_rows else 1 // 0),
            rf"transaction 0\): .* the function raised ZeroDivisionError: .*{FILE}, line \d+\)",
        ),
    ],
)
def test_an_error_of_a_changes_function_names_it_and_the_transactions(
    rules_with, function, message
):
    with pytest.raises(BadRequest, match=message):
        compute_changes(log((0, 1, "", 0.0)), rules_with(function))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows.drop_columns(["id"]), f"function {NAME}: expected exactly one column"),
        (lambda rows: _with(rows, "id", [0.5], pa.float64()), "key column 'id': .* found double"),
    ],
)
def test_a_changes_function_must_return_the_key(rules_with, function, message):
    with pytest.raises(BadConfig, match=message):
        rules_with(function)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("changed", "expected 'module:function', such as 'shop.accounts:changes', found 'changed'"),
        ("none_such:f", "changes function: 'none_such:f' cannot be imported .* Hint: it must be"),
        (f"{__name__}:NAME", "expected '.*:NAME' to be a function, found"),
    ],
)
def test_a_changes_function_must_exist(name, message):
    with pytest.raises(BadConfig, match=message):
        changes_function(name, log().schema, ["id"])


def test_a_column_without_values_has_the_type_of_the_table(rules_with):
    rules = rules_with(lambda rows: _with(rows, "op", [None], pa.null()) if len(rows) else rows)
    assert compute_changes(log((0, 1, "", 0.0)), rules)["op"].type == pa.string()


def test_a_null_key_of_a_changes_function_is_an_error(rules_with):
    rules = rules_with(lambda rows: _with(rows, "id", [None], pa.int64()))
    with pytest.raises(BadFormat, match=r"partition 0, transaction 0: .* key column 'id'"):
        compute_changes(log((0, 1, "", 0.0)), rules)
