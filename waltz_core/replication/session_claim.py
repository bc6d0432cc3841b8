"""The conditions of a session claim, and the values that it writes to ZooKeeper.

The claim is the first compare-and-set of a session. If it treats an existing partition as a new
one, the log can be lost. So this module contains all conditions of the claim, separate from the
requests to ZooKeeper.

Rules (docs/design/correctness.md 2.1 A and B, 2.4 rows 15, 17 and 36):
    1. Never claim if ZooKeeper has a later generation than this server.
    2. Never claim if ZooKeeper has lost data. There are two signs:
        - A partition that was opened before has no replica states.
        - Storages have promised a session that ZooKeeper does not know, and the other storages are
          fewer than a quorum.
    3. Never claim if the replicas that are new in the assignment are a quorum by themselves.
    4. Two servers can claim the same session ID. So only the session ID and the nonce together
       identify a claim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.records.record import Generation, ReplicaId, SessionId, TransactionId
from waltz_core.replication.quorum import quorum_size
from waltz_core.replication.session_recovery import (
    HistoryOrigin,
    history_origin_of,
    states_to_claim,
)


class PartitionNodes(NamedTuple):
    """Both ZooKeeper nodes of a partition, with their versions; a write replaces these versions."""

    metadata: PartitionMetadata
    metadata_version: int
    marker: PartitionMarker | None
    marker_version: int

    @property
    def versions(self) -> tuple[int, int]:
        """The versions of both nodes."""
        return self.metadata_version, self.marker_version

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark of the partition."""
        return None if self.marker is None else self.marker.archived

    @property
    def last_claim(self) -> tuple[SessionId, bytes] | None:
        """Session and nonce of the last claim; None if a 0.13 server has made this claim."""
        marker = self.marker
        if marker is None or marker.session_id != self.metadata.session_id:
            return None
        return marker.session_id, marker.nonce


class InDoubtIds(NamedTuple):
    """The IDs of an earlier session without a final outcome: those above `committed`."""

    session_id: SessionId
    committed: TransactionId
    last: TransactionId


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """A successful claim: the values of the first compare-and-set, and the state of the owner.

    `highest_committed` is the highest ID that this owner knows to be committed. `excluded_until_ms`
    maps each replica that rejected appends recently to the end of its exclusion. `later_promises`
    maps replicas to the sessions that they have promised and that ZooKeeper does not know.
    `archived_mark` is the mark that ZooKeeper records; None if there is none.
    """

    session_id: SessionId
    generation: Generation
    nonce: bytes
    origin: HistoryOrigin
    states: Mapping[ReplicaId, ReplicaState]
    assigned: tuple[ReplicaId, ...]
    follows_own_session: bool
    highest_committed: TransactionId
    in_doubt: InDoubtIds | None
    excluded_until_ms: Mapping[ReplicaId, int]
    later_promises: Mapping[ReplicaId, SessionId]
    archived_mark: ArchivedMark | None = None


def is_later_generation(generation: Generation, other: Generation) -> bool:
    """Return whether a generation is later than another. Both are int32 and may wrap around."""
    return 0 < ((generation - other) & 0xFFFFFFFF) < 1 << 31


def claim_rejection(
    nodes: PartitionNodes, replicas: Sequence[ReplicaId], promised: Mapping[ReplicaId, SessionId]
) -> str | None:
    """Return why no session may be claimed (rules 2 and 3); None if a session may be claimed.

    `promised` are the sessions that storages have reported as promised.
    """
    if history_origin_of(nodes.metadata, nodes.marker) is HistoryOrigin.LOST:
        return (
            "the partition was opened before, but its metadata in ZooKeeper has no replica states: "
            "ZooKeeper's data was lost or rolled back"
        )
    states = nodes.metadata.states
    quorum = quorum_size(len(replicas))
    new_replicas = [name for name in replicas if name not in states]
    if states and len(new_replicas) >= quorum:
        return (
            f"expected fewer than {quorum} new replicas at once, found "
            f"{', '.join(new_replicas)} among {', '.join(replicas)}"
        )
    last_session = nodes.metadata.session_id
    ahead = [name for name in replicas if promised.get(name, last_session) > last_session]
    if len(ahead) > len(replicas) - quorum:
        return (
            f"replicas {', '.join(ahead)} have promised store sessions after {last_session}, but "
            f"in ZooKeeper the last session is {last_session}: ZooKeeper's data was lost or rolled "
            "back"
        )
    return None


def claimed_nodes(
    nodes: PartitionNodes, generation: Generation, replicas: Sequence[ReplicaId], nonce: bytes
) -> PartitionNodes:
    """Return the values of CAS#1: the next session ID, the nonce, everything else unchanged."""
    assert not is_later_generation(nodes.metadata.generation, generation), "rule 1"
    origin = history_origin_of(nodes.metadata, nodes.marker)
    assert origin is not HistoryOrigin.LOST, "rule 2"
    session_id = SessionId(nodes.metadata.session_id + 1)
    states = states_to_claim(origin, nodes.metadata.states, replicas)
    state = MarkerState.NEW if nodes.marker is None else nodes.marker.state
    return nodes._replace(
        metadata=PartitionMetadata(generation, session_id, states),
        marker=PartitionMarker(state, session_id, nonce, nodes.archived_mark),
    )


def nodes_with_states(
    nodes: PartitionNodes, states: Mapping[ReplicaId, ReplicaState], archived: ArchivedMark | None
) -> PartitionNodes:
    """Return the values of CAS#2 and CAS#3: states, archived mark, and the marker OPEN."""
    marker = nodes.marker
    assert marker is not None
    metadata = PartitionMetadata(nodes.metadata.generation, nodes.metadata.session_id, states)
    return nodes._replace(
        metadata=metadata,
        marker=PartitionMarker(MarkerState.OPEN, marker.session_id, marker.nonce, archived),
    )
