"""Options that declare columns of payloads, for verbs that return tables."""

import re
from collections.abc import Callable, Sequence
from typing import Final

import click
import pyarrow as pa
from click.decorators import FC

from waltz_core.cli import shared_options as options
from waltz_core.client.api.scanning import DATA_FORMATS, ArrowSchema
from waltz_core.config.settings import nearest
from waltz_core.errors import BadConfig
from waltz_core.records.batches import READ_SCHEMA

_TYPES = {
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
_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
TYPES_TEXT: Final = f"{', '.join(_TYPES)}, decimal(P,S)"

data_format = click.option(
    "--data-format",
    type=options.NamedChoice(list(DATA_FORMATS)),
    default="msgpack",
    help="format of the payloads, if --column names columns of the payload [default: msgpack]",
)


def column_option(default: str) -> Callable[[FC], FC]:
    """Declare `--column`."""
    return click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="NAME[:TYPE]",
        help="NAME is a column of the log, NAME:TYPE a column of the payload; repeat the option "
        f"for several [default: {default}]",
    )


def schema_of(columns: Sequence[str]) -> ArrowSchema | None:
    """Return the schema of `--column`; None without any.

    Raises:
        BadConfig: a column has no type and is not the log's, or its type is unknown.
    """
    fields = []
    for each in columns:
        name, colon, kind = each.partition(":")
        if not colon and name in READ_SCHEMA.names:
            fields.append(READ_SCHEMA.field(name))
        elif not colon:
            raise BadConfig(
                f"--column: the log has no column {name!r}. Hint: use NAME:TYPE for a column "
                f"of the payload; the columns of the log are {', '.join(READ_SCHEMA.names)}."
            )
        else:
            fields.append(pa.field(name, _type_of(name, kind)))
    return pa.schema(fields) if fields else None


def _type_of(name: str, kind: str) -> pa.DataType:
    if kind in _TYPES:
        return _TYPES[kind]
    if found := _DECIMAL.fullmatch(kind):
        try:
            return pa.decimal128(int(found[1]), int(found[2]))
        except ValueError as error:
            raise BadConfig(f"--column {name}: {error}") from None
    raise BadConfig(
        f"--column {name}: expected one of the types {TYPES_TEXT}, found {kind!r}"
        f"{nearest(kind, list(_TYPES))}"
    )
