"""Records, batches and segments for the tests of the storage's parts."""

from pathlib import Path
from random import Random

import numpy as np

from waltz_core.checksum import crc32
from waltz_core.raw_records import record_crcs
from waltz_core.record import BEFORE_FIRST, GENESIS_CHAIN, RECORD_PREFIX, LineageEntry, next_chain
from waltz_core.sim.disk import SimDisk
from waltz_core.storage.format import SegmentHeader
from waltz_core.storage.segment import Segment
from waltz_core.storage.segments import Segments

KEY = bytes(range(16))
ROOT = Path("/storage")
BLANK = SegmentHeader(5, KEY, 2, 0)


def make_run(first, sizes, seed=0):
    """Return records with data of these sizes, back to back, and their lengths."""
    parts = []
    for place, size in enumerate(sizes):
        data = Random(f"{seed} {first + place}").randbytes(size)
        head = RECORD_PREFIX.pack(first + place, bytes(16), 7, size, crc32(data))
        parts.append(head + data + crc32(head + data).to_bytes(4, "big"))
    return b"".join(parts), np.array([len(one) for one in parts], dtype=np.int64)


def make_batches(first, counts, chain=GENESIS_CHAIN, *, sizes=20, session=1, seed=0):
    """Return records, lengths and entries of batches of so many records."""
    records, lengths = make_run(first, [sizes] * sum(counts), seed)
    crcs = record_crcs(records, lengths)
    entries = []
    at = first
    for count in counts:
        part = crcs[4 * (at - first) : 4 * (at - first + count)]
        chain = next_chain(chain, at, at + count - 1, session, part)
        entries.append(LineageEntry(at, at + count - 1, session, 5, chain))
        at += count
    return records, lengths, entries


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
    """Return segments with batches of so many records in each, and all records and entries."""
    segments = Segments(disk, ROOT, BLANK, [new_segment(disk)])
    records, entries = b"", []
    for place, counts in enumerate(counts_of_each):
        chain = entries[-1].chain if entries else GENESIS_CHAIN
        if place:
            segments.add(5, chain)
        more, made = fill_segment(segments.current, counts, chain)
        records += more
        entries += made
    return segments, records, entries
