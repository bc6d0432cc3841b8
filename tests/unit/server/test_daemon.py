"""A server daemon derives limits from settings, and rejects invalid settings."""

import asyncio
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.loops import run_on_loop
from waltz_core import errors
from waltz_core.cluster.znodes.model import ReplicaAssignments, ServerDescriptor
from waltz_core.config import ServerConfig
from waltz_core.records.record import FRAME_BYTES_MAX, Generation, PartitionId, ReplicaId
from waltz_core.server.process import server_daemon
from waltz_core.server.process.server_daemon import Server, partition_limits_of, session_limits_of

MIB = 1024 * 1024
STORAGES = [ReplicaId(f"10.0.0.{number}:5280") for number in (1, 2, 3)]


def config(**settings: int) -> ServerConfig:
    return ServerConfig(connect="localhost:2181/waltz/test", **settings)


def test_lock_tables_share_a_budget() -> None:
    assert partition_limits_of(config(), 4).lock_slot_count == 1_048_573
    many = partition_limits_of(config(), 1_000)
    assert many.lock_slot_count * 8 * 1_000 <= config().lock_table_bytes_max


def test_appends_joined_in_one_turn_fit_into_one_storage_frame() -> None:
    for batch_bytes in (5 * MIB, 8 * MIB, 12 * MIB):
        limits = partition_limits_of(
            config(batch_bytes_max=batch_bytes, batch_rows_max=1_000_000), 4
        )
        rows = limits.batch_rows_max + limits.slice_rows_max
        assert limits.batch_bytes_max + limits.slice_bytes_max + 48 * rows < FRAME_BYTES_MAX


def test_batch_bytes_max_must_fit_into_a_storage_frame() -> None:
    with pytest.raises(errors.BadConfig, match="batch_bytes_max"):
        partition_limits_of(config(batch_bytes_max=15 * MIB), 4)


def test_settings_are_passed_to_replication() -> None:
    limits = session_limits_of(
        config(
            replica_lag_bytes_max=20 * MIB,
            quorum_timeout_ms=700,
            slow_append_ms=80,
            archive_interval_ms=70,
        )
    )
    assert (limits.lag_bytes_max, limits.answer_ms_max) == (20 * MIB, 700)
    assert limits.slow_append_ms == 80
    assert limits.archive_interval_ms == 70


class HandOverRecorder:
    """A coordinator that only records hand-overs; each hand-over waits for `may_finish`."""

    def __init__(self, *, is_taken: bool = True) -> None:
        self.may_finish, self.requested, self.running_count = asyncio.Event(), list[int](), 0
        self.is_taken, self.running_max = is_taken, 0
        self.preferred = list[tuple[int, ...]]()
        self.remove_dead_server = None
        self.keep_owners = lambda: None
        self.writes, self.issued_ids = None, SimpleNamespace(allocate_ids=None)

    async def hand_over(self, partition_id: int, _generation: int) -> bool:
        self.requested.append(partition_id)
        self.running_count += 1
        self.running_max = max(self.running_max, self.running_count)
        await self.may_finish.wait()
        self.running_count -= 1
        return self.is_taken

    async def change_preferences(self, descriptor: ServerDescriptor) -> None:
        self.preferred.append(descriptor.preferred)


def server_of(coordinator: HandOverRecorder, *released: int) -> Server:
    store = SimpleNamespace(cluster_key=UUID(int=1))
    cluster = SimpleNamespace(params=SimpleNamespace(partition_count=4), store=store)
    server = Server(config(), coordinator, cluster, 1)  # type: ignore[arg-type]
    for each in released:
        server.hosts[each] = SimpleNamespace(partition=SimpleNamespace(is_owned=False))  # type: ignore[index, assignment]
    return server


def server_that_rechecks(monkeypatch: pytest.MonkeyPatch) -> tuple[HandOverRecorder, Server]:
    """Return a server that checks again at once, with the storages of partition 0."""
    monkeypatch.setattr(server_daemon, "HAND_OVER_PAUSE_S", 0.0)
    monkeypatch.setattr(server_daemon, "PREFERENCE_CHECK_S", 0.001)
    coordinator = HandOverRecorder()
    coordinator.may_finish.set()
    server = server_of(coordinator, 0, 1)
    server._assignments = ReplicaAssignments(dict.fromkeys(STORAGES, (PartitionId(0),)))
    return coordinator, server


