"""Computes what a partition costs its server, for balancing by load.

Rules:
    1. The unit is approximately the work for one KiB that is appended in large batches. An accuracy
       within a factor of two is enough, because a cost is only compared with the costs of other
       partitions. The compared costs are averages over the last 30 s.
    2. Everything sent to clients counts: results of appends, feeds, answers to reads.
"""

from typing import Final

from waltz_core.server.locking.pending_appends import AppendCounters

# The costs in addition to bytes. A row is validated, numbered and hashed. An answer uses a turn of
# the event loop, and a frame on both sides. According to docs/performance.md, a row of a single
# append costs about a hundred times as much as a row of a large batch.
_ROW_COST_KIB: Final = 0.125
_ANSWER_COST_KIB: Final = 16.0
_KIB: Final = 1024


def cost_of(counters: AppendCounters, *, answers: int, answer_bytes: int) -> float:
    """Return the total cost of a partition since its start, computed from its counters."""
    bytes_kib = (counters.committed_bytes + answer_bytes) / _KIB
    return bytes_kib + counters.committed * _ROW_COST_KIB + answers * _ANSWER_COST_KIB
