"""`waltz-core disk dump-segment | segment-statistic`: print the content of segments.

Rules:
    1. A dump is printed while the segment is read, so even a large segment needs only a few blocks
       of memory.
    2. With `--json`, a dump is one JSON value per line, each with a field `kind`; a statistic is
       one JSON list.
    3. Damaged parts are printed as they are, and the dump continues after them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.disk.disk_text import (
    Deserializer,
    fields_json,
    find_deserializer,
    payload_json,
    payload_text,
    utc_text,
    uuid_text,
)
from waltz_core.cli.output import print_json, print_result
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadConfig
from waltz_core.offline.file_findings import records_text
from waltz_core.offline.files import OpenFile, segment_path, segments_at
from waltz_core.offline.layout import (
    FILE_HEADER_BYTES,
    OFFSET_BYTES,
    BatchEntry,
    FileHeader,
    crc32,
    decode_file_header,
)
from waltz_core.offline.lineage import batches_of, header_of
from waltz_core.offline.records import Gap, RecordFields, is_record_at, record_fields, walk_records
from waltz_core.offline.statistic import PERCENTILES, SegmentStatistic, percentile, statistic_of


class _DumpOptions(NamedTuple):
    """The parts of a segment to print, and their format."""

    header: bool
    records: bool
    batches: bool
    first: int
    last: int | None
    deserializer: Deserializer | None
    as_json: bool


class DumpArguments(NamedTuple):
    """The values of the options of `dump-segment`."""

    as_json: bool
    metadata: bool
    record: bool
    batches: bool
    transaction: int | None
    first: int | None
    last: int | None
    data: bool
    deserializer: str | None


@subcommand
@click.option("-m", "--metadata", is_flag=True, help="print the header of the segment")
@click.option(
    "-r",
    "--record",
    is_flag=True,
    help="print the records [without -m, -r and --batches: the header and the records]",
)
@click.option("--batches", is_flag=True, help="print the batches, from the .chn file")
@click.option(
    "-t",
    "--transaction",
    type=int,
    metavar="ID",
    help="print only the record with this transaction ID",
)
@click.option("--first", type=int, metavar="ID", help="the first transaction ID to print")
@click.option("--last", type=int, metavar="ID", help="the last transaction ID to print")
@click.option("--data", is_flag=True, help="also print the data of the records")
@click.option(
    "-d",
    "--deserializer",
    metavar="NAME",
    help="deserializer of the data: bytes, msgpack, json, or module:name of a function that takes "
    "bytes, or of a serializer; implies --data [default: bytes]",
)
@options.storage_file_options("a .seg file, a partition's directory or a storage directory")
@options.gather_options(DumpArguments)
def dump_segment(arguments: DumpArguments, *, path: Path, partitions: list[int] | None) -> int:
    """Print the header, records and batches of segments."""
    options = _parse_dump_arguments(arguments)
    paths = segments_at(path, partitions)
    for dumped_path, next_path in zip(paths, [*paths[1:], None], strict=True):
        has_next_segment = next_path is not None and next_path.parent == dumped_path.parent
        ends_before = (
            has_next_segment and next_path is not None and int(next_path.stem) <= options.first
        )
        begins_after = options.last is not None and int(dumped_path.stem) > options.last
        if not ends_before and not begins_after:
            _dump_segment(dumped_path, options)
    return 0


def _parse_dump_arguments(arguments: DumpArguments) -> _DumpOptions:
    first, last = arguments.first, arguments.last
    if arguments.transaction is not None:
        if first is not None or last is not None:
            raise BadConfig("--transaction cannot be used with --first or --last")
        first = last = arguments.transaction
    for option, value in (("--first", first), ("--last", last)):
        if value is not None and value < 0:
            raise BadConfig(f"{option}: expected a transaction ID of at least 0, found {value}")
    selects_part = arguments.metadata or arguments.record or arguments.batches
    name = arguments.deserializer or ("bytes" if arguments.data else None)
    return _DumpOptions(
        header=arguments.metadata or not selects_part,
        records=arguments.record or not selects_part,
        batches=arguments.batches,
        first=first or 0,
        last=last,
        deserializer=None if name is None else find_deserializer(name),
        as_json=arguments.as_json,
    )


# ---------------------------------------------------------------------------------------------
# One segment


def _dump_segment(path: Path, options: _DumpOptions) -> None:
    first = int(path.stem)
    batches = _read_batches(path, options) if options.batches else iter(())
    with OpenFile(path) as file:
        header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
        if options.header:
            _show_header(path, header, file.size(), options)
        if options.records:
            batches = _dump_records(file, path, first, options, batches)
    for batch in batches:
        _show_batch(batch, options)


def _dump_records(
    file: OpenFile, path: Path, first: int, options: _DumpOptions, batches: Iterator[BatchEntry]
) -> Iterator[BatchEntry]:
    """Print records, and each batch after its last record; return the remaining batches."""
    if not options.as_json:
        _show_record_titles(options)
    batch = next(batches, None)
    for part in walk_records(file, *_start_position(file, path, first, options.first)):
        if options.last is not None and part.first > options.last:
            break
        if isinstance(part, Gap):
            _show_gap(part, options)
            continue
        run = part.starting_at(options.first)
        if options.last is not None:
            run = run.up_to(options.last)
        for position in range(run.length):
            start, end = run.bounds[position], run.bounds[position + 1]
            _show_record(run.offset + start, run.data[start:end], options)
            while batch is not None and batch.last <= run.first + position:
                _show_batch(batch, options)
                batch = next(batches, None)
    return iter(()) if batch is None else _prepend_batch(batch, batches)


def _prepend_batch(batch: BatchEntry, batches: Iterator[BatchEntry]) -> Iterator[BatchEntry]:
    yield batch
    yield from batches


def _start_position(file: OpenFile, path: Path, first: int, wanted_id: int) -> tuple[int, int]:
    """Return the ID and the offset of the first record to read, from the index if possible."""
    index = segment_path(path.parent, first, ".idx")
    if wanted_id > first and index.exists():
        with OpenFile(index) as entries:
            start_offset = FILE_HEADER_BYTES + OFFSET_BYTES * (wanted_id - first)
            offset = int.from_bytes(entries.pread(OFFSET_BYTES, start_offset), "big", signed=True)
        if is_record_at(file, wanted_id, offset):
            return wanted_id, offset
    return first, FILE_HEADER_BYTES


def _read_batches(path: Path, options: _DumpOptions) -> Iterator[BatchEntry]:
    chain_path = segment_path(path.parent, int(path.stem), ".chn")
    if not chain_path.exists():
        return
    with OpenFile(chain_path) as file:
        for placed_entry in batches_of(file, header_of(file).segment_crc):
            batch = placed_entry.batch
            if batch.last < options.first:
                continue
            if options.last is not None and batch.first > options.last and not batch.errors:
                return
            yield batch


def _show_header(path: Path, header: FileHeader, size: int, options: _DumpOptions) -> None:
    if options.as_json:
        print_json({"kind": "segment", "file": str(path), **_header_json(header), "bytes": size})
        return
    print_result(
        f"{path}: version {header.version}, partition {header.partition}, first transaction "
        f"{header.first}, {size} bytes, created {utc_text(header.created_ms)}, cluster key "
        f"{uuid_text(header.cluster_key)}"
    )
    for error in header.errors:
        print_result(f"  wrong: {error}")


def _header_json(header: FileHeader) -> dict[str, object]:
    return {
        "version": header.version,
        "created": utc_text(header.created_ms),
        "created_ms": header.created_ms,
        "cluster_key": uuid_text(header.cluster_key),
        "partition": header.partition,
        "first": header.first,
        "wrong": header.errors,
    }


_RECORD_TITLES = (
    "id",
    "offset",
    "client/gen/part/seq",
    "header",
    "bytes",
    "CRC",
    "data CRC",
    "valid",
)
_RECORD_ROW = "{:>10}  {:>11}  {:>20}  {:>11}  {:>8}  {:8}  {:8}  {:5}"


def _show_record_titles(options: _DumpOptions) -> None:
    print_result(
        (
            _RECORD_ROW.format(*_RECORD_TITLES)
            + ("  data" if options.deserializer is not None else "")
        ).rstrip()
    )


def _show_record(offset: int, record: bytes, options: _DumpOptions) -> None:
    fields = record_fields(record)
    data = record[36:-4]
    stated_crc = int.from_bytes(record[-4:], "big")
    has_valid_crc = crc32(record[:-4]) == stated_crc and crc32(data) == fields.data_crc
    if options.as_json:
        print_json(
            _record_json(fields, offset, stated_crc, has_valid_crc=has_valid_crc)
            | _data_json(options, data)
        )
        return
    identity = f"{fields.client}/{fields.generation}/{fields.partition}/{fields.sequence}"
    row = _RECORD_ROW.format(
        fields.transaction_id,
        offset,
        identity,
        fields.header,
        fields.data_bytes,
        f"{stated_crc:08x}",
        f"{fields.data_crc:08x}",
        "yes" if has_valid_crc else "NO",
    )
    print_result(
        row.rstrip()
        if options.deserializer is None
        else f"{row}  {payload_text(options.deserializer, data)}"
    )


def _record_json(
    fields: RecordFields, offset: int, crc: int, *, has_valid_crc: bool
) -> dict[str, object]:
    return {
        "kind": "record",
        "transaction_id": fields.transaction_id,
        "offset": offset,
        "client_id": fields.client,
        "generation": fields.generation,
        "partition": fields.partition,
        "sequence": fields.sequence,
        "header": fields.header,
        "data_bytes": fields.data_bytes,
        "crc": f"{crc:08x}",
        "data_crc": f"{fields.data_crc:08x}",
        "is_valid": has_valid_crc,
    }


def _data_json(options: _DumpOptions, data: bytes) -> dict[str, object]:
    return {} if options.deserializer is None else payload_json(options.deserializer, data)


def _show_gap(gap: Gap, options: _DumpOptions) -> None:
    if options.as_json:
        print_json(
            {
                "kind": "gap",
                "first": gap.first,
                "next_id": gap.next_id,
                "offset": gap.offset,
                "end": gap.end,
                "why": gap.reason,
            }
        )
        return
    records = f"records from {gap.first} on"
    if gap.next_id is not None:
        records = records_text(gap.first, gap.next_id - 1)
    print_result(f"  {records}: bytes {gap.offset}..{gap.end - 1} cannot be read: {gap.reason}")


def _show_batch(batch: BatchEntry, options: _DumpOptions) -> None:
    if options.as_json:
        value = {"kind": "batch", **fields_json(batch), "chain": batch.chain.hex()}
        print_json({**value, "stamp": utc_text(batch.stamp_ms)})
        return
    errors = f"  wrong: {'; '.join(batch.errors)}" if batch.errors else ""
    print_result(
        f"  batch {batch.first}..{batch.last}, session {batch.session}, "
        f"{utc_text(batch.stamp_ms)}, chain hash {batch.chain.hex()}, written when "
        f"transactions up to {batch.synced} were synced{errors}"
    )


# ---------------------------------------------------------------------------------------------
# Statistics


@subcommand
@options.storage_file_options("a .seg file, a partition's directory or a storage directory")
def segment_statistic(*, path: Path, partitions: list[int] | None, as_json: bool) -> int:
    """Print sizes, IDs, batches and sessions of segments."""
    statistics = (statistic_of(path) for path in segments_at(path, partitions))
    if as_json:
        print_json([_statistic_json(statistic) for statistic in statistics])
        return 0
    for statistic in statistics:
        _print_statistic(statistic)
    return 0


def _sizes_json(statistic: SegmentStatistic) -> dict[str, object] | None:
    if not statistic.record_count:
        return None
    return {
        "min": min(statistic.sizes),
        "mean": round(statistic.data_bytes / statistic.record_count, 1),
        "max": max(statistic.sizes),
        **{f"p{percent}": percentile(statistic.sizes, percent) for percent in PERCENTILES},
    }


def _statistic_json(statistic: SegmentStatistic) -> dict[str, object]:
    batches: dict[str, object] = {
        "count": statistic.batch_count,
        "wrong": statistic.invalid_batch_count,
    }
    if statistic.batch_count:
        batches["records_min"] = min(statistic.batch_records)
        records = sum(size * count for size, count in statistic.batch_records.items())
        batches["records_mean"] = round(records / statistic.batch_count, 1)
        batches["records_max"] = max(statistic.batch_records)
    return {
        "file": str(statistic.path),
        **_header_json(statistic.header),
        "bytes": statistic.file_bytes,
        "records": statistic.record_count,
        "last": statistic.last,
        "unreadable_bytes": statistic.unreadable_bytes,
        "data_bytes": statistic.data_bytes,
        "data_size": _sizes_json(statistic),
        "clients": len(statistic.clients),
        "batches": batches,
        "sessions": [
            {
                "session": session,
                "batches": session_statistic.batch_count,
                "first": session_statistic.first,
                "last": session_statistic.last,
                "first_stamp_ms": session_statistic.first_stamp_ms,
                "last_stamp_ms": session_statistic.last_stamp_ms,
            }
            for session, session_statistic in statistic.sessions.items()
        ],
        "first_stamp_ms": statistic.first_stamp_ms,
        "last_stamp_ms": statistic.last_stamp_ms,
        "index_entries": statistic.index_entry_count,
        "index_density": statistic.index_density,
    }


def _print_statistic(statistic: SegmentStatistic) -> None:
    value = _statistic_json(statistic)
    print_result(
        f"{statistic.path}: {statistic.file_bytes} bytes, created "
        f"{utc_text(statistic.header.created_ms)}"
    )
    ids = (
        "none"
        if statistic.last is None
        else f"{statistic.last - statistic.record_count + 1}..{statistic.last}"
    )
    if statistic.unreadable_bytes:
        ids = (
            f"{statistic.header.first}..{statistic.last}; "
            f"{statistic.unreadable_bytes} bytes cannot be read"
        )
    print_result(
        f"  records   {statistic.record_count}, transaction IDs {ids}, of {len(statistic.clients)} "
        "clients"
    )
    sizes = _sizes_json(statistic)
    if sizes is not None:
        sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        print_result(f"  data      {statistic.data_bytes} bytes: {sizes_text}")
    batches = value["batches"]
    assert isinstance(batches, dict)
    if statistic.batch_count:
        print_result(
            f"  batches   {statistic.batch_count}, of {batches['records_min']} to "
            f"{batches['records_max']} records, mean {batches['records_mean']}"
        )
    if statistic.invalid_batch_count:
        print_result(f"  batches   {statistic.invalid_batch_count} entries are wrong")
    for session, session_statistic in statistic.sessions.items():
        ids = f"{session_statistic.first}..{session_statistic.last}"
        print_result(f"  session   {session}: {session_statistic.batch_count} batches, {ids}")
    if statistic.first_stamp_ms is not None and statistic.last_stamp_ms is not None:
        seconds = (statistic.last_stamp_ms - statistic.first_stamp_ms) / 1000
        span = f"{utc_text(statistic.first_stamp_ms)} to {utc_text(statistic.last_stamp_ms)}"
        print_result(f"  committed {span}, {seconds:.1f} s")
    entries_per_record = statistic.index_density
    index_text = (
        "missing"
        if entries_per_record is None
        else f"{statistic.index_entry_count} entries, {entries_per_record:.2f} a record"
    )
    print_result(f"  index     {index_text}")
