"""Counts the rows of a log by their content."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from waltz_core.client import WaltzClient

BEFORE_ALL_MARKS: Mapping[int, int] = MappingProxyType({})


def payload_counts(
    client: WaltzClient, after: Mapping[int, int] = BEFORE_ALL_MARKS
) -> Counter[bytes]:
    """Return the payloads after the marks, and how often each is in the log.

    No request ID may be in the log twice, whichever attempt has used it.
    """
    counts: Counter[bytes] = Counter()
    req_ids: set[bytes] = set()
    for partition, last in client.high_water_marks(linearizable=True).items():
        for chunk in client.read_range(partition, after.get(partition, -1) + 1, last):
            records, start = bytes(chunk.records), 0
            for length in chunk.lengths.tolist():
                assert records[start + 8 : start + 24] not in req_ids
                req_ids.add(records[start + 8 : start + 24])
                counts[records[start + 36 : start + length - 4]] += 1
                start += length
    return counts
