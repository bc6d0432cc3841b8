"""Fetches one range of ids in a task, and converts it to Arrow batches of the read's schema.

Batch and stream reads use it.

Rules:
    1. It processes whole columns; a batch has at most 8,192 rows or about 8 MiB.
    2. Without `data` and without payload columns only headers are fetched.
    3. Ids are dense: a gap without a filter fails the read.
"""

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from waltz_core.client import ArchivedObjects, RangeChunk, RangeForm, ReplicaSet, WaltzClient
from waltz_core.records import batches
from waltz_core.records.record import PartitionId
from waltz_spark.datasource.archive_read import chunks_of
from waltz_spark.options import LOG_COLUMNS, OnCorrupt, ReadOptions
from waltz_spark.planning import TransactionRange
from waltz_spark.spark_version import arrow_schema
from waltz_spark.unpacking import Unpacker, is_case_sensitive

_log = logging.getLogger("waltz")

# The columns in an error for a payload that cannot be unpacked.
_PLACE = ("partition", "transaction_id")


class BatchColumns:
    """The columns of a read's batches.

    Args:
        options: the options of the read.
        schema: Spark's schema of the batches.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.arrow = arrow_schema(schema)
        self._wanted = [part.name for part in self.arrow if part.name in LOG_COLUMNS]
        corrupt = options.corrupt_column
        foreign = [
            part for part in self.arrow if part.name not in LOG_COLUMNS and part.name != corrupt
        ]
        self._unpacker = None
        self._foreign = [part.name for part in foreign]
        columns = list(self._wanted)
        if foreign or corrupt in self.arrow.names:
            assert options.data_format is not None, "checked when the reader was created"
            self._unpacker = Unpacker(
                foreign,
                options.data_format,
                required=options.required_columns,
                is_case_sensitive=is_case_sensitive(),
            )
            columns += [name for name in (*_PLACE, "data") if name not in columns]
        # A count needs no column; the narrowest one has the number of rows.
        self.columns = columns or ["partition"]
        self.headers_only = "data" not in self.columns

    def project(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert a batch of the log's columns to one of the schema."""
        found = {name: batch.column(name) for name in batch.schema.names}
        if self._unpacker is not None:
            found = self._unpacked(found, self._unpacker)
        if not len(self.arrow):
            return batch.select([])
        arrays = [found[part.name] for part in self.arrow]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _unpacked(self, found: dict[str, pa.Array], unpacker: Unpacker) -> dict[str, pa.Array]:
        """Add the payload's columns; option `mode` decides about invalid payloads."""
        data, corrupt = found["data"], self.options.corrupt_column
        if self.options.on_corrupt is OnCorrupt.FAIL:
            ids, partitions = found["transaction_id"], found["partition"]
            columns = unpacker.columns(
                data, lambda row: f"partition {partitions[row]}, transaction {ids[row]}"
            )
            good = np.ones(len(data), dtype=np.bool_)
        else:
            columns, good = unpacker.readable_columns(data)
        found |= dict(zip(self._foreign, columns, strict=True))
        if corrupt in self.arrow.names:
            kind = self.arrow.field(corrupt).type
            found[corrupt] = pc.if_else(pa.array(good), pa.scalar(None, data.type), data)
            if kind != data.type:
                found[corrupt] = _as_text(found[corrupt]).cast(kind)
        if self.options.on_corrupt is OnCorrupt.DROP and not good.all():
            return {name: column.filter(pa.array(good)) for name, column in found.items()}
        return found


def _as_text(data: pa.Array) -> pa.Array:
    """Return bytes as text, with a replacement character for invalid ones."""
    texts = [None if each is None else each.decode(errors="replace") for each in data.to_pylist()]
    return pa.array(texts, pa.string())


class Source(NamedTuple):
    """Where a task reads: `archived` first, if its transactions are there."""

    client: WaltzClient
    replicas: ReplicaSet
    archived: ArchivedObjects | None


def fetch(source: Source, span: TransactionRange, shape: BatchColumns) -> Iterator[pa.RecordBatch]:
    """Yield the transactions of a span.

    Raises:
        DataLoss: an id is missing.
        ChecksumMismatch: a record is damaged on all sources.
        Unavailable: no replica and no server answered in time.
    """
    began = time.monotonic()
    rows = size = 0
    for chunk in _chunks(source, span, shape):
        size += len(chunk.records)
        for batch in _batches(chunk, span.partition, shape):
            rows += batch.num_rows
            yield shape.project(batch)
    _log.info(
        "spark.range_read partition=%d first=%d last=%d rows=%d bytes=%d took_s=%.2f",
        span.partition,
        span.first,
        span.last,
        rows,
        size,
        time.monotonic() - began,
    )


def _chunks(source: Source, span: TransactionRange, shape: BatchColumns) -> Iterator[RangeChunk]:
    form = RangeForm.HEADERS if shape.headers_only else RangeForm.WHOLE
    first = span.first
    if source.archived is not None:
        for chunk in chunks_of(source.archived, span, form, shape.options.headers):
            first = chunk.next
            yield chunk
    if first <= span.last:
        yield from source.client.read_range(
            span.partition,
            first,
            span.last,
            form=form,
            header_values=shape.options.headers,
            replicas=source.replicas if shape.options.from_replica else None,
        )


def _batches(chunk: RangeChunk, partition: int, shape: BatchColumns) -> list[pa.RecordBatch]:
    if shape.headers_only:
        return batches.headers_to_arrow(
            chunk.records, chunk.stamps, shape.columns, partition_id=PartitionId(partition)
        )
    return batches.range_to_arrow(
        chunk.records,
        chunk.lengths,
        chunk.stamps,
        shape.columns,
        partition_id=PartitionId(partition),
    )
