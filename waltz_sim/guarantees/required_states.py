"""The states that a batch of runs must reach at least once.

A checker without input always passes, so it proves nothing. So this module lists the states that a
batch of runs must have reached to prove something. The component that observes a state counts it.
"""

from collections.abc import Mapping
from typing import Final

# These are names of counters of checkers, of the simulated ZooKeeper, or of reports by machines.
REQUIRED_STATES: Final = (
    "recovery waited for more trusted replicas",
    "recovery decided without some replicas",
    "torn record at the end of a log",
    "damage repaired",
    "damage repaired in an open session",
    "scrub found damage",
    "storage.scrub_finished",
    "storage.read_failed",
    "replica joined an open session",
    "reply to a compare-and-set lost",
    "two owners claimed one session",
    "rejection delayed until the conflict committed",
    "reported LOCK",
    "reported AHEAD",
    "session without appends",
    "segment roll during recovery",
    "partition returned to its previous owner",
    "NO_SPACE",
    "flushed",
    "mark confirmed by a quorum",
    "mark not confirmed by a quorum",
    "mark requested from an old owner",
    "read",
    "single transaction read",
    "reported LOST",
    "reported unknown",
    "unacknowledged rows kept by a recovery",
    "replica.rejected",
    "session.abandoned",
    "coordinator.unavailable",
    "locks.loaded",
    "locks.partially_loaded",
    "partition released",
    "dependent append sent before its predecessors committed",
    "dependent append of another session rejected",
    "append on an older connection",
    "session of a hanging server expired",
    "disaster recovery interrupted",
    "replica marked by a command",
    "feed unsubscribed",
    "context client restarted",
    "archive.manifest_recorded",
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
# Reports of machines -> the states above that they show.
STATES_OF_REPORTS: Final[Mapping[str, str]] = {
    "recovery.waiting": "recovery waited for more trusted replicas"
}


def missing_states(counts: Mapping[str, int]) -> list[str]:
    """Return the required states that no run has reached, in the order of `REQUIRED_STATES`."""
    return [required_state for required_state in REQUIRED_STATES if not counts.get(required_state)]
