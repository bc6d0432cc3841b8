"""Fetches one range of IDs in a task, and converts it to Arrow batches with the read's schema.

Batch reads and stream reads use this module.

Rules:
    1. The module processes whole columns; a batch has at most 8,192 rows or about 8 MiB.
    2. If a read needs neither `data` nor payload columns, only headers are fetched.
    3. IDs are consecutive. If a read has no filter, a gap is an error.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from waltz_core.client import ArchivedObjects, RangeChunk, RangeForm, ReplicaSet, WaltzClient
from waltz_core.records import batches
from waltz_core.records.record import PartitionId
from waltz_core.records.unpacking import Unpacker
from waltz_spark.datasource.archive_read import read_archived_chunks
from waltz_spark.options import ERROR_COLUMN, CorruptPayloadMode, ReadOptions
from waltz_spark.payload_encryption import decrypt_batch, decryption_of
from waltz_spark.payload_schemas import payload_decoder
from waltz_spark.planning import TransactionRange
from waltz_spark.rows import is_case_sensitive
from waltz_spark.spark_version import arrow_schema

_log = logging.getLogger("waltz")

# The columns that locate a payload in an error message.
_LOCATION_COLUMNS = ("partition", "transaction_id")
# The columns that decryption of a payload needs.
_DECRYPTION_COLUMNS = ("partition", "header", "data")


class BatchConverter:
    """The columns of the batches of a read, and the conversion to them.

    Args:
        options: the options of the read.
        schema: Spark's schema of the batches.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.arrow = arrow_schema(schema)
        log_columns, corrupt = options.log_columns, options.corrupt_column
        requested_columns = [part.name for part in self.arrow if part.name in log_columns]
        payload_fields = [
            part for part in self.arrow if part.name not in log_columns and part.name != corrupt
        ]
        self._unpacker = None
        self._payload_columns = [part.name for part in payload_fields]
        columns = [name for name in requested_columns if name != ERROR_COLUMN]
        if payload_fields or corrupt in self.arrow.names:
            assert options.data_format is not None, "checked when the reader was created"
            self._unpacker = Unpacker(
                payload_fields,
                options.data_format,
                decode=payload_decoder(options),
                required=options.required_columns,
                is_case_sensitive=is_case_sensitive(),
            )
            columns += [name for name in (*_LOCATION_COLUMNS, "data") if name not in columns]
        self._encryption = None
        if options.encryption_keys is not None and {"data", ERROR_COLUMN} & {
            *columns,
            *requested_columns,
        }:
            self._encryption = decryption_of(options)
            columns += [name for name in _DECRYPTION_COLUMNS if name not in columns]
        # `count()` needs no columns, but batches must have the right number of rows. So read the
        # narrowest column.
        self.columns = columns or ["partition"]

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert a batch of the log's columns to a batch of the schema."""
        if self._encryption is None:
            columns_by_name = {name: batch.column(name) for name in batch.schema.names}
        else:
            columns_by_name = decrypt_batch(batch, self._encryption)
        if self._unpacker is not None:
            columns_by_name = self._add_payload_columns(columns_by_name, self._unpacker)
        if not len(self.arrow):
            return batch.select([])
        arrays = [columns_by_name[part.name] for part in self.arrow]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _add_payload_columns(
        self, columns_by_name: dict[str, pa.Array], unpacker: Unpacker
    ) -> dict[str, pa.Array]:
        """Add the payload's columns; option `mode` determines the result for invalid payloads.

        If a payload was not decrypted, all of these columns are null, in every mode.
        """
        data, corrupt = columns_by_name["data"], self.options.corrupt_column
        if data.null_count:
            columns, fits_schema = self._unpack_valid_payloads(columns_by_name, unpacker)
        else:
            columns, fits_schema = self._unpack_payloads(columns_by_name, unpacker)
        columns_by_name |= dict(zip(self._payload_columns, columns, strict=True))
        if corrupt in self.arrow.names:
            kind = self.arrow.field(corrupt).type
            columns_by_name[corrupt] = pc.if_else(
                pa.array(fits_schema), pa.scalar(None, data.type), data
            )
            if kind != data.type:
                columns_by_name[corrupt] = _decode_text(columns_by_name[corrupt]).cast(kind)
        if self.options.corrupt_payload_mode is CorruptPayloadMode.DROP and not fits_schema.all():
            return {
                name: column.filter(pa.array(fits_schema))
                for name, column in columns_by_name.items()
            }
        return columns_by_name

    def _unpack_payloads(
        self, columns_by_name: dict[str, pa.Array], unpacker: Unpacker
    ) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Return the payload's columns, and a mask of the payloads that fit."""
        if self.options.corrupt_payload_mode is not CorruptPayloadMode.FAIL:
            return unpacker.readable_columns(columns_by_name["data"])
        ids, partitions = columns_by_name["transaction_id"], columns_by_name["partition"]
        columns = unpacker.columns(
            columns_by_name["data"],
            lambda row: f"partition {partitions[row]}, transaction {ids[row]}",
        )
        return columns, np.ones(len(ids), dtype=np.bool_)

    def _unpack_valid_payloads(
        self, columns_by_name: dict[str, pa.Array], unpacker: Unpacker
    ) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Unpack a batch with null payloads. They give null columns, and count as fitting."""
        is_present = columns_by_name["data"].is_valid()
        names = (*_LOCATION_COLUMNS, "data")
        columns, present_fits = self._unpack_payloads(
            {name: columns_by_name[name].filter(is_present) for name in names}, unpacker
        )
        present_mask = is_present.to_numpy(zero_copy_only=False)
        fits_schema = np.ones(len(present_mask), dtype=np.bool_)
        fits_schema[present_mask] = present_fits
        index = pa.array(np.cumsum(present_mask) - 1, mask=~present_mask)
        return [column.take(index) for column in columns], fits_schema


def _decode_text(data: pa.Array) -> pa.Array:
    """Decode binary values as UTF-8, with a replacement character for each invalid byte."""
    texts = [None if row is None else row.decode(errors="replace") for row in data.to_pylist()]
    return pa.array(texts, pa.string())


class ReadSource(NamedTuple):
    """The source of a task's transactions: the archive first, if it has them, then the cluster."""

    client: WaltzClient
    replicas: ReplicaSet
    archived_objects: ArchivedObjects | None


