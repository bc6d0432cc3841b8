"""Computes the changes of rows in decoded transactions, and the last change of each key.

Tables of changes have the columns of the transactions, and `_deleted`:

    decoded transactions -> changes -> the last change of each key

Rules:
    1. A key consists of one or more columns with types that have exact equality: no floats. A null
       in a key is an error that names the transaction.
    2. A transaction is a delete if its header is one of `delete_headers`, or if the condition
       `delete_where` is true; null counts as false. All other transactions are upserts.
    3. If there is a changes function, this function determines the changes, including deletes:
       - The function receives parts of a batch, of any size. So the changes of a transaction must
         depend only on this transaction.
       - The function returns only changes of the transactions that it has received.
       - The order of its output is the order of the changes within a transaction.
       - Each result must have the same columns as the result for an empty table of transactions.
    4. Transactions of one partition are ordered by ID. There is no order between partitions, so a
       key with changes in two partitions is an error.
    5. `last_changes` is associative: applied to the last changes of several parts, it returns the
       last changes of all parts together. The only condition is that no transaction is split
       between two parts.
"""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.tables.table_marks import MarkMap, StoredRules
from waltz_core.user_functions import is_function_name, load_function

ArrowTable: TypeAlias = pa.Table

PART_BYTES: Final = 32 * 1024 * 1024
DELETED_COLUMN = "_deleted"
_DELETED_FIELD = pa.field(DELETED_COLUMN, pa.bool_(), nullable=False)
_POSITION_COLUMNS = ("partition", "transaction_id")

_KEY_TYPES: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date,
    pa.types.is_timestamp,
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_PLAIN_NAME = re.compile(r"[^\W\d]\w*")
_CONDITION_PATTERN = re.compile(
    rf"\s*(?:(?P<plain>{_PLAIN_NAME.pattern})|`(?P<quoted>[^`]+)`)\s*"
    r"(?:(?P<operator>=|!=|<>|<=|>=|<|>)\s*"
    r"(?:'(?P<text>(?:[^']|'')*)'|(?P<number>[+-]?\d+(?:\.\d+)?)|(?P<flag>(?i:true|false)))\s*)?"
)


class DeleteCondition(NamedTuple):
    """A comparison of a column with a literal, or, without an operator, a boolean column."""

    column: str
    operator: str = "="
    literal: str | Decimal | bool = True

    def __str__(self) -> str:
        """Return a canonical text, the same for all forms of the condition."""
        column, operator, literal = self
        name = column if _PLAIN_NAME.fullmatch(column) else f"`{column}`"
        if isinstance(literal, bool):
            literal_text = str(literal).lower()
        elif isinstance(literal, Decimal):
            literal_text = f"{literal.normalize():f}"
        else:
            escaped = literal.replace("'", "''")
            literal_text = f"'{escaped}'"
        return f"{name} {'!=' if operator == '<>' else operator} {literal_text}"


