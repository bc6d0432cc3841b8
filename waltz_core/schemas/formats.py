"""The serializers `Avro` and `Protobuf`: payloads in Confluent's wire format, with a registry.

    ORDERS = Avro("http://registry:8081", subject="orders-value", schema=ORDER_SCHEMA)
    builder.set_transaction_data(order, ORDERS)
    order = transaction.value(ORDERS)

Rules:
    1. A schema is requested once per process, because the schema of an ID never changes. An ID that
       does not exist is requested again after `MISSING_SCHEMA_RETRY_S`. The cache has at most
       `SCHEMAS_MAX` IDs, because the IDs come from payloads, and writers choose these IDs.
    2. A serializer can be sent to another process, because it contains only references: URLs, the
       name of a file with credentials, subject and schema. Each process has its own cache.
    3. An outage of the schema registry raises `Unavailable`. An outage is never reported as a
       payload that is damaged or does not fit.
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
MISSING_SCHEMA_RETRY_S: Final = 5.0


class PayloadCodec(Protocol):
    """Encodes and decodes the bytes of a payload after the schema ID."""

    def decode(self, body: bytes) -> Any:  # noqa: ANN401 - any value of a schema
        """Decode the bytes; raises BadFormat."""

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Encode a value; raises BadRequest."""

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields that `encode` accepts; () if the schema is no record."""


class _MissingSchema(NamedTuple):
    """An ID that does not exist in the registry; it is not requested again before `retry_at_s`."""

    reason: str
    retry_at_s: float


class SchemaCache:
    """The codecs for the schemas of a registry, by schema ID (rule 1); thread-safe.

    Args:
        registry: requests schemas.
        kind: the kind of all schemas, Avro or Protobuf.
        clock: a monotonic clock, in seconds.
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
        # NB: there is no lock, because a fork could copy it in a locked state. Each access is
        # atomic.
        self._codecs: OrderedDict[int, PayloadCodec | _MissingSchema] = OrderedDict()

    def decode(self, data: bytes) -> Any:  # noqa: ANN401
        """Decode a payload with the schema that it names.

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
        """Add a schema, so that the cache does not request it."""
        if schema.schema_id not in self._codecs:
            self._store(schema.schema_id, codec_of(schema))

    def _request_codec(self, schema_id: int, missing: _MissingSchema | None) -> PayloadCodec:
        if missing is not None and self._clock() < missing.retry_at_s:
            raise BadFormat(missing.reason)
        try:
            codec = codec_of(self.registry.schema(schema_id, self.kind))
        except BadFormat as error:
            self._store(
                schema_id, _MissingSchema(str(error), self._clock() + MISSING_SCHEMA_RETRY_S)
            )
            raise
        self._store(schema_id, codec)
        return codec

    def _store(self, schema_id: int, codec: PayloadCodec | _MissingSchema) -> None:
        self._codecs[schema_id] = codec
        if len(self._codecs) > SCHEMAS_MAX:
            with suppress(KeyError):  # another thread has removed it
                self._codecs.popitem(last=False)


def codec_of(schema: RegisteredSchema, message: str | None = None) -> PayloadCodec:
    """Return the codec for a schema; `message` is the message type to write, for Protobuf only.

    Raises:
        BadFormat: the schema is not valid.
        BadConfig: the package for the format is missing, or the message type does not exist.
    """
    if schema.kind is SchemaType.AVRO:
        from waltz_core.schemas.avro_codec import AvroCodec  # noqa: PLC0415 - optional

        return AvroCodec(schema)
    from waltz_core.schemas.protobuf_codec import ProtobufCodec  # noqa: PLC0415 - optional

    return ProtobufCodec(schema, message)


@lru_cache(maxsize=16)
def shared_schema_cache(urls: str, auth_file: str | None, kind: SchemaType) -> SchemaCache:
    """Return the schema cache for a registry; each call in a process returns the same object.

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
    """Encodes payloads with one registered schema; no process needs the registry for this."""

    def __init__(self, schema: RegisteredSchema, message: str | None = None) -> None:
        self._prefix = prefix_of(schema.schema_id)
        self._codec = codec_of(schema, message)
        self.field_names = self._codec.field_names()

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Encode a value as a payload; raises BadRequest if the value does not fit the schema."""
        return self._prefix + self._codec.encode(value)


class SchemaFormat:
    """The common part of `Avro` and `Protobuf`: a serializer with a schema registry.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; or several, with commas.
        auth_file: a file with `user:password`, for basic authentication.
        subject: the subject of the schema to write; readers need none.
        version: the version of the schema to write [default: the latest].

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
        self._encoder: PayloadEncoder | None = None
        self.schema_cache()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_encoder": None}  # rule 2

    def serialize(self, value: Any) -> bytes:  # noqa: ANN401 - any value of the schema
        """Encode a value as a payload.

        The first call requests the schema from the registry, and blocks meanwhile.

        Raises:
            BadRequest: the value does not fit the schema, or the registry rejects the schema.
            BadConfig, Unavailable: the schema registry cannot be read.
        """
        if self._encoder is None:
            self._encoder = PayloadEncoder(self.schema_to_write(), self._message_type_to_write())
        return self._encoder.encode(value)

    def deserialize(self, data: bytes) -> Any:  # noqa: ANN401
        """Decode a payload with the schema with which it was written.

        The first payload of each schema requests the schema from the registry, and blocks
        meanwhile.

        Raises:
            BadFormat: the payload is damaged, or its schema does not exist.
            BadConfig, Unavailable: the schema registry cannot be read.
        """
        try:
            return self.decode(data)
        except BadFormat as error:
            raise BadFormat(f"transaction data: {error}") from error

    def decode(self, data: bytes) -> Any:  # noqa: ANN401
        """Decode a payload like `deserialize`, for callers that add the location to errors."""
        return self.schema_cache().decode(bytes(data))

    def schema_cache(self) -> SchemaCache:
        """Return this process's cache for the schema registry."""
        return shared_schema_cache(self._registry, self._auth_file, self.kind)

    def schema_to_write(self) -> RegisteredSchema:
        """Return the schema with which payloads are written.

        Raises:
            BadConfig: the subject is missing, or has no such version.
            Unavailable: the schema registry cannot be read.
        """
        registry = self.schema_cache().registry
        return registry.subject_schema(self._required_subject(), self._version, self.kind)

    def _required_subject(self) -> str:
        if self._subject is None:
            raise BadConfig(
                f"{type(self).__name__}: writing needs the argument subject. Hint: a subject, "
                "such as 'orders-value', has the versions of one schema."
            )
        return self._subject

    def _message_type_to_write(self) -> str | None:
        return None


