"""Requests of a principal with limits, in virtual time: order, waits, rejections, charges."""

import asyncio
import dataclasses

from tests.loops import pass_time, run_on_virtual_loop
from waltz_core.access.permissions import PrincipalLimits
from waltz_core.access.quotas import BYTES_PER_REJECTION, REJECTIONS_PER_S, SECOND_NS, Quota, Usage
from waltz_core.records.record import ReqId
from waltz_core.transport.admission import throttle
from waltz_core.transport.admission.throttle import Throttle
from waltz_core.wire.messages import (
    AppendRequest,
    ErrorResponse,
    FeedBatch,
    Mounted,
    MountRequest,
    MountResponse,
    MountState,
    MountWriter,
    RangeBytes,
    RangeData,
    RangeRequest,
    TransactionDataResponse,
)
from waltz_core.wire.record_locations import LOCATIONS

BEGIN_S = 10.0


class Connection:
    """The access of a connection, with the forwarded requests and their times."""

    def __init__(self, quota=None, **limits):
        self.loop = asyncio.get_running_loop()
        self.quota = quota or Quota("etl", PrincipalLimits(**limits), Usage())
        self.quota.add_connection(self)
        self.rejected, self.passed, self.is_ended, self.peer = {}, [], False, "a:1"
        self.error, self.resumed_s = None, []
        self.throttle = Throttle(self, self._take, lambda: self.resumed_s.append(self.loop.time()))

    @property
    def now_ns(self):
        return int((self.loop.time() + BEGIN_S) * SECOND_NS)

    def mark_over_limit(self, message, error):
        self.rejected[id(message)] = error

    def end_over_limit(self):
        self.is_ended = True

    def end_after_failure(self, error):
        self.error = error

    def is_over_limit(self, message):
        return id(message) in self.rejected

    def _take(self, messages):
        for message in messages:
            error = self.rejected.get(id(message))
            self.passed.append((message, error and error.retry_after_ms, self.loop.time()))

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


@run_on_virtual_loop
async def test_requests_wait_in_order_and_the_connection_is_not_read():
    connection = Connection(appends_per_s=10)
    begun_s = connection.loop.time()
    connection.throttle.receive(appends(1, 15))
    assert connection.throttle.is_pausing
    assert 10 <= len(connection.passed) < 15
    await pass_time(0.2)
    connection.throttle.receive(appends(16, 16))  # the request was buffered
    await pass_time(2)
    assert not connection.throttle.is_pausing
    assert connection.sequences == [*range(1, 17)]
    assert not any(connection.rejections)
    assert 0.4 <= connection.passed[14][2] - begun_s <= 0.5  # 11 at once, then one in 0.1 s


@run_on_virtual_loop
async def test_requests_that_wait_longer_than_a_second_are_rejected_in_order():
    connection = Connection(appends_per_s=10)
    connection.throttle.receive(appends(1, 50))
    await pass_time(1.5)
    assert connection.sequences == [*range(1, 51)]
    granted = connection.rejections.index(True)
    assert 18 <= granted <= 22
    assert all(connection.rejections[granted:])
    _, retry_ms, at_s = connection.passed[-1]
    assert 0 < retry_ms <= 1_100
    assert at_s <= 1.1


@run_on_virtual_loop
async def test_pipelined_requests_over_a_limit_are_rejected_fast_but_a_flood_is_not_read():
    connection = Connection(bytes_per_s=1_000)
    connection.throttle.receive([*appends(1, 1, bytes(9_000)), *appends(2, REJECTIONS_PER_S)])
    assert connection.rejections == [False] + [True] * (REJECTIONS_PER_S - 1)
    assert connection.passed[1][1] >= 8_000
    assert not connection.throttle.is_pausing
    connection.throttle.receive(appends(1, REJECTIONS_PER_S))
    assert connection.throttle.is_pausing
    await pass_time(0.9)
    assert connection.throttle.is_pausing
    await pass_time(0.2)
    assert not connection.throttle.is_pausing


