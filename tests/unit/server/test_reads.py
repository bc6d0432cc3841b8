"""Reads from storages: limits on fetches, waiting requests, and ends of sessions."""

import dataclasses
import struct
import zlib

import pytest

from tests.unit.storage.logs import make_run
from waltz_core import errors
from waltz_core.records.raw_records import lengths_to_wire
from waltz_core.records.record import (
    GENESIS_CHAIN,
    RECONSTRUCTED,
    ClientId,
    Generation,
    LineageEntry,
    PartitionId,
    ReplicaId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.session_events import Batch
from waltz_core.server.partition_events import (
    ConnectionId,
    FeedFailed,
    FeedHeaders,
    Fetch,
    FetchFailed,
    PartitionLimits,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.server.read.read_ahead import PREFETCH_BYTES_MAX, PREFETCH_COUNT_MAX
from waltz_core.server.read.reads import (
    AVOIDED_FETCH_COUNT,
    RETRY_MS_MAX,
    RETRY_MS_MIN,
    ROUNDS_MAX,
    ROWS_MAX,
    Reads,
)
from waltz_core.wire.messages import (
    FILTER_HEADERS_MAX,
    ErrorResponse,
    RangeBytes,
    RangeData,
    RangeForm,
    RangeRequest,
    TransactionDataRequest,
)

REQ_ID = ReqId(ClientId(1), Generation(0), PartitionId(0), 1)
REPLICAS = [ReplicaId("s1:1"), ReplicaId("s2:1"), ReplicaId("s3:1")]


def reads(mark: int = 999, *, budget_bytes: int = 1 << 20, **limits: int) -> Reads:
    new_reads = Reads(
        PartitionId(0),
        PartitionLimits(lock_slot_count=11, **limits),
        TransactionCache(CacheBudget(budget_bytes)),
        FeedCache(20 * 100),
    )
    new_reads.replicas = REPLICAS
    assert new_reads.on_session_opened(SessionId(4), TransactionId(mark)) == []
    return new_reads


def request_range(
    machine: Reads, first: int, last: int, *, form: RangeForm = RangeForm.HEADERS, sequence: int = 1
) -> list[SendToClient | Fetch | FeedHeaders]:
    req_id = ReqId(ClientId(1), Generation(0), PartitionId(0), sequence)
    message = RangeRequest(req_id, first, last, 1 << 20, form, ())
    return machine.request_range(RequestReceived(ConnectionId(1), message, 70, 0), message)


def fetch_of(outcomes: list[SendToClient | Fetch | FeedHeaders]) -> Fetch:
    (outcome,) = outcomes
    assert isinstance(outcome, Fetch)
    return outcome


def headers(fetch: Fetch, count: int) -> RangeBytes:
    request = fetch.message
    records = b"".join(
        struct.pack(">q", request.first + index) + bytes(20) for index in range(count)
    )
    return RangeBytes(
        request.session_id,
        request.sequence,
        0,
        request.first,
        count,
        request.form,
        b"",
        records,
        zlib.crc32(records),
        bytes(16),
        (),
    )


def test_a_limited_number_of_fetches_runs_and_the_others_wait_in_order() -> None:
    machine = reads(concurrent_fetches_max=2)
    first = fetch_of(request_range(machine, 0, 9))
    second = fetch_of(request_range(machine, 10, 19))
    assert request_range(machine, 20, 29) == []
    assert request_range(machine, 30, 39) == []
    answer, third = machine.on_range_fetched(first.token, headers(first, 10), 0)
    assert isinstance(answer, SendToClient)
    assert isinstance(third, Fetch)
    assert third.message.first == 20
    (fourth,) = machine.on_fetch_failed(FetchFailed(second.token, "gone"), 0)
    assert isinstance(fourth, Fetch)
    assert fourth.message.first == 30


def test_a_read_is_not_fetched_if_all_its_connections_have_closed() -> None:
    machine = reads(concurrent_fetches_max=1)
    first = fetch_of(request_range(machine, 0, 9))
    for number in range(10, 60, 10):
        assert request_range(machine, number, number + 9) == []
    message = RangeRequest(REQ_ID, 50, 59, 1 << 20, RangeForm.HEADERS, ())
    assert machine.request_range(RequestReceived(ConnectionId(2), message, 70, 0), message) == []
    assert machine.request_headers(TransactionId(70), TransactionId(79)) == []
    machine.close(ConnectionId(1), {70})
    second = fetch_of(machine.on_range_fetched(first.token, headers(first, 10), 0))
    assert second.message.first == 50
    answer, third = machine.on_range_fetched(second.token, headers(second, 10), 0)
    assert answer.connection == 2
    assert isinstance(third, Fetch)
    assert third.message.first == 70  # for a feed
    assert len(machine.on_range_fetched(third.token, headers(third, 10), 0)) == 1
    assert not machine._range_fetches


def test_a_retry_for_a_closed_connection_is_dropped() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    for _ in REPLICAS[1:]:
        fetch = fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0))
    assert machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0) == []
    assert machine.wake_at_ms == RETRY_MS_MIN
    machine.close(ConnectionId(1), ())
    assert machine.wake_at_ms is None
    assert machine.wake(RETRY_MS_MIN) == []


