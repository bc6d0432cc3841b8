"""The metrics of a partition, and the renewal of its ownership."""

from math import isnan
from random import Random
from types import SimpleNamespace

import pytest

from tests.loops import run_on_loop
from tests.unit.server.test_partition import ALICE, A, World
from waltz_core import errors
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.driver import loop_clock_ms
from waltz_core.metrics import Metrics
from waltz_core.records.record import (
    GENESIS_CHAIN,
    Generation,
    PartitionId,
    ReplicaId,
    TransactionId,
)
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.replication.session_events import ArchiveBacklog
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import (
    ConnectionCongested,
    PartitionIdentity,
    PartitionLimits,
)
from waltz_core.server.process.host import (
    Host,
    InSyncReplicaMetric,
    ReplicaWaitReporter,
    _PublishedCounters,
)
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache

A_REPLICA = ReplicaId("10.0.0.1:5280")


def test_the_lag_metric_is_the_lag_of_the_slowest_feed() -> None:
    world, metrics, shown = World(), Metrics("server"), _PublishedCounters()

    def lag() -> float:
        shown.publish(PartitionId(0), world.partition, metrics)
        return metrics.value("waltz_server_feed_lag_transactions", partition=0)

    world.open()
    world.mount(ALICE, A, feed=True)
    assert lag() == 0
    world.step(ConnectionCongested(A))
    world.fill(7)
    assert lag() == 7


@run_on_loop
async def test_the_archive_lag_is_exported_if_an_archive_is_used() -> None:
    world, metrics, shown = World(), Metrics("server"), _PublishedCounters()
    names = ("archived_transaction", "unarchived_transactions", "unarchived_bytes")

    def metric_values() -> list[float]:
        shown.publish(PartitionId(0), world.partition, metrics)
        return [metrics.value(f"waltz_server_{name}", partition=0) for name in names]

    world.open()
    metric_values()
    assert 'waltz_server_unarchived_seconds{partition="0"}' not in metrics.page().decode()
    world.store.archive_backlog = ArchiveBacklog(7, None, loop_clock_ms() - 5_000)
    assert metric_values()[:2] == [-1, 7]
    assert isnan(metric_values()[2]), "no storage has reported a backlog"
    assert metrics.value("waltz_server_unarchived_seconds", partition=0) >= 5
    mark = ArchivedMark(TransactionId(9), GENESIS_CHAIN, 5, TransactionId(3), 77, "m")
    world.store.archived_mark, world.store.archive_backlog = mark, ArchiveBacklog(0, 0, None)
    assert metric_values() == [9, 0, 0]
    assert metrics.value("waltz_server_unarchived_seconds", partition=0) == 0


def test_the_session_metric_is_minus_1_without_an_open_session() -> None:
    world, metrics, shown = World(), Metrics("server"), _PublishedCounters()

    def session() -> float:
        shown.publish(PartitionId(0), world.partition, metrics)
        return metrics.value("waltz_server_store_session", partition=0)

    assert session() == -1
    world.open()
    assert session() == world.session
    world.close()
    assert session() == -1


class CountingMetrics(Metrics):
    """Metrics that count how often they are updated."""

    update_count = 0

    def set(self, name: str, value: float, **labels: str | int) -> None:
        self.update_count += 1
        super().set(name, value, **labels)

    def add(self, name: str, amount: float = 1, **labels: str | int) -> None:
        self.update_count += 1
        super().add(name, amount, **labels)


def test_unchanged_metrics_are_not_updated_again() -> None:
    world, metrics, shown = World(), CountingMetrics("server"), _PublishedCounters()
    world.open()
    world.mount(ALICE, A, feed=True)
    shown.publish(PartitionId(0), world.partition, metrics)
    before = metrics.update_count
    shown.publish(PartitionId(0), world.partition, metrics)
    assert metrics.update_count == before
    world.fill(7)
    shown.publish(PartitionId(0), world.partition, metrics)
    mark = world.partition.high_water_mark
    assert metrics.value("waltz_server_high_water_mark", partition=0) == mark
    assert metrics.value("waltz_server_appended_transactions_total", partition=0) > 0
    assert metrics.update_count > before


