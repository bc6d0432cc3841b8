"""Encodes and decodes Avro with one schema; the only file that imports fastavro.

Rules:
    1. A payload is decoded with its writer's schema. It must end where its value ends.
    2. fastavro receives only checked schemas (`avro_schemas.py`) and converted values
       (`avro_values.py`). Reason: fastavro does not check values, and would choose the type of a
       union itself.
"""

import io
import struct
from typing import TYPE_CHECKING, Any, Final

from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.records.strict_json import from_json
from waltz_core.schemas.avro_schemas import AvroSchemaCheck
from waltz_core.schemas.avro_values import LOGICAL_READERS, AvroConverter
from waltz_core.schemas.registered_schemas import RegisteredSchema

if TYPE_CHECKING:
    from waltz_core.schemas.strict_values import Converter

try:
    import fastavro
    import fastavro.read
    import fastavro.schema
except ImportError as error:
    raise BadConfig(
        f"Avro needs the package fastavro: {error}. Hint: run pip install 'waltz-spark[avro]'."
    ) from error

# The names of these logical types begin with `RENAMED_PREFIX`, so other users of fastavro are
# unaffected.
fastavro.read.LOGICAL_READERS.update(LOGICAL_READERS)

# The errors that fastavro raises for damaged bytes.
_DAMAGED_BYTES_ERRORS: Final = (
    EOFError,
    ValueError,
    IndexError,
    OverflowError,
    TypeError,
    struct.error,
)
_INVALID_SCHEMA_ERRORS: Final = (
    fastavro.schema.SchemaParseException,
    fastavro.schema.UnknownType,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)


class AvroCodec:
    """Encodes and decodes values with a schema.

    Args:
        schema: the schema, with the schemas to which it refers.

    Raises:
        BadFormat: the schema is not valid, or is not supported.
    """

    def __init__(self, schema: RegisteredSchema) -> None:
        check = AvroSchemaCheck()
        self._named_types: dict[str, Any] = {}
        try:
            for _, text in schema.references:
                self._parse_schema(check, text)
            self._schema = self._parse_schema(check, schema.text)
        except BadFormat as error:
            raise BadFormat(f"schema {schema.schema_id}: {error}") from None
        self._converter: Converter | None = None

    def _parse_schema(self, check: AvroSchemaCheck, text: str) -> Any:  # noqa: ANN401 - a schema
        try:
            parsed = from_json(text.encode())
        except ValueError as error:
            if not text.strip().replace(".", "").replace("_", "").isalnum():
                raise BadFormat(f"Avro schema: expected JSON: {error}") from None
            parsed = text.strip()  # the name of a type, without quotes
        checked = check.check_schema(parsed)
        try:
            return fastavro.parse_schema(checked, named_schemas=self._named_types)
        except _INVALID_SCHEMA_ERRORS as error:
            raise BadFormat(f"Avro schema: {error}") from None

    def decode(self, body: bytes) -> Any:  # noqa: ANN401 - a value of the schema
        """Decode the bytes of a payload after its prefix.

        Raises:
            BadFormat: the bytes are not a value of the schema.
        """
        source = io.BytesIO(body)
        try:
            value = fastavro.schemaless_reader(source, self._schema, None)
        except _DAMAGED_BYTES_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise BadFormat(f"not a value of the Avro schema: {reason:.300}") from None
        rest_bytes = len(body) - source.tell()
        if rest_bytes:
            raise BadFormat(
                f"expected one value of the Avro schema, found {rest_bytes} more bytes after it"
            )
        return value

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the record's fields; () if the schema is not a record."""
        schema = self._schema
        while isinstance(schema, str) and schema in self._named_types:
            schema = self._named_types[schema]
        is_record = isinstance(schema, dict) and schema["type"] == "record"
        return tuple(field["name"] for field in schema["fields"]) if is_record else ()

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Encode a value.

        Raises:
            BadRequest: the value does not fit the schema.
        """
        if self._converter is None:
            try:
                self._converter = AvroConverter(self._named_types).converter_of(self._schema)
            except (TypeError, ValueError, AttributeError, KeyError):
                raise BadRequest("the Avro schema has a default that is not of its type") from None
        sink = io.BytesIO()
        try:
            fastavro.schemaless_writer(sink, self._schema, self._converter(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"a value does not fit the Avro schema: {error}") from None
        except RecursionError:
            raise BadRequest("a value does not fit the Avro schema: nested too deeply") from None
        return sink.getvalue()
