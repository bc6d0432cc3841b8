"""Archive objects: Parquet files from which the exact bytes of complete batches can be rebuilt.

Any reader of Parquet can use an object: a row is a transaction, and column `data` is its payload.
The bytes of each record can be computed from its row. The file's metadata contains the chain hash
before the object. From this hash and from the rows, the chain hash of each batch can be computed.

Rules (docs/decisions/047):
    1. An object has complete batches and consecutive IDs. A row group may end within a batch.
    2. `verify` rebuilds every record. It checks ID, length and CRC of the record, the bounds of the
       batches, and the hash chain from the first to the last batch. `verify` does not trust the
       file's metadata: the caller compares the result with the expected range and the expected
       chain hash.
    3. A commit stamp of 0 is stored as null. Records of Waltz 0.13 have no commit stamp.
    4. Each page of a column has a CRC-32. It protects the commit stamps, because record CRCs and
       chain hashes do not cover them.
    5. If the store that holds the object fails, the store's error is raised unchanged, because the
       object is not damaged.
    6. PyArrow's threads never read a Python file: if such a thread releases a Python file while the
       process exits, the process aborts. So the threads read `StoreFile.native`, a file of PyArrow.
       The errors of `native` do not show whether the store has failed or the object is damaged. So
       a failed read is repeated without threads. The repeated read raises the right error (rule 5).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records import arrow_buffers, raw_records, strict_json
from waltz_core.records.raw_records import I64, PREFIX_DTYPE, Buffer
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    Chain,
    LineageEntry,
    PartitionId,
    SessionId,
    TransactionId,
    next_chain,
)

OBJECT_FORMAT: Final = 1
_METADATA_KEY: Final = b"waltz"
SCHEMA: Final = pa.schema(
    [
        pa.field("transaction_id", pa.int64(), nullable=False),
        pa.field("client_id", pa.int32(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("sequence", pa.int32(), nullable=False),
        pa.field("header", pa.int32(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("data_crc", pa.uint32(), nullable=False),
        pa.field("record_crc", pa.uint32(), nullable=False),
        pa.field("commit_time", pa.timestamp("ms", tz="UTC")),
        pa.field("session_id", pa.int64(), nullable=False),
        pa.field("batch_first", pa.int64(), nullable=False),
        pa.field("batch_last", pa.int64(), nullable=False),
    ]
)
# The columns of the request ID, by its fields.
_REQ_ID_COLUMNS: Final = {
    "client_id": "client_id",
    "generation": "generation",
    "partition_id": "partition",
    "sequence": "sequence",
}
# The columns with statistics, so that readers can skip row groups. For payloads and checksums,
# statistics would only cost space.
_STATISTICS_COLUMNS: Final = ["transaction_id", "commit_time", "header"]
# The columns for an index of the object: its batches, and the record CRCs for the hash chain. They
# are adjacent in each row group. The IDs are not needed, because they are consecutive.
_INDEX_COLUMNS: Final = ["record_crc", "commit_time", "session_id", "batch_first", "batch_last"]
_ASCENDING_COLUMNS: Final = ("transaction_id", "sequence", "batch_first", "batch_last")
_READ_ERRORS: Final = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    OverflowError,
)


class ObjectMetadata(NamedTuple):
    """The metadata of an object: its partition, its range, and the chain hashes around it."""

    cluster_key: bytes
    partition_id: PartitionId
    first: TransactionId
    last: TransactionId
    chain_before: Chain
    chain: Chain

    def to_bytes(self) -> bytes:
        """Return the metadata as JSON."""
        values = {
            "format": OBJECT_FORMAT,
            "cluster_key": self.cluster_key.hex(),
            "partition": self.partition_id,
            "first": self.first,
            "last": self.last,
            "chain_before": self.chain_before.hex(),
            "chain": self.chain.hex(),
        }
        return json.dumps(values).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "ObjectMetadata":
        """Decode the metadata; raises BadFormat."""
        try:
            values = strict_json.from_json(data)
            if values["format"] != OBJECT_FORMAT:
                raise BadFormat(
                    f"expected object format {OBJECT_FORMAT}, found {values['format']!r}"
                )
            return ObjectMetadata(
                bytes.fromhex(values["cluster_key"]),
                PartitionId(int(values["partition"])),
                TransactionId(int(values["first"])),
                TransactionId(int(values["last"])),
                Chain(bytes.fromhex(values["chain_before"])),
                Chain(bytes.fromhex(values["chain"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadFormat(f"the metadata of the Parquet file is not valid: {error}") from error


class ArchivedRecords(NamedTuple):
    """Consecutive records for an archive object, and the batches to which they belong.

    The first and the last batch may reach beyond the records.
    """

    records: Buffer
    lengths: I64
    batches: Sequence[LineageEntry]


class RowGroupOutline(NamedTuple):
    """The data of a row group from which chain hashes are computed: record CRCs, and batches.

    `crcs` has 4 big-endian bytes for each record.
    """

    first: TransactionId
    crcs: bytes
    batches: Sequence[LineageEntry]


class ObjectWriter:
    """Writes an object, one row group after the other."""

    def __init__(self, sink: Any, metadata: ObjectMetadata) -> None:  # noqa: ANN401 - as pyarrow's
        schema = SCHEMA.with_metadata({_METADATA_KEY: metadata.to_bytes()})
        self._writer = pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_statistics=_STATISTICS_COLUMNS,
            column_encoding=dict.fromkeys(_ASCENDING_COLUMNS, "DELTA_BINARY_PACKED"),
            write_page_checksum=True,  # rule 4
        )

    def write_row_group(self, parts: Iterable[ArchivedRecords]) -> None:
        """Write consecutive parts as one row group."""
        batches = [
            pa.RecordBatch.from_arrays(_columns_from_records(part), schema=SCHEMA) for part in parts
        ]
        table = pa.Table.from_batches(batches)  # without a copy
        self._writer.write_table(table, row_group_size=table.num_rows)

    def close(self) -> None:
        """Write the end of the file; the caller's sink makes it durable."""
        self._writer.close()


