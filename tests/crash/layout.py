"""Reads and writes the files of Waltz 0.13; written only from the description of their layout.

This module checks the code of Waltz, so it uses only `struct` and `zlib`, and no code of Waltz.
`read_directory` reads the same data as a 0.13 storage at its start: the control file, and the
records of each segment up to the first incomplete record.

    waltz-storage.ctl     128 bytes of header, 76 for each partition: its number and two structures
    <p>/<19 digits>.seg   128 bytes of header, records without gaps
    <p>/<19 digits>.idx   128 bytes of header, 8 for each record: its position in the .seg file
"""

import struct
import zlib
from itertools import pairwise
from typing import NamedTuple

HEADER_BYTES = 128
CONTROL = struct.Struct(">iq16si96x")
SEGMENT = struct.Struct(">iq16siq88x")
STRUCTURE = struct.Struct(">qqqiiI")
RECORD = struct.Struct(">q16siiI")
CHECKPOINT = 1000


class StartFailed(Exception):
    """The error with which a 0.13 storage fails to start."""


class Structure(NamedTuple):
    session: int
    low_water_mark: int
    local_low_water_mark: int
    flags: int
    sequence: int


class Control(NamedTuple):
    key: bytes
    partitions: tuple[Structure, ...]


def read_control(data):
    version, _, key, count = CONTROL.unpack_from(data)
    if version != 0 or len(data) != HEADER_BYTES + 76 * count or any(data[32:128]):
        raise StartFailed("control file")
    partitions = []
    for number in range(count):
        offset = HEADER_BYTES + 76 * number
        if struct.unpack_from(">i", data, offset) != (number,):
            raise StartFailed(f"partition {number} of the control file")
        partitions.append(_newer(data, offset + 4))
    return Control(key, tuple(partitions))


def _newer(data, at):
    good = []
    for start in (at, at + 36):
        *fields, crc = STRUCTURE.unpack_from(data, start)
        if zlib.crc32(data[start : start + 32]) == crc:
            good.append(Structure(*fields))
    sequences = [one.sequence for one in good]
    if not good or len(set(sequences)) != len(sequences):
        raise StartFailed("both structures of a partition")
    return max(good, key=lambda one: one.sequence)


def control(key, structures, created_ms=1):
    """Return the bytes of a control file with the given current structures."""
    parts = [CONTROL.pack(0, created_ms, key, len(structures))]
    for number, structure in enumerate(structures):
        older = structure._replace(sequence=structure.sequence - 1)
        parts.append(struct.pack(">i", number) + _structure(older) + _structure(structure))
    return b"".join(parts)


def _structure(one):
    plain = STRUCTURE.pack(*one, 0)[:32]
    return plain + zlib.crc32(plain).to_bytes(4, "big")


def record(number, data, header=7):
    """Return the bytes of a record."""
    request = struct.pack(">iiii", 1, 1, 0, number)
    plain = RECORD.pack(number, request, header, len(data), zlib.crc32(data)) + data
    return plain + zlib.crc32(plain).to_bytes(4, "big")


def segment(key, partition, first, records):
    """Return the bytes of a .seg file and of its .idx file."""
    head = SEGMENT.pack(0, 1, key, partition, first)
    at, starts = HEADER_BYTES, []
    for record in records:
        starts.append(at.to_bytes(8, "big"))
        at += len(record)
    return head + b"".join(records), head + b"".join(starts)


def whole_record(data, at, number):
    """Return the record with an ID at a position; None if it is missing or incomplete."""
    if at + RECORD.size + 4 > len(data):
        return None
    found, _, _, length, data_crc = RECORD.unpack_from(data, at)
    end = at + RECORD.size + length
    if found != number or length < 0 or end + 4 > len(data):
        return None
    if int.from_bytes(data[end : end + 4], "big") != zlib.crc32(data[at:end]):
        return None
    if zlib.crc32(data[at + RECORD.size : end]) != data_crc:
        return None
    return data[at : end + 4]


def read_segment(data, index, *, key, partition, first, local_low_water_mark):
    """Return the records that a 0.13 storage finds in a segment after a crash."""
    for name, each in (("seg", data), ("idx", index)):
        if len(each) < HEADER_BYTES:
            raise StartFailed(f"{name} of {first} is cut")
        if SEGMENT.unpack_from(each)[2:] != (key, partition, first) or each[:4] != bytes(4):
            raise StartFailed(f"header of {name} of {first}")
    starts = [int.from_bytes(index[at : at + 8], "big") for at in range(128, len(index) - 7, 8)]
    highest = first + len(starts) - 1
    start = highest
    if highest > local_low_water_mark:
        start = max(local_low_water_mark, CHECKPOINT * ((highest - 1) // CHECKPOINT))
    records = []
    if start <= first:
        at = HEADER_BYTES
    else:
        # 0.13 trusts all records before `start`, and checks the record with this ID.
        bounds = starts[: start - first + 1]
        records = [data[a:b] for a, b in pairwise(bounds)]
        at = bounds[-1]
        if whole_record(data, at, start) is None:
            raise StartFailed(f"segment {first} is corrupted at {start}")
    while (one := whole_record(data, at, first + len(records))) is not None:
        records.append(one)
        at += len(one)
    return records


def read_directory(files, root):
    """Return the records of all assigned partitions by partition; `files` is path -> bytes."""
    found = read_control(files[root / "waltz-storage.ctl"])
    logs = {}
    for partition, info in enumerate(found.partitions):
        names = sorted(
            path for path in files if path.parent == root / str(partition) and path.suffix == ".seg"
        )
        if not info.flags & 4 or not names:
            continue
        records = []
        for path in names:
            if int(path.stem) != len(records) or len(path.stem) != 19:
                raise StartFailed(f"segment {path.stem} behind {len(records)} records")
            index = files.get(path.with_suffix(".idx"))
            if index is None:
                raise StartFailed(f"no index for {path.stem}")
            records += read_segment(
                files[path],
                index,
                key=found.key,
                partition=partition,
                first=len(records),
                local_low_water_mark=info.local_low_water_mark,
            )
        logs[partition] = records
    return found, logs