@pytest.mark.parametrize("replicas_in_group", [REPLICAS, REPLICAS[:2]])
def test_nearby_replicas_are_queried_in_turn(replicas_in_group: list[ReplicaId]) -> None:
    machine = reads()
    machine.replicas_in_group = set() if replicas_in_group == REPLICAS else set(replicas_in_group)
    replicas = [
        fetch_of(request_range(machine, 10 * number, 10 * number + 9)).replica
        for number in range(6)
    ]
    assert sorted(replicas) == sorted(6 // len(replicas_in_group) * replicas_in_group)


def test_nearby_replicas_of_the_session_are_queried_first() -> None:
    machine = reads()
    machine.replicas_in_group = {REPLICAS[1], ReplicaId("near-but-not-engaged:1")}
    fetches = [
        fetch_of(request_range(machine, 10 * number, 10 * number + 9)) for number in range(4)
    ]
    assert [fetch.replica for fetch in fetches] == 4 * [REPLICAS[1]]
    fetch = fetch_of(machine.on_fetch_failed(FetchFailed(fetches[0].token, "gone"), 0))
    other = fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0))
    assert {fetch.replica, other.replica} == {REPLICAS[0], REPLICAS[2]}
    # The next session does not include the nearby replica.
    machine.on_session_closed()
    machine.replicas = [REPLICAS[0], REPLICAS[2]]
    assert machine.on_session_opened(SessionId(5), TransactionId(999)) == []
    assert fetch_of(request_range(machine, 500, 509)).replica in machine.replicas


def test_a_failed_fetch_is_sent_to_each_replica_before_a_retry_delay() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    tried = [fetch.replica]
    for _ in range(2):
        assert fetch.is_urgent  # short timeout, until all storages were tried
        fetch = fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0))
        tried.append(fetch.replica)
    assert fetch.is_urgent
    assert sorted(tried) == sorted(REPLICAS)
    assert machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0) == []
    assert machine.wake_at_ms == RETRY_MS_MIN
    assert machine.wake(RETRY_MS_MIN - 1) == []
    fetch = fetch_of(machine.wake(RETRY_MS_MIN))
    assert not fetch.is_urgent
    (answer,) = machine.on_range_fetched(fetch.token, headers(fetch, 10), RETRY_MS_MIN)
    assert isinstance(answer, SendToClient)
    assert isinstance(answer.message, RangeData)


