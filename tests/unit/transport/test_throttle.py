"""Requests of a principal with limits, in virtual time: order, waits, rejections, charges."""

import asyncio
import dataclasses

from tests.loops import on_virtual_loop, pass_time
from waltz_core.access.permissions import PrincipalLimits
from waltz_core.access.quotas import REJECTIONS_PER_S, SECOND_NS, Quota, Usage
from waltz_core.records.record import ReqId
from waltz_core.transport.throttle import Throttle
from waltz_core.wire.messages import (
    AppendRequest,
    ErrorResponse,
    MountWriter,
    RangeBytes,
    RangeData,
    RangeRequest,
    TransactionDataResponse,
)
from waltz_core.wire.record_locations import LOCATIONS

BEGIN_S = 10.0


class Connection:
    """The access of a connection, what was passed on, and when."""

    def __init__(self, quota=None, **limits):
        self.loop = asyncio.get_running_loop()
        self.quota = quota or Quota("etl", PrincipalLimits(**limits), Usage())
        self.quota.connect(self)
        self.rejected, self.passed = {}, []
        self.throttle = Throttle(self, self._take)

    @property
    def now_ns(self):
        return int((self.loop.time() + BEGIN_S) * SECOND_NS)

    def over_limit(self, message, error):
        self.rejected[id(message)] = error

    def is_over_limit(self, message):
        return id(message) in self.rejected

    def _take(self, messages):
        for each in messages:
            error = self.rejected.get(id(each))
            self.passed.append((each, error and error.retry_after_ms, self.loop.time()))

    @property
    def sequences(self):
        return [each.req_id.sequence for each, *_ in self.passed]

    @property
    def rejections(self):
        return [retry_ms is not None for _, retry_ms, _ in self.passed]


def appends(first, last, data=b""):
    return [
        AppendRequest(ReqId(1, 2, 3, number), 0, (), (), (), 0, data, 0)
        for number in range(first, last + 1)
    ]


@on_virtual_loop
async def test_requests_wait_in_order_and_the_connection_is_not_read():
    made = Connection(appends_per_s=10)
    begun_s = made.loop.time()
    made.throttle.receive(appends(1, 15))
    assert made.throttle.is_pausing
    assert 10 <= len(made.passed) < 15
    await pass_time(0.2)
    made.throttle.receive(appends(16, 16))  # it was in a buffer
    await pass_time(2)
    assert not made.throttle.is_pausing
    assert made.sequences == [*range(1, 17)]
    assert not any(made.rejections)
    assert 0.4 <= made.passed[14][2] - begun_s <= 0.5  # 11 at once, then one in 0.1 s


@on_virtual_loop
async def test_what_waits_longer_than_a_second_is_rejected_in_order():
    made = Connection(appends_per_s=10)
    made.throttle.receive(appends(1, 50))
    await pass_time(1.5)
    assert made.sequences == [*range(1, 51)]
    granted = made.rejections.index(True)
    assert 18 <= granted <= 22
    assert all(made.rejections[granted:])
    _, retry_ms, at_s = made.passed[-1]
    assert 0 < retry_ms <= 1_100
    assert at_s <= 1.1


@on_virtual_loop
async def test_pipelined_requests_over_a_limit_drain_fast_but_a_flood_is_not_read():
    made = Connection(bytes_per_s=1_000)
    made.throttle.receive([*appends(1, 1, bytes(9_000)), *appends(2, REJECTIONS_PER_S)])
    assert made.rejections == [False] + [True] * (REJECTIONS_PER_S - 1)
    assert made.passed[1][1] >= 8_000
    assert not made.throttle.is_pausing
    made.throttle.receive(appends(1, REJECTIONS_PER_S))
    assert made.throttle.is_pausing
    await pass_time(0.9)
    assert made.throttle.is_pausing
    await pass_time(0.2)
    assert not made.throttle.is_pausing


