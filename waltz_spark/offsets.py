"""The offsets of a stream in a checkpoint: the mark of each partition, and the cluster's key.

The reader writes offsets; the lag of a query is computed from them.

    {"0": 41, "1": -1, "cluster": "00112233445566778899aabbccddeeff"}

Offsets of development versions have no cluster.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from waltz_spark.options import Marks

CLUSTER = "cluster"

# Spark's form, JSON: partitions are strings, and marks numbers.
Offset = dict[str, Any]


class StreamOffset(NamedTuple):
    """An offset: the last transaction that was read of each partition, and the cluster's key."""

    marks: Marks
    cluster: str | None


def encode(marks: Marks, cluster_key: bytes) -> Offset:
    """Return an offset for Spark."""
    by_name: Offset = {str(partition): int(mark) for partition, mark in sorted(marks.items())}
    return by_name | {CLUSTER: cluster_key.hex()}


def decode(offset: Mapping[str, Any]) -> StreamOffset:
    """Decode an offset; raises ValueError or TypeError if it is not valid."""
    cluster = offset.get(CLUSTER)
    if cluster is not None and not isinstance(cluster, str):
        raise TypeError(f"offset of a stream: expected a cluster key, found {cluster!r}")
    try:
        marks = {int(name): int(mark) for name, mark in offset.items() if name != CLUSTER}
    except OverflowError as error:
        raise ValueError(
            f"offset of a stream: expected high-water marks, found an infinity: {error}"
        ) from error
    return StreamOffset(marks, cluster)
