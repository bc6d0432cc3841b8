"""Requests to a partition's owner: routing, and answers that cause a retry."""

import asyncio
import contextlib
import itertools
import struct
from random import Random

import pytest

from tests.loops import run_in_virtual_time, run_on_virtual_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client.links.directory import Owner
from waltz_core.client.read.ranges import RangeQuery
from waltz_core.client.read.reported_rejections import Rejection
from waltz_core.client.read.requests import OwnerRequests
from waltz_core.config import ClientConfig
from waltz_core.records.record import NO_SESSION, ReqId
from waltz_core.wire import messages as m

CONFIG = ClientConfig(retry_interval_ms_min=1, retry_interval_ms_max=1, request_timeout_ms=20_000)


class Cluster:
    """Owners by address, each with the answer that the test sets."""

    def __init__(self, **answers):
        self.answers = answers  # address: a function of the request, or an error
        self.owners = list(answers)  # after each failure the next owner is used
        self.sent_requests = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.requests = OwnerRequests(self, self, CONFIG, Random(1))

    async def owner(self, partition_id, *, after_failure):
        if after_failure and len(self.owners) > 1:
            del self.owners[0]
        return Owner(self.owners[0], 1)

    async def get(self, address, *, is_bulk):
        return Link(self, address, is_bulk)


class Link:
    is_legacy_server = False
    reports_rejections = True

    def __init__(self, cluster, address, is_bulk):
        self.cluster, self.address, self.is_bulk = cluster, address, is_bulk

    async def request(self, answer, make, *, client_id, partition_id, timeout_s):
        assert self.is_bulk == (answer is m.RangeData)
        request = make((client_id, 0, partition_id, 1))
        self.cluster.sent_requests.append((self.address, type(request)))
        found = self.cluster.answers[self.address](request)
        if isinstance(found, Exception):
            raise found
        if found is NO_ANSWER:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            raise errors.Unreachable("it says nothing")
        await self.cluster.may_answer.wait()
        return found


def replicas_response(request, mark):
    return m.ReplicasResponse(
        request.req_id,
        session_id=5,
        high_water_mark=mark,
        cluster_key=bytes(16),
        partition_count=1,
        replicas=(),
    )


def mark(number):
    """Return an owner whose log ends at a mark and has no rows of the client."""

    def answer(request):
        match request:
            case m.HighWaterMarkRequest():
                return m.HighWaterMarkResponse(request.req_id, number)
            case m.ReplicasRequest(linearizable=is_proved):
                reported_mark = number + (100 if is_proved else 0)
                return replicas_response(request, reported_mark)
            case m.RangeRequest(first=first, form=form):
                return m.RangeData(
                    request.req_id, first, 0, first, form, b"", b"", NO_SESSION, number, ()
                )

    return answer


NO_ANSWER = object()


def moved_owner(_request):
    return errors.NotOwned("it has moved")


def test_after_a_failure_the_next_owner_is_looked_up():
    cluster = Cluster(old=moved_owner, new=mark(7))
    assert run_in_virtual_time(cluster.requests.high_water_mark(0, linearizable=False)) == 7
    assert [address for address, _ in cluster.sent_requests] == ["old", "new"]


def test_a_linearizable_mark_is_requested_with_the_linearizable_flag():
    cluster = Cluster(owner=mark(7))
    assert run_in_virtual_time(cluster.requests.high_water_mark(0, linearizable=True)) == 107


def test_the_end_of_the_log_is_trusted_if_a_quorum_confirms_it():
    """A server that has lost the partition may have neither this nor later transactions."""
    ends = []

    def stale(request):
        if isinstance(request, m.ReplicasRequest):
            ends.append(9 if len(ends) < 2 else 4)
            return replicas_response(request, ends[-1])
        return mark(4)(request)

    cluster = Cluster(owner=stale)
    chunk = run_in_virtual_time(cluster.requests.fetch_range(0, RangeQuery(5, 9)))
    assert (chunk.next, ends) == (5, [9, 9, 4])


@run_on_virtual_loop
async def test_a_request_is_repeated_after_the_pause_that_the_server_names():
    loop, request_times_s = asyncio.get_running_loop(), []

    def limited(request):
        request_times_s.append(loop.time())
        over = errors.Overloaded("over a limit", 3_000)
        return over if len(request_times_s) < 3 else mark(7)(request)

    cluster = Cluster(owner=limited)
    assert await cluster.requests.high_water_mark(0, linearizable=False) == 7
    pauses = [later - earlier for earlier, later in itertools.pairwise(request_times_s)]
    assert all(3 <= pause < 3.5 for pause in pauses)


@run_on_virtual_loop
async def test_a_pause_above_the_request_timeout_is_an_error_with_the_reason():
    cluster = Cluster(owner=lambda _: errors.Overloaded("over a limit", 3_600_000))
    with pytest.raises(errors.Overloaded, match="over a limit") as raised:
        await cluster.requests.high_water_mark(0, linearizable=False)
    assert raised.value.retry_after_ms == 3_600_000
    assert asyncio.get_running_loop().time() < 21


