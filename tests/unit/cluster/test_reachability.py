"""The servers that may own partitions, by the reports of other servers about them."""

import asyncio

import pytest

from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.cluster.membership.reachability import (
    FAILING_MS,
    FAILURES_MIN,
    REASON_CHARS_MAX,
    STABLE_MS,
    PublishedReachability,
    Reachability,
    ReachReport,
    eligible_servers,
)
from waltz_core.cluster.znodes.interface import CreateNode
from waltz_core.cluster.znodes.node_access import ClusterNodes
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper


def report(reached=(), unreachable=()):
    return ReachReport(frozenset(reached), dict.fromkeys(unreachable, "refused"))


def report_without_open_partition(reached=()):
    return report(reached).as_non_witness()


@pytest.mark.parametrize(
    ("live", "serving", "reports", "may_own"),
    [
        pytest.param([1], [], {}, [1], id="one server"),
        pytest.param([1, 2], [], {}, [1, 2], id="no witness"),
        pytest.param([1, 2], [1], {1: report()}, [1], id="new and not reached yet"),
        pytest.param([1, 2], [1], {1: report(reached=[2])}, [1, 2], id="new and reached"),
        pytest.param([1, 2], [1], {1: report(unreachable=[2])}, [1], id="new and unreachable"),
        pytest.param([1, 2], [1, 2], {1: report(), 2: report()}, [1, 2], id="served before"),
        pytest.param([1, 2], [1, 2], {1: report(unreachable=[2])}, [1], id="one witness is enough"),
        pytest.param(
            [1, 2],
            [1, 2],
            {1: report(unreachable=[2]), 2: report(unreachable=[1])},
            [1, 2],
            id="two servers report each other",
        ),
        pytest.param(
            [1, 2, 3],
            [1, 2, 3],
            {1: report([2, 3]), 2: report(unreachable=[1, 3]), 3: report([1, 2])},
            [1, 2, 3],
            id="a majority of witnesses overrules one",
        ),
        pytest.param(
            [1, 2, 3],
            [1, 2, 3],
            {1: report([2], [3]), 2: report([1], [3]), 3: report(unreachable=[1, 2])},
            [1, 2],
            id="one server is isolated",
        ),
        pytest.param([2, 3], [2], {1: report(unreachable=[3])}, [2, 3], id="the witness is dead"),
        pytest.param(
            [2], [2], {2: report(unreachable=[2])}, [2], id="a server is not its own witness"
        ),
        pytest.param(
            [1, 2, 3],
            [1, 2, 3],
            {
                1: report(unreachable=[2, 3]),
                2: report_without_open_partition([3]),
                3: report_without_open_partition([2]),
            },
            [1, 2, 3],
            id="an isolated server opens partitions first",
        ),
        pytest.param(
            [1, 2, 3],
            [1, 2, 3],
            {
                1: report(unreachable=[2, 3]),
                2: report([3], [1]),
                3: report_without_open_partition([2]),
            },
            [2, 3],
            id="an isolated server loses them to the next one",
        ),
        pytest.param(
            [1, 2],
            [1, 2],
            {1: report_without_open_partition(), 2: report_without_open_partition([1])},
            [1, 2],
            id="no witness and an unreached server",
        ),
        pytest.param(
            [1, 2, 3],
            [1],
            {
                1: report(unreachable=[2, 3]),
                2: report_without_open_partition([3]),
                3: report_without_open_partition([2]),
            },
            [1],
            id="two new servers reach only each other",
        ),
        pytest.param(
            [1, 2, 3],
            [1, 2],
            {1: report(unreachable=[2, 3]), 3: report_without_open_partition([2])},
            [1],
            id="reached only by an excluded server",
        ),
    ],
)
def test_reachable_servers_may_own_partitions(live, serving, reports, may_own):
    assert eligible_servers(live, serving, reports) == set(may_own)


