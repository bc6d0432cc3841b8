"""Reads of archived transactions directly from the object store, for option `archive`.

The driver finds the archived objects and splits them into tasks by size. Tasks read the objects
without a server or a storage.

Rules:
    1. If the archive cannot be read, the query continues. A warning names the partition and the
       reason, and the task reads the rest from the storages. A URL that names no object store is an
       error.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

from waltz_core.client import (
    ArchivedObjects,
    ArchivedRange,
    RangeChunk,
    RangeForm,
    ReplicaSet,
    find_objects,
    last_committed_before,
    read_archived,
)
from waltz_core.errors import BadConfig, WaltzError
from waltz_core.records.record import BEFORE_FIRST
from waltz_spark.planning import TransactionRange

_log = logging.getLogger("waltz")
# The maximum size of records per task; a task reads several small objects or a part of a large one.
TASK_BYTES_MAX = 128 * 1024 * 1024


def find_archived_objects(
    url: str, spans: Sequence[TransactionRange], sources: Mapping[int, ReplicaSet]
) -> dict[int, ArchivedObjects]:
    """Return, for each partition, the archived objects that contain transactions of the spans.

    Raises:
        BadConfig: the URL names no object store.
    """
    objects_by_partition: dict[int, ArchivedObjects] = {}
    for partition in dict.fromkeys(span.partition for span in spans):
        archived = sources[partition].archived
        own_spans = [span for span in spans if span.partition == partition]
        first, last = min(span.first for span in own_spans), max(span.last for span in own_spans)
        if archived is None or archived.last < first:
            continue
        try:
            objects = find_objects(url, archived, first, last)
        except BadConfig:
            raise
        except WaltzError as error:
            _warn_archive_not_read(partition, first, error)
            continue
        if objects.entries:
            objects_by_partition[partition] = objects
    return objects_by_partition


def last_archived_before(url: str, partition: int, archived: ArchivedRange, time_ms: int) -> int:
    """Return the last archived ID that is known to be older than a time; -1 if there is none.

    Raises:
        BadConfig: the URL names no object store.
    """
    try:
        return last_committed_before(url, archived, time_ms)
    except BadConfig:
        raise
    except WaltzError as error:
        _warn_archive_not_read(partition, archived.first, error)
        return BEFORE_FIRST


def split_at_objects(
    span: TransactionRange, objects: ArchivedObjects | None
) -> list[TransactionRange]:
    """Split a span at the ends of archived objects, into parts of at most `TASK_BYTES_MAX`.

    A larger object is split at IDs, as if all of its records had the same size. Transactions that
    no object contains are one part.
    """
    if objects is None:
        return [span]
    parts: list[TransactionRange] = []
    next_id, part_bytes = span.first, 0

    def end_part(last: int) -> None:
        nonlocal next_id, part_bytes
        if next_id <= last:
            parts.append(TransactionRange(span.partition, next_id, last))
        next_id, part_bytes = max(next_id, last + 1), 0

    for entry in objects.entries:
        first = max(entry.first, span.first, objects.manifest.first)
        last = min(entry.last, span.last)
        if last < first:
            continue
        if first == objects.manifest.first:
            end_part(first - 1)  # expired transactions, which the storages reject
        size = entry.record_bytes * (last - first + 1) // (entry.last - entry.first + 1)
        if part_bytes and part_bytes + size > TASK_BYTES_MAX:
            end_part(first - 1)
        count = -(-size // TASK_BYTES_MAX)
        for index in range(1, count):
            end_part(first + (last - first + 1) * index // count - 1)
        part_bytes += size // max(1, count)
    end_part(min(span.last, objects.manifest.last))
    end_part(span.last)
    return parts


def read_archived_chunks(
    objects: ArchivedObjects,
    span: TransactionRange,
    form: RangeForm,
    header_values: Sequence[int],
) -> Iterator[RangeChunk]:
    """Yield the transactions of a span, but fewer if the archive cannot be read (rule 1)."""
    first = span.first
    try:
        for chunk in read_archived(
            objects, span.first, span.last, form=form, header_values=header_values
        ):
            first = chunk.next
            yield chunk
    except WaltzError as error:
        _warn_archive_not_read(span.partition, first, error)


def _warn_archive_not_read(partition: int, first: int, error: WaltzError) -> None:
    _log.warning("spark.archive_not_read partition=%d first=%d error=%s", partition, first, error)
