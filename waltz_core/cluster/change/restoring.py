"""The nodes of a cluster that is restored from a backup, as a pure function.

Rules (docs/decisions/055):
    1. A partition is new, and its marker has an archived mark: its log begins after that mark
       (`session_recovery.py`, rule 4). No server claims it before the root's data is written.
    2. Client IDs, generations and sessions continue above all that were ever allocated, even after
       the backup (`rebuilding.py`, rule 5). So no append, owner or batch is mistaken for an old
       one.
    3. A write that began after the restored end of a partition begins at that end. If a partition
       ends before the backup's mark, no write counts as done: a repetition finds its rows in the
       log, and appends the missing rows. A write that is being removed is still being removed.
    4. The permissions are those of the backup, with their revision: daemons of a restored cluster
       start with this revision. The permissions have a new key for proofs of client IDs: IDs that
       were issued after the backup have proofs of the earlier key, and may be issued again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from waltz_core.access.permissions import Permissions
from waltz_core.cluster.change.backup import Backup
from waltz_core.cluster.change.creation import NewCluster, creation_steps
from waltz_core.cluster.change.rebuilding import NO_SERVER, issued_from
from waltz_core.cluster.write_registry import BegunWrite
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.interface import CreateNode, Operation
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.cluster.znodes.restored_from import RestoredFrom
from waltz_core.records.record import BEFORE_FIRST, ClientId, Generation, PartitionId, SessionId


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """A partition that continues after its restored end; without an end, the partition is empty."""

    generation: Generation
    session_id: SessionId
    end: model.ArchivedMark | None


@dataclass(frozen=True, slots=True)
class RestoredCluster:
    """The state of a restored cluster: partitions by number, counters, and the writes."""

    partitions: tuple[RestoredPartition, ...]
    client_id: ClientId
    issued_client_id: ClientId
    writes: Mapping[str, BegunWrite]
    restored_from: RestoredFrom
    access: Permissions | None = None


def next_session(backup: Backup, partition_id: PartitionId, ids: int) -> SessionId:
    """Return the session of a restored partition in its first metadata (rule 2)."""
    return SessionId(max(backup.partitions[partition_id].session_id + 1, ids))


def restored_cluster(
    backup: Backup,
    cluster_key: bytes,
    ends: Mapping[PartitionId, model.ArchivedMark | None],
    ids: int,
    client_key: bytes,
) -> RestoredCluster:
    """Return the cluster of a backup up to these ends; `ids` is that of a rebuilding (rule 2).

    `client_key` is a new key for proofs of client IDs (rule 4).
    """
    partitions = tuple(
        RestoredPartition(
            Generation(max(each.generation + 1, ids)),
            next_session(backup, PartitionId(number), ids),
            ends[PartitionId(number)],
        )
        for number, each in enumerate(backup.partitions)
    )
    marks = {each: BEFORE_FIRST if end is None else end.last for each, end in ends.items()}
    is_whole = all(marks[each] == mark for each, mark in backup.marks.items())
    sources = backup.restored_from
    if cluster_key != backup.cluster_key.bytes:
        by_number = {int(each): int(mark) for each, mark in marks.items()}
        sources = sources.continued(backup.cluster_key.hex, by_number)
    return RestoredCluster(
        partitions,
        ClientId(max(backup.client_id, ids)),
        ClientId(max(backup.issued_client_id, issued_from(ids))),
        {
            name: _restored_write(each, marks, is_whole=is_whole)
            for name, each in backup.writes.items()
        },
        sources,
        None if backup.access is None else replace(backup.access, client_key=client_key),
    )


def _restored_write(
    write: BegunWrite, marks: Mapping[PartitionId, int], *, is_whole: bool
) -> BegunWrite:
    """Return a write of the backup as it is in the restored cluster (rule 3)."""
    state = write.state
    capped = {
        each: min(mark, marks.get(PartitionId(each), mark)) for each, mark in state.marks.items()
    }
    is_removed = state.summary == {}
    summary = state.summary if is_whole or is_removed else None
    return write._replace(state=replace(state, marks=capped, summary=summary))


def restoring_steps(
    paths: ClusterPaths, new: NewCluster, restored: RestoredCluster, *, root_version: int
) -> list[list[Operation]]:
    """Return the writes that create the nodes of a restored cluster, in order."""
    partitions = {PartitionId(number): each for number, each in enumerate(restored.partitions)}
    owned = {each: its.generation for each, its in partitions.items()}
    assignment = model.PartitionAssignment(
        model.NO_CVERSION, new.partition_count, {NO_SERVER: owned}
    )
    contents = {
        paths.servers: assignment.to_bytes(),
        paths.client_ids: model.encode_id(restored.client_id),
    }
    added = []
    for each, its in partitions.items():
        marker = model.PartitionMarker(model.MarkerState.NEW, archived=its.end)
        contents[paths.marker(each)] = marker.to_bytes()
        metadata = model.PartitionMetadata(its.generation, its.session_id)
        added.append(CreateNode(paths.partition(each), metadata.to_bytes(each)))
    added.append(CreateNode(paths.issued_client_ids, model.encode_id(restored.issued_client_id)))
    added.append(CreateNode(paths.restored_from, restored.restored_from.to_bytes()))
    if restored.access is not None:
        added.append(CreateNode(paths.access, access_node.encode(restored.access)))
    added.append(CreateNode(paths.writes))
    for name, write in restored.writes.items():
        added.append(CreateNode(paths.write(name), write.state.to_bytes()))
        added += [
            CreateNode(f"{paths.write(name)}/{number}", task.to_bytes())
            for number, task in write.tasks.items()
        ]
    return creation_steps(paths, new, root_version=root_version, contents=contents, added=added)
