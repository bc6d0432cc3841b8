"""What has to come to pass somewhere in a batch of runs: a quiet simulator proves nothing.

A checker that never had anything to look at is green for ever. This is the list of states that are
worth the trouble, each counted by the one who sees it.
"""

from collections.abc import Mapping
from typing import Final

# As they are counted: by checkers, by the simulated ZooKeeper, or by a report of a machine.
SOMETIMES: Final = (
    "undecidable wait",
    "U>0",
    "torn tail",
    "damage repaired",
    "damage mended live",
    "scrub found damage",
    "scrub_finished",
    "read_failed",
    "late join",
    "CAS lost reply",
    "nonce mismatch",
    "lock wait",
    "told LOCK",
    "told AHEAD",
    "session with 0 appends",
    "segment roll during recovery",
    "owner bounce",
    "NO_SPACE",
    "flushed",
    "proven mark",
    "unproved mark",
    "mark asked of an old owner",
    "read",
    "read alone",
    "told LOST",
    "told unknown",
    "doubt in the log",
    "replica.refused",
    "session.abandoned",
    "coordinator.away",
    "locks.refilled",
    "locks.refilled_in_part",
    "released",
    "followed in flight",
    "follower of another session refused",
    "append on an older connection",
    "session of a hanging server expired",
    "rescue broken off",
    "replica marked by a command",
    "feed laid down",
    "context client restarted",
)
# Reports of machines under the names above.
REPORTED: Final[Mapping[str, str]] = {"recovery.waiting": "undecidable wait"}


def never(counts: Mapping[str, int]) -> list[str]:
    """Return what never came to pass in runs with these counts, in the order of the list."""
    return [each for each in SOMETIMES if not counts.get(each)]
