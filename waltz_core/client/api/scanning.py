"""Reads parts of the log as one Arrow stream, for pandas, Polars and DuckDB: `WaltzClient.scan`.

Rules:
    1. The high-water marks are determined when `scan` is called, so the stream is a snapshot. The
       stream has exactly the transactions from `start` to `stop` of each partition, one partition
       after another.
    2. The stream reads no data before its consumer requests a batch. It keeps in memory the chunks
       of `read_range`, and one batch of at most 8,192 rows or about 8 MiB.
    3. Payloads are decoded strictly (`records/unpacking.py`); an error names the transaction.
    4. If the scan has neither payload columns nor column `data`, only headers are read.
    5. If the client has encryption keys but cannot decrypt a payload, the payload and its columns
       are null, and the column `data_error` has the reason.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeAlias

import pyarrow as pa

from waltz_core.client.read.ranges import RangeChunk, ReplicaSet
from waltz_core.errors import BadRequest, BeforeLogStart, DataLoss
from waltz_core.records import batches
from waltz_core.records.record import PartitionId
from waltz_core.records.typed_values import TYPED_FORMATS
from waltz_core.records.unpacking import Decode, Unpacker
from waltz_core.schemas.formats import SchemaFormat
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.client.api.sync_client import WaltzClient

ArrowReader: TypeAlias = pa.RecordBatchReader
ArrowSchema: TypeAlias = pa.Schema

DATA_FORMATS = ("msgpack", "json")
# The format of payloads: one of `DATA_FORMATS`, or a serializer with a schema registry.
DataFormat: TypeAlias = str | SchemaFormat
ERROR_FIELD = pa.field("data_error", pa.string())
# The columns that locate a payload in an error message.
_LOCATION_COLUMNS = ("partition", "transaction_id")
# Columns that may be null in the log.
_NULLABLE_COLUMNS = ("commit_time",)
_NULLABLE_COLUMNS_WITH_KEYS = ("commit_time", "data", ERROR_FIELD.name)


class ScanRange(NamedTuple):
    """The transactions start..stop-1 of a partition."""

    partition: int
    start: int
    stop: int


class ScanColumns:
    """The columns of a scan, and the conversion of the log's batches to these columns.

    Args:
        schema: the wanted columns; None for the columns of the log.
        data_format: the format of payloads: a name, or a serializer `Avro` or `Protobuf`. It is
            needed for columns that the log does not have.
        has_keys: whether the client decrypts payloads (rule 5).

    Raises:
        BadRequest: a column of the log has another type, or the format is unknown.
    """

    def __init__(
        self,
        schema: ArrowSchema | None,
        data_format: DataFormat = "msgpack",
        *,
        has_keys: bool = False,
    ) -> None:
        name, decode = _format_name_and_decoder(data_format)
        log = batches.READ_SCHEMA.append(ERROR_FIELD) if has_keys else batches.READ_SCHEMA
        self.schema = log if schema is None else _check_schema(schema, log, has_keys=has_keys)
        self._payload_columns = [part for part in self.schema if part.name not in log.names]
        columns = [
            name for name in self.schema.names if name in log.names and name != ERROR_FIELD.name
        ]
        needs_data = bool(self._payload_columns) or ERROR_FIELD.name in self.schema.names
        if needs_data or (has_keys and "data" in columns):
            columns += [
                name for name in (*_LOCATION_COLUMNS, "header", "data") if name not in columns
            ]
        self._unpacker = Unpacker(
            self._payload_columns, name, decode=decode, is_case_sensitive=True
        )
        # For a scan without columns, a batch still needs its number of rows.
        self._columns = columns or ["partition"]
        self.form = RangeForm.WHOLE if "data" in self._columns else RangeForm.HEADERS

    def batches(
        self,
        chunk: RangeChunk,
        partition: int,
        select: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the transactions of a chunk in batches; `select` returns the rows to decode.

        Raises:
            BadFormat: a payload does not fit the schema.
        """
        partition_id = PartitionId(partition)
        if chunk.form is RangeForm.HEADERS:
            record_batches = batches.headers_to_arrow(
                chunk.records, chunk.stamps, self._columns, partition_id=partition_id
            )
        else:
            record_batches = batches.range_to_arrow(
                chunk.records, chunk.lengths, chunk.stamps, self._columns, partition_id=partition_id
            )
        for batch in record_batches:
            yield self._convert_batch(select(batch), chunk)

    def _convert_batch(self, batch: pa.RecordBatch, chunk: RangeChunk) -> pa.RecordBatch:
        columns_by_name = dict(zip(batch.schema.names, batch.columns, strict=True))
        if chunk.decrypt is not None and "data" in columns_by_name:
            payloads = [
                chunk.decrypt(data, header=header)
                for data, header in zip(
                    columns_by_name["data"].to_pylist(),
                    columns_by_name["header"].to_pylist(),
                    strict=True,
                )
            ]
            columns_by_name["data"] = pa.array([payload.data for payload in payloads], pa.binary())
            columns_by_name[ERROR_FIELD.name] = pa.array(
                [payload.error for payload in payloads], pa.string()
            )
        if self._payload_columns:
            columns = self._unpack_payloads(columns_by_name)
            columns_by_name |= dict(
                zip((part.name for part in self._payload_columns), columns, strict=True)
            )
        if not self.schema.names:
            return batch.select([])
        arrays = [columns_by_name[name] for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _unpack_payloads(self, columns_by_name: dict[str, pa.Array]) -> list[pa.Array]:
        """Return the columns from payloads; rows without a decrypted payload are null (rule 5)."""
        is_present = columns_by_name["data"].is_valid()
        data, *locations = (
            columns_by_name[name].filter(is_present) for name in ("data", *_LOCATION_COLUMNS)
        )
        columns = self._unpacker.columns(
            data, lambda row: f"partition {locations[0][row]}, transaction {locations[1][row]}"
        )
        if not columns_by_name["data"].null_count:
            return columns
        is_present_flags = is_present.to_pylist()
        rows = iter(range(len(data)))
        row_of = pa.array([next(rows) if flag else None for flag in is_present_flags], pa.int64())
        return [column.take(row_of) for column in columns]


def _format_name_and_decoder(data_format: DataFormat) -> tuple[str, Decode | None]:
    """Return a format's name and decoder; the decoder is None for a format without a schema."""
    if isinstance(data_format, SchemaFormat):
        return data_format.data_format, data_format.decode
    if data_format in DATA_FORMATS:
        return data_format, None
    similar_names = difflib.get_close_matches(str(data_format), DATA_FORMATS, n=1)
    hint = "Hint: scan supports no other formats."
    if similar_names:
        hint = f"Hint: did you mean {similar_names[0]!r}?"
    if data_format in TYPED_FORMATS:
        hint = f"Hint: pass {data_format.capitalize()}(registry), with the URL of the registry."
    raise BadRequest(
        f"argument data_format: expected {', '.join(DATA_FORMATS)}, Avro(...) or Protobuf(...), "
        f"found {data_format!r}. {hint}"
    )


def _check_schema(schema: ArrowSchema, log: ArrowSchema, *, has_keys: bool) -> ArrowSchema:
    """Return the schema; raises BadRequest for a column that the log cannot fill."""
    if not isinstance(schema, pa.Schema):
        raise BadRequest(
            f"argument schema: expected a pyarrow.Schema, found {schema!r}. Hint: for example "
            'pyarrow.schema([("id", pyarrow.int64())]).'
        )
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise BadRequest(
                f"argument schema: expected different column names, found {name!r} twice"
            )
    nullable = _NULLABLE_COLUMNS_WITH_KEYS if has_keys else _NULLABLE_COLUMNS
    for part in schema:
        if part.name not in log.names:
            if has_keys and not part.nullable:
                raise BadRequest(
                    f"argument schema: column {part.name!r} is not nullable, but it is null "
                    "for payloads that cannot be decrypted. Hint: declare the column as "
                    "nullable."
                )
            continue
        expected_type = log.field(part.name).type
        if part.type != expected_type:
            raise BadRequest(
                f"argument schema, column {part.name!r} of the log: expected type {expected_type}, "
                f"found {part.type} in the schema"
            )
        if part.name in nullable and not part.nullable:
            raise BadRequest(
                f"argument schema: column {part.name!r} is declared as not nullable, "
                "but the log may have nulls in it. Hint: declare the column as nullable."
            )
    return schema


def scan_ranges_of(
    sources: Mapping[int, ReplicaSet], start: object, stop: object
) -> list[ScanRange]:
    """Return the range of transactions to read from each partition.

    Args:
        sources: the partitions to read, with their current high-water marks.
        start: the first ID, or one for each partition; None: the first ID that is available.
        stop: the ID after the last, or one for each partition; None: the current end of the log.

    Raises:
        BadRequest: an ID is not a number or is negative, a partition has no ID, or a start is after
            its stop.
        BeforeLogStart: IDs before the first available one are requested.
        DataLoss: an ID is after the end of the log.
    """
    starts, stops = (
        _ids_by_partition("start", start, sources),
        _ids_by_partition("stop", stop, sources),
    )
    ranges = []
    for partition, source in sorted(sources.items()):
        end = int(source.high_water_mark) + 1
        first_available = int(source.archived.first) if source.archived else 0
        first, last = starts.get(partition, first_available), stops.get(partition, end)
        for name, value in (("start", first), ("stop", last)):
            if value > end:
                raise DataLoss(
                    f"argument {name}, partition {partition}: expected at most {end}, the end of "
                    f"the log, found {value}. Hint: the ID may come from another cluster, or the "
                    "log was created again."
                )
        if first < first_available or last < first_available:
            raise BeforeLogStart(
                f"partition {partition}: cannot scan from {first} to {last}, because the "
                f"transactions before {first_available} have expired",
                first_available,
            )
        if first > last:
            raise BadRequest(
                f"partition {partition}: expected start <= stop, found start {first} and stop "
                f"{last}"
            )
        ranges.append(ScanRange(partition, first, last))
    return ranges


def _ids_by_partition(
    name: str, value_or_values: object, partitions: Mapping[int, Any]
) -> dict[int, int]:
    """Return the given IDs by partition; a single ID is used for all partitions."""
    if value_or_values is None:
        return {}
    ids = (
        value_or_values
        if isinstance(value_or_values, Mapping)
        else dict.fromkeys(partitions, value_or_values)
    )
    if ids.keys() != partitions.keys():
        raise BadRequest(
            f"argument {name}: expected an ID for each partition of {sorted(partitions)}, "
            f"found IDs for {sorted(ids)}"
        )
    checked_ids = {}
    for partition, value in ids.items():
        if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 0:
            raise BadRequest(
                f"argument {name}, partition {partition}: expected a transaction ID, found "
                f"{value!r}"
            )
        checked_ids[partition] = index(value)
    return checked_ids


def open_scan(
    client: "WaltzClient",
    spans: Sequence[ScanRange],
    sources: Mapping[int, ReplicaSet],
    columns: ScanColumns,
) -> ArrowReader:
    """Return an Arrow reader of the ranges `spans`; it reads only on request (rule 2)."""

    def read() -> Iterator[pa.RecordBatch]:
        for partition, start, stop in spans:
            if start == stop:
                continue
            chunks = client.read_range(
                partition, start, stop - 1, form=columns.form, replicas=sources[partition]
            )
            # Close the range here. Without this call, the traceback of an error would keep the
            # range open longer than the client.
            with closing(chunks):
                for chunk in chunks:
                    yield from columns.batches(chunk, partition)

    return pa.RecordBatchReader.from_batches(columns.schema, read())