@dataclass(frozen=True, slots=True)
class ChangesFunction:
    """A function of the user that computes changes (rule 3); created by `changes_function`.

    Args:
        name: the name of the function, `module:function`.
        columns: the columns of the table. These are the columns that the function returns, without
            position and `_deleted`.
    """

    name: str
    columns: pa.Schema

    def __call__(self, rows: ArrowTable) -> ArrowTable:
        """Call the function; return changes with their positions and `_deleted`.

        Raises:
            BadRequest: the function has raised an error, or its result is not valid.
        """
        result = _call_function(self.name, rows)
        expected = {*self.columns.names, *_POSITION_COLUMNS, DELETED_COLUMN}
        if set(result.schema.names) != expected:
            raise _bad_result_error(
                self.name,
                rows,
                f"the columns {_names_text(expected)}",
                _names_text(result.schema.names),
            )
        fields = [
            *self.columns,
            *(rows.schema.field(name) for name in _POSITION_COLUMNS),
            _DELETED_FIELD,
        ]
        columns = []
        for part in fields:
            column = result[part.name]
            if column.type not in (part.type, pa.null()):
                expected_type = f"type {part.type} of column {part.name!r}"
                raise _bad_result_error(self.name, rows, expected_type, str(column.type))
            columns.append(column.cast(part.type))
        _check_transactions(self.name, result, rows)
        return pa.table(columns, schema=pa.schema(fields))


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """The rules by which transactions become changes of rows.

    Args:
        key: the key columns; none for an append-only table.
        delete_headers: the headers of transactions that are deletes.
        delete_where: the condition for other deletes.
        function: computes the changes of transactions (rule 3).

    Raises:
        BadConfig: the key contains a column twice, or a function is combined with rules for
            deletes.
    """

    key: Sequence[str]
    delete_headers: Sequence[int] = ()
    delete_where: DeleteCondition | None = None
    function: ChangesFunction | None = None

    def __post_init__(self) -> None:
        if len(set(self.key)) < len(self.key):
            raise BadConfig(f"argument key: expected column names, each once, found {self.key!r}")
        if self.function is not None and (self.delete_headers or self.delete_where):
            raise BadConfig(
                f"expected either the changes function {self.function.name} or rules for deletes, "
                f"found both. Hint: let the function return a boolean column {DELETED_COLUMN!r}."
            )

    def stored_rules(self, headers: Iterable[int] | None) -> StoredRules:
        """Return the rules as a table stores them, with the headers of the table's transactions."""
        return StoredRules(
            tuple(sorted(self.key)),
            None if headers is None else tuple(sorted(set(headers))),
            tuple(sorted(set(self.delete_headers))),
            None if self.delete_where is None else str(self.delete_where),
            None if self.function is None else self.function.name,
        )


def parse_condition(text: str) -> DeleteCondition:
    """Parse a condition such as `op = 'D'`.

    Raises:
        BadConfig: the text is neither a column nor one comparison of a column with a literal.
    """
    match = _CONDITION_PATTERN.fullmatch(text)
    if match is None:
        raise BadConfig(
            "condition for deletes: expected a column, or one comparison of a column with a "
            f"literal, such as op = 'D', amount < 0 or is_closed = true; found {text!r}. Hint: for "
            "another condition use a boolean column, or the changes function of a followed table."
        )
    column = match["plain"] or match["quoted"]
    if match["operator"] is None:
        return DeleteCondition(column)
    literal: str | Decimal | bool
    if match["text"] is not None:
        literal = match["text"].replace("''", "'")
    elif match["number"] is not None:
        literal = Decimal(match["number"])
    else:
        literal = match["flag"].lower() == "true"
    return DeleteCondition(column, match["operator"], literal)


def check_rules(rules: ChangeRules, schema: pa.Schema) -> None:
    """Reject rules that do not fit the schema of the transactions.

    Raises:
        BadConfig: a column is missing, a key column has a type that is not permitted, or the
            literal of `delete_where` does not fit its column's type.
    """
    used_columns = [*_POSITION_COLUMNS, *(["header"] if rules.delete_headers else [])]
    used_columns += [] if rules.delete_where is None else [rules.delete_where.column]
    if rules.function is None:
        _check_key_types(rules.key, schema)
    for name in used_columns:
        _find_field(schema, name)
    if rules.delete_where is not None:
        _literal_scalar(rules.delete_where, _find_field(schema, rules.delete_where.column).type)


def _find_field(schema: pa.Schema, name: str) -> pa.Field:
    if schema.names.count(name) != 1:
        columns_text = first_names_text(schema.names, 20)
        raise BadConfig(
            f"expected exactly one column {name!r}, found the columns {columns_text}. Hint: "
            "declare the "
            "column, or correct its name in the key or in the condition for deletes."
        )
    return schema.field(name)


def _check_key_types(key: Sequence[str], schema: pa.Schema) -> None:
    for name in key:
        kind = _find_field(schema, name).type
        if not any(is_type(kind) for is_type in _KEY_TYPES):
            raise BadConfig(
                f"key column {name!r}: expected a boolean, an integer, a decimal, text, "
                f"binary, a date or a timestamp, found {kind}. Hint: use another column as "
                "key, or declare this column with another type."
            )


