"""Archive objects: a range of whole batches as a Parquet file, and back to the same bytes.

Any reader of Parquet can use an object: a row is a transaction, with its payload as `data`. The
bytes of each record follow from its row, and the chain of each batch from the rows and from the
chain before the object, which the file's metadata has.

Rules (docs/decisions/047):
    1. An object has whole batches and consecutive IDs. A row group may end within a batch.
    2. `verify` rebuilds every record, and checks its ID, length and CRC, the bounds of the batches
       and the chain from the first to the last one. It does not trust the file's metadata: the
       caller compares the result with the range and the chain that it expects.
    3. A commit stamp of 0 is null, as for records of Waltz 0.13.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records import arrow_buffers, raw_records
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

FORMAT: Final = 1
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
# The request ID has the partition under this name.
_REQ_ID_COLUMNS: Final = {
    "client_id": "client_id",
    "generation": "generation",
    "partition_id": "partition",
    "sequence": "sequence",
}
# Statistics for pruning; those of payloads and checksums would only cost space.
_STATISTICS: Final = ["transaction_id", "commit_time", "header"]
_RISING: Final = ("transaction_id", "sequence", "batch_first", "batch_last")
_UNREADABLE: Final = (pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError)


class ObjectFacts(NamedTuple):
    """What the metadata of an object states: its partition, its range, the chains around it."""

    cluster_key: bytes
    partition_id: PartitionId
    first: TransactionId
    last: TransactionId
    chain_before: Chain
    chain: Chain

    def to_bytes(self) -> bytes:
        """Return them as JSON."""
        values = {
            "format": FORMAT,
            "cluster_key": self.cluster_key.hex(),
            "partition": self.partition_id,
            "first": self.first,
            "last": self.last,
            "chain_before": self.chain_before.hex(),
            "chain": self.chain.hex(),
        }
        return json.dumps(values).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "ObjectFacts":
        """Decode; raises BadFormat."""
        try:
            values = json.loads(data)
            if values["format"] != FORMAT:
                raise BadFormat(f"object: expected format {FORMAT}, found {values['format']!r}")
            return ObjectFacts(
                bytes.fromhex(values["cluster_key"]),
                PartitionId(int(values["partition"])),
                TransactionId(int(values["first"])),
                TransactionId(int(values["last"])),
                Chain(bytes.fromhex(values["chain_before"])),
                Chain(bytes.fromhex(values["chain"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadFormat(f"object: its metadata is not valid: {error}") from error


class Piece(NamedTuple):
    """Consecutive records of a range, and the batches that they belong to, in order.

    The first and the last batch may reach beyond the records.
    """

    records: Buffer
    lengths: I64
    batches: Sequence[LineageEntry]


class ObjectWriter:
    """Writes an object piece by piece; a piece becomes a row group."""

    def __init__(self, sink: Any, facts: ObjectFacts) -> None:  # noqa: ANN401 - as pyarrow's
        schema = SCHEMA.with_metadata({_METADATA_KEY: facts.to_bytes()})
        self._writer = pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_statistics=_STATISTICS,
            column_encoding=dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"),
        )
        self._schema = schema

    def add(self, piece: Piece) -> None:
        """Write one row group."""
        count = piece.lengths.size
        table = pa.Table.from_arrays(_columns(piece), schema=self._schema)
        self._writer.write_table(table, row_group_size=count)

    def close(self) -> None:
        """Write the end of the file. Durability is the sink's."""
        self._writer.close()


def _columns(piece: Piece) -> list[pa.Array]:
    records, lengths = piece.records, piece.lengths
    prefixes = raw_records.prefixes_of(records, lengths)
    heads = prefixes["head"]
    ids = heads["transaction_id"].astype(np.int64)
    made: dict[str, npt.NDArray[Any]] = {
        "transaction_id": ids,
        "header": heads["header"].astype(np.int32),
    }
    for source, name in _REQ_ID_COLUMNS.items():
        made[name] = heads["req_id"][source].astype(np.int32)
    made["data_crc"] = prefixes["data_crc"].astype(np.uint32)
    crcs = np.frombuffer(raw_records.record_crcs(records, lengths), ">u4")
    made["record_crc"] = crcs.astype(np.uint32)
    bounds = np.array([each[:4] for each in piece.batches], dtype=np.int64).reshape(-1, 4)
    place = bounds[:, 1].searchsorted(ids)
    assert (bounds[place, 0] <= ids).all(), "a record outside of the batches"
    for column, name in enumerate(("batch_first", "batch_last", "session_id", "commit_time")):
        made[name] = np.ascontiguousarray(bounds[place, column])
    arrays = []
    for field in SCHEMA:
        if field.name == "data":
            whole = arrow_buffers.as_binary(records, lengths)
            arrays.append(pc.binary_slice(whole, PREFIX_DTYPE.itemsize, -4))
        else:
            values = made[field.name]
            present = np.not_equal(values, 0) if field.nullable else None  # rule 3
            arrays.append(arrow_buffers.numbers(values, field.type, is_present=present))
    return arrays


