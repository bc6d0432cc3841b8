"""`waltz-core follow`: apply the log to tables continuously.

`tables/follower.py` contains the loop; docs/tables.md describes the guarantees.
"""

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.client import payload_columns
from waltz_core.cli.client.followed_tables import TABLE_FORMATS, TableOptions, read_tables
from waltz_core.cli.output import print_error, print_json
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import WaltzClient
from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.client.read.start_times import last_id_before_time, stamp_ms_of
from waltz_core.config import ClientConfig
from waltz_core.errors import BadConfig
from waltz_core.tables.followed_log import ChangeDecoder, ClientFollowedLog, LogStateReader
from waltz_core.tables.follower import Follower, TableProgress, errors_of_table
from waltz_core.tables.parquet_table import FollowedParquetTable
from waltz_core.tables.row_changes import ChangeRules
from waltz_core.tables.table_marks import MarkMap, TableMarks

if TYPE_CHECKING:
    from waltz_core.tables.delta_table import FollowedDeltaTable

BATCH_TRANSACTIONS_DEFAULT = 100_000
INTERVAL_S_DEFAULT = 1.0


class FollowOptions(NamedTuple):
    """The values of the options of `follow`."""

    connect: str
    table: str | None
    tables: Path | None
    format: str | None
    key: tuple[str, ...]
    columns: tuple[str, ...]
    data_format: str
    schema_registry: str | None
    schema_registry_auth_file: Path | None
    encryption_keys: str
    require_encryption: bool
    headers: tuple[int, ...]
    delete_headers: tuple[int, ...]
    delete_where: str | None
    changes: str | None
    follower: str
    start_marks: str | None
    start_time: str | None
    until: str | None
    batch_transactions: int
    interval_s: float
    as_json: bool


@subcommand
@options.gather_options(FollowOptions)
@options.argument(
    "table", "[TABLE]", "directory of the table, or its URL in an object store", required=False
)
@click.option(
    "--tables",
    type=options.PATH_TYPE,
    metavar="FILE",
    help="a TOML file with a section for each of several tables; replaces TABLE and its options",
)
@click.option(
    "--format",
    type=options.SuggestingChoice(TABLE_FORMATS),
    help="format of the table; a parquet table has no key, and the follower only adds rows to it "
    "[default: delta]",
)
@click.option(
    "--key",
    multiple=True,
    metavar="NAME",
    help="a key column; repeat the option for several",
)
@payload_columns.column_option("the columns are inferred from the payloads")
@payload_columns.payload_format_options
@click.option(
    "--encryption-keys",
    metavar="KEYS",
    default="",
    help="source of the keys for encrypted payloads: a directory with a file for each key, or "
    "module:function [default: payloads are not decrypted]",
)
@click.option(
    "--require-encryption",
    is_flag=True,
    help="fail if a payload is not encrypted",
)
@click.option(
    "--header",
    "headers",
    type=int,
    multiple=True,
    metavar="H",
    help="header of the transactions to apply; repeat the option for several [default: all]",
)
@click.option(
    "--delete-header",
    "delete_headers",
    type=int,
    multiple=True,
    metavar="H",
    help="header of transactions that delete the row with their key; repeat the option for several",
)
@click.option(
    "--delete-where",
    metavar="CONDITION",
    help="condition for transactions that delete the row with their key: a boolean column, or a "
    "comparison such as \"op = 'D'\"",
)
@click.option(
    "--changes",
    metavar="MODULE:FUNCTION",
    help="a Python function that returns the changes (inserts, updates and deletes) of "
    "transactions",
)
@click.option(
    "--follower",
    default="follow",
    metavar="NAME",
    help="name of the follower in the commits of the table [default: follow]",
)
@click.option(
    "--start-marks",
    metavar="JSON",
    help="start of a new table: for each partition, the last transaction ID to skip, for example "
    '{"0": 41} [default: the first available transaction]',
)
@click.option(
    "--start-time",
    metavar="TIME",
    help="start of a new table: the earliest commit time of its transactions, with a time zone",
)
@click.option(
    "--until",
    type=options.SuggestingChoice(["now"]),
    help="end when the table has all transactions that were in the log at the start [default: "
    "continue until interrupted]",
)
@click.option(
    "--batch-transactions",
    type=int,
    default=BATCH_TRANSACTIONS_DEFAULT,
    metavar="N",
    help=f"maximum number of transactions in one commit [default: {BATCH_TRANSACTIONS_DEFAULT}]",
)
@click.option(
    "--interval-s",
    type=float,
    default=INTERVAL_S_DEFAULT,
    metavar="S",
    help=f"seconds between requests for new transactions [default: {INTERVAL_S_DEFAULT:g}]",
)
@options.json_option
@options.connect_option
def follow(options: FollowOptions) -> int:
    """Apply the log to one or several tables, batch by batch."""
    if options.interval_s <= 0:
        raise BadConfig(f"--interval-s: expected more than 0, found {options.interval_s:g}")
    payloads = payload_columns.payload_format(
        options.data_format, options.schema_registry, options.schema_registry_auth_file
    )
    tables = _table_options(options)
    if any(each.changes for each in tables) and "" not in sys.path:
        sys.path.insert(0, "")  # the function may be in the current directory
    tables_and_decoders = []
    for each in tables:
        with errors_of_table(each.location):
            declared_columns = each.declared_columns()
            rules = each.change_rules(declared_columns)
            columns = declared_columns if rules.function is None else rules.function.columns
            table = _open_table(each, columns, rules)
            schema = table.columns if declared_columns is None else declared_columns
            decoder = ChangeDecoder(
                each.location,
                schema=schema,
                rules=rules,
                data_format=payloads,
                headers=each.headers,
                has_keys=bool(options.encryption_keys),
            )
        tables_and_decoders.append((table, decoder))
    start_marks = _parse_start_marks(options)
    since_ms = _parse_start_time(options)
    config = ClientConfig(
        encryption_keys=options.encryption_keys, encryption_required=options.require_encryption
    )
    with WaltzClient(options.connect, config) as client, ProgressLine() as line:
        state_reader = LogStateReader(client, interval_s=options.interval_s)
        if since_ms is not None:
            start_marks = _marks_before_time(client, state_reader, since_ms)
        name = TableMarks(options.follower, client.cluster().key.hex(), start_marks)
        follower = Follower(
            ClientFollowedLog(
                client, state_reader, [decoder for _, decoder in tables_and_decoders]
            ),
            [
                TableProgress(table, decoder.location, name._replace(rules=decoder.stored_rules))
                for table, decoder in tables_and_decoders
            ],
            batch_transactions=options.batch_transactions,
            on_progress=lambda done, total: line.show(done, total, "transactions applied"),
        )
        marks = follower.run(dict(state_reader.state().marks) if options.until else None)
    marks_by_location = {
        decoder.location: each
        for (_, decoder), each in zip(tables_and_decoders, marks, strict=True)
    }
    return _print_marks(options, marks_by_location)