@run_on_virtual_loop
async def test_a_large_rejected_request_counts_as_several_rejected_requests():
    connection = Connection(bytes_per_s=1_000)
    connection.throttle.receive(appends(1, 1, bytes(9_000)))
    count = REJECTIONS_PER_S // (1 + (1 << 20) // BYTES_PER_REJECTION)
    connection.throttle.receive(appends(2, 1 + count, bytes(1 << 20)))
    assert not connection.throttle.is_pausing
    connection.throttle.receive(appends(2 + count, 1 + 2 * count, bytes(1 << 20)))
    assert connection.throttle.is_pausing


@run_on_virtual_loop
async def test_appends_after_a_rejected_append_are_rejected_without_a_charge():
    connection = Connection(bytes_per_s=1_000)
    connection.throttle.receive([*appends(1, 1, bytes(3_000)), *appends(2, 2)])
    await pass_time(3)
    connection.throttle.receive(appends(3, 5, bytes(9_000)))
    assert connection.rejections == [False] + [True] * 4
    other = AppendRequest(ReqId(9, 2, 3, 1), 0, (), (), (), 0, b"", 0)
    mount_message = MountWriter(ReqId(1, 2, 3, -1), 1, 0, wants_feed=False)
    connection.throttle.receive([other, mount_message, *appends(3, 3)])
    await pass_time(2)
    assert connection.rejections == [False] + [True] * 4 + [False] * 3


@run_on_virtual_loop
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


@run_on_virtual_loop
async def test_ranges_are_limited_to_a_part_of_the_rate_and_charged_when_sent():
    connection = Connection(bytes_per_s=1_000_000)
    ranged = RangeRequest(ReqId(-1, 0, 3, -9), 0, 9, 4_000_000, 0, ())
    connection.throttle.receive([ranged])
    assert connection.passed[0][0] == dataclasses.replace(ranged, bytes_max=250_000)
    connection.throttle.receive([dataclasses.replace(ranged, bytes_max=1_000)])
    assert connection.passed[1][0].bytes_max == 1_000
    lengths = (250_000).to_bytes(4, "big") + (150_000).to_bytes(4, "big")
    for answer in (
        RangeData(ranged.req_id, 0, 9, 10, 0, b"", bytes(1_000_000), 0, 9, ()),
        RangeBytes(1, 2, 3, 0, 9, 0, b"", bytes(1_000_000), 0, bytes(16), ()),
        TransactionDataResponse(ranged.req_id, 3, (bytes(100_000), None)),
        RangeBytes(1, 2, 3, 0, 2, LOCATIONS, lengths, b"places", 0, bytes(16), ()),
        ErrorResponse(ranged.req_id, 1, False, "x"),
    ):
        connection.throttle.on_sent(answer)
    connection.throttle.receive([ranged])
    _, retry_ms, _ = connection.passed[2]
    assert 1_400 <= retry_ms <= 1_600
    assert connection.passed[2][0] is ranged  # `denial` finds the error of this object


async def feed(connection, frames, *, count=1_000):
    """Send frames of a feed whenever it is not paused; return the elapsed time."""
    begun_s = connection.loop.time()
    for number in range(frames):
        while connection.throttle.is_pausing_feeds:
            await pass_time(0.005)
        connection.throttle.on_sent(feed_frame(number * count, count))
    return connection.loop.time() - begun_s


def feed_frame(first, count, headers=b""):
    return FeedBatch(ReqId(1, 2, 3, -1), first, count, headers, 1, -1, bytes(16))


@run_on_virtual_loop
async def test_a_feed_is_charged_for_filtered_headers_too():
    connection = Connection(bytes_per_s=100_000)
    took_s = await feed(connection, 30)  # 20 KB each, 600 KB in total; the burst does not wait
    assert 4.6 <= took_s <= 5.3
    assert connection.quota.usage.bytes == 600_000 - connection.throttle._unpaid_bytes
    await pass_time(1)
    assert not connection.throttle.is_pausing_feeds
    assert connection.quota.usage.bytes == 600_000
    connection.throttle.on_feed_sent(150_000)  # of a 0.13 client
    assert connection.throttle.is_pausing_feeds
    pauses = len(connection.resumed_s)
    await pass_time(2)
    assert len(connection.resumed_s) == pauses + 1
    connection.quota = None
    assert await feed(connection, 100) < 0.1