def test_a_server_is_unreachable_after_several_failures_over_some_time():
    seen = Reachability()
    for at_ms in (0, 1, 2, FAILING_MS - 1):
        seen.note_failure(7, "refused", at_ms)
        assert seen.report(at_ms) == ReachReport()
    seen.note_failure(7, "x" * 1_000, FAILING_MS)
    assert seen.report(FAILING_MS) == ReachReport(unreachable={7: "x" * REASON_CHARS_MAX})


def test_few_failures_over_a_long_time_are_ignored():
    seen = Reachability()
    seen.note_connection(7, 0)
    for number in range(FAILURES_MIN - 1):
        seen.note_failure(7, "refused", number * 10 * FAILING_MS)
    assert seen.report(100 * FAILING_MS) == ReachReport(frozenset({7}))


def test_a_server_is_reached_again_once_a_connection_lasts():
    seen = Reachability()
    for at_ms in (0, 1, FAILING_MS):
        seen.note_failure(7, "refused", at_ms)
    seen.note_connection(7, 10_000)
    assert seen.report(10_000 + STABLE_MS - 1).unreachable
    seen.note_failure(7, "refused", 10_000 + STABLE_MS)
    assert seen.report(10_000 + STABLE_MS).unreachable
    seen.note_connection(7, 30_000)
    assert seen.report(30_000 + STABLE_MS) == ReachReport(frozenset({7}))
    seen.keep_only([8])
    assert seen.report(40_000) == ReachReport()


def test_a_report_round_trips():
    report = ReachReport(frozenset({3, 1}), {7: "TLS \u2014 refused"})
    for each in (report, report.as_non_witness()):
        assert ReachReport.from_bytes(each.to_bytes()) == each
    assert not report.as_non_witness().unreachable
    for data in (
        b"",
        b"[]",
        b'{"format":2}',
        b'{"format":1}',
        b'{"format":1,"reached":{},"unreachable":[]}',
        b'{"format":1,"reached":' + 5_000 * b"[" + 5_000 * b"]" + b"}",
        b'{"format":1,"reached":[],"unreachable":{"' + 5_000 * b"1" + b'":""}}',
        b'{"format":1,"reached":[' + 5_000 * b"1" + b'],"unreachable":{}}',
    ):
        with pytest.raises(errors.BadFormat, match="reachability report"):
            ReachReport.from_bytes(data)


@run_on_virtual_loop
async def test_a_server_publishes_its_reachability_report_again_in_a_new_session():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    await session.write([CreateNode("/w")])
    published = PublishedReachability(ClusterNodes(session, "/w"))
    reader = PublishedReachability(ClusterNodes(zookeeper.session(), "/w"))
    await published.publish(1, report([2]))
    assert await reader.read([1, 2]) == {1: report([2])}
    await published.publish(1, report([], [2]))
    assert await reader.read([1, 2]) == {1: report([], [2])}
    assert await reader.read([2]) == {}
    await session.write([CreateNode("/w/x/reach/2", b"of another version")])
    assert await reader.read([1, 2]) == {1: report([], [2])}
    session.expire()
    session.resume()
    assert await reader.read([1]) == {}
    await published.publish(1, report([], [2]))
    assert await reader.read([1]) == {1: report([], [2])}


@run_on_virtual_loop
async def test_a_report_is_published_again_after_a_write_of_unknown_outcome(monkeypatch):
    session = MemoryZooKeeper(asyncio.Event).session()
    await session.write([CreateNode("/w")])
    nodes = ClusterNodes(session, "/w")
    published = PublishedReachability(nodes)
    await published.publish(1, report([2]))
    put_ephemeral = nodes.put_ephemeral

    async def put_own_without_an_answer(path, data, parent):
        await put_ephemeral(path, data, parent)
        raise errors.CoordinatorOutcomeUnknown("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "put_ephemeral", put_own_without_an_answer)
        with pytest.raises(errors.CoordinatorOutcomeUnknown):
            await published.publish(1, report([], [2]))
    await published.publish(1, report([2]))
    assert await published.read([1]) == {1: report([2])}
