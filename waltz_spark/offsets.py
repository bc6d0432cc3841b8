"""The offsets of a stream in a checkpoint: a high-water mark per partition, and the cluster key.

The stream reader writes the offsets. `lag.py` computes the lag of a query from the offsets.

    {"0": 41, "1": -1, "cluster": "00112233445566778899aabbccddeeff"}

Offsets that development versions wrote have no cluster key.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from waltz_spark.options import Marks

_CLUSTER_FIELD = "cluster"

# Spark stores an offset as JSON: partitions are strings, and marks are numbers.
Offset = dict[str, Any]


class StreamOffset(NamedTuple):
    """An offset: the last transaction read from each partition, and the cluster key."""

    marks: Marks
    cluster_key: str | None  # hexadecimal; None in offsets of development versions


def encode_offset(marks: Marks, cluster_key: bytes) -> Offset:
    """Encode high-water marks and the cluster key as an offset for Spark."""
    by_name: Offset = {str(partition): int(mark) for partition, mark in sorted(marks.items())}
    return by_name | {_CLUSTER_FIELD: cluster_key.hex()}


def decode_offset(offset: Mapping[str, Any]) -> StreamOffset:
    """Decode an offset; raises ValueError or TypeError if it is not valid."""
    cluster = offset.get(_CLUSTER_FIELD)
    if cluster is not None and not isinstance(cluster, str):
        raise TypeError(f"offset of a stream: expected a cluster key, found {cluster!r}")
    try:
        marks = {int(name): int(mark) for name, mark in offset.items() if name != _CLUSTER_FIELD}
    except OverflowError as error:
        raise ValueError(
            f"offset of a stream: expected high-water marks, found an infinity: {error}"
        ) from error
    return StreamOffset(marks, cluster)
