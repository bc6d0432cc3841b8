"""Payloads with schemas in Spark, Avro and Protobuf: `waltz_core.schemas` with the options.

Rules:
    1. The driver finds the schema of a write before any task: it registers the schema of the
       columns, or requests a version. Tasks get it with the options, and need no registry for it.
    2. A task that reads requests each schema once in its process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from waltz_core.client import Avro, Protobuf
from waltz_core.errors import BadRequest
from waltz_core.records.unpacking import Decode, decoder_of
from waltz_core.schemas.avro_schemas import schema_of_columns
from waltz_core.schemas.formats import PayloadEncoder, SchemaFormat
from waltz_spark.options import ReadOptions, RegistryOptions, WriteOptions


def format_of(
    options: ReadOptions | WriteOptions, avro_schema: dict[str, Any] | None = None
) -> SchemaFormat | None:
    """Return the serializer of a read or a write; None for a format without schemas.

    Raises:
        BadConfig: its package is not installed.
    """
    given = options.registry
    if given is None:
        return None
    auth_file, subject, version = given.auth_file, given.subject, given.version
    if options.data_format == "protobuf":
        return Protobuf(
            given.urls,
            message=given.message,
            auth_file=auth_file,
            subject=subject,
            version=version,
        )
    return Avro(
        given.urls, schema=avro_schema, auth_file=auth_file, subject=subject, version=version
    )


def payload_decoder(options: ReadOptions | WriteOptions) -> Decode | None:
    """Return the decoder of payloads; None for a format that the unpacker decodes itself."""
    found = format_of(options)
    if found is None:
        return None
    if options.registry is not None and options.registry.schema is not None:
        found.schemas().add(options.registry.schema)
    return found.decode


def row_key_decoder(options: WriteOptions) -> Decode | None:
    """Return the decoder of payloads of any format; None without option `dataFormat`."""
    if options.data_format is None:
        return None
    return payload_decoder(options) or decoder_of(options.data_format)


def payload_encoder(options: WriteOptions) -> Callable[[dict[str, Any]], bytes] | None:
    """Return what encodes a row; None for a format without schemas."""
    writer = _writer(options.registry)
    return None if writer is None else writer.encode


def with_written_schema(options: WriteOptions, columns: Sequence[pa.Field]) -> WriteOptions:
    """Return the options with the schema that is written (rule 1).

    Raises:
        BadRequest: Avro has no such columns, the registry rejects the schema as not compatible, or
            a column is not a field of a registered one.
        BadConfig, Unavailable: the schema registry cannot be read.
    """
    given = options.registry
    if given is None:
        return options
    schema = schema_of_columns(columns) if given.is_of_columns else None
    found = format_of(options, schema)
    assert found is not None
    registry = replace(given, schema=found.written_schema())
    writer = _writer(registry)
    assert writer is not None
    for part in columns:
        if part.name not in writer.field_names:
            raise BadRequest(
                f"column {part.name!r}: subject {given.subject!r} has no such field; it has "
                f"{', '.join(writer.field_names[:20]) or 'none'}"
            )
    return replace(options, registry=registry)


def _writer(registry: RegistryOptions | None) -> PayloadEncoder | None:
    if registry is None:
        return None
    assert registry.schema is not None, "the driver has found it"
    return PayloadEncoder(registry.schema, registry.message)
