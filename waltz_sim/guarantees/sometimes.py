"""States that a batch of runs must reach at least once.

A checker without input always passes, so it proves nothing. This module lists the states that make
a batch meaningful; the component that observes a state counts it.
"""

from collections.abc import Mapping
from typing import Final

# Names of counters of checkers, of the simulated ZooKeeper, or of reports by machines.
SOMETIMES: Final = (
    "undecidable wait",
    "U>0",
    "torn tail",
    "damage repaired",
    "damage repaired live",
    "scrub found damage",
    "storage.scrub_finished",
    "storage.read_failed",
    "late join",
    "CAS lost reply",
    "nonce mismatch",
    "lock wait",
    "reported LOCK",
    "reported AHEAD",
    "session with 0 appends",
    "segment roll during recovery",
    "owner bounce",
    "NO_SPACE",
    "flushed",
    "proven mark",
    "unproved mark",
    "mark requested from an old owner",
    "read",
    "read alone",
    "reported LOST",
    "reported unknown",
    "doubt in the log",
    "replica.rejected",
    "session.abandoned",
    "coordinator.unavailable",
    "locks.refilled",
    "locks.partially_refilled",
    "released",
    "followed in flight",
    "dependent append of another session rejected",
    "append on an older connection",
    "session of a hanging server expired",
    "rescue interrupted",
    "replica marked by a command",
    "feed unsubscribed",
    "context client restarted",
    "archive.recorded",
    "archive.failed",
    "archive.object_replaced",
    "checkpoint due",
    "archive answer lost",
    "archive file deleted",
    "archive write after its answer",
    "archive write after its sender died",
    "storage.segment_removed",
    "replica reset",
    "read from the archive",
    "archived objects expired",
    "read below the first available ID",
)
# Reports of machines -> the names above.
REPORTED: Final[Mapping[str, str]] = {"recovery.waiting": "undecidable wait"}


def never(counts: Mapping[str, int]) -> list[str]:
    """Return the states that runs with these counts never reached, in the list's order."""
    return [each for each in SOMETIMES if not counts.get(each)]