@pytest.mark.parametrize("others", range(AVOIDED_FETCH_COUNT, AVOIDED_FETCH_COUNT + 6))
def test_a_failed_fetch_is_sent_to_each_replica_once_even_if_other_fetches_succeed(
    others: int,
) -> None:
    machine = reads(mark=10_000)
    fetch = fetch_of(request_range(machine, 0, 9))
    tried = [fetch.replica]
    while outcomes := machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0):
        fetch = fetch_of(outcomes)
        tried.append(fetch.replica)
        assert len(set(tried)) == len(tried)
        # After many other fetches no replica is avoided any more.
        for number in range(1, others + 1):
            other = fetch_of(
                request_range(machine, 10 * number, 10 * number + 9, sequence=number + 1)
            )
            machine.on_range_fetched(other.token, headers(other, 10), 0)
    assert sorted(tried) == sorted(REPLICAS)


def test_a_fetch_from_the_only_storage_is_not_urgent() -> None:
    machine = reads()
    machine.replicas = REPLICAS[:1]
    assert not fetch_of(request_range(machine, 0, 9)).is_urgent


def test_a_failed_storage_is_queried_last_for_a_while() -> None:
    machine = reads(mark=10_000)
    fetch = fetch_of(request_range(machine, 0, 9))
    failed = fetch.replica
    requests = []
    fetch = fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "no answer"), 0))
    for number in range(1, 2 * AVOIDED_FETCH_COUNT):
        requests.append(fetch.replica)
        machine.on_range_fetched(fetch.token, headers(fetch, 10), 0)
        fetch = fetch_of(request_range(machine, 10 * number, 10 * number + 9))
    assert failed not in requests[:AVOIDED_FETCH_COUNT]
    assert failed in requests[AVOIDED_FETCH_COUNT : AVOIDED_FETCH_COUNT + 3]
    # A replica is not avoided if it is the only replica.
    machine.replicas = [failed]
    assert (
        fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "no answer"), 0)).replica
        == failed
    )


def test_after_some_rounds_the_client_gets_an_error() -> None:
    machine = reads()
    outcomes = request_range(machine, 0, 9)
    now_ms = 0
    for _ in range(ROUNDS_MAX * len(REPLICAS)):
        if not outcomes:
            assert machine.wake_at_ms is not None
            now_ms = machine.wake_at_ms
            outcomes = machine.wake(now_ms)
        outcomes = machine.on_fetch_failed(FetchFailed(fetch_of(outcomes).token, "gone"), now_ms)
    (answer,) = outcomes
    assert isinstance(answer, SendToClient)
    assert answer.message.error_code == errors.Unreachable.code
    assert machine.wake_at_ms is None


def test_reads_of_an_ended_session_continue_in_the_next_session() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    machine.on_session_closed()
    machine.replicas = []
    assert machine.on_fetch_failed(FetchFailed(fetch.token, "fenced"), 0) == []
    assert request_range(machine, 10, 19) == []
    assert machine.wake_at_ms is None
    machine.replicas = REPLICAS
    again = machine.on_session_opened(SessionId(5), TransactionId(999))
    assert [one.message.session_id for one in again if isinstance(one, Fetch)] == [5, 5]


def test_an_answer_from_an_earlier_session_is_accepted() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    machine.on_session_closed()
    (answer,) = machine.on_range_fetched(fetch.token, headers(fetch, 10), 0)
    assert isinstance(answer, SendToClient)
    assert machine.on_range_fetched(fetch.token, headers(fetch, 10), 0) == []


@pytest.mark.parametrize("is_good", [True, False])
def test_a_read_in_progress_counts_towards_the_limit_after_a_timeout(is_good: bool) -> None:
    machine = reads(concurrent_fetches_max=1)
    fetch = fetch_of(request_range(machine, 0, 9, sequence=1))
    machine.abandon()
    machine.on_session_opened(SessionId(5), TransactionId(99))
    assert request_range(machine, 10, 19, sequence=2) == []
    late = (
        machine.on_range_fetched(fetch.token, headers(fetch, 10), 0)
        if is_good
        else machine.on_fetch_failed(FetchFailed(fetch.token, ""), 0)
    )
    assert fetch_of(late).message.first == 10


