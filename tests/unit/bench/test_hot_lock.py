"""`bench hot-lock` checks that the log has one chain of updates, and reports errors in it."""

import pytest

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import memory_cluster
from waltz_bench import hot_lock
from waltz_bench.hot_lock import CounterView

RUN_ID = 99


async def append_counts(client, counts) -> dict[int, int]:
    """Append counts, each with the ID of the transaction from which it claims to be computed."""
    found = {}
    for value, writer in counts:
        data = hot_lock._COUNTER_LAYOUT.pack(RUN_ID, value, writer) + b"padding"
        found[await (await client.append(data, partition=0))] = value
    return found


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [
        ([(1, -1), (2, 1), (3, 2)], (0, 0)),
        ([(1, -1), (1, -1), (2, 2)], (0, 1)),  # a value twice: both claim no predecessor
        ([(1, -1), (3, 1)], (0, 1)),  # a missing value
        ([(1, -1), (2, -1)], (0, 1)),  # the next value, computed from another transaction
    ],
)
def test_a_log_with_a_gap_in_its_updates_is_an_error(counts, wrong):
    @run_on_virtual_loop
    async def scenario():
        async with memory_cluster() as cluster, cluster.client().open_during() as client:
            await (await client.append(b"of another client", partition=0))
            acknowledged = await append_counts(client, counts)
            assert await hot_lock._check_log(client, RUN_ID, 0, acknowledged) == wrong
            assert await hot_lock._check_log(client, RUN_ID, 0, {**acknowledged, 77: 5}) == (
                1,
                wrong[1],
            )

    scenario()


def test_an_author_with_lag_reads_the_transactions_after_its_mark():
    @run_on_virtual_loop
    async def scenario():
        async with memory_cluster() as cluster, cluster.client().open_during() as client:
            await append_counts(client, [(1, -1), (2, 0)])
            await (await client.append(b"of another client", partition=0))
            assert await hot_lock._read(client, RUN_ID, CounterView(0, -1, -1), 2) == CounterView(
                2, 1, 2
            )
            assert await hot_lock._read(client, RUN_ID, CounterView(2, 1, 2), 2) == CounterView(
                2, 1, 2
            )

    scenario()
