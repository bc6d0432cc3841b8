"""Rebuilds the metadata of a partition from its replicas, and chooses the replica to trust.

Normally, a quorum of replicas determines the log of a partition. Metadata must be rebuilt only if
ZooKeeper has lost its data, or if too few replicas of a partition have a trusted log.

Among the replicas that answer, the best log is the longest log among the replicas with the newest
session. If fewer than a quorum of replicas are missing, this log contains all acknowledged records,
for these reasons:
    - A quorum of replicas has synced each acknowledged record in some session.
    - A storage stores a session before it accepts appends in this session, and only if its log
      contains all earlier records.
    - Of n replicas with a quorum of Q, any n - Q + 1 replicas include one that has synced the
      record. Example: of three replicas, any two.

Only the replicas of the last assignment count, but this assignment is lost. A log with an older
session may belong to a replica that had fallen behind. Or the partition has moved to other
storages, and the log has remained on its old storage. Such a log proves nothing about later
sessions. Conversely, a storage may have had a replica, although it has no readable log. There are
three possible reasons: the log cannot be opened, the replica was taken offline, or the directory is
empty. Only a log of the newest session certainly belonged to a replica in this session.

Rules (docs/design/correctness.md 2.4, row 15):
    1. No server can open a partition before its log is chosen. Until then, the new nodes contain no
       engaged replica, and a marker which states that the partition is not new.
    2. Only the replica with the chosen log is declared engaged. A second replica is assigned
       together with this replica, so that a single disk never acknowledges appends. The other
       replicas are added later, like any new replica.
    3. A replica that is suspect, or damaged above its low-water mark, is not chosen automatically.
       But if such a replica reports a later session, this session is the newest session.
    4. Only logs of the newest session count towards the quorum. This rule may reject a partition
       although its log is safe, for example if one replica has fallen behind and another replica is
       lost. In such a case, an operator can decide.
    5. Client IDs (both counters) and generations continue above all values that were ever
       allocated, so that no append is mistaken for an old append. IDs and generations start at the
       number of seconds since 2020. Because the operator's clock may have been set back, the start
       is also above the greatest values in the last records of each log. A principal may have
       requested so many IDs that servers have issued IDs above this start. The proofs of these IDs
       become invalid, because the permissions get a new key (`stored_permissions.py`, rule 4).
    6. The metadata is written before the replica is marked, because a marked replica is trusted. In
       the opposite order, a command could die between the two writes. Then a session with the old
       metadata would trust a replica that lacks records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from waltz_core import errors
from waltz_core.access.client_ids import BEFORE_FIRST_ISSUED_ID
from waltz_core.cluster.change.creation import NewCluster, creation_steps
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode, Operation
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    Generation,
    PartitionId,
    ReplicaId,
    ServerId,
    SessionId,
    TransactionId,
)

# Over years, fewer than one client ID per second is allocated. So the number of seconds since 2020
# is above all allocated IDs.
IDS_EPOCH_S = 1_577_836_800  # the beginning of 2020
# The owner of all partitions in the first assignment: no server ever has this ID.
NO_SERVER = ServerId(0)


class ReportedLog(NamedTuple):
    """The state that a replica reports after it was fenced and has synced its log."""

    last_session: SessionId
    last_synced_id: TransactionId
    is_suspect: bool
    is_damaged: bool  # above its low-water mark

    def to_json(self) -> dict[str, object]:
        """Return the log as JSON for the output of commands; the keys never change."""
        return {
            "last_session": self.last_session,
            "synced_max": self.last_synced_id,
            "is_suspect": self.is_suspect,
            "is_damaged": self.is_damaged,
        }

    @property
    def is_trusted(self) -> bool:
        """Whether the replica may be chosen automatically (rule 3)."""
        return not (self.is_suspect or self.is_damaged)

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of logs: a log with a greater rank has more records."""
        return self.last_session, self.last_synced_id


