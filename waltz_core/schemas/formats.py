"""The serializers `Avro` and `Protobuf`: payloads in Confluent's wire format, with a registry.

    ORDERS = Avro("http://registry:8081", subject="orders-value", schema=ORDER_SCHEMA)
    builder.set_transaction_data(order, ORDERS)
    order = transaction.value(ORDERS)

Rules:
    1. A schema is requested once in a process: an ID never changes its schema. An ID that does not
       exist is requested again after `MISSING_S`. The cache has at most `SCHEMAS_MAX` IDs: payloads
       name them, and a writer chooses these.
    2. A serializer keeps references only, so that it can be sent to another process: URLs, the name
       of a file with credentials, subject and schema. The cache belongs to the process.
    3. An outage of the schema registry is `Unavailable`, and never a payload that does not fit.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.schemas.registered_schemas import RegisteredSchema, SchemaType
from waltz_core.schemas.registry_client import SchemaRegistry
from waltz_core.schemas.schema_prefix import prefix_of, split_prefix

SCHEMAS_MAX: Final = 1_000
MISSING_S: Final = 5.0


class PayloadCodec(Protocol):
    """Encodes and decodes the bytes after the schema ID."""

    def decode(self, body: bytes) -> Any:  # noqa: ANN401 - any value of a schema
        """Return the value of the bytes; raises BadFormat."""

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Return the bytes of a value; raises BadRequest."""

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields that are written; none if it is not a record."""


class _MissingSchema(NamedTuple):
    reason: str
    until_s: float


class SchemaCache:
    """The codecs of a schema registry by schema ID (rule 1); several threads may use it.

    Args:
        registry: requests schemas.
        kind: the kind of all schemas.
        clock: the time in seconds.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        kind: SchemaType,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.kind = kind
        self._clock = clock
        # NB: no lock, which a fork could copy in a locked state: each access is one operation.
        self._codecs: OrderedDict[int, PayloadCodec | _MissingSchema] = OrderedDict()

    def decode(self, data: bytes) -> Any:  # noqa: ANN401
        """Return the value of a payload.

        Raises:
            BadFormat: the payload is damaged, or its schema is missing or not valid.
            BadConfig, Unavailable: the schema registry cannot be read.
        """
        schema_id, body = split_prefix(data)
        codec = self._codecs.get(schema_id)
        if codec is None or isinstance(codec, _MissingSchema):
            codec = self._request_codec(schema_id, codec)
        return codec.decode(body)

    def add(self, schema: RegisteredSchema) -> None:
        """Add a schema, so that it need not be requested."""
        if schema.schema_id not in self._codecs:
            self._keep(schema.schema_id, codec_of(schema))

    def _request_codec(self, schema_id: int, missing: _MissingSchema | None) -> PayloadCodec:
        if missing is not None and self._clock() < missing.until_s:
            raise BadFormat(missing.reason)
        try:
            codec = codec_of(self.registry.schema(schema_id, self.kind))
        except BadFormat as error:
            self._keep(schema_id, _MissingSchema(str(error), self._clock() + MISSING_S))
            raise
        self._keep(schema_id, codec)
        return codec

    def _keep(self, schema_id: int, codec: PayloadCodec | _MissingSchema) -> None:
        self._codecs[schema_id] = codec
        if len(self._codecs) > SCHEMAS_MAX:
            with suppress(KeyError):  # another thread has removed it
                self._codecs.popitem(last=False)


def codec_of(schema: RegisteredSchema, message: str | None = None) -> PayloadCodec:
    """Return the codec of a schema; `message` is the type that a Protobuf schema writes.

    Raises:
        BadFormat: the schema is not valid.
        BadConfig: the package for it is missing, or there is no such message.
    """
    if schema.kind is SchemaType.AVRO:
        from waltz_core.schemas.avro_codec import AvroCodec  # noqa: PLC0415 - optional

        return AvroCodec(schema)
    from waltz_core.schemas.protobuf_codec import ProtobufCodec  # noqa: PLC0415 - optional

    return ProtobufCodec(schema, message)


@lru_cache(maxsize=16)
def schemas_of(urls: str, auth_file: str | None, kind: SchemaType) -> SchemaCache:
    """Return the schemas of a registry, the same object for each call in a process.

    Raises:
        BadConfig: a URL is not valid, or the package for this kind is missing.
    """
    registry = SchemaRegistry(urls, auth_file)
    if kind is SchemaType.AVRO:
        import waltz_core.schemas.avro_codec  # noqa: PLC0415 - optional
    else:
        import waltz_core.schemas.protobuf_codec  # noqa: F401, PLC0415 - optional
    return SchemaCache(registry, kind)