def _literal_scalar(condition: DeleteCondition, kind: pa.DataType) -> pa.Scalar:
    """Convert the literal of a condition to the type of its column; raises BadConfig."""
    literal: Any = condition.literal
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    try:
        if isinstance(literal, bool) and pa.types.is_boolean(kind):
            return pa.scalar(literal, kind)
        if isinstance(literal, Decimal) and pa.types.is_floating(kind):
            return pa.scalar(float(literal), kind)
        if isinstance(literal, Decimal) and is_number:
            return pa.scalar(literal).cast(kind)
        is_time = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
        if isinstance(literal, str) and (is_text or is_time):
            return pa.scalar(literal).cast(kind)
        reason = "these types cannot be compared"
    except (pa.ArrowException, OverflowError) as error:
        reason = str(error)
    literal_text = f"'{literal}'" if isinstance(literal, str) else literal
    raise BadConfig(
        f"condition for deletes: expected a literal of type {kind} for column "
        f"{condition.column!r}, "
        f"found {literal_text} ({reason})"
    )


# ---------------------------------------------------------------------------------------------
# Transactions to changes


def transactions_after(rows: ArrowTable, marks: MarkMap) -> ArrowTable:
    """Return the transactions after the marks of a table."""
    partitions, ids = (rows[name].to_numpy() for name in _POSITION_COLUMNS)
    is_new = np.ones(rows.num_rows, dtype=np.bool_)
    for partition, mark in marks.items():
        is_new &= (partitions != partition) | (ids > mark)
    return rows if is_new.all() else rows.filter(pa.array(is_new))


def select_transactions(
    batch: pa.RecordBatch, after: int, headers: Sequence[int]
) -> pa.RecordBatch:
    """Return the transactions after a mark that have one of the headers; all if none is given."""
    is_selected = batch["transaction_id"].to_numpy() > after
    if headers:
        is_selected &= np.isin(batch["header"].to_numpy(), headers)
    return batch if is_selected.all() else batch.filter(pa.array(is_selected))


def compute_changes(rows: ArrowTable, rules: ChangeRules) -> ArrowTable:
    """Return the changes of decoded transactions; `check_rules` must have accepted the rules.

    Raises:
        BadFormat: a key column is null (rule 1).
        BadRequest: the changes function has raised an error, or its result is not valid (rule 3).
    """
    if rules.function is not None:
        changes = rules.function(rows) if rows.num_rows else empty_changes(rows.schema, rules)
    else:
        changes = rows.append_column(_DELETED_FIELD, pa.array(delete_mask(rows, rules)))
    _check_key_nulls(changes, rules.key)
    return changes


def delete_mask(rows: ArrowTable, rules: ChangeRules) -> npt.NDArray[np.bool_]:
    """Return a mask of the transactions that are deletes (rule 2).

    The rules must have no changes function, and `check_rules` must have accepted them.
    """
    mask: npt.NDArray[np.bool_] = np.zeros(rows.num_rows, dtype=np.bool_)
    if rules.delete_headers:
        mask |= np.isin(rows["header"].to_numpy(), list(rules.delete_headers))
    if rules.delete_where is not None:
        condition = rules.delete_where
        column = rows[condition.column]
        is_match = _COMPARISONS[condition.operator](column, _literal_scalar(condition, column.type))
        mask |= is_match.fill_null(False).to_numpy()  # noqa: FBT003 - Arrow's parameter
    return mask


def _check_key_nulls(changes: ArrowTable, key: Sequence[str]) -> None:
    for name in key:
        if changes[name].null_count:
            row = changes[name].is_null().index(pa.scalar(True)).as_py()  # noqa: FBT003
            raise BadFormat(
                f"{_row_text(changes, row)}: expected a value in key column {name!r}, found "
                "null. Hint: correct the key, or read only transactions of this table with a "
                "filter by header."
            )


def _row_text(changes: ArrowTable, row: int) -> str:
    partition, transaction = (changes[name][row].as_py() for name in _POSITION_COLUMNS)
    return f"partition {partition}, transaction {transaction}"