class MaximumIds(NamedTuple):
    """The greatest client ID, generation and issued ID in the last records of logs (rule 5).

    `issued_id` is the greatest client ID that a server has issued.
    """

    client_id: int
    generation: int
    issued_id: int = BEFORE_FIRST_ISSUED_ID

    @staticmethod
    def of_record(client_id: int, generation: int) -> "MaximumIds":
        """Return the IDs of one record."""
        if client_id > BEFORE_FIRST_ISSUED_ID:
            return MaximumIds(0, generation, client_id)
        return MaximumIds(client_id, generation)

    def maximum_of_each(self, other: "MaximumIds") -> "MaximumIds":
        """Return the greater value of each ID."""
        return MaximumIds(*map(max, self, other))


NO_IDS = MaximumIds(0, -1)


@dataclass(frozen=True, slots=True)
class RebuildDecision:
    """The replica whose log becomes the log of a partition, and the replicas that receive it."""

    partition_id: PartitionId
    source: ReplicaId
    log: ReportedLog
    members: tuple[ReplicaId, ...]

    @property
    def first_members(self) -> tuple[ReplicaId, ...]:
        """The replicas that are assigned first (rule 2)."""
        return self.members[:2]

    def with_log_session(self, session_id: SessionId) -> "RebuildDecision":
        """Return this decision with the session in which the chosen log was marked."""
        return replace(self, log=self.log._replace(last_session=session_id))

    def metadata(self, generation: Generation, session_id: SessionId) -> model.PartitionMetadata:
        """Return the metadata for ZooKeeper; the replicas have promised `session_id`."""
        states = {self.source: model.ReplicaState(self.log.last_session, model.UNRESOLVED)}
        return model.PartitionMetadata(generation, session_id, states)


class RebuildOperations(Protocol):
    """The writes that make a chosen log the log of its partition.

    Each write is durable when the call returns.
    """

    async def write_metadata(self, metadata: model.PartitionMetadata) -> None:
        """Write the partition's metadata and its marker, which contains the session."""

    async def set_low_water_mark(self) -> None:
        """Mark the chosen replica in the session, so that its log is trusted."""

    async def assign_replicas(self) -> None:
        """Assign the first replicas."""


async def declare_log(metadata: model.PartitionMetadata, operations: RebuildOperations) -> None:
    """Make a chosen log the log of its partition: write the metadata, mark, assign (rule 6)."""
    await operations.write_metadata(metadata)
    await operations.set_low_water_mark()
    await operations.assign_replicas()


def choose_log(
    partition_id: PartitionId,
    logs: Mapping[ReplicaId, ReportedLog],
    *,
    groups: Mapping[ReplicaId, int],
    replica_count: int,
    unanswered: Sequence[ReplicaId],
) -> RebuildDecision:
    """Choose the log of a partition from those of the storages that answered.

    `unanswered` are storages that did not answer and may have a replica. Raises BadRequest, with a
    hint, if the logs that answered may lack acknowledged records.
    """
    trusted = {replica: log for replica, log in logs.items() if log.is_trusted}
    untrusted = [*unanswered, *(replica for replica in logs if replica not in trusted)]
    newest = max((log.last_session for log in logs.values()), default=NO_SESSION)
    current = [replica for replica, log in trusted.items() if log.last_session == newest]  # rule 4
    older = [replica for replica in trusted if replica not in current]
    quorum = replica_count // 2 + 1
    if max(len(untrusted), replica_count - len(current)) >= quorum:
        raise errors.BadRequest(
            f"partition {partition_id}: cannot choose the log automatically. {len(current)} of "
            f"{replica_count} replicas have a trusted log of the last store session "
            f"({', '.join(current) or 'none'}); "
            f"replicas without a trusted log: {', '.join(untrusted) or 'none'}; replicas that "
            f"were only in older sessions: {', '.join(older) or 'none'}. An automatic choice "
            f"requires that fewer than {quorum} replicas lack a trusted log of the last session. "
            "Hint: start the storages of more replicas, or choose a log with "
            f"`cluster accept-replicas {partition_id}`."
        )
    ranked = sorted(trusted, key=lambda replica: trusted[replica].rank, reverse=True)
    members = _choose_members(ranked, groups, replica_count)
    return RebuildDecision(partition_id, ranked[0], trusted[ranked[0]], members)