def test_a_feed_and_a_reader_may_wait_for_the_same_fetch() -> None:
    machine = reads(feed_frame_count_max=10)
    fetch = fetch_of(machine.request_headers(TransactionId(0), TransactionId(9)))
    assert machine.request_headers(TransactionId(0), TransactionId(9)) == []
    found = machine.on_range_fetched(fetch.token, headers(fetch, 10), 0)
    (feed_headers,) = found
    assert (feed_headers.first, feed_headers.size) == (0, 10)


def test_a_range_never_has_more_rows_than_a_frame_can_report() -> None:
    machine = reads(mark=10 * ROWS_MAX)
    fetch = fetch_of(request_range(machine, 5, 9 * ROWS_MAX))
    assert fetch.message.last == 5 + ROWS_MAX - 1


def test_abandoning_all_reads_returns_their_requests() -> None:
    machine = reads(concurrent_fetches_max=1)
    fetch = fetch_of(request_range(machine, 0, 9, sequence=1))
    request_range(machine, 10, 19, sequence=2)
    assert [one.message.req_id.sequence for one in machine.abandon()] == [1, 2]
    assert machine.on_range_fetched(fetch.token, headers(fetch, 10), 0) == []


def test_feed_headers_do_not_have_the_chain_of_a_reconstructed_batch() -> None:
    machine = reads()
    fetch = fetch_of(machine.request_headers(TransactionId(0), TransactionId(9)))
    lineage = tuple(
        LineageEntry(TransactionId(first), TransactionId(first), session, 0, GENESIS_CHAIN)
        for first, session in ((0, SessionId(4)), (1, RECONSTRUCTED))
    )
    answer = dataclasses.replace(headers(fetch, 2), lineage=lineage)
    (feed_headers,) = machine.on_range_fetched(fetch.token, answer, 0)
    assert (feed_headers.first, len(feed_headers.headers), feed_headers.chain_at) == (0, 40, 0)


def test_feed_headers_have_the_chain_of_their_last_batch_end() -> None:
    machine = reads(mark=-1)
    for first, last in ((0, 1), (2, 2), (3, 9)):
        count = last - first + 1
        record = bytes(44)
        entry = LineageEntry(
            TransactionId(first), TransactionId(last), SessionId(4), 0, GENESIS_CHAIN
        )
        machine.cache_batch(
            entry,
            Batch(
                entry.first,
                entry.last,
                struct.pack(">i", 44) * count,
                record * count,
                bytes(4 * count),
                0,
                0,
            ),
        )
    assert machine.cache_reads()["feed", "hit"] == 0
    for first, last, chain_at in ((0, 9, 9), (0, 5, 2), (1, 1, 1), (3, 5, -1), (4, 9, 9)):
        feed_headers = machine.read_cached(TransactionId(first), TransactionId(last))
        assert feed_headers is not None
        assert feed_headers.chain_at == chain_at, (first, last)
    assert machine.read_cached(TransactionId(10), TransactionId(12)) is None
    assert machine.cache_reads()["feed", "miss"] == 1


def whole_records(fetch: Fetch, *ids: int) -> RangeBytes:
    """Records of these IDs, with a stated count from the first requested ID on."""
    runs = [make_run(transaction_id, [5]) for transaction_id in ids]
    records = b"".join(run for run, _ in runs)
    lengths = b"".join(lengths_to_wire(each) for _, each in runs)
    request = fetch.message
    return dataclasses.replace(
        headers(fetch, len(ids)), first=request.first, lengths=lengths, records=records
    )


def corrupt(answer: RangeBytes) -> RangeBytes:
    data = bytearray(answer.records)
    data[-5] ^= 1
    return dataclasses.replace(answer, records=bytes(data), records_crc=zlib.crc32(data))


