"""Avro schemas: checks schemas from a schema registry, and derives schemas from columns.

A malicious schema could let a small payload exhaust the memory of the decoder, or crash it by deep
recursion. So a schema is checked before it is used.

Rules:
    1. A schema has at most `DEPTH_MAX` nested levels, including references to named types. A type
       that contains itself is rejected, because a payload could nest this type until the process
       crashes.
    2. An element of an array or a map takes at least one byte. It contains at most
       `VALUES_PER_BYTE` values for each of its bytes, not counting nested arrays and maps. Without
       this rule, a payload of a few bytes could contain a count for billions of values.
    3. Logical types are renamed, so that `avro_values.py` converts them instead of fastavro. Some
       conversions of fastavro lose information, or take a time that is quadratic in the size of
       the payload. Unknown logical types are ignored, as the specification demands.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from waltz_core.errors import BadFormat, BadRequest
from waltz_core.records.payload_types import is_binary
from waltz_core.schemas.strict_values import DECIMAL_DIGITS_MAX

DEPTH_MAX: Final = 64
VALUES_MAX: Final = 10_000
VALUES_PER_BYTE: Final = 16
FIXED_BYTES_MAX: Final = 4 * 1024 * 1024
# The prefix of renamed logical types (rule 3).
RENAMED_PREFIX: Final = "waltz-"
# The key that replaces "default" in fields, so that fastavro sees no defaults. A payload contains
# all fields, so reading needs no defaults. `avro_values.py` adds the defaults before writing.
DEFAULT_KEY: Final = f"{RENAMED_PREFIX}default"
ROOT_NAME: Final = "topLevelRecord"  # the name that Spark's to_avro uses
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class _Size(NamedTuple):
    """The number of values in a type, not counting nested arrays and maps, and its nesting depth.

    `excess` is the maximum of `values - VALUES_PER_BYTE * bytes` over all values of the type.
    """

    excess: int
    values: int
    depth: int


def _flat_size(bytes_min: int) -> _Size:
    return _Size(1 - VALUES_PER_BYTE * bytes_min, 1, 1)


_PRIMITIVE_SIZES: Final = {
    "null": _flat_size(0),
    **dict.fromkeys(("boolean", "int", "long", "bytes", "string"), _flat_size(1)),
    "float": _flat_size(4),
    "double": _flat_size(8),
}
_LOGICAL_TYPE_BASES: Final = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "decimal": ("bytes", "fixed"),
    "uuid": ("string", "fixed"),
}


class AvroSchemaCheck:
    """Checks schemas, and returns them with full names and renamed logical types.

    The object stores named types, so that a later schema may refer to types of an earlier one.
    """

    def __init__(self) -> None:
        self._named_sizes: dict[str, _Size | None] = {}  # None: the definition is not complete yet

    def check_schema(self, schema: object) -> Any:  # noqa: ANN401 - JSON
        """Check a schema, and convert it for `avro_codec.py`.

        Raises:
            BadFormat: it is not an Avro schema, or violates rule 1 or 2.
        """
        checked, size = self._check_type(schema, "", DEPTH_MAX)
        if size.values > VALUES_MAX:
            raise BadFormat(f"Avro schema: expected up to {VALUES_MAX} fields, found {size.values}")
        return checked

    def _check_type(self, schema: object, namespace: str, depth: int) -> tuple[Any, _Size]:
        if depth == 0:
            raise _too_deep_error()
        checked: Any
        match schema:
            case str():
                checked, size = self._find_type(schema, namespace)
            case list():
                checked, size = self._check_union(schema, namespace, depth)
            case dict():
                checked, size = self._check_complex(schema, namespace, depth)
            case _:
                raise BadFormat(f"Avro schema: expected a type, found {schema!r:.100}")
        if size.depth > DEPTH_MAX:
            raise _too_deep_error()
        return checked, size

    def _find_type(self, name: str, namespace: str) -> tuple[str, _Size]:
        if name in _PRIMITIVE_SIZES:
            return name, _PRIMITIVE_SIZES[name]
        full_name = name if "." in name or not namespace else f"{namespace}.{name}"
        if full_name not in self._named_sizes:
            full_name = name
        if full_name not in self._named_sizes:
            raise BadFormat(f"Avro schema: there is no type {name!r:.100}")
        size = self._named_sizes[full_name]
        if size is None:  # rule 1
            raise BadFormat(
                f"Avro schema: type {full_name!r:.100} contains itself, which is not supported"
            )
        return full_name, size

    def _check_union(
        self, schema: list[Any], namespace: str, depth: int
    ) -> tuple[list[Any], _Size]:
        if not schema:
            raise BadFormat(
                "Avro schema: expected a union with at least one type, found an empty one"
            )
        if any(isinstance(branch_schema, list) for branch_schema in schema):
            raise BadFormat("Avro schema: expected no union in a union, found one")
        parts = [self._check_type(branch_schema, namespace, depth - 1) for branch_schema in schema]
        names = [branch_name(branch) for branch, _ in parts]
        if len(set(names)) != len(names):
            raise BadFormat(
                f"Avro schema: expected a union of different types, found {sorted(names)!r:.100}"
            )
        sizes = [size for _, size in parts]
        return [branch for branch, _ in parts], _Size(
            _flat_size(1).excess + max(size.excess for size in sizes),
            1 + max(size.values for size in sizes),
            1 + max(size.depth for size in sizes),
        )

    def _check_complex(  # noqa: PLR0911 - a case each
        self, schema: dict[str, Any], namespace: str, depth: int
    ) -> tuple[Any, _Size]:
        match schema.get("type"):
            case "record" | "error":
                return self._check_record(schema, namespace, depth)
            case "enum":
                return self._check_enum(schema, namespace)
            case "fixed":
                return self._check_fixed(schema, namespace)
            case "array":
                checked, size = self._check_elements(
                    schema.get("items"), namespace, depth, key_bytes=0
                )
                return {"type": "array", "items": checked}, size
            case "map":
                checked, size = self._check_elements(
                    schema.get("values"), namespace, depth, key_bytes=1
                )
                return {"type": "map", "values": checked}, size
            case str() as name if name in _PRIMITIVE_SIZES:
                return {"type": name} | _renamed_logical_type(schema, name), _PRIMITIVE_SIZES[name]
            case inner_schema:
                return self._check_type(inner_schema, namespace, depth - 1)

    def _check_elements(
        self, schema: object, namespace: str, depth: int, *, key_bytes: int
    ) -> tuple[Any, _Size]:
        """Check the type of the elements; return this type, and the size of the array or map."""
        checked, size = self._check_type(schema, namespace, depth - 1)
        if size.excess > VALUES_PER_BYTE * key_bytes:  # rule 2
            raise BadFormat(
                "Avro schema: the type of an array's or map's elements is not supported, because "
                f"an element may have no bytes, or more than {VALUES_PER_BYTE} values per byte"
            )
        return checked, _flat_size(1)._replace(depth=1 + size.depth)

    def _check_record(
        self, schema: dict[str, Any], namespace: str, depth: int
    ) -> tuple[Any, _Size]:
        name, inner_namespace = self._define_type(schema, namespace)
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise BadFormat(f"Avro schema: record {name!r:.100} has no list of fields")
        size, checked_fields, names = _flat_size(0), [], set()
        for field in fields:
            if not isinstance(field, dict) or not _is_name(field.get("name"), _NAME):
                raise BadFormat(f"Avro schema: record {name!r:.100} has a field without a name")
            if field["name"] in names:
                raise BadFormat(
                    f"Avro schema: record {name!r:.100} has two fields {field['name']!r:.100}"
                )
            names.add(field["name"])
            checked_type, part = self._check_type(field.get("type"), inner_namespace, depth - 1)
            size = _Size(
                size.excess + part.excess,
                size.values + part.values,
                max(size.depth, 1 + part.depth),
            )
            default = {DEFAULT_KEY: field["default"]} if "default" in field else {}
            checked_fields.append({"name": field["name"], "type": checked_type} | default)
        self._named_sizes[name] = size
        return {"type": "record", "name": name, "fields": checked_fields}, size

    def _check_enum(self, schema: dict[str, Any], namespace: str) -> tuple[Any, _Size]:
        name, _ = self._define_type(schema, namespace)
        symbols = schema.get("symbols")
        if not isinstance(symbols, list) or not all(_is_name(symbol, _NAME) for symbol in symbols):
            raise BadFormat(f"Avro schema: enum {name!r:.100} has no list of symbols")
        self._named_sizes[name] = size = _flat_size(1)
        return {"type": "enum", "name": name, "symbols": symbols}, size

    def _check_fixed(self, schema: dict[str, Any], namespace: str) -> tuple[Any, _Size]:
        name, _ = self._define_type(schema, namespace)
        count = schema.get("size")
        if type(count) is not int or not 0 <= count <= FIXED_BYTES_MAX:
            raise BadFormat(f"Avro schema: fixed {name!r:.100} has no valid size")
        self._named_sizes[name] = size = _flat_size(count)
        fixed_schema = {"type": "fixed", "name": name, "size": count}
        return fixed_schema | _renamed_logical_type(schema, "fixed"), size

    def _define_type(self, schema: dict[str, Any], namespace: str) -> tuple[str, str]:
        """Register a new type; return its full name, and the namespace of its inner types."""
        name, own_namespace = schema.get("name"), schema.get("namespace")
        if own_namespace is None:
            own_namespace = namespace
        full_name = f"{own_namespace}.{name}" if own_namespace and "." not in str(name) else name
        if not isinstance(full_name, str) or not _is_name(full_name, _FULL_NAME):
            raise BadFormat(f"Avro schema: expected a name of a type, found {full_name!r:.100}")
        if full_name in self._named_sizes or full_name in _PRIMITIVE_SIZES:
            raise BadFormat(f"Avro schema: two types have the name {full_name!r:.100}")
        self._named_sizes[full_name] = None
        return full_name, full_name.rpartition(".")[0]


def branch_name(schema: str | dict[str, Any]) -> str:
    """Return the name of a type inside a union; the name must be unique in this union."""
    if isinstance(schema, str):
        return schema
    name: str = schema.get("name", schema["type"])
    return name


def _too_deep_error() -> BadFormat:
    return BadFormat(
        f"Avro schema: expected at most {DEPTH_MAX} levels of nested types, found more"
    )


def _is_name(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _renamed_logical_type(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """Return the renamed logical type of a schema; empty if there is none (rule 3)."""
    name = schema.get("logicalType")
    if not isinstance(name, str) or base not in _LOGICAL_TYPE_BASES.get(name, ()):
        return {}
    renamed: dict[str, Any] = {"logicalType": RENAMED_PREFIX + name}
    if name == "uuid" and base == "fixed" and schema["size"] != 16:
        return {}
    if name == "decimal":
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if type(precision) is not int or not 1 <= precision <= DECIMAL_DIGITS_MAX:
            return {}
        if type(scale) is not int or not 0 <= scale <= precision:
            return {}
        renamed |= {"precision": precision, "scale": scale}
    return renamed


# ---------------------------------------------------------------------------------------------
# Columns to a schema


def schema_of_columns(fields: Sequence[pa.Field]) -> dict[str, Any]:
    """Derive the Avro schema from columns; a nullable column has the default null.

    Raises:
        BadRequest: Avro has no type for a column, or does not permit its name.
    """
    return _record_schema(fields, ROOT_NAME, "")


def _record_schema(fields: Sequence[pa.Field], name: str, path: str) -> dict[str, Any]:
    parts = []
    for part in fields:
        if _NAME.fullmatch(part.name) is None:
            raise BadRequest(
                f"column {path + part.name!r}: a name in Avro has letters, digits and '_', and "
                "does not begin with a digit. Hint: rename it."
            )
        kind = _column_type(part, f"{name}.{part.name}", f"{path}{part.name}")
        default = {"default": None} if isinstance(kind, list) else {}
        parts.append({"name": part.name, "type": kind} | default)
    return {"type": "record", "name": name, "fields": parts}


def _column_type(part: pa.Field, name: str, path: str) -> Any:  # noqa: ANN401 - JSON
    avro_type = _not_null_type(part.type, name, path)
    if part.nullable and avro_type != "null":
        return ["null", avro_type]
    return avro_type


def _element_type(part: pa.Field, name: str, path: str) -> Any:  # noqa: ANN401 - JSON
    avro_type = _column_type(part, name, path)
    return (
        [avro_type] if avro_type == "null" else avro_type
    )  # a union has at least one byte (rule 2)


def _not_null_type(kind: pa.DataType, name: str, path: str) -> Any:  # noqa: ANN401 - JSON
    if pa.types.is_struct(kind):
        return _record_schema(list(kind), name, f"{path}.")
    if pa.types.is_map(kind):
        if not pa.types.is_string(kind.key_type) and not pa.types.is_large_string(kind.key_type):
            raise BadRequest(
                f"column {path!r}: a map in Avro has keys of type string, found {kind.key_type}. "
                "Hint: cast the keys to strings."
            )
        return {"type": "map", "values": _element_type(kind.item_field, f"{name}.value", path)}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "items": _element_type(kind.value_field, f"{name}.element", path)}
    flat_type = _flat_type(kind)
    if flat_type is None:
        raise BadRequest(f"column {path!r}: Avro has no type for {kind}. Hint: cast it first.")
    return flat_type


def _flat_type(kind: pa.DataType) -> Any:  # noqa: ANN401 - JSON
    """Return the Avro type for values that are not nested; None if Avro has none."""
    if pa.types.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
        sizes = {"precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", "logicalType": "decimal"} | sizes
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        zone = "" if kind.tz is not None else "local-"
        return {"type": "long", "logicalType": f"{zone}timestamp-micros"}
    if is_binary(kind):
        return "bytes"
    return _FLAT_TYPES.get(kind)


_FLAT_TYPES: Final = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), "int"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "long"),
    pa.float32(): "float",
    pa.float64(): "double",
    **dict.fromkeys((pa.string(), pa.large_string()), "string"),
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.time64("us"): {"type": "long", "logicalType": "time-micros"},
}
