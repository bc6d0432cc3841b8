"""The numeric limits of the replication state machines.

The state machines read no configuration. The process sets these limits from its settings.

Rules:
    1. No limit affects safety. Even a limit that is a hundred times too high or too low costs only
       time or memory, never data.
"""

from dataclasses import dataclass, fields

MIB = 1024 * 1024
_ZERO_ALLOWED_FIELDS = (
    "quorum_ms_max",
    "opening_grace_ms",
    "slow_append_ms",
    "archive_interval_ms",
    "archive_retention_ms",
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of a session, all in milliseconds, bytes or counts; `0 < ..._min <= ..._max`.

    Pauses:
        - `first_retry_ms_max`: maximum of the random pause after the first failed session. Later
          pauses start at `retry_ms_min` and double up to `retry_ms_max`. The pauses between
          requests to an unavailable coordinator double in the same way.
        - `redial_ms_...`: pauses between dials of a storage without a connection.
        - `rejected_retry_ms`: pause after an error that an operator may have to correct: a storage
          was rejected, or the metadata does not permit a claim.
        - `opening_grace_ms`: how long a session that could open waits for replicas that are nearly
          ready.

    Timeouts:
        - `answer_ms_max`: answer timeout of a replica. A replica that exceeds the timeout is
          dropped if the session is not settled yet, or if the replica has not answered PREPARE. In
          all other cases, the replica stays in the session, but in repairs another source replaces
          it.
        - `quorum_ms_max`: how long the owner keeps a partition without a quorum; 0 for no limit.
        - `proof_ms_max`: timeout of a proof of the high-water mark (a confirmation by a quorum).

    Lifetimes:
        - `stable_session_ms`: if a session lasted this long, its end does not count as a failure.
        - `useful_session_ms`: if a session accepted appends for this long and then lost a storage,
          the session's end does not count as a failure either. A rolling restart causes such ends.
        - `rejoin_session_age_ms_min`: minimum age of an open session before a returning replica
          starts a new session.
        - `exclusion_ms_...`: how long a replica that rejected appends is left out.
        - `lost_races_max`: number of sessions lost to other servers before the partition is
          released.

    Appends and catch-up:
        - `lag_bytes_max`: limit of unanswered appends to one replica, and of batches kept in memory
          for slow replicas.
        - `lag_count_max`: limit of the number of these appends and batches, because each of them
          uses memory in addition to its bytes.
        - `range_bytes_max`: size of one copied range.
        - `slow_append_ms`: an append is reported as slow if an engaged replica takes this long to
          acknowledge it; 0 for never.

    Archive:
        - `archive_interval_ms`: pause between attempts to archive committed batches, doubled after
          each failure; 0: nothing is archived.
        - `archived_bytes_max`: if the archived records above the confirmed mark exceed this size,
          the owner is notified that a checkpoint is due.
        - `archive_retention_ms`: age at which archived objects expire; 0: never.
        - `collection_interval_ms`: pause between two collections of the archive's garbage in a
          session.
    """

    first_retry_ms_max: int = 20
    retry_ms_min: int = 50
    retry_ms_max: int = 2_000
    redial_ms_min: int = 100
    redial_ms_max: int = 2_000
    rejected_retry_ms: int = 10_000
    opening_grace_ms: int = 20
    answer_ms_max: int = 5_000
    quorum_ms_max: int = 12_000
    proof_ms_max: int = 2_000
    stable_session_ms: int = 5_000
    useful_session_ms: int = 1_000
    rejoin_session_age_ms_min: int = 2_000
    exclusion_ms_min: int = 1_000
    exclusion_ms_max: int = 60_000
    lost_races_max: int = 8
    lag_bytes_max: int = 16 * MIB
    lag_count_max: int = 16_384
    range_bytes_max: int = 1 * MIB
    slow_append_ms: int = 0
    archive_interval_ms: int = 0
    archive_retention_ms: int = 0
    collection_interval_ms: int = 3_600_000
    archived_bytes_max: int = 64 * MIB

    def __post_init__(self) -> None:
        for name in (limit.name for limit in fields(self)):
            minimum = 0 if name in _ZERO_ALLOWED_FIELDS else 1
            assert getattr(self, name) >= minimum, name
        assert self.retry_ms_min <= self.retry_ms_max
        assert self.redial_ms_min <= self.redial_ms_max
        assert self.exclusion_ms_min <= self.exclusion_ms_max