@run_on_virtual_loop
async def test_a_feed_delays_a_request_by_less_than_a_second():
    connection = Connection(bytes_per_s=100_000)
    reading = [connection, Connection(connection.quota), Connection(connection.quota)]
    for each in reading:
        each.throttle.on_feed_sent(1_000_000)  # 10 s of the limit
    await pass_time(2)
    for number in range(1, 6):
        sent_s = connection.loop.time()
        connection.throttle.receive(appends(number, number, bytes(1_000)))
        while not connection.sequences or connection.sequences[-1] != number:
            await pass_time(0.01)
        assert connection.loop.time() - sent_s < 0.4
    assert not any(connection.rejections)
    assert all(each.throttle.is_pausing_feeds for each in reading)
    await pass_time(30)
    assert not any(each.throttle.is_pausing_feeds for each in reading)


@run_on_virtual_loop
async def test_a_flood_of_requests_does_not_stop_a_feed():
    connection = Connection(bytes_per_s=100_000)
    flooding = [Connection(connection.quota) for _ in range(4)]

    async def flood(each):
        number = 0
        while True:
            if not each.throttle.is_pausing:
                number += 1
                each.throttle.receive(appends(number, number, bytes(10_000)))
            await pass_time(0.01)

    async with asyncio.TaskGroup() as tasks:
        floods = [tasks.create_task(flood(each)) for each in flooding]
        took_s = await feed(connection, 20)
        for each in floods:
            each.cancel()
    assert took_s < 60  # 4 s without the flood


@run_on_virtual_loop
async def test_a_range_is_charged_for_filtered_transactions_too():
    connection = Connection(bytes_per_s=1_000_000)
    lineage = (object(),)
    answers = (
        RangeData(ReqId(-1, 0, 3, -9), 0, 0, 50_000, 0, b"", b"", 0, 9, lineage),
        RangeData(ReqId(-1, 0, 3, -9), 0, 0, 50_000, 0, b"", b"", 0, 9, ()),  # own headers
    )
    for answer in answers:
        connection.throttle.on_sent(answer)
        assert connection.quota.usage.bytes == 1_000_000


@run_on_virtual_loop
async def test_an_exception_in_a_delayed_message_closes_the_connection(caplog):
    connection, errors = Connection(appends_per_s=10), []

    def fail(_messages):
        errors.append(ValueError("a bug"))
        raise errors[-1]

    connection.throttle.receive(appends(1, 15))
    connection.throttle._pass_on = fail
    await pass_time(2)
    assert [connection.error] == errors
    assert "net.throttle_failed peer=a:1" in caplog.text
    fed = Connection(bytes_per_s=1_000)
    fed.throttle._resume_feeds = lambda: fail(None)
    fed.throttle.on_feed_sent(3_000)
    await pass_time(4)
    assert fed.error is errors[-1]


def mount_id(partition, sequence=-1):
    return ReqId(7, 0, partition, sequence)


def request_mount(connection, partition, *, wants_feed=True, sequence=-1):
    """Request a mount; return the pause if it is rejected."""
    message = MountWriter(mount_id(partition, sequence), 1, 0, wants_feed)
    connection.throttle.receive([message])
    return connection.passed[-1][1]


def answer_mount(connection, partition, sequence=-1):
    connection.throttle.on_sent(Mounted(mount_id(partition, sequence), 1, 0, 1, 1, 1))


def answer_with_error(connection, partition, sequence=-1):
    connection.throttle.on_sent(ErrorResponse(mount_id(partition, sequence), 42, False, "x"))


