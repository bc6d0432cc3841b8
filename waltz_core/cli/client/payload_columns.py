"""The options that declare the format and the columns of payloads (`export`, `follow`)."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import pyarrow as pa
from click.decorators import FC

from waltz_core.cli import shared_options as options
from waltz_core.client import Avro, Protobuf
from waltz_core.client.api.scanning import DATA_FORMATS, ArrowSchema, DataFormat
from waltz_core.errors import BadConfig
from waltz_core.records.batches import READ_SCHEMA

_COLUMN_TYPES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_DECIMAL_PATTERN = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
COLUMN_TYPES_TEXT: Final = f"{', '.join(_COLUMN_TYPES)}, decimal(P,S)"

_SCHEMA_FORMATS: Final[dict[str, type[Avro] | type[Protobuf]]] = {
    "avro": Avro,
    "protobuf": Protobuf,
}


def payload_format_options(function: FC) -> FC:
    """Declare the options that describe the format of payloads."""
    for declare in (
        click.option(
            "--schema-registry-auth-file",
            type=options.PATH_TYPE,
            metavar="FILE",
            help="a file with user:password for the schema registry",
        ),
        click.option(
            "--schema-registry",
            metavar="URL",
            help="schema registry of the payloads; avro and protobuf need it",
        ),
        click.option(
            "--data-format",
            type=options.SuggestingChoice([*DATA_FORMATS, *_SCHEMA_FORMATS]),
            default="msgpack",
            help="format of the payloads; used only for columns of the payload [default: msgpack]",
        ),
    ):
        function = declare(function)
    return function


def payload_format(name: str, registry: str | None, auth_file: Path | None) -> DataFormat:
    """Return the format of payloads that the options describe.

    Raises:
        BadConfig: the format needs a schema registry and none is given, or a schema registry
            or its auth file is given and the format needs none.
    """
    kind = _SCHEMA_FORMATS.get(name)
    if kind is not None and registry is not None:
        return kind(registry, auth_file=None if auth_file is None else str(auth_file))
    if kind is not None:
        raise BadConfig(f"--data-format {name} needs --schema-registry URL")
    if registry is not None or auth_file is not None:
        raise BadConfig(
            "--schema-registry and --schema-registry-auth-file need --data-format avro or protobuf"
        )
    return name


def column_option(default: str) -> Callable[[FC], FC]:
    """Declare `--column`; `default` describes the result without the option."""
    return click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="NAME[:TYPE]",
        help="NAME is a column of the log, NAME:TYPE a column of the payload; repeat the option "
        f"for several [default: {default}]",
    )


def declared_schema(columns: Sequence[str]) -> ArrowSchema | None:
    """Return the schema that the `--column` options declare; None without these options.

    Raises:
        BadConfig: the type of a column is unknown, or is missing although the column is not a
            column of the log.
    """
    fields = []
    for column in columns:
        name, colon, kind = column.partition(":")
        if not colon and name in READ_SCHEMA.names:
            fields.append(READ_SCHEMA.field(name))
        elif not colon:
            raise BadConfig(
                f"--column: the log has no column {name!r}. Hint: use NAME:TYPE for a column "
                f"of the payload; the columns of the log are {', '.join(READ_SCHEMA.names)}."
            )
        else:
            fields.append(pa.field(name, _parse_type(name, kind)))
    return pa.schema(fields) if fields else None


def _parse_type(name: str, kind: str) -> pa.DataType:
    if kind in _COLUMN_TYPES:
        return _COLUMN_TYPES[kind]
    if match := _DECIMAL_PATTERN.fullmatch(kind):
        try:
            return pa.decimal128(int(match[1]), int(match[2]))
        except ValueError as error:
            raise BadConfig(f"--column {name}: {error}") from None
    raise BadConfig(
        f"--column {name}: expected one of the types {COLUMN_TYPES_TEXT}, found {kind!r}"
    )
