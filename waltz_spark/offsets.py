"""What a checkpoint holds of a stream: the mark of each partition, and which cluster they are of.

The reader writes offsets, and whatever measures a query's progress reads them.

    {"0": 41, "1": -1, "cluster": "00112233445566778899aabbccddeeff"}

Offsets of development versions have no cluster.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from waltz_spark.options import Marks

CLUSTER = "cluster"

# As Spark has it, in JSON: partitions are texts, and marks numbers.
Offset = dict[str, Any]


class Position(NamedTuple):
    """An offset: the last transaction that was read of each partition, and the cluster's key."""

    marks: Marks
    cluster: str | None


def encode(marks: Marks, cluster_key: bytes) -> Offset:
    """Return an offset for Spark to keep."""
    by_name: Offset = {str(partition): int(mark) for partition, mark in sorted(marks.items())}
    return by_name | {CLUSTER: cluster_key.hex()}


def decode(offset: Mapping[str, Any]) -> Position:
    """Return what an offset says; raises ValueError or TypeError for what is none of ours."""
    cluster = offset.get(CLUSTER)
    if cluster is not None and not isinstance(cluster, str):
        raise TypeError(f"offset: expected a cluster's key, found {cluster!r}")
    marks = {int(name): int(mark) for name, mark in offset.items() if name != CLUSTER}
    return Position(marks, cluster)