def read_converted_batches(
    source: ReadSource, span: TransactionRange, converter: BatchConverter
) -> Iterator[pa.RecordBatch]:
    """Yield the transactions of a span.

    Raises:
        DataLoss: an ID is missing.
        ChecksumMismatch: a record is damaged on all sources.
        Unavailable: no replica and no server answered in time.
    """
    for batch in read_log_batches(source, span, converter.options, converter.columns):
        yield converter.convert(batch)


def read_log_batches(
    source: ReadSource, span: TransactionRange, options: ReadOptions, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the given columns of the log for the transactions of a span.

    Raises:
        The errors of `read_converted_batches`.
    """
    start_s = time.monotonic()
    rows = size = 0
    for chunk in _read_chunks(source, span, options, headers_only="data" not in columns):
        size += len(chunk.records)
        for batch in _chunk_to_batches(chunk, span.partition, columns):
            rows += batch.num_rows
            yield batch
    _log.info(
        "spark.range_read partition=%d first=%d last=%d rows=%d bytes=%d took_s=%.2f",
        span.partition,
        span.first,
        span.last,
        rows,
        size,
        time.monotonic() - start_s,
    )


def _read_chunks(
    source: ReadSource, span: TransactionRange, options: ReadOptions, *, headers_only: bool
) -> Iterator[RangeChunk]:
    form = RangeForm.HEADERS if headers_only else RangeForm.WHOLE
    first = span.first
    if source.archived_objects is not None:
        # The span of a change feed may end after the archived transactions, or begin after them.
        part = span._replace(last=min(span.last, source.archived_objects.manifest.last))
        for chunk in read_archived_chunks(source.archived_objects, part, form, options.headers):
            first = chunk.next
            yield chunk
    if first <= span.last:
        yield from source.client.read_range(
            span.partition,
            first,
            span.last,
            form=form,
            header_values=options.headers,
            replicas=source.replicas if options.reads_from_replicas else None,
        )


def _chunk_to_batches(
    chunk: RangeChunk, partition: int, columns: Sequence[str]
) -> list[pa.RecordBatch]:
    if "data" not in columns:
        return batches.headers_to_arrow(
            chunk.records, chunk.stamps, columns, partition_id=PartitionId(partition)
        )
    return batches.range_to_arrow(
        chunk.records,
        chunk.lengths,
        chunk.stamps,
        columns,
        partition_id=PartitionId(partition),
    )
