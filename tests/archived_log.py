"""Logs as archives: batches of random records, objects and manifests of them."""

import io
from random import Random
from typing import NamedTuple

import numpy as np

from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry
from waltz_core.archive.objects import ObjectFacts, ObjectWriter, Piece
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, ReqId, next_chain

KEY = bytes(range(16))
PARTITION = 3
STAMP = 1_700_000_000_000


def batches_from(first, *, sizes, chain=GENESIS_CHAIN, seed=0, stamp=STAMP):
    """Return the records of some batches, and their lineage; the first batch has no stamp."""
    rng, records, lineage = Random(seed), [], []
    for number, size in enumerate(sizes):
        crcs = b""
        last = first + size - 1
        for transaction_id in range(first, last + 1):
            data = rng.randbytes(rng.choice((0, 5, 300)))
            req_id = ReqId(7, number, PARTITION, transaction_id - first)
            header = rng.randrange(-9, 9)
            record = raw_records.encode_record(transaction_id, req_id, header, data, crc32(data))
            records.append(record)
            crcs += record[-4:]
        chain = next_chain(chain, first, last, number, crcs)
        lineage.append(LineageEntry(first, last, number, stamp * (number > 0), chain))
        first = last + 1
    return records, lineage


def pieces_of(records, lineage, rows):
    """Yield the records in pieces of the given number of rows."""
    for start in range(0, len(records), rows):
        part = records[start : start + rows]
        low, high = lineage[0].first + start, lineage[0].first + start + len(part) - 1
        inside = [each for each in lineage if each.first <= high and each.last >= low]
        yield Piece(b"".join(part), np.array([len(each) for each in part]), inside)


def object_of(records, lineage, *, rows=10, chain_before=GENESIS_CHAIN, **changes):
    """Return the bytes of an object with row groups of the given number of rows."""
    first = lineage[0].first
    facts = ObjectFacts(KEY, PARTITION, first, lineage[-1].last, chain_before, lineage[-1].chain)
    sink = io.BytesIO()
    writer = ObjectWriter(sink, facts._replace(**changes))
    for piece in pieces_of(records, lineage, rows):
        writer.add([piece])
    writer.close()
    return sink.getvalue()


class ArchivedLog(NamedTuple):
    """A log from ID 0 on that is archived as a whole."""

    records: list[bytes]
    lineage: list[LineageEntry]
    manifest: Manifest
    name: str
    crc: int

    def batches(self, first, last):
        """Return the chain before first..last, and the batches that touch it."""
        inside = [each for each in self.lineage if each.last >= first and each.first <= last]
        at = self.lineage.index(inside[0])
        return self.lineage[at - 1].chain if at else GENESIS_CHAIN, tuple(inside)


def write_manifest(store, manifest, name):
    """Write the head of a manifest; return its CRC-32."""
    store.write(name, manifest.to_bytes())
    return crc32(manifest.to_bytes())


def write_archive(
    store,
    *,
    objects=4,
    sizes=(3, 1, 40, 7),
    rows=10,
    page_entries=0,
    unused=(),
    seed=0,
    folder=f"{PARTITION}",
):
    """Write a log of some objects, with a manifest and one page of its oldest `page_entries`.

    Each object has one batch without and some with commit times: `STAMP` and one second more for
    each object. `unused` are the sizes of batches in the first object that the manifest omits.
    """
    manifest = Manifest(KEY, PARTITION, 0, 0, -1, GENESIS_CHAIN)
    records, lineage, chain = [], [], GENESIS_CHAIN
    for number in range(objects):
        stamp = STAMP + 1_000 * number
        made, batches = batches_from(
            len(records),
            sizes=(*sizes, *(unused if number == 0 else ())),
            chain=chain,
            seed=seed + number,
            stamp=stamp,
        )
        data = object_of(made, batches, rows=rows, chain_before=chain)
        used = batches[: len(sizes)]
        name = f"{folder}/objects/{number}.parquet"
        store.write(name, data)
        entry = ObjectEntry(
            name=name,
            first=used[0].first,
            last=used[-1].last,
            chain=used[-1].chain,
            file_bytes=len(data),
            file_crc=crc32(data),
            record_bytes=sum(map(len, made)),
            commit_ms_min=stamp,
            commit_ms_max=stamp,
        )
        manifest = manifest.with_object(entry)
        records += made[: sum(sizes)]
        lineage, chain = lineage + used, used[-1].chain
    if page_entries:
        page = ManifestPage(manifest.newest[:page_entries])
        store.write(f"{folder}/manifests/page", page.to_bytes())
        manifest = manifest.with_page(f"{folder}/manifests/page", page)
    name = f"{folder}/manifests/{manifest.version}"
    return ArchivedLog(records, lineage, manifest, name, write_manifest(store, manifest, name))
