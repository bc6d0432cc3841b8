"""An object returns exactly the records that it was written from."""

import io
import threading
from random import Random
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.archived_log import CLUSTER_KEY, encode_object, make_batches, split_into_pieces
from waltz_core.archive.objects import SCHEMA, ArchiveObject, ObjectMetadata, ObjectWriter
from waltz_core.archive.store import ArchiveStore, StoreFile
from waltz_core.errors import ArchiveUnavailable, BadFormat, ChecksumMismatch
from waltz_core.records import raw_records
from waltz_core.records.record import GENESIS_CHAIN

SIZES = (3, 1, 40, 7)  # of batches; one is large enough for bulk processing
FIRST_ID = 1_000


def open_object(data):
    return ArchiveObject(io.BytesIO(data), "o")


@pytest.mark.parametrize("rows", [1, 2, 10, 45, 1_000])
def test_records_and_batches_are_read_back_byte_for_byte(rows):
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    archive_object = open_object(encode_object(records, lineage, rows=rows))
    pieces = [archive_object.read_row_group(group) for group in range(archive_object.group_count)]
    assert b"".join(bytes(piece.records) for piece in pieces) == b"".join(records)
    assert [n for piece in pieces for n in piece.lengths] == [len(record) for record in records]
    assert list(archive_object.verify()) == lineage
    assert archive_object.metadata == ObjectMetadata(
        CLUSTER_KEY, 3, FIRST_ID, lineage[-1].last, GENESIS_CHAIN, lineage[-1].chain
    )


def test_any_parquet_reader_can_read_the_rows():
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    table = pq.read_table(io.BytesIO(encode_object(records, lineage)))
    assert table.column("transaction_id").to_pylist() == list(
        range(FIRST_ID, FIRST_ID + sum(SIZES))
    )
    assert table.column("data").to_pylist() == [record[36:-4] for record in records]
    times = table.column("commit_time").to_pylist()
    assert times[: SIZES[0]] == [None] * SIZES[0]  # rule 3
    assert {each.timestamp() for each in times[SIZES[0] :]} == {1_700_000_000.0}


def test_row_groups_can_be_skipped_by_id_time_and_header():
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    metadata = pq.ParquetFile(io.BytesIO(encode_object(records, lineage))).metadata
    names = {name: index for index, name in enumerate(metadata.schema.names)}
    for name in ("transaction_id", "header", "commit_time"):
        assert metadata.row_group(1).column(names[name]).statistics.has_min_max, name
    assert metadata.row_group(1).column(names["transaction_id"]).statistics.min == FIRST_ID + 10


def test_a_changed_byte_is_detected_or_does_not_change_the_object():
    """The byte is in the pages, in the statistics or in the footer."""
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    whole = encode_object(records, lineage)
    rng, found = Random(4), 0
    for offset in rng.sample(range(len(whole)), 100):
        data = bytearray(whole)
        data[offset] ^= 1 << rng.randrange(8)
        try:
            reopened = open_object(bytes(data))
            assert list(reopened.verify()) == lineage
            pieces = [reopened.read_row_group(group) for group in range(reopened.group_count)]
            assert b"".join(bytes(piece.records) for piece in pieces) == b"".join(records)
        except (BadFormat, ChecksumMismatch) as error:
            found += str(error).startswith("archived object")
    assert found > 25


@pytest.mark.parametrize("rows", [1, 2, 10, 45, 1_000])
def test_read_outlines_returns_chains_and_record_crcs_without_the_records(rows):
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    archive_object = open_object(encode_object(records, lineage, rows=rows))
    outlines, entries = archive_object.read_outlines()
    assert entries == lineage
    assert [outline.first for outline in outlines] == list(
        range(FIRST_ID, FIRST_ID + len(records), rows)
    )
    pieces = [archive_object.read_row_group(group) for group in range(archive_object.group_count)]
    assert [outline.crcs for outline in outlines] == [
        raw_records.record_crcs(*piece[:2]) for piece in pieces
    ]


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_changed_byte_of_each_column_is_found(column):
    """Test also the column of commit times, which no chain or record CRC covers (rule 4)."""
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    data = bytearray(encode_object(records, lineage))
    chunk = open_object(bytes(data)).footer.row_group(2).column(SCHEMA.get_field_index(column))
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    with pytest.raises((BadFormat, ChecksumMismatch), match="object o: "):
        list(open_object(bytes(data)).verify())


def test_an_error_of_the_store_is_not_reported_as_damage():
    """Rule 5: PyArrow passes on the store's error unchanged."""

    class FailingSource(io.BytesIO):
        is_failing = False

        def read(self, *arguments):
            if self.is_failing:
                raise ArchiveUnavailable("no route")
            return super().read(*arguments)

    source = FailingSource(encode_object(*make_batches(FIRST_ID, sizes=SIZES)))
    archive_object = ArchiveObject(source, "o")
    source.is_failing = True
    for read in (
        lambda: archive_object.read_row_group(0),
        archive_object.read_outlines,
        lambda: ArchiveObject(source, "o"),
    ):
        with pytest.raises(ArchiveUnavailable, match="no route"):
            read()


