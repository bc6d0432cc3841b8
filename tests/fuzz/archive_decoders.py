"""Decoders of the files of an archive: manifests, pages, objects."""

import io
import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from tests.archived_log import encode_object, make_batches
from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import BINARY_WORDS, TEXT_WORDS
from tests.fuzz.zookeeper_decoders import CHAIN, KEY, saved_manifest, sealed_frame
from waltz_core.archive.file_names import manifest_version_of, origin_of, writer_cluster_key
from waltz_core.archive.manifest import Expiry, Manifest, ManifestPage
from waltz_core.archive.object_index import ObjectIndex
from waltz_core.archive.objects import ArchiveObject, ObjectMetadata
from waltz_core.errors import BadFormat, ChecksumMismatch

DAMAGED = (BadFormat, ChecksumMismatch)
NAME_BYTES_MAX = 1_024  # the limit for a key in S3


def manifests() -> list[bytes]:
    saved = saved_manifest()
    full = saved.manifest.with_expiry(2, 1_700_000_000_000)
    assert full.expiries == (Expiry(2, 1_700_000_000_000),)
    return [saved.head, full.to_bytes(), Manifest(KEY.bytes, 0, 0, 0, -1, CHAIN).to_bytes()]


def decode_manifest(manifest_class, data: bytes) -> None:
    found = manifest_class.from_bytes(data, "f")
    assert manifest_class.from_bytes(found.to_bytes(), "f") == found


def objects() -> list[bytes]:
    records, lineage = make_batches(0, sizes=(2, 3))
    return [encode_object(records, lineage, rows=4)]


def changed_objects() -> list[bytes]:
    """Return objects whose pages have valid checksums, and values that no log has."""
    table = pq.read_table(io.BytesIO(objects()[0]))
    objects_found = []
    for name in table.column_names:
        column = table.column(name)
        for value in (None, -1, 0, (1 << 31) - 1, (1 << 63) - 1, -(1 << 63)):
            for where in (slice(0, 1), slice(0, None), slice(4, 5)):
                values = column.to_pylist()
                changed = [value] * len(values[where])
                if pa.types.is_binary(column.type):
                    changed = [None if value is None else bytes(value % 7) for _ in changed]
                values[where] = changed
                try:
                    array = pa.array(values, column.type)
                except (pa.ArrowException, OverflowError):  # the value is too wide for the column
                    continue
                objects_found.append(written(table, name, array))
    objects_found.append(written(table.drop_columns(["header"]), "", None))
    objects_found.append(written(table[:0], "", None))
    return objects_found


def written(table: pa.Table, name: str, array: pa.Array | None) -> bytes:
    if array is not None:
        index = table.column_names.index(name)
        field = pa.field(name, array.type, nullable=array.null_count > 0)
        table = table.set_column(index, field, array)
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=4, write_page_checksum=True, use_dictionary=False)
    return sink.getvalue()


def read_object(data: bytes) -> None:
    """Read an object completely, verify it, and build its index; each step may detect an error."""
    archive_object = ArchiveObject(data, "o")
    groups = range(min(archive_object.group_count, 100))
    uses = [partial(archive_object.read_row_group, group) for group in groups]
    uses += [lambda: list(archive_object.verify()), lambda: ObjectIndex(archive_object)]
    wrong = None
    for each in uses:
        try:
            each()
        except DAMAGED as error:
            wrong = error
    if wrong is not None:
        raise wrong


def facts() -> list[bytes]:
    found = pq.ParquetFile(io.BytesIO(objects()[0])).metadata.metadata[b"waltz"]
    assert json.loads(found)["format"] == 1
    return [found]


def names() -> list[bytes]:
    origin = f"7-{CHAIN.hex()}-2"
    folder = f"{KEY}/3"
    return [
        f"{folder}/{each}".encode()
        for each in (
            f"objects/0-9-{origin}.parquet",
            f"objects/0-9-{origin}.parquet.tmp",
            f"manifests/4-{origin}.json",
            f"manifests/4-{origin}-page.json",
        )
    ]


def decode_name(data: bytes) -> None:
    name = data[:NAME_BYTES_MAX].decode(errors="surrogateescape")
    manifest_version_of(name), origin_of(name), writer_cluster_key(name)


DECODERS = (
    Decoder(
        "manifest",
        partial(decode_manifest, Manifest),
        DAMAGED,
        manifests,
        sealed_frame,
        words=TEXT_WORDS,
    ),
    Decoder(
        "manifest-page",
        partial(decode_manifest, ManifestPage),
        DAMAGED,
        lambda: list(saved_manifest().pages),
        sealed_frame,
        words=TEXT_WORDS,
    ),
    Decoder(
        "archive-object",
        read_object,
        DAMAGED,
        lambda: objects() + changed_objects(),
        words=BINARY_WORDS,
        examples=10,
    ),
    Decoder("object-facts", ObjectMetadata.from_bytes, (BadFormat,), facts, words=TEXT_WORDS),
    Decoder("archive-name", decode_name, (), names, words=TEXT_WORDS),
)
