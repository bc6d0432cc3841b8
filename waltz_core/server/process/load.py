"""What a partition has cost its server so far: one number that only rises.

What counts how much is a matter of measurement, and one place has to say it.

Rules:
    1. The unit is about the work of one KiB appended in large batches. It needs to be right within
       a factor of two only: partitions are compared with one another, over half a minute.
    2. Whatever a client is sent counts: results of appends, feeds, answers to reads.
"""

from typing import Final

from waltz_core.server.locking.tickets import AppendFigures

# Beside its bytes: a row is judged, numbered and hashed; an answer takes a turn of the loop and a
# frame on both sides (docs/performance.md: single appends cost about a hundred times as much for
# each row as those of large batches).
_ROW_KIB: Final = 0.125
_ANSWER_KIB: Final = 16.0
_KIB: Final = 1024


def cost_of(figures: AppendFigures, *, answers: int, answer_bytes: int) -> float:
    """Return what a partition has cost so far, from what it counts."""
    bytes_kib = (figures.committed_bytes + answer_bytes) / _KIB
    return bytes_kib + figures.committed * _ROW_KIB + answers * _ANSWER_KIB
