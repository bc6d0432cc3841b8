"""Seven checks of every partition, from ZooKeeper to storages, like `verify` of Waltz 0.13.

`diagnosis.py` reports each cause once. In contrast, a check fails whatever the cause, and for every
affected partition. Both modules use `condition.py`.

Rules:
    1. A failure names its check and its partitions.
    2. If a process does not answer, a check has failed, and the other processes are still checked.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from waltz_core.cluster.change import replica_steps
from waltz_core.ops.condition import PartitionCondition, UnavailableReason, unavailable_reason
from waltz_core.ops.facts import ClusterFacts, ServerFacts, StorageFacts
from waltz_core.records.record import PartitionId

# Each check and its condition for a partition, in the order of `verify` of Waltz 0.13.
CHECKS: Final = {
    "assignment": "ZooKeeper assigns it a server and replicas, spread over groups of storages",
    "server": "the server that owns it answers for it",
    "connectivity": "the server that owns it can connect to its storages",
    "storage": "its storages answer, and each has its replica",
    "quorum": "a quorum of its replicas is in sync",
    "recovery": "every replica is in sync in the newest store session",
    "health": "the server that owns it has an open store session",
}


class FailedCheck(NamedTuple):
    """A failed check: a sentence about the failure, and the affected partitions (rule 1)."""

    check: str
    text: str
    partitions: tuple[PartitionId, ...]


def failed_checks(found: Sequence[FailedCheck], partition_id: PartitionId) -> set[str]:
    """Return the names of the checks that a partition has failed."""
    return {each.check for each in found if partition_id in each.partitions}


def check_cluster(cluster: ClusterFacts, chosen: tuple[PartitionId, ...]) -> list[FailedCheck]:
    """Run all checks for the chosen partitions; return every failure."""
    standings = [PartitionCondition(cluster, each) for each in chosen]
    found = [*_check_assignment(cluster, standings)]
    for server in cluster.servers.values():
        found += _check_server(server, standings)
    for storage in cluster.storages.values():
        found += _check_storage(storage, standings)
    for now in standings:
        found += _check_replicas(now)
    return found + [
        FailedCheck(
            "assignment",
            f"partition {each}: its replicas are in fewer groups of storages than possible. "
            "Hint: `waltz-core cluster auto-assign` spreads them",
            (each,),
        )
        for each in replica_steps.partitions_in_too_few_groups(cluster.assigned, cluster.groups)
        if each in chosen
    ]


def _check_assignment(
    cluster: ClusterFacts, standings: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    chosen = tuple(each.partition_id for each in standings)
    if not cluster.is_settled:
        yield FailedCheck(
            "assignment", "the assignment does not match the live servers yet", chosen
        )
    if not cluster.servers:
        yield FailedCheck("assignment", "no server is registered. Hint: start one", chosen)
        return
    for each in standings:
        if each.owner is None:
            text = f"partition {each.partition_id} is assigned to no server"
            yield FailedCheck("assignment", text, (each.partition_id,))


def _check_server(
    server: ServerFacts, standings: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    address, affected = server.address, [each for each in standings if each.owner is server]
    if server.failure:
        owned = tuple(each.partition_id for each in affected)
        yield FailedCheck("server", f"server {address} does not answer: {server.failure}", owned)
        return
    for each in affected:
        where, partitions = f"partition {each.partition_id}: server {address}", (each.partition_id,)
        if not each.is_served:
            text = f"{where} owns it, but does not answer requests for it"
            yield FailedCheck("server", text, partitions)
        elif not each.is_open:
            text = f"{where} has no open store session with a quorum of its replicas"
            yield FailedCheck("health", text, partitions)
    for storage in server.out_of_reach:
        owned = tuple(each.partition_id for each in affected if storage in each.assigned)
        yield FailedCheck("connectivity", f"server {address} cannot reach storage {storage}", owned)


def _check_storage(
    storage: StorageFacts, standings: Sequence[PartitionCondition]
) -> Iterator[FailedCheck]:
    address, affected = (
        storage.address,
        [each for each in standings if storage.address in each.assigned],
    )
    wanted = tuple(each.partition_id for each in affected)
    # A 0.13 storage neither registers itself nor reports its ID.
    if storage.registered_id is None and (storage.failure or storage.storage_id is not None):
        text = (
            f"storage {address} is not registered: it has never started, or it is a Waltz "
            "0.13 storage"
        )
        yield FailedCheck("storage", text, wanted)
    if storage.failure:
        yield FailedCheck(
            "storage", f"storage {address} does not answer: {storage.failure}", wanted
        )
    elif not storage.is_of_cluster:
        yield FailedCheck("storage", f"the storage at {address} belongs to another cluster", wanted)
    elif storage.admin_failure:
        text = f"storage {address} does not answer at its admin port: {storage.admin_failure}"
        yield FailedCheck("storage", text, wanted)
    else:
        for each in affected:
            text = _unavailable_text(each, storage)
            if text:
                where = f"partition {each.partition_id}: storage {address}"
                yield FailedCheck("storage", f"{where} {text}", (each.partition_id,))


def _unavailable_text(now: PartitionCondition, storage: StorageFacts) -> str:
    """Return the reason why a storage does not serve a partition; empty if there is none."""
    held = now.held(storage.address)
    reason = None if held is None else unavailable_reason(held)
    if held is None or reason is None:
        return ""
    texts = {
        UnavailableReason.NOT_HELD: "has no replica of it, although ZooKeeper assigns one. "
        "Hint: `waltz-core storage sync-partitions`",
        UnavailableReason.OFFLINE: "has taken its replica offline. Hint: `waltz-core storage "
        f"availability --storage {storage.address} --partition {now.partition_id} --online "
        "true`",
        UnavailableReason.OPENING: "is still opening the log of its replica",
        UnavailableReason.UNREADABLE: f"cannot open the log of its replica: {held.reason}",
        UnavailableReason.STUCK: "does not complete requests for this partition",
    }
    return texts[reason]


def _check_replicas(now: PartitionCondition) -> Iterator[FailedCheck]:
    """Report replicas that are not engaged in the newest session, and partitions without quorum."""
    name, affected = f"partition {now.partition_id}", (now.partition_id,)
    if not now.assigned:
        text = f"{name} has no replicas. Hint: `waltz-core cluster auto-assign`"
        yield FailedCheck("assignment", text, affected)
        return
    if not now.replicas.was_opened:
        yield FailedCheck("recovery", f"{name} was never opened", affected)
        return
    if now.is_of_other_replicas:
        text = (
            f"{name}: no store session has been opened yet with its replicas "
            f"{', '.join(now.assigned)}"
        )
        yield FailedCheck("recovery", text, affected)
    if len(now.replicas.in_sync) < now.quorum:
        yield FailedCheck(
            "quorum", f"{name}: less than a quorum of its replicas is in sync", affected
        )
    elif now.not_engaged:
        are = "is" if len(now.not_engaged) == 1 else "are"
        text = f"{name}: {', '.join(now.not_engaged)} {are} not in sync"
        yield FailedCheck("recovery", text, affected)