def _choose_members(
    ranked: Sequence[ReplicaId], groups: Mapping[ReplicaId, int], count: int
) -> tuple[ReplicaId, ...]:
    """Take the best replica of each group first, then the best of the remaining replicas."""
    best_of_group: dict[int | None, ReplicaId] = {}
    for name in ranked:
        best_of_group.setdefault(groups.get(name), name)
    first = list(best_of_group.values())
    return tuple([*first, *(name for name in ranked if name not in first)][:count])


def describe_missing_in_chosen(
    chosen_log: ReportedLog, logs: Mapping[ReplicaId, ReportedLog]
) -> list[str]:
    """Return a text for each session or transaction range that the chosen log lacks."""
    texts: list[str] = []
    for name, log in logs.items():
        if log.last_session > chosen_log.last_session:
            texts.append(
                f"the last store session of replica {name} is {log.last_session}, but that of the "
                f"chosen log is {chosen_log.last_session}"
            )
        if log.last_synced_id > chosen_log.last_synced_id:
            first = chosen_log.last_synced_id + 1
            texts.append(
                f"replica {name} has transactions {first}..{log.last_synced_id}, which the chosen "
                "log does not have"
            )
    return texts


def first_id_after_loss(now_s: int) -> int:
    """Return the first client ID and generation to use after a loss of all metadata (rule 5)."""
    return min(max(now_s - IDS_EPOCH_S, 1), model.INT32_MAX // 2)


def first_issued_id_after_loss(ids: int) -> int:
    """Return the first client ID that servers issue; `ids` is from `first_id_after_loss`."""
    return min(BEFORE_FIRST_ISSUED_ID + ids, model.INT32_MAX)


def rebuilding_steps(
    paths: ClusterPaths, new: NewCluster, *, root_version: int, ids: int
) -> list[list[Operation]]:
    """Return the writes that create a cluster's nodes for a rebuilding (rules 1 and 5).

    The metadata of every partition names every storage as a replica, so that each storage serves
    exactly the logs in its directory.
    """
    partitions = [PartitionId(number) for number in range(new.partition_count)]
    closed = model.ReplicaState(NO_SESSION, BEFORE_FIRST)
    metadata = model.PartitionMetadata(
        Generation(ids), NO_SESSION, dict.fromkeys(new.groups, closed)
    )
    owned = dict.fromkeys(partitions, Generation(ids))
    assignment = model.PartitionAssignment(
        model.NO_CVERSION, new.partition_count, {NO_SERVER: owned}
    )
    data_by_path = {
        paths.servers: assignment.to_bytes(),
        paths.client_ids: model.encode_id_counter(ids),
        **{
            paths.marker(partition_id): model.PartitionMarker(model.MarkerState.OPEN).to_bytes()
            for partition_id in partitions
        },
    }
    added_nodes = [
        CreateNode(paths.partition(partition_id), metadata.to_bytes(partition_id))
        for partition_id in partitions
    ]
    added_nodes.append(
        CreateNode(
            paths.issued_client_ids, model.encode_id_counter(first_issued_id_after_loss(ids))
        )
    )
    return creation_steps(
        paths,
        replace(new, assignment={}),
        root_version=root_version,
        data_by_path=data_by_path,
        added_nodes=added_nodes,
    )


def is_undecided(
    metadata: model.PartitionMetadata | None, marker: model.PartitionMarker | None
) -> bool:
    """Whether a partition of a rebuilt cluster still waits until its log is chosen."""
    return (
        marker is not None
        and marker.state is model.MarkerState.OPEN
        and metadata is not None
        and bool(metadata.states)
        and all(state == (NO_SESSION, BEFORE_FIRST) for state in metadata.states.values())
    )