def test_a_silent_replica_is_reported_until_it_answers(caplog) -> None:
    """A late replica delays no commit, so only this metric shows that it hangs."""
    caplog.set_level("INFO")
    waiting_since, metrics = {}, Metrics("server")
    waits = ReplicaWaitReporter(
        PartitionId(3), lambda now: {r: now - at for r, at in waiting_since.items()}, metrics
    )

    def wait_s() -> float:
        return metrics.value("waltz_server_replica_wait_seconds", partition=3, replica=A_REPLICA)

    waiting_since[A_REPLICA] = 1_000
    waits.publish(1_500)
    assert (wait_s(), waits.silent_replicas) == (0, set())
    waits.publish(4_000)
    assert (wait_s(), waits.silent_replicas) == (3, set())
    for now_ms in (11_000, 12_000):
        waits.publish(now_ms)
    assert (wait_s(), waits.silent_replicas) == (11, {A_REPLICA})
    assert metrics.value("waltz_server_events_total", event="replica.silent") == 1
    waiting_since[A_REPLICA] = 12_900
    waits.publish(13_000)
    assert (wait_s(), waits.silent_replicas) == (0, set())
    assert [each.message for each in caplog.records] == [
        f"replica.silent partition=3 replica={A_REPLICA}",
        f"replica.responsive partition=3 replica={A_REPLICA}",
    ]


def test_each_assigned_replica_is_exported_as_in_sync_or_not() -> None:
    metrics = Metrics("server")
    one, two, three = (ReplicaId(f"10.0.0.{each}:15280") for each in (1, 2, 3))
    shown = InSyncReplicaMetric(PartitionId(3), metrics)

    def lines() -> list[str]:
        page = metrics.page().decode().splitlines()
        return [each for each in page if each.startswith("waltz_server_replica_in_sync{")]

    shown.publish((one, two), {two})
    assert lines() == [
        f'waltz_server_replica_in_sync{{partition="3",replica="{one}"}} 0.0',
        f'waltz_server_replica_in_sync{{partition="3",replica="{two}"}} 1.0',
    ]
    shown.publish((two, three), ())
    assert lines() == [
        f'waltz_server_replica_in_sync{{partition="3",replica="{two}"}} 0.0',
        f'waltz_server_replica_in_sync{{partition="3",replica="{three}"}} 0.0',
    ]


def new_host(**services: object) -> tuple[Host, Partition, list[Exception]]:
    """Return the host of a partition without storages, its partition, and the list of failures."""
    failures: list[Exception] = []
    store = PartitionStore(PartitionId(0), bytes(16), 1, {}, rng=Random(1), limits=SessionLimits())
    partition = Partition(
        PartitionIdentity(PartitionId(0), 1, bytes(16)),
        store,
        PartitionLimits(lock_slot_count=11),
        TransactionCache(CacheBudget(1 << 20)),
        FeedCache(1 << 16),
        LargeBatchThrottle(),
    )
    own_services = {
        "metrics": Metrics("server"),
        "tasks": None,
        "on_failure": failures.append,
        "write_backlog_bytes_max": 1 << 20,
        "ssl": None,
    }
    return (
        Host(PartitionId(0), partition, store, SimpleNamespace(**own_services, **services)),
        partition,
        failures,
    )


@run_on_loop
async def test_a_released_partition_without_storages_is_not_owned_again() -> None:
    """The partition lost its storages in the pause. A store without storages would crash."""
    host, partition, failures = new_host()
    host.assign(Generation(1), ())
    host._retake_ownership()
    assert failures == []
    assert not partition.is_owned


@pytest.mark.parametrize(
    ("error", "damage_code"),
    [
        (errors.ObjectMissing("o"), errors.ObjectMissing.code),
        (errors.ChecksumMismatch("o"), errors.ChecksumMismatch.code),
        (errors.DiskFailed("a disk, which may be replaced"), 0),
        (errors.ReadFailed("a sector"), 0),
        (errors.ArchiveUnavailable("the store"), 0),
        (errors.Unreachable("the storage"), 0),
    ],
)
@run_on_loop
async def test_only_damage_in_the_archive_sets_the_damage_code_of_a_failed_read(
    error, damage_code
) -> None:
    class Links:
        async def fetch(self, *_arguments, **_options):
            raise error

    host, _, _ = new_host(read_links=Links())
    posted = []
    host.post = posted.append
    await host._fetch_from_storage(
        SimpleNamespace(replica=A_REPLICA, message=None, is_urgent=False, token=7)
    )
    (found,) = posted
    assert (found.token, found.damage_code) == (7, damage_code)
