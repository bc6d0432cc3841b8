"""Archives of random logs: batches, objects and manifests."""

import io
from random import Random
from typing import NamedTuple

import numpy as np

from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry
from waltz_core.archive.objects import ArchivedRecords, ObjectMetadata, ObjectWriter
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, ReqId, next_chain

CLUSTER_KEY = bytes(range(16))
PARTITION_ID = 3
FIRST_COMMIT_MS = 1_700_000_000_000


def make_batches(first, *, sizes, chain=GENESIS_CHAIN, seed=0, stamp=FIRST_COMMIT_MS):
    """Return the records of some batches, and their lineage; the first batch has no stamp."""
    rng, records, lineage = Random(seed), [], []
    for number, size in enumerate(sizes):
        crcs = b""
        last = first + size - 1
        for transaction_id in range(first, last + 1):
            data = rng.randbytes(rng.choice((0, 5, 300)))
            req_id = ReqId(7, number, PARTITION_ID, transaction_id - first)
            header = rng.randrange(-9, 9)
            record = raw_records.encode_record(transaction_id, req_id, header, data, crc32(data))
            records.append(record)
            crcs += record[-4:]
        chain = next_chain(chain, first, last, number, crcs)
        lineage.append(LineageEntry(first, last, number, stamp * (number > 0), chain))
        first = last + 1
    return records, lineage


def split_into_pieces(records, lineage, rows):
    """Yield the records in pieces of the given number of rows."""
    for start in range(0, len(records), rows):
        part = records[start : start + rows]
        low, high = lineage[0].first + start, lineage[0].first + start + len(part) - 1
        inside = [entry for entry in lineage if entry.first <= high and entry.last >= low]
        yield ArchivedRecords(b"".join(part), np.array([len(each) for each in part]), inside)


def encode_object(records, lineage, *, rows=10, chain_before=GENESIS_CHAIN, **changes):
    """Return the bytes of an object with row groups of the given number of rows."""
    first = lineage[0].first
    metadata = ObjectMetadata(
        CLUSTER_KEY, PARTITION_ID, first, lineage[-1].last, chain_before, lineage[-1].chain
    )
    sink = io.BytesIO()
    writer = ObjectWriter(sink, metadata._replace(**changes))
    for piece in split_into_pieces(records, lineage, rows):
        writer.write_row_group([piece])
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
        inside = [entry for entry in self.lineage if entry.last >= first and entry.first <= last]
        index = self.lineage.index(inside[0])
        return self.lineage[index - 1].chain if index else GENESIS_CHAIN, tuple(inside)


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
    folder=f"{PARTITION_ID}",
):
    """Write a log of objects, and a manifest with one page for its oldest `page_entries` objects.

    In each object, one batch has no commit time. The other batches have `FIRST_COMMIT_MS` plus one
    second per object. At its end, the first object also has batches of the sizes `unused`. The
    manifest omits these batches.
    """
    manifest = Manifest(CLUSTER_KEY, PARTITION_ID, 0, 0, -1, GENESIS_CHAIN)
    records, lineage, chain = [], [], GENESIS_CHAIN
    for number in range(objects):
        stamp = FIRST_COMMIT_MS + 1_000 * number
        log_batches, batches = make_batches(
            len(records),
            sizes=(*sizes, *(unused if number == 0 else ())),
            chain=chain,
            seed=seed + number,
            stamp=stamp,
        )
        data = encode_object(log_batches, batches, rows=rows, chain_before=chain)
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
            record_bytes=sum(map(len, log_batches)),
            commit_ms_min=stamp,
            commit_ms_max=stamp,
        )
        manifest = manifest.with_object(entry)
        records += log_batches[: sum(sizes)]
        lineage, chain = lineage + used, used[-1].chain
    if page_entries:
        page = ManifestPage(manifest.newest_objects[:page_entries])
        store.write(f"{folder}/manifests/page", page.to_bytes())
        manifest = manifest.with_page(f"{folder}/manifests/page", page)
    name = f"{folder}/manifests/{manifest.version}"
    return ArchivedLog(records, lineage, manifest, name, write_manifest(store, manifest, name))