def changes_function(name: str, schema: pa.Schema, key: Sequence[str]) -> ChangesFunction:
    """Load a changes function, and determine the columns that it returns.

    Args:
        name: the name of the function, `module:function`.
        schema: the columns of the transactions for the function. It is called once without
            transactions.
        key: the key columns.

    Raises:
        BadConfig: the function does not exist, or a key column has a type that is not permitted.
        BadRequest: the function has raised an error, or its result is not valid.
    """
    if not is_function_name(name):
        raise BadConfig(
            "changes function: expected 'module:function', such as 'shop.accounts:changes', found "
            f"{name!r}"
        )
    result_schema = _call_function(name, schema.empty_table()).schema
    columns = pa.schema(
        [part for part in result_schema if part.name not in (*_POSITION_COLUMNS, DELETED_COLUMN)]
    )
    if not columns.names:
        raise BadRequest(
            f"result of the changes function {name} for an input without transactions: expected "
            f"columns of the table, found {_names_text(result_schema.names)}. Hint: return a table "
            "with all columns even if there are no transactions, for example "
            "pyarrow.Table.from_pylist(rows, schema=...)."
        )
    try:
        _check_key_types(key, columns)
    except BadConfig as error:
        raise BadConfig(f"result of the changes function {name}: {error}") from None
    return ChangesFunction(name, columns)


