"""The columns that a Delta table can have, whether deltalake or Spark writes it."""

import re
from collections.abc import Iterable

import pyarrow as pa

from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.errors import BadConfig
from waltz_core.tables.inferred_columns import LEVELS_MAX
from waltz_core.tables.row_changes import DELETED_COLUMN

_RESERVED_NAMES = {"_partition", "_transaction_id", DELETED_COLUMN}
# Spark cannot write a column if the name contains a space or one of ,;{}()= . deltalake cannot find
# a column with a control character, and reserves the prefix __delta_rs_ for its own columns.
_FORBIDDEN_NAME = re.compile(r"[ ,;{}()=\x00-\x1f]|^__delta_rs_")
_DELTA_TYPES = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date32,
)


def check_schema(schema: ArrowSchema) -> None:
    """Reject columns that Delta does not support.

    Raises:
        BadConfig: the error names the column.
    """
    if not schema.names:
        raise BadConfig("schema of the table: expected one or more columns, found none")
    _check_names(schema, "", _RESERVED_NAMES)
    for part in schema:
        _check_nested(part.type, part.name, 1)
        if not _is_delta_type(part.type):
            raise BadConfig(
                f"column {part.name!r}: Delta has no type {part.type}. Hint: declare it as int64, "
                "decimal, text or a timestamp in microseconds."
            )


def _check_names(fields: Iterable[pa.Field], path: str, reserved: set[str]) -> None:
    names_by_lower = {name: name for name in reserved}
    for part in fields:
        if _FORBIDDEN_NAME.search(part.name) or not part.name:
            raise BadConfig(
                f"column {path + part.name!r}: Delta does not permit this name. Hint: "
                "use a name without spaces, without control characters, without the characters "
                "`,;{}()=`, and without the prefix `__delta_rs_`."
            )
        if (other_name := names_by_lower.get(part.name.lower())) is not None:
            names = f" Reserved names are {', '.join(sorted(reserved))}." if reserved else ""
            raise BadConfig(
                f"column {path + part.name!r}: the name {other_name!r} is already used, and "
                f"Delta does not distinguish upper and lower case.{names} Hint: rename the column."
            )
        names_by_lower[part.name.lower()] = part.name


def _check_nested(kind: pa.DataType, path: str, level: int) -> None:
    """Check the names of nested fields, and the number of nesting levels."""
    if level > LEVELS_MAX:
        raise BadConfig(
            f"column {path!r:.200}: expected at most {LEVELS_MAX} levels of lists, maps and "
            "structs, found more"
        )
    if pa.types.is_struct(kind):
        _check_names(kind, f"{path}.", set())
    for child_index in range(kind.num_fields):
        part = kind.field(child_index)
        inner_path = f"{path}.{part.name}" if pa.types.is_struct(kind) else path
        _check_nested(part.type, inner_path, level + 1)


def _is_delta_type(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_map(kind):
        return all(
            _is_delta_type(kind.field(child_index).type) for child_index in range(kind.num_fields)
        )
    if pa.types.is_timestamp(kind):
        return kind.unit == "us" and kind.tz in (None, "UTC")
    if pa.types.is_decimal(kind):
        return bool(kind.precision <= 38)
    return any(is_type(kind) for is_type in _DELTA_TYPES)
