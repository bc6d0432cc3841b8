"""`accept-replicas` and `rebuild-metadata`: the chosen replica, the order of writes, the IDs."""

import asyncio
import contextlib
from types import SimpleNamespace
from uuid import UUID

import pytest

from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.access.permissions import Permissions
from waltz_core.cli.cluster import cluster_disaster_recovery
from waltz_core.cli.cluster.cluster_disaster_recovery import _choose_replica
from waltz_core.cluster.change.rebuilding import IDS_EPOCH_S, NO_IDS, MaximumIds, ReportedLog
from waltz_core.cluster.membership.assignment import assign_partitions
from waltz_core.cluster.znodes import access_node
from waltz_core.cluster.znodes.interface import SetNode
from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    MarkerState,
    PartitionAssignment,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
    ServerDescriptor,
)
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.errors import BadConfig, BadFormat, BadRequest, ReadFailed, Unavailable
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION
from waltz_core.wire.messages import Prepared

A, B, C = "10.0.0.1:5280", "10.0.0.2:5280", "10.0.0.3:5280"


def log(session=7, last=90, *, is_suspect=False, is_damaged=False):
    return ReportedLog(session, last, is_suspect, is_damaged)


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ({A: log(is_suspect=True), B: log(), C: log(last=50)}, B),  # the trusted log
        ({B: log(), A: log(is_suspect=True), C: log(last=50)}, B),
        (
            {A: log(8, 10, is_suspect=True), B: log(7, 90)},
            A,
        ),  # the latest session, then the longest log
        ({A: log(7, 91, is_suspect=True), B: log(7, 90)}, A),
        ({A: log(8, 99, is_damaged=True), B: log(7, 90)}, B),  # a damaged log is the last choice
    ],
)
def test_the_longest_undamaged_log_of_the_latest_session_is_chosen(logs, expected):
    assert _choose_replica(None, 0, logs) == expected


def test_a_named_replica_is_chosen_if_it_answered():
    assert _choose_replica(B, 0, {A: log(), B: log(last=1)}) == B
    with pytest.raises(BadConfig, match="did not answer as a replica"):
        _choose_replica(C, 0, {A: log()})
    with pytest.raises(Unavailable, match="no replica answers"):
        _choose_replica(None, 0, {})


@pytest.mark.parametrize(
    ("logs", "is_rolled_back", "is_waiting", "is_refused"),
    [
        ({A: log(), B: log(), C: log()}, False, False, True),
        ({A: log(), B: log(last=50)}, False, False, True),
        ({A: log(), B: log(last=50)}, False, True, False),  # a rebuild waits for a decision
        ({A: log(), B: log(), C: log()}, True, False, False),
        ({A: log(), B: log(is_suspect=True), C: log(is_suspect=True)}, False, False, False),
        ({A: log(), B: log(is_damaged=True)}, False, False, False),
        ({A: log()}, False, False, False),
    ],
)
def test_command_accept_replicas_is_rejected_if_a_quorum_is_trusted(
    logs, is_rolled_back, is_waiting, is_refused
):
    state = ReplicaState(NO_SESSION, BEFORE_FIRST) if is_waiting else ReplicaState(7, UNRESOLVED)
    metadata = PartitionMetadata(1, 8, dict.fromkeys((A, B, C), state))
    view = SimpleNamespace(metadata=metadata, marker=PartitionMarker(MarkerState.OPEN))
    prepared_state = SimpleNamespace(
        partition_view=view, logs=logs, is_zookeeper_rolled_back=is_rolled_back
    )
    refusal = pytest.raises(
        BadRequest, match=r"nothing was changed: .* of 3 replicas have a trusted"
    )
    with refusal if is_refused else contextlib.nullcontext():
        cluster_disaster_recovery._check_is_needed(0, prepared_state)


class CommandDied(Exception):
    """Ends a command at a chosen call."""


def test_no_replica_is_marked_before_the_write_to_zookeeper():
    """A marked replica is trusted; with the old metadata it would count despite its lost data."""
    marked = []

    class Link:
        async def set_low_water_mark(self, *_):
            marked.append(A)

    class Coordinator:
        async def write_partition(self, *_):
            assert not marked
            raise CommandDied

    metadata = SimpleNamespace(generation=1)
    prepared_state = SimpleNamespace(
        session=cluster_disaster_recovery.ClaimedSession(8, bytes(16)),
        partition_view=SimpleNamespace(metadata=metadata, marker=None, versions=None),
        prepared={A: None},
        connections={A: Link()},
        logs={A: log()},
    )
    command = SimpleNamespace(coordinator=Coordinator())
    with pytest.raises(CommandDied):
        asyncio.run(
            cluster_disaster_recovery._declare_chosen_log(command, 0, prepared_state, A, None)
        )
    assert not marked


class Storage:
    """A link to a storage with a log; its records have these client IDs and generations."""

    address = A

    def __init__(self, *ids, is_readable=True):
        self.ids, self.is_readable = ids, is_readable

    async def prepare(self, sessions):
        last = len(self.ids) - 1
        fields = (bytes(16), 3, last, True, last, bytes(16), False, b"")
        return {
            each: Prepared(claim.session_id, 1, each, *fields) for each, claim in sessions.items()
        }

    async def highest_ids(self, partition_id, session, prepared):
        if not self.is_readable:
            raise ReadFailed("record 1 cannot be read:")
        assert prepared.synced_max == len(self.ids) - 1
        return max(self.ids, default=NO_IDS)

    def close(self):
        pass


async def raise_died(*_):
    raise CommandDied


async def no_archive_url(*_):
    return ""