def _call_function(name: str, rows: ArrowTable) -> ArrowTable:
    """Call a changes function; return its result, after checks of its reserved columns."""
    function = load_function(
        name,
        "changes function",
        "Hint: it must be a function in a module that each process can import (Spark: --py-files).",
    )
    try:
        result = function(rows)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise BadRequest(
            f"changes function {name}{_rows_text(rows)}: expected a table, but the function "
            f"raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        ) from error
    if not isinstance(result, pa.Table):
        raise _bad_result_error(name, rows, "a pyarrow.Table", type(result).__name__)
    names = result.schema.names
    if len(set(names)) < len(names):
        raise _bad_result_error(name, rows, "different names of columns", str(names))
    for position_column in _POSITION_COLUMNS:
        kind = rows.schema.field(position_column).type
        if position_column not in names or result[position_column].type != kind:
            found_text = (
                result[position_column].type
                if position_column in names
                else f"the columns {_names_text(names)}"
            )
            raise _bad_result_error(
                name, rows, f"a column {position_column!r} of type {kind}", str(found_text)
            )
    if DELETED_COLUMN not in names:
        return result.append_column(_DELETED_FIELD, pa.array(np.zeros(len(result), dtype=np.bool_)))
    if result[DELETED_COLUMN].type != pa.bool_() or result[DELETED_COLUMN].null_count:
        kind = result[DELETED_COLUMN].type
        found_text = "a null" if kind == pa.bool_() else str(kind)
        raise _bad_result_error(
            name, rows, f"true or false in column {DELETED_COLUMN!r}", found_text
        )
    return result


def _check_transactions(name: str, result: ArrowTable, rows: ArrowTable) -> None:
    """Check that all changes belong to transactions that the function has received."""
    if any(result[position_column].null_count for position_column in _POSITION_COLUMNS):
        raise _bad_result_error(
            name, rows, f"{' and '.join(_POSITION_COLUMNS)} in each row", "a null"
        )
    unknown_rows = result.select(_POSITION_COLUMNS).join(
        rows.select(_POSITION_COLUMNS), list(_POSITION_COLUMNS), join_type="left anti"
    )
    if unknown_rows.num_rows:
        expected = "changes only for transactions that the function was given"
        raise _bad_result_error(name, rows, expected, _row_text(unknown_rows, 0))


def _bad_result_error(name: str, rows: ArrowTable, expected: str, found_text: str) -> BadRequest:
    return BadRequest(
        f"result of the changes function {name}{_rows_text(rows)}: expected {expected}, "
        f"found {found_text}"
    )


def _rows_text(rows: ArrowTable) -> str:
    return f" (first transaction: {_row_text(rows, 0)})" if rows.num_rows else ""


def _names_text(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# ---------------------------------------------------------------------------------------------
# Changes to the last change of each key


def last_changes(changes: ArrowTable, key: Sequence[str]) -> ArrowTable:
    """Return the last change of each key, ordered by transaction ID (rules 4 and 5).

    Without a key, all changes are returned, in their order.

    Raises:
        BadRequest: a key has changes in two partitions.
    """
    if not key:
        return changes
    # Arrow's sort is stable, so changes of one transaction keep their order.
    ordered = changes.take(pc.sort_indices(changes, sort_keys=[("transaction_id", "ascending")]))
    # Rename the key columns, because their names may collide with those of this function.
    keys = {f"key{key_index}": ordered[name] for key_index, name in enumerate(key)}
    row_number = pa.array(np.arange(ordered.num_rows))
    positions = pa.table({**keys, "row_number": row_number, "partition": ordered["partition"]})
    groups = positions.group_by(list(keys), use_threads=False).aggregate(
        [("row_number", "max"), ("partition", "min"), ("partition", "max")]
    )
    conflicting_groups = groups.filter(
        pc.not_equal(groups["partition_min"], groups["partition_max"])
    )
    if conflicting_groups.num_rows:
        raise _two_partitions_error(ordered, conflicting_groups.slice(0, 1), key)
    return ordered.take(groups["row_number_max"].sort())


def reduce_batches(
    batches: Iterable[pa.RecordBatch],
    rules: ChangeRules,
    schema: pa.Schema,
    after: MarkMap | None = None,
) -> ArrowTable:
    """Return the last change of each key in batches of decoded transactions.

    The function needs memory for a part of `PART_BYTES`, and for the last change of each key (rule
    5).

    Args:
        batches: the transactions in a part of the log.
        rules: how transactions become changes; `check_rules` must have accepted the rules.
        schema: the schema of the batches.
        after: the marks of a table; transactions up to these marks are dropped.

    Raises:
        The errors of `compute_changes` and `last_changes`.
    """
    changes = empty_changes(schema, rules)
    for part in combine_batches(batches):
        changes = add_changes(
            changes, part if after is None else transactions_after(part, after), rules
        )
    return changes


def combine_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[ArrowTable]:
    """Combine batches into tables of about `PART_BYTES`, and yield the tables."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= PART_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def empty_changes(schema: pa.Schema, rules: ChangeRules) -> ArrowTable:
    """Return an empty table of changes for transactions with a schema."""
    if rules.function is not None:
        schema = pa.schema([*rules.function.columns, *map(schema.field, _POSITION_COLUMNS)])
    return schema.append(_DELETED_FIELD).empty_table()


def add_changes(last: ArrowTable, rows: ArrowTable, rules: ChangeRules) -> ArrowTable:
    """Add the changes of more rows to `last`, which has the last change of each key.

    Raises the same errors as `reduce_batches`.
    """
    changes = last_changes(compute_changes(rows, rules), rules.key)
    if not last.num_rows:
        return changes
    combined = pa.concat_tables([last, changes], promote_options="default")
    return last_changes(combined, rules.key)


def _two_partitions_error(changes: ArrowTable, group: ArrowTable, key: Sequence[str]) -> BadRequest:
    values = {name: group[f"key{key_index}"][0] for key_index, name in enumerate(key)}
    has_key = np.ones(changes.num_rows, dtype=np.bool_)
    for name, value in values.items():
        has_key &= pc.equal(changes[name], value).to_numpy()
    changes_of_key = changes.filter(pa.array(has_key))
    positions = [
        _row_text(
            changes_of_key, changes_of_key["partition"].index(group[f"partition_{side}"][0]).as_py()
        )
        for side in ("min", "max")
    ]
    key_text = ", ".join(f"{name} = {value.as_py()!r}" for name, value in values.items())
    return BadRequest(
        f"the key {key_text} has changes in two partitions, {' and '.join(positions)}, and "
        "partitions have no common order. Hint: use a key that includes the column that "
        "chooses the partition."
    )
