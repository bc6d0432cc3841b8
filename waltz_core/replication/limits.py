"""The numbers that the replication machines keep to.

Machines take no configuration, only the few numbers they need; the process around them fills these
in from its own settings.

Rules:
    1. Nothing here decides what is safe. Each number may be wrong by a factor of a hundred and
       costs time or memory, never data.
"""

from dataclasses import dataclass, fields

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """All in milliseconds or bytes; `0 < ..._min <= ..._max`.

    `first_retry_ms_max`: a broken session is followed by the next within this time, chosen at
    random; later ones wait `retry_ms_min` doubling up to `retry_ms_max`, and so do questions to a
    coordinator that is away. `redial_ms_...`: how often an absent storage is dialled.
    `refused_retry_ms`: after a storage or the metadata was refused and a human may have to help.
    `grace_ms`: how long a session that could open waits for replicas that are nearly ready.
    `answer_ms_max`: a replica that owes an answer for longer is given up until a session has opened
    and is settled; after that, another source is asked for what it should have given.
    `quorum_ms_max`: without a quorum for so long the partition is released; 0 for never.
    `proof_ms_max`: how long a proof of the mark waits. `stable_ms`: a session that lived so long
    was no failure; nor was one that took appends for `useful_ms` and then lost a storage, as when
    all of them are restarted one after the other. `rejoin_ms_min`: a replica that came back makes
    a new session no earlier than so long after the last opened. `hold_ms_...`: a replica that
    refused appends stays out so long.
    `lost_races_max`: so many sessions are lost to other servers before the partition is released.
    `lag_bytes_max`: appends to one replica without answer, and what is kept in memory for slow
    ones. `range_bytes_max`: one copied stretch. `slow_append_ms`: appends that an
    engaged replica takes this long to answer are reported; 0 for never.
    """

    first_retry_ms_max: int = 20
    retry_ms_min: int = 50
    retry_ms_max: int = 2_000
    redial_ms_min: int = 100
    redial_ms_max: int = 2_000
    refused_retry_ms: int = 10_000
    grace_ms: int = 20
    answer_ms_max: int = 5_000
    quorum_ms_max: int = 12_000
    proof_ms_max: int = 2_000
    stable_ms: int = 5_000
    useful_ms: int = 1_000
    rejoin_ms_min: int = 2_000
    hold_ms_min: int = 1_000
    hold_ms_max: int = 60_000
    lost_races_max: int = 8
    lag_bytes_max: int = 16 * MIB
    range_bytes_max: int = 1 * MIB
    slow_append_ms: int = 0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            least = 0 if name in ("quorum_ms_max", "grace_ms", "slow_append_ms") else 1
            assert getattr(self, name) >= least, name
        assert self.retry_ms_min <= self.retry_ms_max
        assert self.redial_ms_min <= self.redial_ms_max
        assert self.hold_ms_min <= self.hold_ms_max
