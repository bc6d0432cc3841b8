"""The start of a read, of a batch or of the first micro-batch of a stream.

A start by time needs requests to the log.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from waltz_core.client import RangeForm, WaltzClient
from waltz_spark import planning
from waltz_spark.options import ReadOptions

# A start by time takes about thirty sequential requests; for this many partitions concurrently.
CONCURRENT_PARTITIONS_MAX = 32


def starts(client: WaltzClient, options: ReadOptions, marks: Mapping[int, int]) -> dict[int, int]:
    """Return the exclusive start of each partition in `marks` (the log's marks now).

    Raises:
        BadConfig: marks were given, but none for one of the partitions.
        DataLoss: a given mark is past the end of its log.
        Unavailable: a partition does not answer.
    """
    if options.starting_ms is None:
        return planning.resolve_starts(options, marks)
    since_ms = options.starting_ms

    def start(partition: int) -> int:
        return planning.first_since(
            partial(_stamp_ms, client, partition), marks[partition], since_ms
        )

    with ThreadPoolExecutor(CONCURRENT_PARTITIONS_MAX) as pool:
        return dict(zip(marks, pool.map(start, marks), strict=True))


def _stamp_ms(client: WaltzClient, partition: int, transaction_id: int) -> int:
    """Return a transaction's commit stamp; 0 if a 0.13 server wrote it."""
    chunks = client.read_range(partition, transaction_id, transaction_id, form=RangeForm.HEADERS)
    return max((stamp_ms for chunk in chunks for _, _, stamp_ms in chunk.stamps), default=0)