@pytest.mark.parametrize(
    ("form", "spoil"),
    [
        (RangeForm.WHOLE, lambda fetch: whole_records(fetch, 10, 12)),
        (RangeForm.WHOLE, lambda fetch: whole_records(fetch, 11, 12)),
        (RangeForm.WHOLE, lambda fetch: whole_records(fetch, 10, 11, 12, 13)),
        (RangeForm.WHOLE, lambda fetch: corrupt(whole_records(fetch, 10, 11))),
        (RangeForm.WHOLE, whole_records),
        (
            RangeForm.WHOLE,
            lambda fetch: dataclasses.replace(whole_records(fetch, 11, 12), first=11),
        ),
        (RangeForm.WHOLE, lambda fetch: dataclasses.replace(whole_records(fetch, 10, 11), count=3)),
        (RangeForm.WHOLE, lambda fetch: headers(fetch, 2)),
        (RangeForm.HEADERS, lambda fetch: whole_records(fetch, 10, 11)),
        (RangeForm.HEADERS, lambda fetch: headers(fetch, 4)),
        (RangeForm.HEADERS, lambda fetch: dataclasses.replace(headers(fetch, 3), records_crc=1)),
        (RangeForm.HEADERS, lambda fetch: dataclasses.replace(headers(fetch, 3), first=11)),
        (RangeForm.HEADERS, lambda fetch: dataclasses.replace(headers(fetch, 3), count=2)),
    ],
)
def test_a_wrong_answer_of_a_storage_is_followed_by_a_fetch_from_another_replica(
    form, spoil
) -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 10, 12, form=form))
    again = fetch_of(machine.on_fetch_failed(FetchFailed(fetch.token, "gone"), 0))
    third = fetch_of(machine.on_range_fetched(again.token, spoil(again), 0))
    assert third.replica not in {fetch.replica, again.replica}
    good = whole_records(third, 10, 11) if form is RangeForm.WHOLE else headers(third, 2)
    (answer,) = machine.on_range_fetched(third.token, good, 0)
    assert isinstance(answer, SendToClient)
    assert isinstance(answer.message, RangeData)
    assert (answer.message.first, answer.message.next) == (10, 12)


def request_data(
    machine: Reads, wanted: int, *, sequence: int = 1
) -> list[SendToClient | Fetch | FeedHeaders]:
    req_id = ReqId(ClientId(1), Generation(0), PartitionId(0), sequence)
    message = TransactionDataRequest(req_id, wanted)
    return machine.request_data(RequestReceived(ConnectionId(1), message, 70, 0), message)


def data_of(outcome: SendToClient | Fetch | FeedHeaders) -> tuple[int, bytes]:
    assert isinstance(outcome, SendToClient)
    data, error = outcome.message.result
    assert error is None
    assert data is not None
    return outcome.message.transaction_id, bytes(data)


def written_data(transaction_id: int) -> tuple[int, bytes]:
    record, _ = make_run(transaction_id, [5])
    return transaction_id, record[36:-4]


def test_sequential_reads_are_read_ahead() -> None:
    machine = reads(mark=5_000)
    fetch = fetch_of(request_data(machine, 7))
    assert (fetch.message.first, fetch.message.last) == (7, 7)
    (answer,) = machine.on_range_fetched(fetch.token, whole_records(fetch, 7), 0)
    assert data_of(answer) == written_data(7)
    fetch = fetch_of(request_data(machine, 8))
    assert (fetch.message.first, fetch.message.last) == (8, 8 + PREFETCH_COUNT_MAX - 1)
    assert fetch.message.bytes_max == PREFETCH_BYTES_MAX
    (answer,) = machine.on_range_fetched(fetch.token, whole_records(fetch, *range(8, 20)), 0)
    assert data_of(answer) == written_data(8)
    # The other records of the answer are cached, and the next range is requested.
    for transaction_id in range(9, 20):
        (answer,) = request_data(machine, transaction_id)
        assert data_of(answer) == written_data(transaction_id)
    assert machine.cache_reads()["transaction", "hit"] == 11
    fetch = fetch_of(request_data(machine, 20))
    assert fetch.message.last == 20 + PREFETCH_COUNT_MAX - 1
    assert machine.fetch_count == 3