def rebuild_cluster(monkeypatch, storage, *, now_s, dies_at=(), access_file=None):
    """Rebuild a cluster of one partition on one storage; return the next IDs and generations.

    The command dies once at each of these calls, and is run again.
    """
    address, notes = A, []

    async def open_links(*_):
        return {address: storage}, {}

    async def scenario():
        zookeeper = MemoryZooKeeper(asyncio.Event)
        command = SimpleNamespace(
            coordinator=zookeeper.coordinator("/a/w"),
            note_step=notes.append,
            report_wait=lambda *_: None,
            carry_out_plan=lambda _: asyncio.sleep(0),
        )
        chosen = cluster_disaster_recovery.FormerCluster(
            name="w",
            storage=(f"{address}:5281",),
            missing=(),
            cluster_key=UUID(int=5),
            partitions=1,
            from_directory=None,
            replicas=1,
            only_znodes=False,
            archive=None,
            access_file=access_file,
        )
        # A server registers as soon as the znodes exist, and owns the partition.
        make_nodes = cluster_disaster_recovery._create_znodes

        async def make_nodes_and_register(*arguments):
            await make_nodes(*arguments)
            if (await arguments[0].coordinator.read_servers()).servers:
                return
            server = ServerDescriptor(1, "h", 1)
            await zookeeper.coordinator("/a/w").register_server(server)
            node = "/a/w/serverDescriptors"
            before = PartitionAssignment.from_bytes(zookeeper.dump()[node])
            after = assign_partitions(before, {1: server}, cversion=1, partition_count=1)
            write = SetNode(node, after.to_bytes(), zookeeper.entry(node).version)
            zookeeper.apply_operations([write], 0)

        monkeypatch.setattr(cluster_disaster_recovery, "_create_znodes", make_nodes_and_register)
        for name in dies_at:
            with monkeypatch.context() as patch:
                patch.setattr(cluster_disaster_recovery, name, raise_died)
                with pytest.raises(CommandDied):
                    await cluster_disaster_recovery._rebuild_cluster(command, chosen)
        await cluster_disaster_recovery._rebuild_cluster(command, chosen)
        replicas = await command.coordinator.read_replica_assignment()
        assert replicas.replicas_of(0) == (address,)
        assignment = PartitionAssignment.from_bytes(zookeeper.dump()["/a/w/serverDescriptors"])
        metadata = (await command.coordinator.read_partition(0)).metadata
        coordinator = command.coordinator
        ids = await coordinator.next_client_id(), await coordinator.issued_ids.allocate_id()
        return ids, assignment.servers[1][0], metadata.generation, notes

    monkeypatch.setattr(cluster_disaster_recovery, "open_connections", open_links)
    monkeypatch.setattr(cluster_disaster_recovery, "reported_archive_url", no_archive_url)
    monkeypatch.setattr(cluster_disaster_recovery.time, "time", lambda: now_s)
    return asyncio.run(scenario())


def test_new_ids_are_above_those_in_the_logs_after_a_clock_was_set_back(monkeypatch):
    last_issued = FIRST_ISSUED_ID + 80_000
    storage = Storage(MaximumIds(70_000, 400), MaximumIds(90_000, 500, last_issued))
    ids, assignment_generation, metadata_generation, _ = rebuild_cluster(
        monkeypatch, storage, now_s=IDS_EPOCH_S + 60
    )
    client_id, issued = ids
    assert client_id > 90_000
    assert issued == last_issued + 1
    assert assignment_generation > 500
    # A server that has not read the raised generation yet can claim nothing.
    assert 61 < metadata_generation <= assignment_generation


def test_exported_permissions_are_restored_once(monkeypatch, tmp_path):
    file = tmp_path / "access"
    file.write_bytes(access_node.encode_permissions(Permissions(17, "ann", 5, bytes(32))))
    storage = Storage(MaximumIds(70, 5))
    *_, notes = rebuild_cluster(
        monkeypatch, storage, now_s=IDS_EPOCH_S + 9, dies_at=("_assign_replicas",), access_file=file
    )
    restored = [each for each in notes if "permissions" in each]
    expected = "restored the permissions of revision 17, written at 1970-01-01T00:00:00Z by ann"
    assert restored == [f"{expected} (grants: 0, groups: 0, tokens: 0), as revision 18"]
    file.write_bytes(b"")
    with pytest.raises(
        BadFormat, match=f"{file} is not a file of exported permissions: permissions: "
    ):
        rebuild_cluster(monkeypatch, storage, now_s=IDS_EPOCH_S + 9, access_file=file)


FAILING_CALLS = ("_highest_ids", "_write_decision", "_assign_replicas", "_assign_replicas")


@pytest.mark.parametrize(
    ("storage", "dies_at"),
    [
        pytest.param(Storage(MaximumIds(70, 5)), (), id="older ids"),
        pytest.param(Storage(), (), id="no log"),
        pytest.param(
            Storage(MaximumIds(70, 5), is_readable=False), (), id="the end cannot be read:"
        ),
        pytest.param(
            Storage(MaximumIds(70, 5)), FAILING_CALLS, id="died before it assigned replicas"
        ),
    ],
)
def test_new_ids_start_at_the_clock_if_the_clock_is_ahead_of_the_stored_ids(
    monkeypatch, storage, dies_at
):
    next_numbers = rebuild_cluster(monkeypatch, storage, now_s=IDS_EPOCH_S + 1_000, dies_at=dies_at)
    ids, assignment_generation, metadata_generation, notes = next_numbers
    assert (*ids, assignment_generation, metadata_generation) == (
        1_001,
        FIRST_ISSUED_ID + 1_000,
        1_001,
        1_000,
    )
    has_note = any("IDs from the clock of this machine:" in note for note in notes)
    assert has_note != storage.is_readable
