"""Seven checks of every partition, from ZooKeeper to storages, like `verify` of Waltz 0.13.

The doctor (`diagnosis.py`) reports each cause once. In contrast, a check reports a failure for
every affected partition, whatever the cause. Both modules use `condition.py`.

Rules:
    1. A failure names its check and its partitions.
    2. A process that does not answer is a failed check. The other processes are still checked.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from waltz_core.cluster.change import replica_steps
from waltz_core.ops.condition import PartitionCondition, UnavailableReason, unavailable_reason
from waltz_core.ops.facts import ClusterFacts, ServerFacts, StorageFacts
from waltz_core.records.record import PartitionId

# Each check and the condition that it verifies for a partition, in the order of Waltz 0.13.
CHECK_CONDITIONS: Final = {
    "assignment": "the partition has an owner and replicas, spread over groups of storages",
    "server": "the owner answers requests for the partition",
    "connectivity": "the owner can connect to the storages of the partition",
    "storage": "the storages of the partition answer, and each has its replica",
    "quorum": "a quorum of the replicas is in sync",
    "recovery": "every replica is in sync in the newest store session",
    "health": "the owner has an open store session",
}


class FailedCheck(NamedTuple):
    """A failed check: a sentence about the failure, and the affected partitions (rule 1)."""

    check: str
    text: str
    partitions: tuple[PartitionId, ...]


def names_of_failed_checks(failures: Sequence[FailedCheck], partition_id: PartitionId) -> set[str]:
    """Return the names of the checks that a partition has failed."""
    return {failure.check for failure in failures if partition_id in failure.partitions}


def check_cluster(
    cluster: ClusterFacts, partition_ids: tuple[PartitionId, ...]
) -> list[FailedCheck]:
    """Run all checks for the chosen partitions; return every failure."""
    conditions = [PartitionCondition(cluster, partition) for partition in partition_ids]
    failures = [*_check_assignment(cluster, conditions)]
    for server in cluster.servers.values():
        failures += _check_server(server, conditions)
    for storage in cluster.storages.values():
        failures += _check_storage(storage, conditions)
    for condition in conditions:
        failures += _check_replicas(condition)
    return failures + [
        FailedCheck(
            "assignment",
            f"partition {partition}: its replicas are in fewer groups of storages than possible. "
            "Hint: `waltz-core cluster auto-assign` spreads them.",
            (partition,),
        )
        for partition in replica_steps.partitions_in_too_few_groups(
            cluster.assigned_replicas, cluster.storage_groups
        )
        if partition in partition_ids
    ]


def _check_assignment(
    cluster: ClusterFacts, conditions: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    """Report a missing or outdated assignment of partitions to servers."""
    partition_ids = tuple(condition.partition_id for condition in conditions)
    if not cluster.is_assignment_settled:
        yield FailedCheck(
            "assignment", "the assignment does not match the live servers yet", partition_ids
        )
    if not cluster.servers:
        yield FailedCheck(
            "assignment", "no server is registered. Hint: start a server.", partition_ids
        )
        return
    for condition in conditions:
        if condition.owner is None:
            text = f"partition {condition.partition_id} is assigned to no server"
            yield FailedCheck("assignment", text, (condition.partition_id,))


def _check_server(
    server: ServerFacts, conditions: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    """Report a server that does not answer, serve its partitions or connect to its storages."""
    address, affected = (
        server.address,
        [condition for condition in conditions if condition.owner is server],
    )
    if server.failure:
        owned_partitions = tuple(condition.partition_id for condition in affected)
        yield FailedCheck(
            "server", f"server {address} does not answer: {server.failure}", owned_partitions
        )
        return
    for condition in affected:
        subject, partitions = (
            f"partition {condition.partition_id}: server {address}",
            (condition.partition_id,),
        )
        if not condition.is_served:
            text = f"{subject} owns it, but does not answer requests for it"
            yield FailedCheck("server", text, partitions)
        elif not condition.has_open_session:
            text = f"{subject} has no open store session with a quorum of its replicas"
            yield FailedCheck("health", text, partitions)
    for storage in server.unreachable_storages:
        owned_partitions = tuple(
            condition.partition_id
            for condition in affected
            if storage in condition.assigned_replicas
        )
        yield FailedCheck(
            "connectivity", f"server {address} cannot reach storage {storage}", owned_partitions
        )


def _check_storage(
    storage: StorageFacts, conditions: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    """Report a storage that does not answer, or does not serve an assigned replica."""
    address, affected = (
        storage.address,
        [condition for condition in conditions if storage.address in condition.assigned_replicas],
    )
    partition_ids = tuple(condition.partition_id for condition in affected)
    # A 0.13 storage neither registers itself nor reports its ID.
    if storage.registered_storage_id is None and (
        storage.failure or storage.storage_id is not None
    ):
        text = (
            f"storage {address} is not registered: it has never started, or it is a Waltz "
            "0.13 storage"
        )
        yield FailedCheck("storage", text, partition_ids)
    if storage.failure:
        yield FailedCheck(
            "storage", f"storage {address} does not answer: {storage.failure}", partition_ids
        )
    elif not storage.belongs_to_cluster:
        yield FailedCheck(
            "storage", f"the storage at {address} belongs to another cluster", partition_ids
        )
    elif storage.admin_failure:
        text = f"storage {address} does not answer at its admin port: {storage.admin_failure}"
        yield FailedCheck("storage", text, partition_ids)
    else:
        for condition in affected:
            text = _unavailable_text(condition, storage)
            if text:
                subject = f"partition {condition.partition_id}: storage {address}"
                yield FailedCheck("storage", f"{subject} {text}", (condition.partition_id,))


def _unavailable_text(condition: PartitionCondition, storage: StorageFacts) -> str:
    """Return the reason why a storage does not serve a partition; empty if there is none."""
    replica = condition.replica_facts(storage.address)
    reason = None if replica is None else unavailable_reason(replica)
    if replica is None or reason is None:
        return ""
    texts = {
        UnavailableReason.MISSING: "has no replica of the partition, although ZooKeeper assigns "
        "one to the storage. Hint: run `waltz-core storage sync-partitions`.",
        UnavailableReason.OFFLINE: "has taken its replica offline. Hint: run `waltz-core "
        f"storage availability --storage {storage.address} --partition "
        f"{condition.partition_id} --online true`.",
        UnavailableReason.OPENING: "is still opening the log of its replica",
        UnavailableReason.UNREADABLE: f"cannot open the log of its replica: {replica.open_error}",
        UnavailableReason.STUCK: "does not complete requests for this partition",
    }
    return texts[reason]


def _check_replicas(condition: PartitionCondition) -> Iterator[FailedCheck]:
    """Report replicas that are not engaged in the newest session, and partitions without quorum."""
    name, affected = f"partition {condition.partition_id}", (condition.partition_id,)
    if not condition.assigned_replicas:
        text = f"{name} has no replicas. Hint: run `waltz-core cluster auto-assign`."
        yield FailedCheck("assignment", text, affected)
        return
    if not condition.replicas.was_ever_opened:
        yield FailedCheck("recovery", f"{name} was never opened", affected)
        return
    if condition.has_outdated_session_replicas:
        text = (
            f"{name}: no store session has been opened yet with its replicas "
            f"{', '.join(condition.assigned_replicas)}"
        )
        yield FailedCheck("recovery", text, affected)
    if len(condition.replicas.in_sync_replicas) < condition.quorum_size:
        yield FailedCheck(
            "quorum", f"{name}: fewer than a quorum of its replicas are in sync", affected
        )
    elif condition.not_engaged_replicas:
        verb_text = "is" if len(condition.not_engaged_replicas) == 1 else "are"
        text = f"{name}: {', '.join(condition.not_engaged_replicas)} {verb_text} not in sync"
        yield FailedCheck("recovery", text, affected)