@run_on_virtual_loop
async def test_a_request_is_not_repeated_if_a_new_assignment_keeps_its_server():
    cluster = Cluster(owner=mark(7))
    cluster.may_answer.clear()
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as group:
        pending_request = group.create_task(cluster.requests.high_water_mark(0, linearizable=False))
        while not cluster.sent_requests:  # noqa: ASYNC110 - it is on its way
            await asyncio.sleep(0)
        cluster.requests.on_owners_changed({0: Owner("owner", 2), 1: Owner("other", 2)})
        await asyncio.sleep(0)
        cluster.may_answer.set()
        assert await pending_request == 7
    assert len(cluster.sent_requests) == 1


@pytest.mark.parametrize("error", [errors.BadRequest, errors.DataLoss])
def test_permanent_errors_are_not_retried(error):
    cluster = Cluster(owner=lambda _request: error("no"))
    with pytest.raises(error, match="no"):
        run_in_virtual_time(cluster.requests.flush(0))
    assert len(cluster.sent_requests) == 1


@pytest.mark.parametrize(
    ("silent_from", "expected"),
    [
        (1, "within 500 ms: ZooKeeper has no owner for the partition"),
        (3, r"has no owner for the partition; before that: no ZooKeeper answered at zk1: refused$"),
    ],
)
def test_a_zookeeper_timeout_reports_the_earlier_failure(silent_from, expected):
    """The error names the host and the reason."""

    class UnavailableCluster(Cluster):
        lookup_count = 0

        async def owner(self, partition_id, *, after_failure):
            self.lookup_count += 1
            if self.lookup_count == silent_from:
                await asyncio.Event().wait()
            raise errors.CoordinatorUnavailable("no ZooKeeper answered at zk1: refused")

    cluster = UnavailableCluster()
    cluster.requests._config = ClientConfig(retry_interval_ms_min=1, request_timeout_ms=500)
    with pytest.raises(errors.CoordinatorUnavailable, match=expected):
        run_in_virtual_time(cluster.requests.high_water_mark(0, linearizable=False))


@pytest.mark.parametrize(
    ("silent_after_s", "expected"), [(0.96, errors.NotOwned), (0.0, errors.Unreachable)]
)
def test_the_error_names_the_cause_of_earlier_attempts(silent_after_s, expected):
    async def scenario():
        silent_at_s = asyncio.get_running_loop().time() + silent_after_s

        def answer(request):
            is_silent = asyncio.get_running_loop().time() >= silent_at_s
            return (
                NO_ANSWER if is_silent and len(cluster.sent_requests) > 1 else moved_owner(request)
            )

        cluster = Cluster(owner=answer)
        cluster.requests._config = ClientConfig(
            retry_interval_ms_min=1, retry_interval_ms_max=1, request_timeout_ms=1_000
        )
        with pytest.raises(errors.Unavailable, match="within 1000 ms: it") as raised:
            await cluster.requests.high_water_mark(0, linearizable=False)
        return type(raised.value)

    assert run_in_virtual_time(scenario()) is expected


# --- rejections


def owner_with_rejections(*, stamps_ms=(9, 8), ids=2, reasons=(1, 3), conflicting=(7, -1)):
    """Return an owner that answers with these rejections."""

    def answer(request):
        return m.RejectionsResponse(
            request.req_id,
            struct.pack(f">{len(stamps_ms)}q", *stamps_ms),
            b"".join(ReqId(1, 2, 3, number).to_bytes() for number in range(ids)),
            bytes(reasons),
            struct.pack(f">{len(conflicting)}q", *conflicting),
        )

    return answer


def test_rejections_are_decoded_in_the_order_of_the_answer():
    cluster = Cluster(owner=owner_with_rejections())
    assert run_in_virtual_time(cluster.requests.recent_rejections(3)) == [
        Rejection(9, ReqId(1, 2, 3, 0), m.RowOutcomeCode.LOCK, 7),
        Rejection(8, ReqId(1, 2, 3, 1), m.RowOutcomeCode.AHEAD, -1),
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"stamps_ms": (9,)}, {"ids": 3}, {"conflicting": ()}, {"reasons": (1, 200)}],
)
def test_rejections_of_different_lengths_are_reported(wrong):
    cluster = Cluster(owner=owner_with_rejections(**wrong))
    with pytest.raises(errors.RemoteProtocolError, match="rejections: expected"):
        run_in_virtual_time(cluster.requests.recent_rejections(3))


def test_an_older_server_gets_no_request_for_rejections(monkeypatch):
    monkeypatch.setattr(Link, "reports_rejections", False)
    cluster = Cluster(owner=owner_with_rejections())
    with pytest.raises(errors.BadRequest) as failed:
        run_in_virtual_time(cluster.requests.recent_rejections(3))
    assert str(failed.value) == (
        "owner does not report the rejections of partition 3: expected client protocol L 9 or "
        "later, found an older version. Hint: upgrade the server."
    )
    assert cluster.sent_requests == []
