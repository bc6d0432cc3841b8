"""`waltz-core disk dump-segment | segment-statistic`: print the content of segments.

Rules:
    1. A dump is printed while the segment is read, so any segment needs only a few blocks of
       memory.
    2. With `--json`, a dump has one value per line, each with its `kind`; a statistic is one list.
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
    help="print the records [default without -m, -r and --batches: header, records and batches]",
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
def dump_segment(chosen: DumpArguments, *, path: Path, partitions: list[int] | None) -> int:
    """Print the header, records and batches of segments."""
    wanted = _parse_dump_arguments(chosen)
    paths = segments_at(path, partitions)
    for each, behind in zip(paths, [*paths[1:], None], strict=True):
        is_next = behind is not None and behind.parent == each.parent
        ends_before = is_next and behind is not None and int(behind.stem) <= wanted.first
        begins_after = wanted.last is not None and int(each.stem) > wanted.last
        if not ends_before and not begins_after:
            _dump_segment(each, wanted)
    return 0


def _parse_dump_arguments(chosen: DumpArguments) -> _DumpOptions:
    first, last = chosen.first, chosen.last
    if chosen.transaction is not None:
        if first is not None or last is not None:
            raise BadConfig("--transaction cannot be used with --first or --last")
        first = last = chosen.transaction
    for option, value in (("--first", first), ("--last", last)):
        if value is not None and value < 0:
            raise BadConfig(f"{option}: expected a transaction ID of at least 0, found {value}")
    is_part = chosen.metadata or chosen.record or chosen.batches
    name = chosen.deserializer or ("bytes" if chosen.data else None)
    return _DumpOptions(
        header=chosen.metadata or not is_part,
        records=chosen.record or not is_part,
        batches=chosen.batches,
        first=first or 0,
        last=last,
        deserializer=None if name is None else find_deserializer(name),
        as_json=chosen.as_json,
    )


# ---------------------------------------------------------------------------------------------
# One segment


def _dump_segment(path: Path, wanted: _DumpOptions) -> None:
    first = int(path.stem)
    batches = _read_batches(path, wanted) if wanted.batches else iter(())
    with OpenFile(path) as file:
        header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
        if wanted.header:
            _show_header(path, header, file.size(), wanted)
        if wanted.records:
            batches = _dump_records(file, path, first, wanted, batches)
    for batch in batches:
        _show_batch(batch, wanted)


def _dump_records(
    file: OpenFile, path: Path, first: int, wanted: _DumpOptions, batches: Iterator[BatchEntry]
) -> Iterator[BatchEntry]:
    """Print records, and each batch after its last record; return the remaining batches."""
    if not wanted.as_json:
        _show_record_titles(wanted)
    batch = next(batches, None)
    for part in walk_records(file, *_start_position(file, path, first, wanted.first)):
        if wanted.last is not None and part.first > wanted.last:
            break
        if isinstance(part, Gap):
            _show_gap(part, wanted)
            continue
        run = part.starting_at(wanted.first)
        if wanted.last is not None:
            run = run.up_to(wanted.last)
        for position in range(run.length):
            start, end = run.bounds[position], run.bounds[position + 1]
            _show_record(run.offset + start, run.data[start:end], wanted)
            while batch is not None and batch.last <= run.first + position:
                _show_batch(batch, wanted)
                batch = next(batches, None)
    return iter(()) if batch is None else _prepend_batch(batch, batches)


def _prepend_batch(batch: BatchEntry, rest: Iterator[BatchEntry]) -> Iterator[BatchEntry]:
    yield batch
    yield from rest


def _start_position(file: OpenFile, path: Path, first: int, wanted: int) -> tuple[int, int]:
    """Return the ID and the offset of the first record to read, from the index if possible."""
    index = segment_path(path.parent, first, ".idx")
    if wanted > first and index.exists():
        with OpenFile(index) as entries:
            at = FILE_HEADER_BYTES + OFFSET_BYTES * (wanted - first)
            offset = int.from_bytes(entries.pread(OFFSET_BYTES, at), "big", signed=True)
        if is_record_at(file, wanted, offset):
            return wanted, offset
    return first, FILE_HEADER_BYTES


def _read_batches(path: Path, wanted: _DumpOptions) -> Iterator[BatchEntry]:
    chain_path = segment_path(path.parent, int(path.stem), ".chn")
    if not chain_path.exists():
        return
    with OpenFile(chain_path) as file:
        for placed in batches_of(file, header_of(file).segment_crc):
            batch = placed.batch
            if batch.last < wanted.first:
                continue
            if wanted.last is not None and batch.first > wanted.last and not batch.errors:
                return
            yield batch


def _show_header(path: Path, header: FileHeader, size: int, wanted: _DumpOptions) -> None:
    if wanted.as_json:
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


def _show_record_titles(wanted: _DumpOptions) -> None:
    print_result(
        (
            _RECORD_ROW.format(*_RECORD_TITLES)
            + ("  data" if wanted.deserializer is not None else "")
        ).rstrip()
    )


def _show_record(offset: int, record: bytes, wanted: _DumpOptions) -> None:
    found = record_fields(record)
    data = record[36:-4]
    stated = int.from_bytes(record[-4:], "big")
    has_valid_crc = crc32(record[:-4]) == stated and crc32(data) == found.data_crc
    if wanted.as_json:
        print_json(
            _record_json(found, offset, stated, has_valid_crc=has_valid_crc)
            | _data_json(wanted, data)
        )
        return
    identity = f"{found.client}/{found.generation}/{found.partition}/{found.sequence}"
    row = _RECORD_ROW.format(
        found.transaction_id,
        offset,
        identity,
        found.header,
        found.data_bytes,
        f"{stated:08x}",
        f"{found.data_crc:08x}",
        "yes" if has_valid_crc else "NO",
    )
    print_result(
        row.rstrip()
        if wanted.deserializer is None
        else f"{row}  {payload_text(wanted.deserializer, data)}"
    )


def _record_json(
    found: RecordFields, offset: int, crc: int, *, has_valid_crc: bool
) -> dict[str, object]:
    return {
        "kind": "record",
        "transaction_id": found.transaction_id,
        "offset": offset,
        "client_id": found.client,
        "generation": found.generation,
        "partition": found.partition,
        "sequence": found.sequence,
        "header": found.header,
        "data_bytes": found.data_bytes,
        "crc": f"{crc:08x}",
        "data_crc": f"{found.data_crc:08x}",
        "is_valid": has_valid_crc,
    }


def _data_json(wanted: _DumpOptions, data: bytes) -> dict[str, object]:
    return {} if wanted.deserializer is None else payload_json(wanted.deserializer, data)


def _show_gap(gap: Gap, wanted: _DumpOptions) -> None:
    if wanted.as_json:
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
    what = f"records from {gap.first} on"
    if gap.next_id is not None:
        what = records_text(gap.first, gap.next_id - 1)
    print_result(f"  {what}: bytes {gap.offset}..{gap.end - 1} cannot be read: {gap.reason}")


def _show_batch(batch: BatchEntry, wanted: _DumpOptions) -> None:
    if wanted.as_json:
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
    found = (statistic_of(path) for path in segments_at(path, partitions))
    if as_json:
        print_json([_statistic_json(statistic) for statistic in found])
        return 0
    for statistic in found:
        _print_statistic(statistic)
    return 0


def _sizes_json(found: SegmentStatistic) -> dict[str, object] | None:
    if not found.records:
        return None
    return {
        "min": min(found.sizes),
        "mean": round(found.data_bytes / found.records, 1),
        "max": max(found.sizes),
        **{f"p{percent}": percentile(found.sizes, percent) for percent in PERCENTILES},
    }


def _statistic_json(found: SegmentStatistic) -> dict[str, object]:
    batches: dict[str, object] = {"count": found.batches, "wrong": found.invalid_batches}
    if found.batches:
        batches["records_min"] = min(found.batch_records)
        records = sum(size * count for size, count in found.batch_records.items())
        batches["records_mean"] = round(records / found.batches, 1)
        batches["records_max"] = max(found.batch_records)
    return {
        "file": str(found.path),
        **_header_json(found.header),
        "bytes": found.file_bytes,
        "records": found.records,
        "last": found.last,
        "unreadable_bytes": found.unreadable_bytes,
        "data_bytes": found.data_bytes,
        "data_size": _sizes_json(found),
        "clients": len(found.clients),
        "batches": batches,
        "sessions": [
            {
                "session": session,
                "batches": statistic.batches,
                "first": statistic.first,
                "last": statistic.last,
                "first_stamp_ms": statistic.first_stamp_ms,
                "last_stamp_ms": statistic.last_stamp_ms,
            }
            for session, statistic in found.sessions.items()
        ],
        "first_stamp_ms": found.first_stamp_ms,
        "last_stamp_ms": found.last_stamp_ms,
        "index_entries": found.index_entries,
        "index_density": found.index_density,
    }


def _print_statistic(found: SegmentStatistic) -> None:
    value = _statistic_json(found)
    print_result(
        f"{found.path}: {found.file_bytes} bytes, created {utc_text(found.header.created_ms)}"
    )
    ids = "none" if found.last is None else f"{found.last - found.records + 1}..{found.last}"
    if found.unreadable_bytes:
        ids = f"{found.header.first}..{found.last}; {found.unreadable_bytes} bytes cannot be read"
    print_result(
        f"  records   {found.records}, transaction IDs {ids}, of {len(found.clients)} clients"
    )
    sizes = _sizes_json(found)
    if sizes is not None:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        print_result(f"  data      {found.data_bytes} bytes: {shown}")
    batches = value["batches"]
    assert isinstance(batches, dict)
    if found.batches:
        print_result(
            f"  batches   {found.batches}, of {batches['records_min']} to "
            f"{batches['records_max']} records, mean {batches['records_mean']}"
        )
    if found.invalid_batches:
        print_result(f"  batches   {found.invalid_batches} entries are wrong")
    for session, statistic in found.sessions.items():
        ids = f"{statistic.first}..{statistic.last}"
        print_result(f"  session   {session}: {statistic.batches} batches, {ids}")
    if found.first_stamp_ms is not None and found.last_stamp_ms is not None:
        seconds = (found.last_stamp_ms - found.first_stamp_ms) / 1000
        span = f"{utc_text(found.first_stamp_ms)} to {utc_text(found.last_stamp_ms)}"
        print_result(f"  committed {span}, {seconds:.1f} s")
    density = found.index_density
    shown = (
        "missing" if density is None else f"{found.index_entries} entries, {density:.2f} a record"
    )
    print_result(f"  index     {shown}")
