"""Records, batches and segments for the tests of the storage's parts."""

import os
import resource
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import record_crcs
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_PREFIX,
    LineageEntry,
    next_chain,
)
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME
from waltz_core.storage.files.format import (
    NEW_PARTITION_INFOS,
    OFFSET_BYTES,
    SEGMENT_HEADER_BYTES,
    SLOT_BLOCK_BYTES,
    AckedMarker,
    LineageHeader,
    SegmentHeader,
    Slot,
    encode_entry,
    segment_name,
)
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log.log_recovery import open_log
from waltz_sim.world.simulated_disk import SimDisk

KEY = bytes(range(16))
ROOT = Path("/storage")
BLANK = SegmentHeader(5, KEY, 2, 0)


def make_run(first, sizes, seed=0):
    """Return contiguous records with data of these sizes, and their lengths."""
    parts = []
    for position, size in enumerate(sizes):
        data = Random(f"{seed} {first + position}").randbytes(size)
        head = RECORD_PREFIX.pack(first + position, bytes(16), 7, size, crc32(data))
        parts.append(head + data + crc32(head + data).to_bytes(4, "big"))
    return b"".join(parts), np.array([len(part) for part in parts], dtype=np.int64)


def make_entries(records, lengths, first, chain, session, counts):
    """Return the entries of batches with the given numbers of these records."""
    crcs = record_crcs(records, lengths)
    entries = []
    at = first
    for count in counts:
        part = crcs[4 * (at - first) : 4 * (at - first + count)]
        chain = next_chain(chain, at, at + count - 1, session, part)
        entries.append(LineageEntry(at, at + count - 1, session, 5, chain))
        at += count
    return entries


def make_batches(first, counts, chain=GENESIS_CHAIN, *, sizes=20, session=1, seed=0):
    """Return records, lengths and entries of batches with the given numbers of records."""
    records, lengths = make_run(first, [sizes] * sum(counts), seed)
    return records, lengths, make_entries(records, lengths, first, chain, session, counts)


def new_disk():
    disk = SimDisk()
    disk.make_directory(ROOT)
    return disk


def new_segment(disk, first=0, chain=GENESIS_CHAIN):
    return Segment.create(disk, ROOT, BLANK._replace(first=first), chain)


def open_segment(disk, first=0):
    return Segment.open(disk, ROOT, first, partition_id=2, cluster_key=KEY)


def fill_segment(segment, counts, chain=GENESIS_CHAIN, seed=0):
    """Append batches to a segment and sync it, index included; return records and entries."""
    records, lengths, entries = make_batches(segment.next_id, counts, chain, seed=seed)
    segment.append(lengths, records)
    segment.append_entries(entries, BEFORE_FIRST)
    segment.sync()
    segment.sync_index()
    return records, entries


def make_segments(disk, *counts_of_each):
    """Return segments with batches of the given numbers of records, and all records and entries."""
    segments = Segments(disk, ROOT, BLANK, [new_segment(disk)])
    records, entries = b"", []
    for position, counts in enumerate(counts_of_each):
        chain = entries[-1].chain if entries else GENESIS_CHAIN
        if position:
            segments.add(5, chain)
        more, new_entries = fill_segment(segments.current, counts, chain)
        records += more
        entries += new_entries
    return segments, records, entries


def open_names(directory):
    """Return the files under a directory that this process has open, by their names."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listed directory
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.is_relative_to(directory):
                found.add(str(path.relative_to(directory)))
    return found


def forge_log(directory, segment_count, *, dirty):
    """Write the files of a log with many segments of two records, without the engine."""
    chain = GENESIS_CHAIN
    for first in range(0, 2 * segment_count, 2):
        records, _, entries = make_batches(first, [2], chain)
        header = BLANK._replace(first=first)
        lineage = LineageHeader(header, chain)
        entry = encode_entry(entries[0], first - 1, segment_crc=lineage.segment_crc, position=0)
        offsets = [SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + len(records) // 2]
        index = b"".join(one.to_bytes(OFFSET_BYTES, "big") for one in offsets)
        for suffix, content in (
            (".seg", header.encode() + records),
            (".idx", header.encode() + index),
            (".chn", lineage.encode() + entry),
        ):
            with open(directory / segment_name(first, suffix), "wb") as file:
                file.write(content)
        chain = entries[0].chain
    marker = AckedMarker(2 * segment_count - 1, chain)
    sequence = NEW_PARTITION_INFOS[1].sequence
    slot = Slot(
        2, control_file_sequence=sequence, promised=1, last_session=1, acked=marker, dirty=dirty
    )
    older = replace(slot, sequence=-1)
    blocks = [one.encode().ljust(SLOT_BLOCK_BYTES, b"\0") for one in (older, slot)]
    (directory / SLOTS_FILE_NAME).write_bytes(b"".join(blocks))


def open_and_read_all(directory, descriptors_max, open_files_max):
    """Open a log, read each segment with a limit of descriptors; return IDs and peak MiB."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_max, descriptors_max))
    disk = RealDisk(open_files_max)
    segments, slots = open_log(disk, directory, BLANK, NEW_PARTITION_INFOS[1], trust_fsync=True)
    assert not slots.slot.suspect
    assert slots.slot.damaged == ()
    assert {one.first + 1 for one in segments.all} == {one.last for one in segments.all}
    opened_mib = peak_mib()
    for segment in segments.all:
        assert segments.record_crcs(segment.first, segment.last) is not None
        assert segments.entry_of(segment.first).last == segment.last
    return segments.last_id, opened_mib, peak_mib()


def peak_mib():
    """Return the peak memory of this process; `getrusage` would include its parent's peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) // 1024
