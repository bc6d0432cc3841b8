"""The nodes of a cluster that is restored from a backup, as a pure function.

Rules (docs/decisions/055):
    1. The marker of a restored partition has state "new" and contains an archived mark. The log
       begins after this mark (`session_recovery.py`, rule 4). No server can claim the partition
       before the root's data is written.
    2. Client IDs, generations and sessions continue above all values that were ever allocated, even
       after the backup (`rebuilding.py`, rule 5). So no append, owner or batch is mistaken for an
       old one.
    3. If an exactly-once write began after the restored end of a partition, its starting mark is
       moved back to this end. If any partition ends before the backup's mark, rows of finished
       writes may be missing. In this case, no write is recorded as done. When Spark then repeats a
       write, it finds the stored rows in the log and appends only the missing rows. A write that
       was being removed at the backup stays in this state.
    4. The permissions and their revision are those of the backup, but the key for proofs of client
       IDs is new. Reason: client IDs that were issued after the backup may be issued again, and
       their proofs with the earlier key must not be valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from waltz_core.access.permissions import Permissions
from waltz_core.cluster.change.backup import Backup
from waltz_core.cluster.change.creation import NewCluster, creation_steps
from waltz_core.cluster.change.rebuilding import NO_SERVER, first_issued_id_after_loss
from waltz_core.cluster.write_registry import WriteWithTasks
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.interface import CreateNode, Operation
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.cluster.znodes.restore_sources import RestoreSources
from waltz_core.records.record import BEFORE_FIRST, ClientId, Generation, PartitionId, SessionId


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """A restored partition: its log begins after `end`, or at ID 0 if `end` is None."""

    generation: Generation
    session_id: SessionId
    end: model.ArchivedMark | None


@dataclass(frozen=True, slots=True)
class RestoredCluster:
    """The state of a restored cluster: partitions by number, counters, and the writes."""

    partitions: tuple[RestoredPartition, ...]
    client_id: ClientId
    issued_client_id: ClientId
    writes: Mapping[str, WriteWithTasks]
    restore_sources: RestoreSources
    permissions: Permissions | None = None


def next_session_id(backup: Backup, partition_id: PartitionId, ids: int) -> SessionId:
    """Return the session ID for the first metadata of a restored partition (rule 2)."""
    return SessionId(max(backup.partitions[partition_id].session_id + 1, ids))


def restored_cluster(
    backup: Backup,
    cluster_key: bytes,
    ends: Mapping[PartitionId, model.ArchivedMark | None],
    ids: int,
    client_key: bytes,
) -> RestoredCluster:
    """Return the state of a cluster that is restored from a backup up to these ends.

    `ids` is the first client ID and generation after a loss (rule 2). `client_key` is a new key for
    proofs of client IDs (rule 4).
    """
    partitions = tuple(
        RestoredPartition(
            Generation(max(each.generation + 1, ids)),
            next_session_id(backup, PartitionId(number), ids),
            ends[PartitionId(number)],
        )
        for number, each in enumerate(backup.partitions)
    )
    marks = {each: BEFORE_FIRST if end is None else end.last for each, end in ends.items()}
    is_whole = all(marks[each] == mark for each, mark in backup.marks.items())
    sources = backup.restore_sources
    if cluster_key != backup.cluster_key.bytes:
        by_number = {int(each): int(mark) for each, mark in marks.items()}
        sources = sources.with_source(backup.cluster_key.hex, by_number)
    return RestoredCluster(
        partitions,
        ClientId(max(backup.client_id, ids)),
        ClientId(max(backup.issued_client_id, first_issued_id_after_loss(ids))),
        {
            name: _restored_write(each, marks, is_whole=is_whole)
            for name, each in backup.writes.items()
        },
        sources,
        None if backup.permissions is None else replace(backup.permissions, client_key=client_key),
    )


def _restored_write(
    write: WriteWithTasks, marks: Mapping[PartitionId, int], *, is_whole: bool
) -> WriteWithTasks:
    """Return a write of the backup as it is in the restored cluster (rule 3)."""
    state = write.state
    capped_marks = {
        number: min(mark, marks.get(PartitionId(number), mark))
        for number, mark in state.marks.items()
    }
    is_removed = state.summary == {}
    summary = state.summary if is_whole or is_removed else None
    return write._replace(state=replace(state, marks=capped_marks, summary=summary))


def restoring_steps(
    paths: ClusterPaths, new: NewCluster, restored: RestoredCluster, *, root_version: int
) -> list[list[Operation]]:
    """Return the writes that create the nodes of a restored cluster, in order."""
    partitions = {
        PartitionId(number): restored_partition
        for number, restored_partition in enumerate(restored.partitions)
    }
    owned = {
        partition_id: restored_partition.generation
        for partition_id, restored_partition in partitions.items()
    }
    assignment = model.PartitionAssignment(
        model.NO_CVERSION, new.partition_count, {NO_SERVER: owned}
    )
    data_by_path = {
        paths.servers: assignment.to_bytes(),
        paths.client_ids: model.encode_id_counter(restored.client_id),
    }
    added_nodes = []
    for partition_id, restored_partition in partitions.items():
        marker = model.PartitionMarker(model.MarkerState.NEW, archived=restored_partition.end)
        data_by_path[paths.marker(partition_id)] = marker.to_bytes()
        metadata = model.PartitionMetadata(
            restored_partition.generation, restored_partition.session_id
        )
        added_nodes.append(
            CreateNode(paths.partition(partition_id), metadata.to_bytes(partition_id))
        )
    added_nodes.append(
        CreateNode(paths.issued_client_ids, model.encode_id_counter(restored.issued_client_id))
    )
    added_nodes.append(CreateNode(paths.restore_sources, restored.restore_sources.to_bytes()))
    if restored.permissions is not None:
        added_nodes.append(
            CreateNode(paths.access, access_node.encode_permissions(restored.permissions))
        )
    added_nodes.append(CreateNode(paths.writes))
    for name, write in restored.writes.items():
        added_nodes.append(CreateNode(paths.write(name), write.state.to_bytes()))
        added_nodes += [
            CreateNode(f"{paths.write(name)}/{number}", task.to_bytes())
            for number, task in write.tasks.items()
        ]
    return creation_steps(
        paths, new, root_version=root_version, data_by_path=data_by_path, added_nodes=added_nodes
    )
