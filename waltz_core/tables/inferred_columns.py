"""Infers the columns of a table from payloads, if the columns are not declared.

Rules:
    1. The type of a column is the type of its first value: boolean, 64-bit integer, double, text,
       binary, list or struct. The type is never derived from several values.
    2. A later value of another type is an error, even an integer in a column of doubles. If types
       were merged, the result would depend on the sizes of batches.
    3. Null has no type, and an empty list or struct as the first value is an error.
    4. New columns are appended to the known columns, and new fields of structs to the known fields.
    5. A table has at most `COLUMNS_MAX` columns and fields of structs, so that payloads with
       arbitrary keys cannot create thousands of columns.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.errors import BadFormat
from waltz_core.records.unpacking import Unpacker
from waltz_core.tables.row_changes import DELETED_COLUMN, ArrowTable

ArrowType: TypeAlias = pa.DataType

# The maximum number of nested lists, maps and structs. deltalake can commit 60 levels, but cannot
# read such a commit again.
LEVELS_MAX = 32
COLUMNS_MAX = 1_000

# The columns of the log in the rows of a follower. These names and those of the position columns
# are reserved in upper case and in lower case, because Spark ignores case.
LOG_COLUMNS = ("partition", "transaction_id", "header")
_RESERVED_NAMES = {*LOG_COLUMNS, "_partition", "_transaction_id", DELETED_COLUMN}

_ARROW_TYPES: dict[type, ArrowType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}
_TYPE_NAMES = {
    pa.bool_(): "a boolean",
    pa.int64(): "an integer",
    pa.float64(): "a double",
    pa.string(): "text",
    pa.binary(): "binary",
}


class _Mismatch(Exception):
    """A value that does not fit: the path of its column, the expected and the actual value."""


def with_inferred_columns(
    rows: ArrowTable, known_columns: ArrowSchema, data_format: str
) -> ArrowTable:
    """Return rows with the columns inferred from their payloads, in place of `data`.

    Args:
        rows: transactions with the columns `LOG_COLUMNS` and `data`.
        known_columns: the columns that the table has so far; the result has all of them.
        data_format: `msgpack` or `json`.

    Raises:
        BadFormat: a value does not fit; the error names the transaction and the column.
    """
    data = rows["data"].combine_chunks()
    partitions, ids = rows["partition"], rows["transaction_id"]

    def position_text(row: int) -> str:
        return f"partition {partitions[row]}, transaction {ids[row]}"

    types: dict[str, ArrowType] = {part.name: part.type for part in known_columns}
    for row, payload in enumerate(Unpacker([], data_format).decode_maps(data, position_text)):
        try:
            _add_payload(types, payload)
        except _Mismatch as error:
            path, expected, found_text = error.args
            raise BadFormat(
                f"{position_text(row)}, column {path!r}: expected {expected}, found {found_text}. "
                "Hint: "
                "declare the columns of the table."
            ) from None
    fields = [pa.field(name, kind) for name, kind in types.items()]
    columns = Unpacker(fields, data_format, is_case_sensitive=True).columns(data, position_text)
    log = rows.select(LOG_COLUMNS)
    return pa.table([*log.columns, *columns], schema=pa.schema([*log.schema, *fields]))


def _add_payload(types: dict[str, ArrowType], payload: Mapping[Any, Any]) -> None:
    """Add the columns of a payload to `types`."""
    for name, value in payload.items():
        if value is None:
            continue
        known_type = types.get(name)
        if known_type is not None and _ARROW_TYPES.get(type(value)) == known_type:
            continue  # the case of nearly all values
        if not isinstance(name, str) or name.lower() in _RESERVED_NAMES:
            raise _Mismatch(
                name,
                f"a text other than {', '.join(sorted(_RESERVED_NAMES))} as column name",
                repr(name),
            )
        widened = _widen_type(known_type, value, name)
        if widened == known_type:
            continue
        types[name] = widened
        if field_count(types.values()) > COLUMNS_MAX:
            raise _Mismatch(name[:200], f"at most {COLUMNS_MAX} columns and fields of maps", "more")


def field_count(types: Iterable[ArrowType]) -> int:
    """Return the number of columns with these types, including the fields in them (rule 5)."""
    return sum(
        1 + field_count(kind.field(child_index).type for child_index in range(kind.num_fields))
        for kind in types
    )


def _widen_type(
    known_type: ArrowType | None, value: object, path: str, level: int = 1
) -> ArrowType:
    """Return the type of a column after one more value (rules 1 to 3)."""
    if level > LEVELS_MAX:
        raise _Mismatch(path[:200], f"at most {LEVELS_MAX} levels of lists and maps", "more")
    if isinstance(value, list):
        return _widen_list(known_type, value, path, level)
    if isinstance(value, dict):
        return _widen_struct(known_type, value, path, level)
    arrow_type = _ARROW_TYPES.get(type(value))
    if (
        known_type is not None
        and known_type not in _TYPE_NAMES
        and not pa.types.is_nested(known_type)
    ):
        return known_type  # the column was declared: the conversion checks the value
    if arrow_type is None or known_type not in (None, arrow_type):
        expected = (
            "a boolean, a number, text, binary, a list or a map" if known_type is None else ""
        )
        type_name = type(value).__name__ if arrow_type is None else _TYPE_NAMES[arrow_type]
        raise _Mismatch(path, expected or _type_text(known_type), type_name)
    return arrow_type


def _widen_list(known_type: ArrowType | None, value: list[Any], path: str, level: int) -> ArrowType:
    if known_type is not None and not pa.types.is_list(known_type):
        raise _Mismatch(path, _type_text(known_type), "a list")
    item = None if known_type is None else known_type.value_type
    for element in value:
        if element is not None:
            item = _widen_type(item, element, f"{path}[]", level + 1)
    if item is None:
        raise _Mismatch(path, "a value", "a list without elements, whose type is unknown")
    return pa.list_(item)


def _widen_struct(
    known_type: ArrowType | None, value: dict[Any, Any], path: str, level: int
) -> ArrowType:
    if known_type is not None and not pa.types.is_struct(known_type):
        raise _Mismatch(path, _type_text(known_type), "a map")
    fields = {} if known_type is None else {part.name: part.type for part in known_type}
    for name, field_value in value.items():
        if not isinstance(name, str):
            raise _Mismatch(path, "text as key of a map", repr(name))
        if field_value is not None:
            fields[name] = _widen_type(fields.get(name), field_value, f"{path}.{name}", level + 1)
    if not fields:
        raise _Mismatch(path, "a value", "a map without entries, whose types are unknown")
    return pa.struct(list(fields.items()))


def _type_text(kind: ArrowType) -> str:
    if pa.types.is_list(kind):
        return "a list"
    return "a map" if pa.types.is_struct(kind) else _TYPE_NAMES.get(kind, str(kind))