def _columns_from_records(part: ArchivedRecords) -> list[pa.Array]:
    records, lengths = part.records, part.lengths
    prefixes = raw_records.prefixes_of(records, lengths)
    heads = prefixes["head"]
    ids = heads["transaction_id"].astype(np.int64)
    values_by_column: dict[str, npt.NDArray[Any]] = {
        "transaction_id": ids,
        "header": heads["header"].astype(np.int32),
    }
    for source, name in _REQ_ID_COLUMNS.items():
        values_by_column[name] = heads["req_id"][source].astype(np.int32)
    values_by_column["data_crc"] = prefixes["data_crc"].astype(np.uint32)
    crcs = np.frombuffer(raw_records.record_crcs(records, lengths), ">u4")
    values_by_column["record_crc"] = crcs.astype(np.uint32)
    bounds = np.array([batch[:4] for batch in part.batches], dtype=np.int64).reshape(-1, 4)
    batch_indexes = bounds[:, 1].searchsorted(ids)
    assert (bounds[batch_indexes, 0] <= ids).all(), "a record outside of the batches"
    for column, name in enumerate(("batch_first", "batch_last", "session_id", "commit_time")):
        values_by_column[name] = np.ascontiguousarray(bounds[batch_indexes, column])
    arrays = []
    for field in SCHEMA:
        if field.name == "data":
            record_array = arrow_buffers.as_binary(records, lengths)
            arrays.append(pc.binary_slice(record_array, PREFIX_DTYPE.itemsize, -4))
        else:
            values = values_by_column[field.name]
            is_present = np.not_equal(values, 0) if field.nullable else None  # rule 3
            arrays.append(arrow_buffers.as_numbers(values, field.type, is_present=is_present))
    return arrays