follow.help_details = (
    "Each batch of transactions is one commit of the table. The commit also contains the marks up "
    "to which the table contains the log. So the table is correct even if the command is killed at "
    "any time, and a repeated command continues at the marks of the table. "
    f"Types of payload columns: {payload_columns.COLUMN_TYPES_TEXT}."
)


def _open_table(
    table: TableOptions, columns: ArrowSchema | None, rules: ChangeRules
) -> "FollowedDeltaTable | FollowedParquetTable":
    if table.format == "parquet":
        return FollowedParquetTable(table.location, columns, rules)
    # deltalake is an optional dependency, and its import is slow.
    from waltz_core.tables.delta_table import FollowedDeltaTable  # noqa: PLC0415

    return FollowedDeltaTable(table.location, columns, rules.key)


def _table_options(options: FollowOptions) -> list[TableOptions]:
    """Return the table that the options describe, or the tables that the file describes."""
    options_of_table = {name: getattr(options, name) for name in TableOptions._fields[1:]}
    if options.tables is None:
        if options.table is None or not (options.key or options.format == "parquet"):
            found_text = "neither" if options.table is None else "TABLE without --key"
            raise BadConfig(
                f"follow: expected TABLE and --key, or --tables FILE; found {found_text}"
            )
        return [TableOptions(options.table, **options_of_table)]
    if options.table is not None or any(options_of_table.values()):
        raise BadConfig(
            "--tables cannot be used with TABLE or with one of the options "
            f"{', '.join(options_of_table)}. Hint: write them into the file."
        )
    return read_tables(options.tables)


def _parse_start_marks(options: FollowOptions) -> MarkMap:
    """Parse `--start-marks`; without this option, return no marks."""
    if options.start_marks is None:
        return {}
    if options.start_time is not None:
        raise BadConfig("expected either --start-marks or --start-time, found both")
    try:
        value = json.loads(options.start_marks)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value or not all(map(_is_mark, value, value.values())):
        raise BadConfig(
            '--start-marks: expected a mark for each partition, such as {"0": 41, "1": -1}, found '
            f"{options.start_marks!r}"
        )
    return {int(partition): mark for partition, mark in value.items()}


def _is_mark(partition: str, mark: object) -> bool:
    return partition.isascii() and partition.isdecimal() and type(mark) is int and mark >= -1


def _parse_start_time(options: FollowOptions) -> int | None:
    """Parse `--start-time` into milliseconds since 1970; None without the option."""
    if options.start_time is None:
        return None
    try:
        time = datetime.fromisoformat(options.start_time)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise BadConfig(
            "--start-time: expected a time with a time zone such as 2026-11-28T10:00:00Z, found "
            f"{options.start_time!r}"
        )
    return int(time.timestamp() * 1000)


def _marks_before_time(
    client: WaltzClient, state_reader: LogStateReader, since_ms: int
) -> Mapping[int, int]:
    """Return the start marks for a start time.

    The mark of a partition is before its first transaction that may have been committed at this
    time or later.
    """
    log = state_reader.state()
    start_marks = {}
    for partition, mark in log.marks.items():
        first = log.first_available_ids[partition]
        last_older_id = last_id_before_time(
            partial(stamp_ms_of, client, partition), mark, since_ms, first - 1
        )
        # If all available transactions are at or after the time, expired transactions may be, too.
        # The follower reports these transactions as lost.
        start_marks[partition] = (
            last_older_id - 1 if 0 < first == last_older_id + 1 else last_older_id
        )
    return start_marks


def _print_marks(options: FollowOptions, marks_by_location: Mapping[str, TableMarks]) -> int:
    if options.as_json:
        marks = {
            location: {
                "marks": {str(part): mark for part, mark in sorted(table_marks.marks.items())}
            }
            for location, table_marks in marks_by_location.items()
        }
        print_json({"tables": marks} if options.table is None else marks[options.table])
        return 0
    for location, table_marks in marks_by_location.items():
        marks_text = ",".join(f"{part}:{mark}" for part, mark in sorted(table_marks.marks.items()))
        print_error(f"table {location} contains the log up to the marks {marks_text}")
    return 0