@run_on_virtual_loop
async def test_a_feed_counts_towards_the_limit_until_it_or_its_connection_ends():
    connection = Connection(feeds=1)
    assert request_mount(connection, 1) is None
    answer_mount(connection, 1)
    assert request_mount(connection, 1) is None
    answer_with_error(connection, 1)  # the earlier mount may still exist
    assert request_mount(connection, 2) == 1_000
    await pass_time(2)
    assert request_mount(connection, 1, wants_feed=False) is None
    assert request_mount(connection, 2) == 1_000
    answer_mount(connection, 1)
    assert request_mount(connection, 2) is None
    answer_with_error(connection, 2, sequence=5)  # an append
    assert len(connection.quota.feeds) == 1
    answer_with_error(connection, 2)
    assert request_mount(connection, 3) is None
    connection.throttle.on_feeds_ended(3)
    assert request_mount(connection, 4) is None
    connection.quota.remove_connection(connection)
    assert connection.quota.feeds == {}


@run_on_virtual_loop
async def test_errors_of_other_requests_do_not_free_the_slot_of_a_feed():
    connection = Connection(feeds=1)
    other = Connection(connection.quota)
    assert request_mount(connection, 1) is None
    answer_mount(connection, 1)
    answer_with_error(connection, 1)  # the answer to a range with the ID of the mount
    assert request_mount(other, 1) is None
    answer_with_error(other, 1)  # a proof that is not valid
    assert request_mount(connection, 2) == 1_000
    connection.throttle.on_feeds_ended(1)
    # The error arrives before the mount is complete.
    assert request_mount(connection, 3) is None
    answer_with_error(connection, 3)
    answer_mount(connection, 3)
    assert request_mount(connection, 4) == 1_000
    connection.throttle.on_feeds_ended(3)
    assert request_mount(connection, 5) is None
    answer_with_error(connection, 5)
    assert request_mount(connection, 6) is None
    answer_mount(connection, 6)
    assert not connection.is_ended
    answer_mount(connection, 5)
    assert connection.is_ended


@run_on_virtual_loop
async def test_failed_mounts_leave_no_state():
    connection = Connection(connections=9)
    for partition in range(100):
        assert request_mount(connection, partition, sequence=5) is None
        answer_with_error(connection, partition, sequence=5)
        connection.throttle.receive([MountRequest(mount_id(partition), 0, 0)])
        connection.throttle.on_sent(MountResponse(mount_id(partition), MountState.NOT_READY))
    assert connection.quota.feeds == {}
    assert connection.throttle._mounts == {}
    for number in range(throttle.MOUNTS_MAX + 1):
        assert not connection.is_ended
        request_mount(connection, 1, sequence=number)
    assert connection.is_ended


@run_on_virtual_loop
async def test_a_closed_connection_forwards_no_requests():
    connection = Connection(appends_per_s=10)
    connection.throttle.receive(appends(1, 15))
    passed = len(connection.passed)
    connection.throttle.stop()
    await pass_time(2)
    assert len(connection.passed) == passed


@run_on_virtual_loop
async def test_removing_the_limits_releases_waiting_requests():
    connection = Connection(appends_per_s=1)
    connection.throttle.receive(appends(1, 3))
    connection.quota = None  # a new revision has no limits
    connection.throttle.receive(appends(4, 9))
    await pass_time(1.5)
    assert connection.sequences == [*range(1, 10)]
    connection.throttle.receive(appends(10, 99))
    assert len(connection.passed) == 99


@run_on_virtual_loop
async def test_a_higher_limit_resumes_a_feed_soon():
    connection = Connection(bytes_per_s=1_000)
    connection.quota.charge_sent_bytes(
        1_000_000, connection.now_ns
    )  # a large range, which takes 1,000 s at this rate
    connection.throttle.on_feed_sent(10_000)
    await pass_time(10)
    assert connection.throttle.is_pausing_feeds
    connection.quota.set_limits(PrincipalLimits(bytes_per_s=1_000_000))
    await pass_time(2)
    assert not connection.throttle.is_pausing_feeds
    assert connection.resumed_s