@on_virtual_loop
async def test_appends_after_one_over_a_limit_are_not_charged_until_the_next_mount():
    made = Connection(bytes_per_s=1_000)
    made.throttle.receive([*appends(1, 1, bytes(3_000)), *appends(2, 2)])
    await pass_time(3)
    made.throttle.receive(appends(3, 5, bytes(9_000)))
    assert made.rejections == [False] + [True] * 4
    other = AppendRequest(ReqId(9, 2, 3, 1), 0, (), (), (), 0, b"", 0)
    mount = MountWriter(ReqId(1, 2, 3, -1), 1, 0, wants_feed=False)
    made.throttle.receive([other, mount, *appends(3, 3)])
    await pass_time(2)
    assert made.rejections == [False] + [True] * 4 + [False] * 3


@on_virtual_loop
async def test_the_connections_of_a_principal_share_its_limit_evenly():
    first = Connection(appends_per_s=100)
    both = (first, Connection(first.quota))
    counts = [1, 1]
    while first.loop.time() < 10:
        for number, each in enumerate(both):
            if not each.throttle.is_pausing:
                each.throttle.receive(appends(counts[number], counts[number] + 4))
                counts[number] += 5
        await pass_time(0.01)
    granted = [each.rejections.count(False) for each in both]
    assert 1_000 <= sum(granted) <= 1_250
    assert min(granted) >= 0.4 * sum(granted)


@on_virtual_loop
async def test_ranges_are_charged_when_they_are_sent_and_have_a_part_of_the_rate():
    made = Connection(bytes_per_s=1_000_000)
    ranged = RangeRequest(ReqId(-1, 0, 3, -9), 0, 9, 4_000_000, 0, ())
    made.throttle.receive([ranged])
    assert made.passed[0][0] == dataclasses.replace(ranged, bytes_max=250_000)
    made.throttle.receive([dataclasses.replace(ranged, bytes_max=1_000)])
    assert made.passed[1][0].bytes_max == 1_000
    lengths = (250_000).to_bytes(4, "big") + (150_000).to_bytes(4, "big")
    for answer in (
        RangeData(ranged.req_id, 0, 9, 10, 0, b"", bytes(1_000_000), 0, 9, ()),
        RangeBytes(1, 2, 3, 0, 9, 0, b"", bytes(1_000_000), 0, bytes(16), ()),
        TransactionDataResponse(ranged.req_id, 3, (bytes(100_000), None)),
        RangeBytes(1, 2, 3, 0, 2, LOCATIONS, lengths, b"places", 0, bytes(16), ()),
        ErrorResponse(ranged.req_id, 1, False, "x"),
    ):
        made.throttle.sent(answer)
    made.throttle.receive([ranged])
    _, retry_ms, _ = made.passed[2]
    assert 1_400 <= retry_ms <= 1_600
    assert made.passed[2][0] is ranged  # `denial` finds its error


@on_virtual_loop
async def test_a_feed_counts_until_its_connection_or_the_feed_ends():
    made = Connection(feeds=1)

    def mount(partition, *, wants_feed=True):
        message = MountWriter(ReqId(7, 0, partition, -1), 1, 0, wants_feed)
        made.throttle.receive([message])
        return made.passed[-1][1]

    assert mount(1) is None
    assert mount(1) is None
    assert mount(2) == 1_000
    await pass_time(2)
    assert mount(1, wants_feed=False) is None
    assert mount(2) is None
    # An error of an append says nothing about the feed; one of the mount ends it.
    made.throttle.sent(ErrorResponse(ReqId(7, 0, 2, 5), 23, True, "x"))
    assert len(made.quota.feeds) == 1
    made.throttle.sent(ErrorResponse(ReqId(7, 0, 2, -1), 42, False, "x"))
    assert mount(3) is None
    made.throttle.feeds_ended(3)
    assert mount(4) is None
    made.quota.leave(made)
    assert made.quota.feeds == {}


@on_virtual_loop
async def test_a_closed_connection_passes_nothing_on():
    made = Connection(appends_per_s=10)
    made.throttle.receive(appends(1, 15))
    passed = len(made.passed)
    made.throttle.stop()
    await pass_time(2)
    assert len(made.passed) == passed


@on_virtual_loop
async def test_without_limits_what_waits_is_passed_on():
    made = Connection(appends_per_s=1)
    made.throttle.receive(appends(1, 3))
    made.quota = None  # a revision has removed them
    made.throttle.receive(appends(4, 9))
    await pass_time(1.5)
    assert made.sequences == [*range(1, 10)]
    made.throttle.receive(appends(10, 99))
    assert len(made.passed) == 99
