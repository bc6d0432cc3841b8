"""Loads of partitions: measurement, reports, and ignored reports."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster_contract import CLUSTER_KEY
from tests.loops import run_on_virtual_loop
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.membership.loads import (
    LoadAverages,
    LoadMeter,
    PartitionLoad,
    decode_loads,
    encode_loads,
)
from waltz_core.cluster.znodes.interface import SetNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.errors import BadFormat

WINDOW_MS = 30_000
figures = st.integers(0, 10**12).map(lambda tenths: tenths / 10)
all_loads = st.dictionaries(
    st.integers(0, 2**31 - 1), st.builds(PartitionLoad, figures, st.integers(0, 2**53)), max_size=20
)


def measure_load(rates, *, step_ms=5_000):
    meter, total, found = LoadMeter(WINDOW_MS), 0.0, {}
    meter.update({0: 0.0}, 0)
    for number, rate in enumerate(rates, 1):
        total += rate * step_ms / 1000
        found = meter.update({0: total}, number * step_ms)
    return found[0]


@given(st.floats(0, 1e9), st.integers(1, 50))
def test_a_steady_rate_is_measured_from_the_first_sample(rate, samples):
    load = measure_load([rate] * samples)
    assert load.per_s == pytest.approx(rate)
    assert load.measured_for_ms == samples * 5_000


def test_a_change_of_load_is_measured_after_some_windows():
    assert measure_load([100] * 20 + [1_000] * 6).per_s == pytest.approx(676, abs=5)
    assert measure_load([100] * 20 + [1_000] * 24).per_s == pytest.approx(984, abs=5)


def test_the_load_of_a_returning_partition_excludes_samples_of_its_earlier_stay():
    meter = LoadMeter(WINDOW_MS)
    meter.update({0: 0.0}, 0)
    assert meter.update({0: 5_000.0}, 5_000) == {0: PartitionLoad(pytest.approx(1_000), 5_000)}
    assert meter.update({}, 10_000) == {}
    assert meter.update({0: 0.0}, 15_000) == {}
    assert meter.update({0: 10.0}, 20_000) == {0: PartitionLoad(pytest.approx(2), 5_000)}


def test_a_restarted_counter_gives_no_negative_load():
    meter = LoadMeter(WINDOW_MS)
    meter.update({0: 1_000.0}, 0)
    assert meter.update({0: 3.0}, 5_000) == {}
    assert meter.update({0: 8.0}, 10_000)[0].per_s == pytest.approx(1)


def test_the_load_of_a_partition_is_kept_until_its_new_owner_reports():
    averages = LoadAverages(WINDOW_MS)
    assert averages.update({1: {7: PartitionLoad(500.0, WINDOW_MS)}}, {7: 1}) == {7: 500.0}
    assert averages.update({1: {7: PartitionLoad(480.0, WINDOW_MS)}, 2: {}}, {7: 2}) == {7: 500.0}
    assert averages.update({2: {7: PartitionLoad(3.0, WINDOW_MS - 1)}}, {7: 2}) == {7: 500.0}
    assert averages.update({2: {7: PartitionLoad(450.0, WINDOW_MS)}}, {7: 2}) == {7: 450.0}


def test_a_load_measured_over_a_short_time_is_not_trusted():
    averages = LoadAverages(WINDOW_MS)
    assert averages.update({1: {7: PartitionLoad(5.0, WINDOW_MS - 1)}}, {7: 1, 8: 1}) == {}
    assert averages.update({1: {7: PartitionLoad(5.0, WINDOW_MS)}}, {7: 1, 8: 1}) == {7: 5.0}
    assert averages.update({}, {8: 1}) == {}


@given(all_loads)
def test_loads_survive_a_round_trip(loads):
    assert decode_loads(encode_loads(loads)) == loads


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected format 1"),
        (b'{"format":2,"loads":{}}', "expected format 1"),
        (b'{"format":1}', "a load and its age"),
        (b'{"format":1,"loads":{"x":[1,1]}}', "a load and its age"),
        (b'{"format":1,"loads":{"1":[1]}}', "a load and its age"),
        (b'{"format":1,"loads":{"1":[-1,1]}}', "a load and its age"),
        (b'{"format":1,"loads":{"1":[true,1]}}', "a load and its age"),
        (b'{"format":1,"loads":{"1":[1,1.5]}}', "a load and its age"),
        (b'{"format":1,"loads":{"1":[1,%d]}}' % 10**400, "a load and its age"),
        (b'{"format":1,"loads":{"1":[%d,1]}}' % 10**400, "a load and its age"),
        (b'{"format":1,"loads":{"1":[1e308,1]}}', "a load and its age"),
        (b'{"format":1,"loads":{"%s":[1,1]}}' % (5_000 * b"9"), "a load and its age"),
        (b'{"format":1,"loads":{"1":[%s,1]}}' % (5_000 * b"9"), "not valid JSON"),
        (100_000 * b"[", "not valid JSON"),
    ],
)
def test_invalid_bytes_are_rejected(data, problem):
    with pytest.raises(BadFormat, match=problem):
        decode_loads(data)


@run_on_virtual_loop
async def test_servers_report_loads_and_the_leader_reads_them():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    one, two = zookeeper.coordinator("/w"), zookeeper.coordinator("/w")
    await one.create_cluster(NewCluster("w", 1, CLUSTER_KEY))
    await one.loads.publish(1, {0: PartitionLoad(1.0, 5)})
    await one.loads.publish(1, {0: PartitionLoad(2.0, 10)})
    await two.loads.publish(2, {})
    assert await two.loads.read([1, 2, 3]) == {1: {0: PartitionLoad(2.0, 10)}, 2: {}}
    # An ending process with the same server ID may still publish.
    await two.loads.publish(1, {0: PartitionLoad(3.0, 15)})
    assert await one.loads.read([1]) == {1: {0: PartitionLoad(3.0, 15)}}
    # A report of a later version is ignored; the other reports are still read.
    nodes = one.loads._nodes
    path = nodes.paths.load(1)
    found = await nodes.znodes.get(path)
    await nodes.znodes.write([SetNode(path, b'{"format": 99}', found.stat.version)])
    ignored = []
    assert await one.loads.read([1, 2], ignored.append) == {2: {}}
    assert [str(each).partition(":")[0] for each in ignored] == [path]
    await two.close()
    assert await one.loads.read([1, 2]) == {}
