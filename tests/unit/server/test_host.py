"""What a partition tells the metrics."""

from tests.unit.server.test_partition import ALICE, A, World
from waltz_core.metrics import Metrics
from waltz_core.record import PartitionId
from waltz_core.server.events import Congested
from waltz_core.server.host import _Told


def test_the_feed_that_is_furthest_behind_is_told() -> None:
    world, metrics, told = World(), Metrics("server"), _Told()

    def lag() -> float:
        told.show(PartitionId(0), world.partition, metrics)
        return metrics.value("waltz_server_feed_lag_transactions", partition=0)

    world.open()
    world.mount(ALICE, A, feed=True)
    assert lag() == 0
    world.step(Congested(A))
    world.fill(7)
    assert lag() == 7