def test_a_failed_read_on_a_pyarrow_thread_is_repeated_to_get_the_stores_error(tmp_path):
    """Rules 5 and 6; `native`, PyArrow's own reader, fails first."""

    class FailingFile(StoreFile):
        is_failing = False

        def read(self, byte_count=None):
            if self.is_failing:
                raise ArchiveUnavailable("no route")
            return super().read(byte_count)

    log = make_batches(FIRST_ID, sizes=SIZES)
    store = ArchiveStore(f"file://{tmp_path}")
    store.write("o", encode_object(*log))
    with FailingFile(store.open("o").native, "o") as source:
        archive_object = ArchiveObject(source, "o")
        source.is_failing = True
        assert list(archive_object.verify()) == log[1]  # with reads of `native` only
        archive_object._native = store.open("o").native
        archive_object._native.close()
        with pytest.raises(ArchiveUnavailable, match="no route"):
            archive_object.read_row_group(0)


def test_only_the_calling_thread_reads_from_a_python_file_object(tmp_path):
    """Rule 6: a file that another thread releases at the end of the process aborts the process."""
    readers = set()

    class Source(io.BytesIO):
        def read(self, *arguments):
            readers.add(threading.get_ident())
            return super().read(*arguments)

    class RecordingFile(StoreFile):
        def read(self, byte_count=None):
            readers.add(threading.get_ident())
            return super().read(byte_count)

    log = make_batches(FIRST_ID, sizes=SIZES)
    store = ArchiveStore(f"file://{tmp_path}")
    store.write("o", encode_object(*log))
    for source in (Source(encode_object(*log)), RecordingFile(store.open("o").native, "o")):
        archive_object = ArchiveObject(source, "o")
        assert list(archive_object.verify()) == archive_object.read_outlines()[1] == log[1]
    assert readers == {threading.get_ident()}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"chain_before": bytes(range(16))}, "with chain hash"),
        ({"chain": bytes(range(16))}, "with chain hash"),
        ({"last": FIRST_ID + 49}, "expected the last transaction 1049"),
        ({"first": FIRST_ID - 1}, "expected transaction ID 999, found 1000"),
    ],
)
def test_metadata_that_contradicts_the_rows_is_found(wrong, problem):
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    with pytest.raises((BadFormat, ChecksumMismatch), match=problem):
        list(open_object(encode_object(records, lineage, **wrong)).verify())


def test_a_missing_record_and_a_missing_batch_are_found():
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    with pytest.raises(BadFormat, match="expected transaction ID 1010, found 1011"):
        list(open_object(encode_object(records[:10] + records[11:], lineage)).verify())
    last = lineage[-1]
    with pytest.raises(ChecksumMismatch, match="expected the last transaction 1050"):
        list(open_object(encode_object(records[: -SIZES[-1]], [*lineage[:-1], last])).verify())


def test_a_file_that_is_not_an_object_is_rejected():
    with pytest.raises(BadFormat, match="object o: "):
        open_object(b"not Parquet")
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(encode_object(records, lineage))).select([0, 1]), sink)
    with pytest.raises(BadFormat, match="expected the columns"):
        open_object(sink.getvalue())
    with pytest.raises(BadFormat, match="expected object format 1, found 2"):
        ObjectMetadata.from_bytes(b'{"format": 2}')
    with pytest.raises(BadFormat, match="file is not valid:"):
        ObjectMetadata.from_bytes(b"{}")


def test_a_footer_with_wrong_row_counts_is_found():
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    archive_object = open_object(encode_object(records, lineage, rows=10))
    archive_object.footer = SimpleNamespace(row_group=lambda group: SimpleNamespace(num_rows=45))
    with pytest.raises(BadFormat, match="object o: "):
        archive_object.read_outlines()


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_several_pieces_are_written_as_one_row_group_with_the_same_rows(rows):
    """Pieces may end within batches, and one of them may have no commit time."""
    records, lineage = make_batches(FIRST_ID, sizes=SIZES)
    whole = encode_object(records, lineage, rows=len(records))
    sink = io.BytesIO()
    writer = ObjectWriter(sink, open_object(whole).metadata)
    writer.write_row_group(split_into_pieces(records, lineage, rows))
    writer.close()
    assert open_object(sink.getvalue()).group_count == 1
    assert list(open_object(sink.getvalue()).verify()) == lineage
    assert pq.read_table(sink).equals(pq.read_table(io.BytesIO(whole)))