def test_random_reads_are_not_read_ahead() -> None:
    machine = reads()
    for wanted in (500, 400, 600, 200, 700, 699):
        fetch = fetch_of(request_data(machine, wanted))
        assert (fetch.message.first, fetch.message.last) == (wanted, wanted)
        machine.on_range_fetched(fetch.token, whole_records(fetch, wanted), 0)


def test_reading_ahead_ends_at_the_mark() -> None:
    machine = reads(mark=12)
    fetch = fetch_of(request_data(machine, 9))
    machine.on_range_fetched(fetch.token, whole_records(fetch, 9), 0)
    assert fetch_of(request_data(machine, 10)).message.last == 12


def test_read_ahead_ranges_are_not_requested_twice() -> None:
    machine = reads()
    fetch = fetch_of(request_data(machine, 7))
    machine.on_range_fetched(fetch.token, whole_records(fetch, 7), 0)
    fetch = fetch_of(request_data(machine, 8))
    assert [request_data(machine, wanted, sequence=wanted) for wanted in (9, 10, 11)] == [
        [],
        [],
        [],
    ]
    # The answer ends earlier than expected, so the rest is requested again.
    *answers, more = machine.on_range_fetched(fetch.token, whole_records(fetch, 8, 9), 0)
    assert [data_of(answer) for answer in answers] == [written_data(8), written_data(9)]
    more = fetch_of([more])
    assert more.message.first == 10
    answers = machine.on_range_fetched(more.token, whole_records(more, 10, 11), 0)
    assert [data_of(answer) for answer in answers] == [written_data(10), written_data(11)]
    assert machine.fetch_count == 3


def test_damage_in_the_read_ahead_does_not_affect_earlier_ranges() -> None:
    machine = reads()
    fetch = fetch_of(request_data(machine, 7))
    machine.on_range_fetched(fetch.token, whole_records(fetch, 7), 0)
    ahead = fetch_of(request_data(machine, 8))
    assert request_data(machine, 9, sequence=2) == []
    alone = machine.on_range_fetched(ahead.token, corrupt(whole_records(ahead, 8, 9)), 0)
    assert [(one.message.first, one.message.last) for one in alone if isinstance(one, Fetch)] == [
        (8, 8),
        (9, 9),
    ]
    assert all(isinstance(one, Fetch) and one.replica != ahead.replica for one in alone)
    (answer,) = machine.on_range_fetched(
        fetch_of(alone[:1]).token, whole_records(fetch_of(alone[:1]), 8), 0
    )
    assert data_of(answer) == written_data(8)


def test_ranges_over_the_cache_limit_are_answered_and_not_kept() -> None:
    machine = reads(budget_bytes=2_000)
    fetch = fetch_of(request_data(machine, 7))
    machine.on_range_fetched(fetch.token, whole_records(fetch, 7), 0)
    fetch = fetch_of(request_data(machine, 8))
    assert request_data(machine, 9, sequence=2) == []
    answers = machine.on_range_fetched(fetch.token, whole_records(fetch, *range(8, 60)), 0)
    assert [data_of(answer) for answer in answers] == [written_data(8), written_data(9)]
    assert fetch_of(request_data(machine, 10)).message.first == 10


def test_read_ahead_is_dropped_if_the_session_cannot_confirm_it() -> None:
    machine = reads()
    for wanted, until in ((7, 7), (8, 12)):
        fetch = fetch_of(request_data(machine, wanted))
        machine.on_range_fetched(fetch.token, whole_records(fetch, *range(wanted, until + 1)), 0)
    machine.clear_caches()
    assert fetch_of(request_data(machine, 9)).message.first == 9


def test_a_partition_can_be_abandoned_during_read_ahead() -> None:
    machine = reads()
    fetch = fetch_of(request_data(machine, 7))
    machine.on_range_fetched(fetch.token, whole_records(fetch, 7), 0)
    ahead = fetch_of(request_data(machine, 8))
    assert len(machine.abandon()) == 1
    machine.on_session_opened(SessionId(5), TransactionId(999))
    assert machine.on_range_fetched(ahead.token, whole_records(ahead, 8, 9), 0) == []
    assert fetch_of(request_data(machine, 9)).message.first == 9


