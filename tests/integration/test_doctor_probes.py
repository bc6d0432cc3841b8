"""The doctor's probes of a storage that hangs or starts."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tests.integration.run_storage import KEY, PARTITION_COUNT
from tests.integration.test_storage_admin import fill
from tests.integration.test_storage_daemon import config_for, on_loop, serving, session
from tests.ports import free_port
from waltz_core.administration import member_connections
from waltz_core.administration.cluster_probes import _StorageProbe
from waltz_core.client.links.storage_admin import admin_connection
from waltz_core.cluster.change.storage_changes import StorageLayout
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.storage.process.storage_daemon import StaticCluster
from waltz_core.storage.service import admin_execution
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import Work
from waltz_core.wire.admin_messages import Done, SetAvailable

CLUSTER = StaticCluster(KEY, PARTITION_COUNT, (PartitionId(0), PartitionId(2)))
# Longer than any healthy process takes, even on a busy machine.
TIMEOUT_S = 4.0


@pytest.fixture
def release_threads():
    """Release hanging threads at the end of a test, because the daemon waits for them."""
    event = threading.Event()
    yield event
    event.set()


async def probe(address, admin_port, partitions=CLUSTER.partitions):
    replica = ReplicaId(address)
    assigned = ReplicaAssignments({replica: tuple(partitions)})
    store = SimpleNamespace(cluster_key=KEY, partition_count=PARTITION_COUNT)
    doctor = SimpleNamespace(
        view=SimpleNamespace(store=store),
        layout=StorageLayout(assigned, {replica: 0}, {replica: admin_port}),
        storage_ids={},
    )
    member_connections.select_settings()  # an earlier command of this process may have had TLS
    return await _StorageProbe(doctor, replica, TIMEOUT_S, None).probe()


def test_a_probe_distinguishes_a_hanging_log_from_a_log_that_answers(
    tmp_path, monkeypatch, release_threads
):
    run, admin_port = Work.run, free_port()

    def hangs(work, *clock):
        if work.log.partition_id == 0 and hanging:
            release_threads.wait(60)
        return run(work, *clock)

    hanging = []
    monkeypatch.setattr(Work, "run", hangs)

    async def main():
        async with serving(config_for(tmp_path, admin_port=admin_port), CLUSTER) as address:
            for partition in CLUSTER.partitions:
                async with session(address, 5, partition) as owner:
                    await fill(owner, 2)
            well = await probe(address, admin_port)
            assert [replica.is_stuck for replica in well.replicas.values()] == [False, False]
            hanging.append(True)
            facts = await probe(address, admin_port)
            assert [replica.is_stuck for replica in facts.replicas.values()] == [True, False]
            assert (facts.failure, facts.admin_failure) == ("", "")
            release_threads.set()

    on_loop(main())


def test_hanging_threads_are_not_reported_as_a_wrong_port(tmp_path, monkeypatch, release_threads):
    disk_status_of, admin_port = admin_execution.disk_status_of, free_port()

    def hangs(*arguments):
        release_threads.wait(60)
        return disk_status_of(*arguments)

    monkeypatch.setattr(admin_execution, "disk_status_of", hangs)

    async def main():
        async with serving(config_for(tmp_path, admin_port=admin_port), CLUSTER) as address:
            facts = await probe(address, admin_port)
            assert facts.is_hanging
            assert facts.admin_failure == "no answer within 4 s"
            release_threads.set()

    on_loop(main())


def test_a_log_that_is_being_opened_has_not_failed_to_open(tmp_path, monkeypatch, release_threads):
    assign, admin_port, opened = StorageEngine.assign, free_port(), threading.Event()
    is_opening = threading.Event()

    def takes_long(engine, partition_id):
        if opened.is_set():
            is_opening.set()
            release_threads.wait(60)
        return assign(engine, partition_id)

    monkeypatch.setattr(StorageEngine, "assign", takes_long)

    async def main():
        config = config_for(tmp_path, admin_port=admin_port)
        admin_address = f"127.0.0.1:{admin_port}"
        async with (
            serving(config, CLUSTER) as address,
            admin_connection(admin_address) as admin,
        ):
            await admin.request(Done, SetAvailable, (0,), False)
            opened.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(admin.request(Done, SetAvailable, (0,), True))
                assert await asyncio.to_thread(is_opening.wait, 60)
                facts = await probe(address, admin_port)
                replica = facts.replicas[0]
                assert (replica.is_opening, replica.open_error) == (True, "")
                release_threads.set()

    on_loop(main())
