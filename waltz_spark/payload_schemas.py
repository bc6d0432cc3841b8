"""Avro and Protobuf payloads in Spark: creates the formats of `waltz_core.schemas` from options.

Rules:
    1. The driver determines the schema of a write before any task starts: it registers the schema
       of the columns, or requests a version. The tasks of a write receive this schema with the
       options, so they need no registry for it.
    2. A task that reads requests each schema once per process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from waltz_core.client import Avro, Protobuf
from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadRequest
from waltz_core.records.unpacking import Decode, decoder_of
from waltz_core.schemas.avro_schemas import schema_of_columns
from waltz_core.schemas.formats import PayloadEncoder, SchemaFormat
from waltz_spark.options import ReadOptions, RegistryOptions, WriteOptions


def create_schema_format(
    options: ReadOptions | WriteOptions, avro_schema: dict[str, Any] | None = None
) -> SchemaFormat | None:
    """Return the serializer for a read or a write; None for a format without schemas.

    Raises:
        BadConfig: the package that the format needs is not installed.
    """
    registry = options.registry
    if registry is None:
        return None
    auth_file, subject, version = registry.auth_file, registry.subject, registry.version
    if options.data_format == "protobuf":
        return Protobuf(
            registry.urls,
            message=registry.message,
            auth_file=auth_file,
            subject=subject,
            version=version,
        )
    return Avro(
        registry.urls, schema=avro_schema, auth_file=auth_file, subject=subject, version=version
    )


def payload_decoder(options: ReadOptions | WriteOptions) -> Decode | None:
    """Return the decoder for payloads; None for a format that the unpacker itself decodes."""
    schema_format = create_schema_format(options)
    if schema_format is None:
        return None
    if options.registry is not None and options.registry.schema is not None:
        schema_format.schema_cache().add(options.registry.schema)
    return schema_format.decode


def row_key_decoder(options: WriteOptions) -> Decode | None:
    """Return the decoder for payloads of any format; None without option `dataFormat`."""
    if options.data_format is None:
        return None
    return payload_decoder(options) or decoder_of(options.data_format)


def payload_encoder(options: WriteOptions) -> Callable[[dict[str, Any]], bytes] | None:
    """Return a function that encodes a row; None for a format without schemas."""
    writer = _create_encoder(options.registry)
    return None if writer is None else writer.encode


def resolve_write_schema(options: WriteOptions, columns: Sequence[pa.Field]) -> WriteOptions:
    """Return the options with the schema that the write uses (rule 1).

    Raises:
        BadRequest: Avro cannot represent a column, the registry rejects the schema as incompatible,
            or the registered schema has no field for a column.
        BadConfig, Unavailable: the schema registry cannot be read.
    """
    registry_options = options.registry
    if registry_options is None:
        return options
    schema = schema_of_columns(columns) if registry_options.is_derived_from_columns else None
    schema_format = create_schema_format(options, schema)
    assert schema_format is not None
    registry = replace(registry_options, schema=schema_format.schema_to_write())
    writer = _create_encoder(registry)
    assert writer is not None
    for part in columns:
        if part.name not in writer.field_names:
            raise BadRequest(
                f"column {part.name!r}: subject {registry_options.subject!r} has no such field; "
                "it has "
                f"{first_names_text(writer.field_names, 20)}"
            )
    return replace(options, registry=registry)


def _create_encoder(registry: RegistryOptions | None) -> PayloadEncoder | None:
    if registry is None:
        return None
    assert registry.schema is not None, "the driver has found it"
    return PayloadEncoder(registry.schema, registry.message)