def fail_rounds(machine: Reads, fetch: Fetch, rounds: list[list[str]]) -> list[object]:
    """Let all replicas fail, round after round; return the last outcomes. "!": damage."""
    now_ms, outcomes = 0, list[object]()
    for number, reasons in enumerate(rounds):
        if number:
            assert machine.wake_at_ms is not None
            now_ms = machine.wake_at_ms
            fetch = fetch_of(machine.wake(now_ms))
        for reason in reasons:
            code = errors.ObjectMissing.code if reason.startswith("!") else 0
            event = FetchFailed(fetch.token, reason, damage_code=code)
            outcomes = list(machine.on_fetch_failed(event, now_ms))
            if reason is not reasons[-1]:
                fetch = fetch_of(outcomes)
    return outcomes


DAMAGED = ["!object a: bad", "!object a: wrong", "!object a: lost"]


def test_the_error_of_a_read_reports_damage_rather_than_other_failures() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    rounds = [["gone", "!object a: bad", "away"]] * ROUNDS_MAX
    (answer,) = fail_rounds(machine, fetch, rounds)
    assert isinstance(answer, SendToClient)
    assert answer.message.retriable
    assert "returned transactions 0..9: !object a: bad" in answer.message.message


def test_a_request_is_not_retried_if_all_replicas_report_damage() -> None:
    machine = reads()
    fetch = fetch_of(request_range(machine, 0, 9))
    (answer,) = fail_rounds(
        machine, fetch, [["gone", "away", "lost"], *[DAMAGED] * (ROUNDS_MAX - 1)]
    )
    assert isinstance(answer, SendToClient)
    assert (answer.message.error_code, answer.message.retriable) == (
        errors.ObjectMissing.code,
        False,
    )
    assert answer.message.message.endswith("returned transactions 0..9: !object a: lost")


def test_a_feed_fails_when_all_replicas_report_damage_for_long() -> None:
    machine = reads()
    fetch = fetch_of(machine.request_headers(TransactionId(0), TransactionId(9)))
    (outcome,) = fail_rounds(machine, fetch, [DAMAGED] * 7)
    assert isinstance(outcome, FeedFailed)
    assert outcome.first == 0
    assert isinstance(outcome.error, errors.Unreachable)
    assert outcome.error.retriable
    assert "transactions 0..9: !object a: lost" in str(outcome.error)
    assert machine.wake_at_ms is None
    assert not machine._range_fetches


def test_a_feed_waits_while_damage_is_brief_or_a_replica_may_return() -> None:
    machine = reads()
    fetch = fetch_of(machine.request_headers(TransactionId(0), TransactionId(9)))
    assert fail_rounds(machine, fetch, [DAMAGED] * 6) == []
    assert machine.wake_at_ms is not None
    machine = reads()
    fetch = fetch_of(machine.request_headers(TransactionId(0), TransactionId(9)))
    assert fail_rounds(machine, fetch, [[*DAMAGED[:2], "gone"]] * 12) == []
    assert machine.wake_at_ms is not None
    assert machine._delayed[0][1].retry_ms == RETRY_MS_MAX


@pytest.mark.parametrize("count", [FILTER_HEADERS_MAX, FILTER_HEADERS_MAX + 1])
def test_a_filter_of_a_range_has_a_limited_number_of_headers(count) -> None:
    """The server compares each record with the headers; a small request must not take much time."""
    message = RangeRequest(REQ_ID, 5, 6, 1 << 20, RangeForm.WHOLE, tuple(range(count)))
    (found,) = reads().request_range(RequestReceived(ConnectionId(1), message, 70, 0), message)
    if count <= FILTER_HEADERS_MAX:
        assert isinstance(found, Fetch)
    else:
        assert isinstance(found, SendToClient)
        assert isinstance(found.message, ErrorResponse)
        assert found.message.message == "range request: expected at most 1000 headers, found 1001"