class ArchiveObject:
    """An open object; `name` is its name in errors.

    Errors in its bytes are raised as BadFormat or ChecksumMismatch.
    """

    def __init__(self, source: Any, name: str, *, footer: Any = None) -> None:  # noqa: ANN401 - as pyarrow's
        """Open an object, and read its footer unless `footer` has it already.

        `source` is a `StoreFile`, another file, or the content of one.
        """
        self.name = name
        self._native = getattr(source, "native", None)
        if isinstance(source, bytes):
            source = pa.BufferReader(source)
        try:
            self._file = pq.ParquetFile(
                source, metadata=footer, pre_buffer=False, page_checksum_verification=True
            )
            self.footer = self._file.metadata
            metadata_json = (self.footer.metadata or {})[_METADATA_KEY]
            schema = self._file.schema_arrow
        except _READ_ERRORS as error:
            raise BadFormat(f"archived object {name}: {_short_message(error)}") from error
        try:
            self.metadata = ObjectMetadata.from_bytes(metadata_json)
        except BadFormat as error:
            raise BadFormat(f"archived object {name}: {error}") from error
        if not schema.equals(SCHEMA):
            raise BadFormat(
                f"archived object {name}: expected the columns {SCHEMA.names}, found other columns"
            )

    @property
    def group_count(self) -> int:
        """The number of row groups."""
        return int(self._file.num_row_groups)

    def read_row_group(self, group: int) -> ArchivedRecords:
        """Read the records of a row group, and check its first ID and all CRCs (rule 2).

        Raises:
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        try:
            table = self._read_columns([group]).combine_chunks()
            if table.num_rows == 0:
                raise BadFormat(f"archived object {self.name}: row group {group} is empty")
            return self._records_from_columns(_columns_of_table(table))
        except _READ_ERRORS as error:
            raise BadFormat(
                f"archived object {self.name}: row group {group} cannot be read: "
                f"{_short_message(error)}"
            ) from error

    def _read_columns(self, groups: Sequence[int], columns: list[str] | None = None) -> pa.Table:
        """Return the rows of row groups; with threads if possible (rule 6)."""
        if self._native is not None:
            with suppress(*_READ_ERRORS):
                # PyArrow combines the requests, and sends them at once.
                parquet_file = pq.ParquetFile(
                    self._native,
                    metadata=self.footer,
                    pre_buffer=True,
                    page_checksum_verification=True,
                )
                return parquet_file.read_row_groups(groups, columns)
        return self._file.read_row_groups(groups, columns, use_threads=False)

    def _records_from_columns(self, columns: dict[str, pa.Array]) -> ArchivedRecords:
        self._reject_nulls(columns)
        records, lengths = _rebuild_records(columns)
        first = TransactionId(columns["transaction_id"][0].as_py())
        if raw_records.verified_crcs(records, lengths, first) is None:
            bad_index = raw_records.first_bad_record(records, lengths)
            if bad_index is None:
                raise BadFormat(
                    f"archived object {self.name}: expected consecutive transaction IDs from "
                    f"{first} on, found a gap"
                )
            raise ChecksumMismatch(
                f"archived object {self.name}: transaction {first + bad_index} does not match "
                "its CRC"
            )
        return ArchivedRecords(records, lengths, self._batches_from_columns(columns, first))

    def _reject_nulls(self, columns: dict[str, pa.Array]) -> None:
        if any(column.null_count for name, column in columns.items() if name != "commit_time"):
            raise BadFormat(
                f"archived object {self.name}: expected columns without nulls, found a null"
            )

    def _batches_from_columns(
        self, columns: dict[str, pa.Array], first: TransactionId
    ) -> list[LineageEntry]:
        """Return the batches of a row group, with empty chain hashes (see `_verify_chains`)."""
        firsts, lasts, sessions = (
            _values(columns[name], np.int64) for name in ("batch_first", "batch_last", "session_id")
        )
        stamps = _values_or_zero(columns["commit_time"], np.int64)  # rule 3
        ids = np.arange(first, first + firsts.size)
        starts = np.append(0, np.flatnonzero(np.diff(firsts)) + 1)
        ends = np.append(starts[1:], firsts.size)
        for values in (firsts, lasts, sessions, stamps):
            if (values != values[starts].repeat(ends - starts)).any():
                raise BadFormat(
                    f"archived object {self.name}: the rows of one batch contradict each "
                    "other about its first and last transaction ID"
                )
        if (firsts > ids).any() or (ids > lasts).any():
            raise BadFormat(
                f"archived object {self.name}: the ID of a row is outside of the ID range of its "
                "batch"
            )
        rows = np.stack([firsts, lasts, sessions, stamps])[:, starts].T.tolist()
        return [
            LineageEntry(
                TransactionId(first), TransactionId(last), SessionId(session), stamp, Chain(b"")
            )
            for first, last, session, stamp in rows
        ]

    def verify(self) -> Iterator[LineageEntry]:
        """Yield every batch with its chain hash, from the first to the last batch (rules 1 and 2).

        Raises:
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        return self._verify_chains(
            self._outline_of_row_group(group) for group in range(self.group_count)
        )

    def _outline_of_row_group(self, group: int) -> RowGroupOutline:
        part = self.read_row_group(group)
        first = TransactionId(int(raw_records.ids_of(part.records, part.lengths[:1])[0]))
        return RowGroupOutline(
            first, raw_records.record_crcs(part.records, part.lengths), part.batches
        )

    def read_outlines(self) -> tuple[list[RowGroupOutline], list[LineageEntry]]:
        """Return the outlines of all row groups, and every batch with its chain hash.

        This method reads only the columns for an index, not the records. If `read_row_group` later
        returns records with the CRCs of the outline, the chain hashes cover these records, too.

        Raises:
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        outlines = []
        first = self.metadata.first
        try:
            table = self._read_columns(range(self.group_count), _INDEX_COLUMNS)
            for group in range(self.group_count):
                count = self.footer.row_group(group).num_rows
                if count <= 0:
                    raise BadFormat(f"archived object {self.name}: row group {group} is empty")
                columns = _columns_of_table(table.slice(first - self.metadata.first, count))
                self._reject_nulls(columns)
                crcs = _values(columns["record_crc"], np.uint32).astype(">u4").tobytes()
                outlines.append(
                    RowGroupOutline(first, crcs, self._batches_from_columns(columns, first))
                )
                first = TransactionId(first + count)
        except _READ_ERRORS as error:
            raise BadFormat(f"archived object {self.name}: {_short_message(error)}") from error
        return outlines, list(self._verify_chains(outlines))

    def _verify_chains(self, outlines: Iterable[RowGroupOutline]) -> Iterator[LineageEntry]:
        chain, next_id = self.metadata.chain_before, self.metadata.first
        open_batch: LineageEntry | None = None
        crcs = bytearray()
        for start, group_crcs, batches in outlines:
            self._check_next_id(start, next_id)
            for batch in batches:
                if open_batch is not None and batch[:4] != open_batch[:4]:
                    raise BadFormat(
                        f"archived object {self.name}: expected the rest of the batch, up to "
                        f"transaction {open_batch.last}, found another batch"
                    )
                if open_batch is None:
                    self._check_next_id(batch.first, next_id)
                stop = min(batch.last + 1, start + len(group_crcs) // 4)
                crcs += group_crcs[4 * (next_id - start) : 4 * (stop - start)]
                next_id, open_batch = TransactionId(stop), batch
                if stop == batch.last + 1:
                    chain = next_chain(
                        chain, batch.first, batch.last, batch.session_id, bytes(crcs)
                    )
                    yield batch._replace(chain=chain)
                    crcs.clear()
                    open_batch = None
        if (
            open_batch is not None
            or next_id != self.metadata.last + 1
            or chain != self.metadata.chain
        ):
            raise ChecksumMismatch(
                f"archived object {self.name}: expected the last transaction "
                f"{self.metadata.last} with chain hash {self.metadata.chain.hex()}, found "
                f"{next_id - 1} with chain hash {chain.hex()}"
            )

    def _check_next_id(self, found: int, expected: int) -> None:
        if found != expected:
            raise BadFormat(
                f"archived object {self.name}: expected transaction ID {expected}, found {found}"
            )


def _rebuild_records(columns: dict[str, pa.Array]) -> tuple[memoryview, I64]:
    """Rebuild the records of rows; return their bytes and lengths."""
    data = columns["data"]
    offsets = np.frombuffer(data.buffers()[1], np.int32)[data.offset : data.offset + len(data) + 1]
    lengths = raw_records.lengths_between(offsets.astype(np.int64))
    prefixes = np.empty(lengths.size, PREFIX_DTYPE)
    head = prefixes["head"]
    head["transaction_id"] = _values(columns["transaction_id"], np.int64)
    for target, name in _REQ_ID_COLUMNS.items():
        head["req_id"][target] = _values(columns[name], np.int32)
    head["header"] = _values(columns["header"], np.int32)
    prefixes["length"] = lengths
    prefixes["data_crc"] = _values(columns["data_crc"], np.uint32)
    trailers = _values(columns["record_crc"], np.uint32).astype(">u4")
    joined = pc.binary_join_element_wise(
        arrow_buffers.fixed_width_binary(prefixes, PREFIX_DTYPE.itemsize),
        data,
        arrow_buffers.fixed_width_binary(trailers, 4),
        arrow_buffers.EMPTY_BINARY,
    )
    record_lengths = lengths + RECORD_OVERHEAD_BYTES
    records = memoryview(joined.buffers()[2]).cast("B")  # PyArrow's bytes are signed
    return records[: int(record_lengths.sum())], record_lengths


def _columns_of_table(table: pa.Table) -> dict[str, pa.Array]:
    """Return the columns of a table that has rows."""
    combined = table.combine_chunks()
    return {name: combined.column(name).chunk(0) for name in combined.column_names}


def _values(column: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a column without nulls."""
    buffer_values = np.frombuffer(column.buffers()[1], kind)
    return buffer_values[column.offset : column.offset + len(column)]


def _values_or_zero(column: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a column, 0 for nulls; `fill_null` would import pandas."""
    values = _values(column, kind)
    if not column.null_count:
        return values
    is_present = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    return values * is_present[column.offset : column.offset + len(column)]


def _short_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