class Avro(SchemaFormat):
    """A serializer for Avro with a schema registry.

    A record is a dict by field name; docs/payload-schemas.md lists the values of all types.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; or several, with commas.
        auth_file: a file with `user:password` for the schema registry.
        subject: the subject of the schema to write; readers need none.
        schema: the schema to write, as JSON text or as parsed JSON. If the subject does not have
            the schema, it is registered; the registry rejects an incompatible schema. Without this
            argument, the schema with `version` is written.
        version: the version of the subject's schema to write [default: the latest].

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
            raise BadConfig(
                "Avro: expected at most one of the arguments schema and version, found both"
            )
        self._schema_text = (
            schema if schema is None or isinstance(schema, str) else _compact_json(schema)
        )
        if self._schema_text is not None:
            try:
                codec_of(RegisteredSchema(0, self.kind, self._schema_text))
            except BadFormat as error:
                reason = str(error).removeprefix("schema 0: ")
                raise BadRequest(f"argument schema: {reason}") from None

    def schema_to_write(self) -> RegisteredSchema:
        """Return the schema with which payloads are written; register it if it is new."""
        if self._schema_text is None:
            return super().schema_to_write()
        return self.schema_cache().registry.register(
            self._required_subject(), self.kind, self._schema_text
        )


class Protobuf(SchemaFormat):
    """A serializer for Protobuf with a schema registry.

    A message is a dict by field name; docs/payload-schemas.md lists the values of all types.
    Writing also accepts an instance of a generated message class, if it has the registered type.

    Args:
        registry: the URL of a schema registry with Confluent's HTTP API; or several, with commas.
        auth_file: a file with `user:password` for the schema registry.
        subject: the subject of the schema to write; readers need none.
        version: the version of the subject's schema to write [default: the latest].
        message: the full name of the message type to write [default: the first one].

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

    def _message_type_to_write(self) -> str | None:
        return self._message_name


def _compact_json(schema: object) -> str:
    try:
        return json.dumps(schema, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"argument schema: expected JSON: {error}") from None