class ArchiveObject:
    """An open object. Errors in its bytes are BadFormat or ChecksumMismatch; `name` is for them."""

    def __init__(self, source: Any, name: str) -> None:  # noqa: ANN401 - as pyarrow's
        self.name = name
        try:
            self._file = pq.ParquetFile(source)
            metadata = self._file.metadata.metadata or {}
            stated = metadata[_METADATA_KEY]
        except _UNREADABLE as error:
            raise BadFormat(f"object {name}: {_brief(error)}") from error
        self.facts = ObjectFacts.from_bytes(stated)
        if not self._file.schema_arrow.equals(SCHEMA):
            raise BadFormat(f"object {name}: expected the columns {SCHEMA.names}, found others")

    @property
    def group_count(self) -> int:
        """The number of row groups."""
        return int(self._file.num_row_groups)

    def read(self, group: int) -> Piece:
        """Return the records of a row group; its first ID and all CRCs are checked (rule 2).

        Raises:
            BadFormat, ChecksumMismatch: with the name of the object.
        """
        try:
            table = self._file.read_row_group(group).combine_chunks()
            if table.num_rows == 0:
                raise BadFormat(f"object {self.name}: row group {group} is empty")
            return self._piece({name: table.column(name).chunk(0) for name in SCHEMA.names})
        except _UNREADABLE as error:
            raise BadFormat(f"object {self.name}: row group {group}: {_brief(error)}") from error

    def _piece(self, columns: dict[str, pa.Array]) -> Piece:
        if any(each.null_count for name, each in columns.items() if name != "commit_time"):
            raise BadFormat(f"object {self.name}: a column has nulls")
        records, lengths = _records_of(columns)
        first = TransactionId(columns["transaction_id"][0].as_py())
        if raw_records.proven_crcs(records, lengths, first) is None:
            bad = raw_records.first_bad_record(records, lengths)
            if bad is None:
                raise BadFormat(f"object {self.name}: the IDs from {first} on are not consecutive")
            raise ChecksumMismatch(
                f"object {self.name}: record {first + bad} does not match its CRC"
            )
        return Piece(records, lengths, self._batches(columns))

    def _batches(self, columns: dict[str, pa.Array]) -> list[LineageEntry]:
        """Return the batches of a row group; their chains are empty until `verify` has them."""
        firsts, lasts, sessions = (
            _values(columns[name], np.int64) for name in ("batch_first", "batch_last", "session_id")
        )
        stamps = _values(columns["commit_time"].fill_null(0).cast(pa.int64()), np.int64)
        ids = _values(columns["transaction_id"], np.int64)
        starts = np.flatnonzero(np.diff(firsts, prepend=firsts[0] - 1))
        reaches = np.append(starts[1:], firsts.size)
        for values in (firsts, lasts, sessions, stamps):
            if (values != values[starts].repeat(reaches - starts)).any():
                raise BadFormat(f"object {self.name}: the rows of a batch differ in its bounds")
        if (firsts > ids).any() or (ids > lasts).any():
            raise BadFormat(f"object {self.name}: a row is outside of its batch")
        rows = np.stack([firsts, lasts, sessions, stamps])[:, starts].T.tolist()
        return [
            LineageEntry(
                TransactionId(first), TransactionId(last), SessionId(session), stamp, Chain(b"")
            )
            for first, last, session, stamp in rows
        ]

    def verify(self) -> Iterator[LineageEntry]:
        """Yield every batch with its chain, from the first to the last one (rules 1 and 2).

        Raises:
            BadFormat, ChecksumMismatch: with the name of the object.
        """
        chain, expected = self.facts.chain_before, self.facts.first
        open_batch: LineageEntry | None = None
        crcs = bytearray()
        for group in range(self.group_count):
            piece = self.read(group)
            all_crcs = raw_records.record_crcs(piece.records, piece.lengths)
            start = int(raw_records.ids_of(piece.records, piece.lengths)[0])
            self._expect(start, expected)
            for each in piece.batches:
                if open_batch is not None and each[:4] != open_batch[:4]:
                    raise BadFormat(f"object {self.name}: a batch ends before {open_batch.last}")
                if open_batch is None:
                    self._expect(each.first, expected)
                stop = min(each.last + 1, start + piece.lengths.size)
                crcs += all_crcs[4 * (expected - start) : 4 * (stop - start)]
                expected, open_batch = TransactionId(stop), each
                if stop == each.last + 1:
                    chain = next_chain(chain, each.first, each.last, each.session_id, bytes(crcs))
                    yield each._replace(chain=chain)
                    crcs.clear()
                    open_batch = None
        if open_batch is not None or expected != self.facts.last + 1 or chain != self.facts.chain:
            raise ChecksumMismatch(
                f"object {self.name}: expected to end at {self.facts.last} with the chain "
                f"{self.facts.chain.hex()}, found {expected - 1} and {chain.hex()}"
            )

    def _expect(self, found: int, expected: int) -> None:
        if found != expected:
            raise BadFormat(f"object {self.name}: expected ID {expected}, found {found}")


def _records_of(columns: dict[str, pa.Array]) -> tuple[memoryview, I64]:
    """Return the bytes of the records of some rows, and their lengths."""
    data = columns["data"]
    offsets = np.frombuffer(data.buffers()[1], np.int32)[data.offset : data.offset + len(data) + 1]
    lengths = raw_records.lengths_between(offsets.astype(np.int64))
    made = np.empty(lengths.size, PREFIX_DTYPE)
    head = made["head"]
    head["transaction_id"] = _values(columns["transaction_id"], np.int64)
    for target, name in _REQ_ID_COLUMNS.items():
        head["req_id"][target] = _values(columns[name], np.int32)
    head["header"] = _values(columns["header"], np.int32)
    made["length"] = lengths
    made["data_crc"] = _values(columns["data_crc"], np.uint32)
    trailers = _values(columns["record_crc"], np.uint32).astype(">u4")
    joined = pc.binary_join_element_wise(
        arrow_buffers.rows_of_one_width(made, PREFIX_DTYPE.itemsize),
        data,
        arrow_buffers.rows_of_one_width(trailers, 4),
        arrow_buffers.NOTHING,
    )
    record_lengths = lengths + RECORD_OVERHEAD_BYTES
    return memoryview(joined.buffers()[2])[: int(record_lengths.sum())], record_lengths


def _values(column: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a column without nulls."""
    whole = np.frombuffer(column.buffers()[1], kind)
    return whole[column.offset : column.offset + len(column)]


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