class PayloadEncoder:
    """Encodes payloads with one registered schema; other processes need no registry for it."""

    def __init__(self, schema: RegisteredSchema, message: str | None = None) -> None:
        self._prefix = prefix_of(schema.schema_id)
        self._codec = codec_of(schema, message)
        self.field_names = self._codec.field_names()

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Return the payload of a value; raises BadRequest for one that does not fit."""
        return self._prefix + self._codec.encode(value)


class SchemaFormat:
    """The common part of `Avro` and `Protobuf`: a serializer with a schema registry.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; several with commas.
        auth_file: a file with `user:password`, for basic authentication.
        subject: the subject of the schema that is written; readers need none.
        version: the version that is written [default: the latest].

    Raises:
        BadConfig: an argument is not valid, or the package for this format is missing.
    """

    kind: SchemaType
    data_format: str

    def __init__(
        self,
        registry: str,
        *,
        auth_file: str | None = None,
        subject: str | None = None,
        version: int | None = None,
    ) -> None:
        self._registry = registry
        self._auth_file = auth_file
        self._subject = subject
        self._version = version
        self._writer: PayloadEncoder | None = None
        self.schemas()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None}  # rule 2

    def serialize(self, value: Any) -> bytes:  # noqa: ANN401 - any value of the schema
        """Return the payload of a value.

        The first call requests the schema, and blocks for it.

        Raises:
            BadRequest: the value does not fit, or the registry rejects the schema.
            BadConfig, Unavailable: the schema registry cannot be read.
        """
        if self._writer is None:
            self._writer = PayloadEncoder(self.written_schema(), self._message())
        return self._writer.encode(value)

    def deserialize(self, data: bytes) -> Any:  # noqa: ANN401
        """Return the value of a payload, by the schema with which it was written.

        The first payload of each schema requests it, and blocks for it.

        Raises:
            BadFormat: the payload is damaged, or its schema does not exist.
            BadConfig, Unavailable: the schema registry cannot be read.
        """
        try:
            return self.decode(data)
        except BadFormat as error:
            raise BadFormat(f"transaction data: {error}") from error

    def decode(self, data: bytes) -> Any:  # noqa: ANN401
        """Return the value of a payload, for columns; the errors are those of `deserialize`."""
        return self.schemas().decode(bytes(data))

    def schemas(self) -> SchemaCache:
        """Return the schemas that this process has requested."""
        return schemas_of(self._registry, self._auth_file, self.kind)

    def written_schema(self) -> RegisteredSchema:
        """Return the schema that is written.

        Raises:
            BadConfig: there is no subject, or it has no such version.
            Unavailable: the schema registry cannot be read.
        """
        registry = self.schemas().registry
        return registry.version(self._written_subject(), self._version, self.kind)

    def _written_subject(self) -> str:
        if self._subject is None:
            raise BadConfig(
                f"{type(self).__name__}: writing needs the argument subject. Hint: a subject has "
                "the versions of one schema, such as 'orders-value'."
            )
        return self._subject

    def _message(self) -> str | None:
        return None


class Avro(SchemaFormat):
    """A serializer for Avro with a schema registry.

    A record is a dict by field name; docs/payload-schemas.md has the values of all types.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; several with commas.
        auth_file: a file with `user:password` for the schema registry.
        subject: the subject of the schema that is written; readers need none.
        schema: the schema that is written, as JSON text or as the parsed JSON. It is registered
            under the subject, unless the subject has it; the registry rejects an incompatible one.
            Without it, `version` is written.
        version: the version of the subject that is written [default: the latest].

    Raises:
        BadConfig: an argument is not valid, or the package fastavro is missing.
        BadRequest: the schema is not valid, or not supported.
    """

    kind = SchemaType.AVRO
    data_format = "avro"

    def __init__(
        self,
        registry: str,
        *,
        schema: str | dict[str, Any] | list[Any] | None = None,
        auth_file: str | None = None,
        subject: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(registry, auth_file=auth_file, subject=subject, version=version)
        if schema is not None and version is not None:
            raise BadConfig("Avro: expected one of the arguments schema and version, found both")
        self._text = schema if schema is None or isinstance(schema, str) else _compact(schema)
        if self._text is not None:
            try:
                codec_of(RegisteredSchema(0, self.kind, self._text))
            except BadFormat as error:
                reason = str(error).removeprefix("schema 0: ")
                raise BadRequest(f"argument schema: {reason}") from None

    def written_schema(self) -> RegisteredSchema:
        """Return the schema that is written, registered if it is new."""
        if self._text is None:
            return super().written_schema()
        return self.schemas().registry.register(self._written_subject(), self.kind, self._text)


class Protobuf(SchemaFormat):
    """A serializer for Protobuf with a schema registry.

    A message is a dict by field name; docs/payload-schemas.md has the values of all types. Writing
    also accepts a message of a generated class, if it is of the registered type.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; several with commas.
        auth_file: a file with `user:password` for the schema registry.
        subject: the subject of the schema that is written; readers need none.
        version: the version of the subject that is written [default: the latest].
        message: the full name of the message type that is written [default: the first one].

    Raises:
        BadConfig: an argument is not valid, or the package protobuf is missing.
    """

    kind = SchemaType.PROTOBUF
    data_format = "protobuf"

    def __init__(
        self,
        registry: str,
        *,
        message: str | None = None,
        auth_file: str | None = None,
        subject: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(registry, auth_file=auth_file, subject=subject, version=version)
        self._message_name = message

    def _message(self) -> str | None:
        return self._message_name


def _compact(schema: object) -> str:
    try:
        return json.dumps(schema, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"argument schema: expected JSON: {error}") from None
