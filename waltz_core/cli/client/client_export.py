"""`waltz-core client export`: export transactions as Parquet, CSV or JSON."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import click
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from waltz_core.cli import shared_options as options
from waltz_core.cli.client import payload_columns
from waltz_core.cli.output import print_error, to_one_line
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import WaltzClient
from waltz_core.client.api.scanning import ArrowReader
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.strict_json import to_json

# The size of a row group in a Parquet file. All batches of a row group are in memory at the same
# time.
ROW_GROUP_BYTES = 64 * 1024 * 1024


@subcommand
@click.option(
    "--format",
    "file_format",
    type=options.SuggestingChoice(["parquet", "csv", "json"]),
    required=True,
    help="format of the output; json writes one line for each transaction",
)
@click.option(
    "--output",
    type=options.PATH_TYPE,
    metavar="FILE",
    help="the file to write [default: standard output]",
)
@click.option(
    "--partition",
    "partitions",
    type=int,
    multiple=True,
    metavar="P",
    help="the partition; repeat the option for several [default: all]",
)
@click.option(
    "--first",
    type=int,
    metavar="ID",
    help="the first transaction to export, by its ID [default: the first available one]",
)
@click.option(
    "--last",
    type=int,
    metavar="ID",
    help="the last transaction to export, by its ID [default: the high-water mark]",
)
@payload_columns.column_option("the columns of the log")
@payload_columns.payload_format_options
@options.connect_option
def export(  # noqa: PLR0913 - one for each option
    *,
    file_format: str,
    output: Path | None,
    partitions: tuple[int, ...],
    first: int | None,
    last: int | None,
    columns: tuple[str, ...],
    data_format: str,
    schema_registry: str | None,
    schema_registry_auth_file: Path | None,
    connect: str,
) -> int:
    """Write transactions to a file or to standard output."""
    if file_format == "parquet" and output is None and sys.stdout.isatty():
        raise BadConfig("a Parquet file cannot be printed on a terminal. Hint: use --output FILE.")
    schema = payload_columns.declared_schema(columns)
    payloads = payload_columns.payload_format(
        data_format, schema_registry, schema_registry_auth_file
    )
    with WaltzClient(connect) as client:
        reader = client.scan(
            partitions or None,
            start=first,
            stop=None if last is None else last + 1,
            schema=schema,
            data_format=payloads,
        )
        with reader, _open_output(output) as output_file:
            count = _WRITERS[file_format](reader, output_file)
    print_error(f"exported {count} transactions")
    return 0


export.help_details = (
    f"Types of payload columns: {payload_columns.COLUMN_TYPES_TEXT}. If a payload does not have "
    "such a value, the command fails with an error that names the transaction, and does not write "
    "FILE. "
    "CSV and JSON have binary values as text, in which bytes that are not UTF-8 are escaped "
    "with a backslash. JSON has decimals as text, and dates and timestamps in ISO 8601."
)


@contextmanager
def _open_output(output: Path | None) -> Iterator[IO[bytes]]:
    """Open the output; a file gets its final name only when it is complete."""
    if output is None:
        sys.stdout.flush()
        with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as sink:
            yield sink
        return
    if output.exists() and not output.is_file():  # for example a device, which must not be replaced
        raise BadConfig(
            f"--output {output}: expected a regular file, found another kind. Hint: without "
            "--output, the command writes to standard output."
        )
    part = output.with_name(f"{output.name}.part")
    try:
        try:
            with part.open("wb") as sink:
                yield sink
            part.replace(output)
        except OSError as error:
            raise BadConfig(
                f"--output {output} cannot be written: {error.strerror or error}"
            ) from error
    finally:
        with suppress(OSError):  # the file was renamed, or was not created
            part.unlink()


# ---------------------------------------------------------------------------------------------
# The formats


def _write_parquet(reader: ArrowReader, sink: IO[bytes]) -> int:
    count = 0
    with pyarrow.parquet.ParquetWriter(sink, reader.schema) as writer:
        for group in _row_groups(reader):
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            count += group.num_rows
    return count


def _row_groups(reader: ArrowReader) -> Iterator[Any]:
    """Combine batches into tables of about `ROW_GROUP_BYTES`, and yield the tables."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in reader:
        waiting.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _write_csv(reader: ArrowReader, sink: IO[bytes]) -> int:
    count = 0
    head = _flatten(reader.schema.empty_table())
    with pyarrow.csv.CSVWriter(sink, head.schema) as writer:
        for batch in reader:
            writer.write_table(_flatten(pa.Table.from_batches([batch])))
            count += batch.num_rows
    return count


def _flatten(table: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return a table with struct fields as columns, and with binary values as text."""
    table = table.flatten()
    for index, part in enumerate(table.schema):
        if pa.types.is_binary(part.type):
            texts = [
                None if value is None else to_one_line(value) for value in table[index].to_pylist()
            ]
            table = table.set_column(index, part.name, pa.array(texts, pa.string()))
    return table


def _write_json(reader: ArrowReader, sink: IO[bytes]) -> int:
    count = 0
    for batch in reader:
        for row in batch.to_pylist():
            try:
                sink.write(
                    to_json({name: _to_json_value(value) for name, value in row.items()}) + b"\n"
                )
            except ValueError as error:
                raise BadFormat(f"line {count + 1} of the output: {error}") from None
            count += 1
    return count


def _to_json_value(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Decimal):
        return format(value, "f")  # text, because JSON readers parse numbers as doubles
    return value.isoformat() if isinstance(value, date | datetime) else value


_WRITERS: dict[str, Callable[[ArrowReader, IO[bytes]], int]] = {
    "parquet": _write_parquet,
    "csv": _write_csv,
    "json": _write_json,
}
