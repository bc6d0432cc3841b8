"""Feeds: turns, slow clients, many clients, and low memory."""

import pytest

from waltz_core.records.raw_records import FEED_HEADER_BYTES
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Chain,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.server.partition_events import (
    ConnectionId,
    FeedHeaders,
    PartitionLimits,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.read.feeds import (
    FRAMES_PER_TURN_MAX,
    ClientFeeds,
    FetchHeaders,
    MountCaughtUp,
)
from waltz_core.wire.messages import (
    FeedBatch,
    FeedRequest,
    FeedSuspended,
    MountRequest,
    MountWriter,
)

CHAIN = Chain(b"c" * 16)


class HeaderCache:
    """Has the IDs from `first` on; the header of each ID is the ID in 20 bytes."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def read_cached(self, first: TransactionId, last: TransactionId) -> FeedHeaders | None:
        if first < self.first:
            return None
        return FeedHeaders(first, headers(first, last), last, CHAIN)


def headers(first: int, last: int) -> bytes:
    return b"".join(number.to_bytes(FEED_HEADER_BYTES, "big") for number in range(first, last + 1))


def feed(mark: int, *, cached_from: int = 0, frame: int = 10, grant: int = 100) -> ClientFeeds:
    new_feed = ClientFeeds(
        PartitionLimits(
            lock_slot_count=11, feed_frame_count_max=frame, feed_request_count_min=grant
        ),
        HeaderCache(cached_from),
    )
    new_feed.on_mark_advanced(SessionId(1), TransactionId(mark))
    return new_feed


def req_id(client: int) -> ReqId:
    return ReqId(ClientId(client), Generation(0), PartitionId(0), 1)


def mount(each: ClientFeeds, client: int, mark: int, until: int) -> None:
    request = RequestReceived(ConnectionId(client), MountRequest(req_id(client), mark, 1), 50, 0)
    each.mount(request, mark=TransactionId(mark), until=TransactionId(until))


def grant(each: ClientFeeds, client: int, mark: int) -> bool:
    request = RequestReceived(ConnectionId(client), FeedRequest(req_id(client), mark), 60, 0)
    return each.grant(request, mark=TransactionId(mark))


def frames(outcomes: list[object], client: int) -> list[tuple[int, int]]:
    """Return first ID and count of each frame to a client, and check the content."""
    found = []
    for outcome in outcomes:
        if isinstance(outcome, SendToClient) and isinstance(outcome.message, FeedBatch):
            message = outcome.message
            assert outcome.cost_bytes == 0
            assert bytes(message.headers) == headers(
                message.first, message.first + message.count - 1
            )
            if outcome.connection == client:
                found.append((message.first, message.count))
    return found


def deliver_all(each: ClientFeeds) -> list[object]:
    out: list[object] = []
    while each.has_work:
        out += each.deliver()
    return out


def test_a_large_lag_is_sent_in_several_frames() -> None:
    machine = feed(24)
    mount(machine, 1, -1, 24)
    assert frames(list(machine.deliver()), 1) == [(0, 10)]
    rest = deliver_all(machine)
    assert frames(rest, 1) == [(10, 10), (20, 5)]
    assert isinstance(rest[-1], MountCaughtUp)
    assert deliver_all(machine) == []


def test_a_mount_at_the_mark_needs_no_feed_frame() -> None:
    machine = feed(24)
    mount(machine, 1, 24, 24)
    assert [type(outcome) for outcome in deliver_all(machine)] == [MountCaughtUp]


def test_the_feed_of_a_mount_ends_at_the_requested_id() -> None:
    machine = feed(4)
    mount(machine, 1, -1, 4)
    machine.on_mark_advanced(SessionId(1), TransactionId(9))
    assert frames(deliver_all(machine), 1) == [(0, 5)]
    assert grant(machine, 1, 4)
    assert frames(deliver_all(machine), 1) == [(5, 5)]


def test_a_feed_request_covers_a_minimum_of_ids_and_the_feed_is_suspended_after_them() -> None:
    machine = feed(1, grant=4)
    mount(machine, 1, 1, 1)
    deliver_all(machine)
    assert grant(machine, 1, 1)
    assert not grant(machine, 1, 1)
    machine.on_mark_advanced(SessionId(2), TransactionId(9))
    out = deliver_all(machine)
    assert frames(out, 1) == [(2, 4)]
    assert out[-1] == SendToClient(ConnectionId(1), FeedSuspended(req_id(1)), 60)
    # If the mark is far ahead, a feed request may reach up to it.
    assert grant(machine, 1, 1)
    assert frames(deliver_all(machine), 1) == [(2, 8)]


def test_feeds_of_many_clients_are_served_round_robin() -> None:
    machine = feed(0)
    clients = range(1, FRAMES_PER_TURN_MAX + 11)
    for client in clients:
        mount(machine, client, -1, 0)
    first = list(machine.deliver())
    served = [client for client in clients if frames(first, client)]
    assert len(served) == FRAMES_PER_TURN_MAX
    second = deliver_all(machine)
    assert sorted(served + [client for client in clients if frames(second, client)]) == list(
        clients
    )


def test_state_of_a_disconnected_congested_client_is_dropped() -> None:
    machine = feed(-1)
    for _ in range(2):
        mount(machine, 1, -1, -1)
        deliver_all(machine)
        assert grant(machine, 1, -1)
        machine.on_connection_congested(ConnectionId(1))
        machine.close(ConnectionId(1))
    mount(machine, 1, -1, -1)
    deliver_all(machine)
    assert grant(machine, 1, -1)
    machine.on_mark_advanced(SessionId(1), TransactionId(0))
    assert frames(deliver_all(machine), 1) == [(0, 1)]


def test_the_lag_is_the_lag_of_the_slowest_mounted_client() -> None:
    machine = feed(24)
    assert machine.lag_max() == 0
    mount(machine, 1, 20, 24)
    mount(machine, 2, 4, 24)
    assert machine.lag_max() == 20
    deliver_all(machine)
    assert machine.lag_max() == 0
    # A client that stops requesting lags until it disconnects.
    assert grant(machine, 1, 24)
    machine.on_mark_advanced(SessionId(1), TransactionId(30))
    deliver_all(machine)
    assert machine.lag_max() == 6
    machine.close(ConnectionId(2))
    assert machine.lag_max() == 0


def test_evicted_headers_are_fetched_once_for_all_clients_at_the_same_mark() -> None:
    machine = feed(30, cached_from=20)
    for client in (1, 2):
        mount(machine, client, 4, 30)
    out = machine.deliver()
    assert out == [FetchHeaders(TransactionId(5), TransactionId(14))]
    assert deliver_all(machine) == []
    delivered = list(
        machine.on_headers_fetched(
            FeedHeaders(TransactionId(5), headers(5, 14), TransactionId(9), CHAIN)
        )
    )
    assert frames(delivered, 1) == frames(delivered, 2) == [(5, 10)]
    (fetch,) = [outcome for outcome in deliver_all(machine) if isinstance(outcome, FetchHeaders)]
    assert fetch.first == 15


@pytest.mark.parametrize("chain_at", [6, 7, 9])
def test_fetched_headers_past_the_end_of_a_feed_request_are_not_sent(chain_at: int) -> None:
    machine = feed(30, cached_from=20)
    mount(machine, 1, 4, 6)
    machine.deliver()
    feed_headers = FeedHeaders(TransactionId(5), headers(5, 14), TransactionId(chain_at), CHAIN)
    (frame, reached) = machine.on_headers_fetched(feed_headers)
    assert isinstance(frame, SendToClient)
    assert isinstance(frame.message, FeedBatch)
    expected = (6, CHAIN) if chain_at == 6 else (BEFORE_FIRST, GENESIS_CHAIN)
    assert frame.message.count == 2
    assert (frame.message.chain_at, frame.message.chain) == expected
    assert isinstance(reached, MountCaughtUp)


def test_an_answer_for_a_disconnected_client_is_dropped() -> None:
    machine = feed(30, cached_from=20)
    mount(machine, 1, 4, 30)
    machine.deliver()
    machine.close(ConnectionId(1))
    assert machine.on_headers_fetched(FeedHeaders(TransactionId(5), headers(5, 14))) == []
    assert machine.count == 0


def test_abandoning_the_feed_returns_the_waiting_requests() -> None:
    machine = feed(4)
    mount(machine, 1, -1, 4)
    mount(machine, 2, 4, 4)
    mount(machine, 3, 4, 4)
    machine.on_connection_congested(ConnectionId(1))
    deliver_all(machine)
    assert grant(machine, 3, 4)
    waiting = machine.abandon()
    assert [type(request.message) for request in waiting] == [MountRequest, FeedRequest]
    assert [request.connection for request in waiting] == [1, 3]
    assert machine.count == 0
    machine.on_mark_advanced(SessionId(2), TransactionId(9))
    assert deliver_all(machine) == []


# ---------------------------------------------------------------------------------------------
# filters: the header of each ID is the ID (see `HeaderCache`)


def mount_with_filter(each: ClientFeeds, client: int, mark: int, until: int, *values: int) -> None:
    message = MountWriter(req_id(client), 1, mark, wants_feed=True, header_values=values)
    request = RequestReceived(ConnectionId(client), message, 50, 0)
    each.mount(request, mark=TransactionId(mark), until=TransactionId(until))


def filtered_frames(outcomes: list[object]) -> list[tuple[int, int, list[int], bytes]]:
    """Return first ID, count, headers and offsets of each frame."""
    messages = [outcome.message for outcome in outcomes if isinstance(outcome, SendToClient)]
    return [
        (
            message.first,
            message.count,
            [
                int.from_bytes(message.headers[offset : offset + 20], "big")
                for offset in range(0, len(message.headers), 20)
            ],
            bytes(message.picked),
        )
        for message in messages
        if isinstance(message, FeedBatch)
    ]


def offsets(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "big") for value in values)


def test_a_filtered_feed_omits_headers_and_still_covers_all_ids() -> None:
    machine = feed(24)
    mount_with_filter(machine, 1, -1, 24, 3, 5, 23)
    sent = deliver_all(machine)
    assert filtered_frames(sent) == [
        (0, 10, [3, 5], offsets(3, 5)),
        (10, 10, [], b""),
        (20, 5, [23], offsets(3)),
    ]
    assert isinstance(sent[-1], MountCaughtUp)


def test_a_batch_that_passes_the_filter_is_sent_unchanged() -> None:
    machine = feed(4)
    mount_with_filter(machine, 1, 1, 4, 2, 3, 4, 99)
    assert filtered_frames(deliver_all(machine)) == [(2, 3, [2, 3, 4], b"")]


def test_filters_of_two_clients_are_independent() -> None:
    machine = feed(9)
    mount_with_filter(machine, 1, -1, 9, 3)
    mount_with_filter(machine, 2, -1, 9, 4)
    mount(machine, 3, -1, 9)
    assert [len(frame[2]) for frame in filtered_frames(deliver_all(machine))] == [
        1,
        1,
        10,
    ]


def test_a_feed_request_continues_a_filtered_feed() -> None:
    machine = feed(4)
    mount_with_filter(machine, 1, 4, 4, 7)
    deliver_all(machine)
    assert grant(machine, 1, 4)
    machine.on_mark_advanced(SessionId(1), TransactionId(9))
    assert filtered_frames(deliver_all(machine)) == [(5, 5, [7], offsets(2))]