async def pass_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@run_on_loop
async def test_partitions_are_handed_over_one_at_a_time_if_they_are_still_unowned() -> None:
    coordinator = HandOverRecorder()
    server = server_of(coordinator, 0, 1, 2, 3)
    async with asyncio.TaskGroup() as tasks:
        request_tasks = [
            tasks.create_task(server._hand_over_partition(each, 1)) for each in range(4)
        ]
        await pass_turns()
        assert coordinator.requested == [0]
        # In the meantime partition 1 is owned again, and partition 2 has moved away.
        server.hosts[1].partition.is_owned = True
        del server.hosts[2]
        coordinator.may_finish.set()
    assert [request_task.result() for request_task in request_tasks] == [True, False, False, True]
    assert (coordinator.requested, coordinator.running_max) == ([0, 3], 1)


@run_on_loop
async def test_a_second_hand_over_follows_soon_only_if_no_server_opens_the_partition() -> None:
    coordinator = HandOverRecorder()
    coordinator.may_finish.set()
    server = server_of(coordinator, 0, 1)
    assert await server._hand_over_partition(0, 1)
    assert not await server._hand_over_partition(0, 3)  # the partition has returned
    coordinator.is_taken = False
    assert not await server._hand_over_partition(1, 1)
    assert not await server._hand_over_partition(1, 1)
    assert coordinator.requested == [0, 1, 1]
    # So the server gets no partitions, although it seems idle.
    assert not server._make_rebalancer()._can_serve_partitions()
    assert server_of(coordinator)._make_rebalancer()._can_serve_partitions()


@run_on_loop
async def test_a_handed_over_partition_is_preferred_again_when_its_storages_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, server = server_that_rechecks(monkeypatch)
    reached = dict.fromkeys(STORAGES[1:], False)
    checks = asyncio.Semaphore(0)

    async def check() -> list[tuple[str, bool]]:
        checks.release()
        return [(STORAGES[0], True), *((str(each), reached[each]) for each in reached)]

    server.check_connectivity = check  # type: ignore[method-assign]
    await server.change_preferences([PartitionId(1), PartitionId(0)], [])
    assert await server._hand_over_partition(PartitionId(0), Generation(1))
    # In the meantime a command prefers another partition; this must not restore the failing one.
    await server.change_preferences([PartitionId(3)], [])
    restore_task = asyncio.get_running_loop().create_task(
        server._restore_preferences_periodically()
    )
    for _ in range(3):
        await checks.acquire()
    assert coordinator.preferred == [(1, 0), (1, 3)]
    reached[STORAGES[1]] = True
    while len(coordinator.preferred) < 3:
        await checks.acquire()
    assert coordinator.preferred == [(1, 0), (1, 3), (1, 0, 3)]
    restore_task.cancel()


@run_on_loop
async def test_a_preference_that_was_removed_is_not_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, server = server_that_rechecks(monkeypatch)
    checked = asyncio.Event()

    async def check() -> list[tuple[str, bool]]:
        # While the storages are queried, a command removes the preference.
        await server.change_preferences([], [PartitionId(0)])
        checked.set()
        return [(str(storage), True) for storage in STORAGES]

    server.check_connectivity = check  # type: ignore[method-assign]
    await server.change_preferences([PartitionId(1), PartitionId(0)], [])
    assert await server._hand_over_partition(PartitionId(0), Generation(1))
    restore_task = asyncio.get_running_loop().create_task(
        server._restore_preferences_periodically()
    )
    await checked.wait()
    await pass_turns()
    assert coordinator.preferred == [(1, 0), (1,)]
    restore_task.cancel()


@run_on_loop
async def test_a_cancelled_hand_over_does_not_delay_other_hand_overs() -> None:
    coordinator = HandOverRecorder()
    server = server_of(coordinator, 0, 1)
    first = asyncio.get_running_loop().create_task(server._hand_over_partition(0, 1))
    await pass_turns()
    first.cancel()
    await pass_turns()
    coordinator.may_finish.set()
    assert await server._hand_over_partition(1, 1)
