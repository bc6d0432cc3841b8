"""The machine of a served partition: sessions, appends, mounts, reads and release."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.unit.server.test_reads import headers
from waltz_core import errors
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.machine import Report, Wakeup
from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append
from waltz_core.records.lock_blocks import LogEnd, encode
from waltz_core.records.record import (
    GENESIS_CHAIN,
    ClientId,
    Generation,
    PartitionId,
    ReplicaId,
    ReqId,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication import session_events as replication
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import (
    ConnectionClosed,
    ConnectionCongested,
    ConnectionDrained,
    ConnectionId,
    Event,
    Fetch,
    FetchAnswered,
    FetchFailed,
    PartitionIdentity,
    PartitionLimits,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.wire import messages
from waltz_core.wire.messages import LATEST_MARK, Buffer, ClientMessage, RangeForm, RowOutcomeCode

ALICE, BOB = ClientId(1), ClientId(2)
A, B, C = ConnectionId(10), ConnectionId(20), ConnectionId(30)
REPLICAS = (ReplicaId("s1:1"), ReplicaId("s2:1"), ReplicaId("s3:1"))
KEY = bytes(range(16))
MessageT = TypeVar("MessageT", bound=ClientMessage)


class FakeStore:
    """A store that reports what the test specifies."""

    def __init__(self) -> None:
        self.events: list[replication.Event] = []
        self.effects: list[replication.Effect] = []
        self.wake_at_ms: int | None = None
        self.readable_replicas: Sequence[ReplicaId] = ()
        self.archived_mark: ArchivedMark | None = None
        self.is_archiving = False
        self.archive_backlog: replication.ArchiveBacklog | None = None
        self.expired = (0, 0)
        self.replaced: dict[replication.ReplaceArchivedObject, replication.ReplacementOutcome] = {}

    def is_expiry_done(self, before: TransactionId, before_ms: int) -> bool:
        return before <= self.expired[0] and before_ms <= self.expired[1]

    def replacement_outcome(
        self, request: replication.ReplaceArchivedObject
    ) -> replication.ReplacementOutcome | None:
        return self.replaced.get(request)

    def step(self, event: replication.Event, now_ms: int) -> Sequence[replication.Effect]:
        assert now_ms >= 0
        self.events.append(event)
        effects, self.effects = self.effects, []
        return effects

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class World:
    def __init__(self, **limits: int) -> None:
        self.store = FakeStore()
        self.limits = PartitionLimits(
            **{"lock_slot_count": 1009, "lock_load_count_max": 0, **limits}
        )
        self.partition = Partition(
            PartitionIdentity(PartitionId(0), 4, KEY),
            self.store,
            self.limits,
            TransactionCache(CacheBudget(1 << 20)),
            FeedCache(20 * 1000),
            LargeBatchThrottle(),
        )
        self.now_ms = 0
        self.session = 0
        self.sequence = 1
        self.answers: list[SendToClient] = []
        self.fetches: list[Fetch] = []
        self.rest: list[object] = []
        self.step(replication.TakeOwnership(Generation(1), REPLICAS))

    # --- steps

    def step(self, event: Event) -> None:
        for effect in self.partition.step(event, self.now_ms):
            if isinstance(effect, SendToClient):
                self.answers.append(effect)
            elif isinstance(effect, Fetch):
                self.fetches.append(effect)
            else:
                self.rest.append(effect)

    def report_from_store(self, *effects: replication.Effect) -> None:
        """Let the store report outcomes, with an unrelated event."""
        self.store.effects = list(effects)
        self.step(replication.Checkpoint())

    def run(self) -> None:
        while (at_ms := self.partition.wake_at_ms) is not None and at_ms <= self.now_ms:
            self.step(Wakeup())

    def open(
        self,
        mark: int = -1,
        *,
        settled: int | None = None,
        follows_own_session: bool = True,
        generation: int = 1,
    ) -> None:
        self.session += 1
        self.chain = GENESIS_CHAIN
        self.store.readable_replicas = REPLICAS
        session_id = SessionId(self.session)
        self.report_from_store(
            replication.SessionOpened(
                session_id,
                Generation(generation),
                TransactionId(mark),
                self.chain,
                follows_own_session,
            ),
            replication.SessionSettled(
                session_id, TransactionId(mark if settled is None else settled)
            ),
        )

    def close(self, error_code: int = 0) -> None:
        self.store.readable_replicas = ()
        reason = "a replica was lost"
        self.report_from_store(
            replication.SessionClosed(SessionId(self.session), reason, error_code)
        )

    def commit(self, count: int | None = None) -> None:
        """Commit the given number of batches that were submitted in this session."""
        batches = [
            message.batch
            for message in self.store.of(replication.SubmitToSession)
            if message.session_id == self.session
            and message.batch.last > self.partition.high_water_mark
        ][:count]
        for batch in batches:
            self.chain = next_chain(
                self.chain, batch.first, batch.last, SessionId(self.session), batch.record_crcs
            )
        self.report_from_store(
            replication.TransactionsCommitted(SessionId(self.session), batches[-1].last, self.chain)
        )

    def prove(self) -> None:
        """Let a quorum answer the latest request for a proof."""
        token = self.store.of(replication.ProveMark)[-1].token
        self.report_from_store(replication.MarkProved(token, self.partition.high_water_mark))

    def fail_proof(self) -> None:
        """Let the latest request for a proof fail."""
        self.report_from_store(
            replication.MarkProofFailed(self.store.of(replication.ProveMark)[-1].token)
        )

    # --- clients

    def send(self, connection: ConnectionId, message: ClientMessage) -> ReqId:
        self.step(RequestReceived(connection, message, 100, 1_000))
        return message.req_id

    def req_id(self, client: ClientId, generation: int = 1) -> ReqId:
        self.sequence += 1
        return ReqId(client, Generation(generation), PartitionId(0), self.sequence)

    def mount(
        self,
        client: ClientId = ALICE,
        connection: ConnectionId = A,
        *,
        sequence: int = 1,
        mark: int = LATEST_MARK,
        feed: bool = False,
        generation: int = 1,
    ) -> ReqId:
        req_id = self.req_id(client, generation)
        mounted = self.send(connection, messages.MountWriter(req_id, sequence, mark, feed))
        self.run()
        return mounted

    def append(
        self,
        client: ClientId = ALICE,
        connection: ConnectionId = A,
        *,
        data: bytes = b"data",
        header: int = 0,
        mark: int = -1,
    ) -> ReqId:
        crc = zlib.crc32(data)
        message = messages.AppendRequest(self.req_id(client), mark, (), (), (), header, data, crc)
        return self.send(connection, message)

    def fill(self, count: int, *, data: bytes = b"data") -> None:
        """Append and commit transactions with the headers 0, 1, 2, ..."""
        for header in range(count):
            self.append(data=data, header=header)
        self.run()
        self.commit()
        self.run()

    # --- reports

    def answer(self, req_id: ReqId) -> ClientMessage:
        (message,) = [
            answer.message
            for answer in self.answers
            if answer.message.req_id == req_id and answer.cost_bytes
        ]
        return message

    def is_answered(self, req_id: ReqId) -> bool:
        return any(answer.message.req_id == req_id and answer.cost_bytes for answer in self.answers)

    def error(self, req_id: ReqId) -> int:
        message = self.answer(req_id)
        return message.error_code

    def reason(self, req_id: ReqId) -> RowOutcomeCode:
        message = self.answer(req_id)
        return RowOutcomeCode(bytes(message.reasons)[0])

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        return [answer.message for answer in self.answers if isinstance(answer.message, kind)]


def world_with_mount(**limits: int) -> World:
    world = World(**limits)
    world.open()
    world.mount()
    return world


# --- appends and sessions


def test_requests_wait_until_an_opened_session_is_settled() -> None:
    world = World()
    mark = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    world.report_from_store(
        replication.SessionOpened(
            SessionId(1), Generation(1), TransactionId(4), GENESIS_CHAIN, follows_own_session=False
        )
    )
    assert world.answers == []
    assert not world.partition.is_open
    world.report_from_store(replication.SessionSettled(SessionId(1), TransactionId(4)))
    assert world.answer(mark) == messages.HighWaterMarkResponse(mark, 4)
    assert world.partition.is_open


def test_a_lost_session_is_settled_before_its_appends_are_reported() -> None:
    world = world_with_mount()
    first, second = world.append(), world.append()
    world.run()
    world.close()
    assert not world.is_answered(first)
    world.open(0, settled=0)
    assert world.reason(first) is RowOutcomeCode.COMMITTED
    assert world.reason(second) is RowOutcomeCode.LOST
    behind = world.append()
    world.run()
    assert world.reason(behind) is RowOutcomeCode.NOT_MOUNTED


def test_an_append_lost_because_of_a_full_disk_is_answered() -> None:
    world = world_with_mount()
    lost = world.append()
    world.run()
    world.close(errors.NoSpace.code)
    world.open(-1, settled=-1)
    assert world.reason(lost) is RowOutcomeCode.NO_SPACE


def test_the_owner_releases_a_partition_whose_log_is_shorter_than_reported() -> None:
    world = world_with_mount()
    world.fill(3)
    waiting = world.append()
    world.close()
    world.open(1)
    assert not world.partition.is_owned
    assert world.error(waiting) == errors.NotOwned.code
    assert any(isinstance(effect, replication.OwnershipReleased) for effect in world.rest)
    assert world.store.of(replication.ReleaseOwnership)


def test_a_partition_that_is_released_reports_the_known_outcomes_to_all_clients() -> None:
    world = world_with_mount()
    in_flight = world.append()
    world.run()
    mounting = world.mount(BOB, B)
    queued = world.append()
    flush = world.send(A, messages.FlushRequest(world.req_id(ALICE)))
    world.step(replication.ReleaseOwnership())
    assert world.error(in_flight) == errors.OutcomeUnknown.code
    answer = world.answer(queued)
    assert (answer.error_code, answer.retriable) == (errors.NotOwned.code, True)
    assert "partition 0" in answer.message
    assert world.error(flush) == errors.NotOwned.code
    assert world.error(mounting) == errors.NotOwned.code
    late = world.append()
    assert world.error(late) == errors.NotOwned.code
    old_mount = world.send(A, messages.MountRequest(world.req_id(ALICE), -1, 2))
    assert world.answer(old_mount) == messages.MountResponse(old_mount, 1)


def test_requests_time_out_without_a_session() -> None:
    world = World()
    mark = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    world.now_ms = world.limits.session_wait_ms_max - 1
    assert world.partition.wake_at_ms == world.limits.session_wait_ms_max
    world.run()
    assert not world.is_answered(mark)
    world.now_ms += 1
    world.run()
    assert world.error(mark) == errors.Unavailable.code


def test_the_store_is_woken_at_the_requested_time() -> None:
    world = world_with_mount()
    world.store.wake_at_ms = 70
    assert world.partition.wake_at_ms == 70
    world.now_ms = 70
    world.store.wake_at_ms = 70
    world.partition.step(Wakeup(), 70)
    assert isinstance(world.store.events[-1], Wakeup)


def test_a_checkpoint_waits_for_appends_in_flight_and_loses_none() -> None:
    world = World(checkpoint_interval_count=3, checkpoint_interval_ms=50)
    world.open(9)
    world.mount()
    world.fill(4)
    world.now_ms = 50
    checkpoints = len(world.store.of(replication.Checkpoint))
    world.append()
    world.run()
    world.store.effects = []
    world.commit()
    # One event makes the test's store report; the other is the tested one.
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 2
    held = world.append()
    world.run()
    assert len(world.store.of(replication.SubmitToSession)) == 2
    world.close()
    world.open(14)
    world.run()
    world.commit()
    assert world.reason(held) is RowOutcomeCode.COMMITTED


def test_a_checkpoint_waits_a_limited_time_for_an_archive_attempt() -> None:
    """If each checkpoint interrupted attempts, no attempt would end under load."""
    world = World(checkpoint_interval_count=1, checkpoint_interval_ms=1)
    world.open(9)
    world.mount()
    world.fill(4)
    world.now_ms = 2
    world.store.is_archiving = True
    for count in range(5, 9):
        world.append()
        world.run()
        checkpoints = len(world.store.of(replication.Checkpoint))
        world.store.effects = []
        world.commit()
        # One event makes the test's store report; the other is the tested one.
        expected = 1 + (count == 8)
        assert len(world.store.of(replication.Checkpoint)) == checkpoints + expected, count


def test_a_due_checkpoint_waits_for_appends_in_flight() -> None:
    world = World(checkpoint_interval_count=1, checkpoint_interval_ms=1)
    world.open()
    world.mount()
    for _ in range(2):
        world.append()
        world.run()
    world.now_ms = 1
    checkpoints = len(world.store.of(replication.Checkpoint))
    world.commit(1)  # committed by one of the two events
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 1
    world.commit(1)
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 3


def test_a_checkpoint_is_due_earlier_if_much_was_archived_in_the_session() -> None:
    world = World(checkpoint_interval_ms=50)
    world.open()
    world.mount()
    world.append()
    world.run()
    due = replication.CheckpointDue(SessionId(world.session))
    checkpoints = len(world.store.of(replication.Checkpoint))
    world.report_from_store(due)
    world.commit()
    # Only the test's own checkpoints: the session is too young for another one.
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 2
    world.now_ms = 50
    world.append()
    world.run()
    world.commit()
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 4
    world.close()
    world.open(1)
    world.append()
    world.run()
    world.now_ms = 100
    world.commit()
    # No checkpoint in the next session, in which little is archived.
    assert len(world.store.of(replication.Checkpoint)) == checkpoints + 7


# --- mounts


def test_a_mount_waits_for_the_appends_in_flight() -> None:
    world = world_with_mount()
    world.append()
    world.run()
    mount = world.mount(ALICE, B, sequence=2)
    assert not world.is_answered(mount)
    old = world.append()
    early = world.append(ALICE, B)
    world.run()
    assert world.reason(old) is RowOutcomeCode.NOT_MOUNTED
    assert world.reason(early) is RowOutcomeCode.NOT_MOUNTED
    world.commit()
    assert world.answer(mount) == messages.Mounted(
        mount,
        1,
        0,
        world.limits.batch_rows_max,
        world.limits.batch_bytes_max,
        world.limits.connection_bytes_max,
    )
    req_id = world.append(ALICE, B)
    world.run()
    world.commit()
    assert world.reason(req_id) is RowOutcomeCode.COMMITTED


def test_a_mount_that_waits_at_the_end_of_a_session_is_answered_by_the_next_session() -> None:
    world = world_with_mount()
    world.append()
    world.run()
    mount = world.mount(ALICE, B, sequence=2)
    world.close()
    assert not world.is_answered(mount)
    world.open(-1, settled=-1)
    world.run()
    assert isinstance(world.answer(mount), messages.Mounted)
    req_id = world.append(ALICE, B)
    world.run()
    world.commit()
    assert world.reason(req_id) is RowOutcomeCode.COMMITTED


def test_requests_of_a_closed_connection_are_forgotten() -> None:
    """A request without a session could wait for days; a returning client repeats it."""
    world = world_with_mount()
    world.append()
    world.run()
    mount = world.mount(BOB, B)
    flush = world.send(B, messages.FlushRequest(world.req_id(BOB)))
    mine = world.send(A, messages.FlushRequest(world.req_id(ALICE)))
    world.close()
    waiting = world.partition._waiting
    assert (len(waiting._mounts), len(waiting._flushes)) == (1, 2)
    world.step(ConnectionClosed(B))
    assert (len(waiting._mounts), len(waiting._flushes)) == (0, 1)
    world.open(0)
    world.run()
    assert isinstance(world.answer(mine), messages.FlushResponse)
    assert not world.is_answered(mount)
    assert not world.is_answered(flush)


@pytest.mark.parametrize("is_closed", [True, False])
def test_headers_for_an_ended_feed_are_not_fetched(is_closed: bool) -> None:
    world = World()
    world.open(999)
    for client in range(10):
        world.mount(ClientId(client), A, mark=client, feed=True)
    assert len(world.fetches) == 8
    if is_closed:
        world.step(ConnectionClosed(A))
    else:
        for client in range(10):
            world.mount(ClientId(client), A, sequence=2)
    for fetch in world.fetches[:8]:
        world.step(FetchAnswered(fetch.token, headers(fetch, 1)))
    assert len(world.fetches) == 8
    assert not world.partition.reads._range_fetches


def test_an_older_connection_cannot_mount_again() -> None:
    world = world_with_mount()
    world.mount(ALICE, B, sequence=5)
    assert world.error(world.mount(ALICE, A, sequence=4)) == errors.ConnectionSuperseded.code
    world.step(ConnectionClosed(B))
    assert world.error(world.mount(ALICE, C, sequence=5)) == errors.ConnectionSuperseded.code
    assert isinstance(world.answer(world.mount(ALICE, C, sequence=6)), messages.Mounted)
    old = world.send(C, messages.MountRequest(world.req_id(ALICE), -1, 7))
    world.run()
    assert world.answer(old) == messages.MountResponse(old, 0)


def test_a_later_mount_of_the_client_ends_its_waiting_mount() -> None:
    world = world_with_mount()
    world.append()
    world.run()
    first = world.mount(ALICE, A, sequence=1)
    second = world.mount(ALICE, A, sequence=1)
    assert world.error(first) == errors.ConnectionSuperseded.code
    world.commit()
    assert isinstance(world.answer(second), messages.Mounted)


def test_a_mount_of_another_generation_is_rejected() -> None:
    world = world_with_mount()
    assert world.error(world.mount(BOB, B, generation=0)) == errors.GenerationMismatch.code
    assert world.error(world.mount(BOB, B, generation=2)) == errors.NotOwned.code


def test_a_new_generation_clears_fences_and_mounts() -> None:
    world = world_with_mount()
    world.mount(ALICE, A, sequence=9)
    world.fill(2)
    world.close()
    world.step(replication.TakeOwnership(Generation(2), REPLICAS))
    world.open(1, settled=1, follows_own_session=True, generation=2)
    mount = world.mount(ALICE, B, sequence=1, generation=2)
    assert isinstance(world.answer(mount), messages.Mounted)
    world.send(B, messages.RangeRequest(world.req_id(ALICE), 0, 1, 1000, RangeForm.WHOLE, ()))
    assert len(world.fetches) == 1


def test_mount_fences_survive_a_release_in_the_same_generation_but_mounts_do_not() -> None:
    """An older attempt must not mount after the partition was released and owned again."""
    world = world_with_mount()
    world.mount(ALICE, B, sequence=5)
    world.step(replication.ReleaseOwnership())
    world.step(replication.TakeOwnership(Generation(1), REPLICAS))
    world.open(-1)
    append = world.append(ALICE, B)
    world.run()
    assert world.reason(append) is RowOutcomeCode.NOT_MOUNTED
    assert world.error(world.mount(ALICE, C, sequence=4)) == errors.ConnectionSuperseded.code
    assert isinstance(world.answer(world.mount(ALICE, C, sequence=6)), messages.Mounted)


def test_a_client_ahead_of_the_log_is_reported() -> None:
    world = world_with_mount()
    new = world.mount(BOB, B, mark=0)
    old = world.send(B, messages.MountRequest(world.req_id(BOB), 5, 1))
    world.prove()
    assert world.error(new) == errors.ClientAheadOfLog.code
    assert not world.is_answered(old)  # the request arrived after that proof had started
    world.prove()
    assert world.answer(old) == messages.MountResponse(old, 2)
    assert world.error(world.mount(BOB, B, mark=-3)) == errors.BadRequest.code


def test_a_mount_ahead_of_the_log_gets_a_retryable_error_if_the_proof_fails() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, mark=0)
    world.fail_proof()
    assert world.error(mount) == errors.SessionLost.code
    assert errors.SessionLost.retriable
    old = world.send(B, messages.MountRequest(world.req_id(BOB), 5, 1))
    world.close()
    assert not world.is_answered(old)
    world.now_ms += world.limits.session_wait_ms_max
    world.run()
    assert world.error(old) == errors.Unavailable.code


def test_a_client_that_was_ahead_of_the_log_is_mounted_by_the_next_session() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, mark=3)
    assert not world.is_answered(mount)
    world.close()
    world.open(3, follows_own_session=False)  # Another server has written since.
    assert isinstance(world.answer(mount), messages.Mounted)


def test_a_mount_ahead_of_the_log_succeeds_after_the_log_reaches_its_mark() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, mark=0)
    world.fill(1)
    world.prove()
    assert isinstance(world.answer(mount), messages.Mounted)


def test_a_connection_that_closes_while_its_mount_waits_for_a_proof_is_forgotten() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, mark=0, feed=True)
    world.step(ConnectionClosed(B))
    world.fill(1)
    world.prove()
    world.run()
    assert not world.is_answered(mount)
    assert (world.partition.mount_count, world.partition.feed.count) == (1, 0)
    late = world.mount(BOB, C, mark=5)
    world.prove()
    assert world.error(late) == errors.ClientAheadOfLog.code


# --- feeds


def ids_in_feed(world: World, connection: ConnectionId) -> list[int]:
    """Return the IDs a connection was fed, in order."""
    ids: list[int] = []
    for answer in world.answers:
        if answer.connection == connection and isinstance(answer.message, messages.FeedBatch):
            assert len(answer.message.headers) == 20 * answer.message.count
            ids += range(answer.message.first, answer.message.first + answer.message.count)
    return ids


def test_a_feed_mount_is_answered_when_the_feed_has_reached_the_mark() -> None:
    world = world_with_mount()
    world.fill(5)
    mount = world.mount(BOB, B, mark=1, feed=True)
    assert ids_in_feed(world, B) == [2, 3, 4]
    kinds = [type(answer.message) for answer in world.answers if answer.connection == B]
    assert kinds == [messages.FeedBatch, messages.Mounted]
    (batch,) = world.of(messages.FeedBatch)
    assert (batch.req_id, batch.session_id) == (mount, 1)
    assert (batch.chain_at, batch.chain) == (4, world.chain)
    heads = raw_records.from_feed_headers(TransactionId(2), batch.headers)
    assert len(heads) == 3 * 28


def test_a_feed_mount_waits_for_the_batches_in_flight_and_receives_them() -> None:
    world = world_with_mount()
    world.append()
    world.run()
    mount = world.mount(BOB, B, mark=-1, feed=True)
    assert not world.is_answered(mount)
    world.commit()
    world.run()
    assert ids_in_feed(world, B) == [0]
    assert world.is_answered(mount)


def test_a_feed_mount_that_outlives_its_session_is_answered_by_the_next_session() -> None:
    world = world_with_mount()
    world.fill(5)
    message = messages.MountWriter(world.req_id(BOB), 1, 1, wants_feed=True)
    mount = world.send(B, message)
    world.close()
    world.run()
    assert not world.is_answered(mount)
    world.open(4)
    world.run()
    mount_answer = world.answer(mount)
    assert isinstance(mount_answer, messages.Mounted)
    assert mount_answer.session_id == world.session


def test_a_feed_mount_that_outlives_its_generation_is_rejected() -> None:
    world = world_with_mount()
    world.fill(5)
    message = messages.MountWriter(world.req_id(BOB), 1, 1, wants_feed=True)
    mount = world.send(B, message)
    world.close()
    world.step(replication.TakeOwnership(Generation(2), REPLICAS))
    world.open(4, generation=2)
    world.run()
    assert not world.is_answered(mount)
    (fetch,) = world.fetches
    world.step(FetchAnswered(fetch.token, headers(fetch, 3)))
    world.run()
    assert world.error(mount) == errors.GenerationMismatch.code
    again = world.mount(BOB, B, sequence=2, generation=2)
    assert isinstance(world.answer(again), messages.Mounted)


def test_a_feed_request_without_a_matching_mount_is_rejected() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, feed=True)
    unknown_mount = world.send(B, messages.FeedRequest(world.req_id(BOB), -1))
    # A client was not notified that its mount had ended with an earlier ownership. So the client
    # gets an error, and mounts again.
    assert world.error(unknown_mount) == errors.NotMounted.code
    world.send(B, messages.FeedRequest(mount, -2))
    ahead = world.send(B, messages.FeedRequest(mount, 7))
    codes = [message.error_code for message in world.of(messages.ErrorResponse)]
    assert codes == [errors.NotMounted.code, errors.BadRequest.code]
    world.prove()
    (found,) = world.of(messages.ErrorResponse)[-1:]
    assert (found.req_id, found.error_code) == (ahead, errors.ClientAheadOfLog.code)
    world.send(B, messages.FeedRequest(mount, -1))
    repeated = world.send(B, messages.FeedRequest(mount, -1))
    (found,) = world.of(messages.ErrorResponse)[-1:]
    assert (found.req_id, found.error_code) == (repeated, errors.BadRequest.code)


def test_a_congested_client_receives_no_feed_until_it_has_drained() -> None:
    world = world_with_mount()
    mount = world.mount(BOB, B, feed=True)
    other = world.mount(ALICE, C, sequence=2, feed=True)
    world.send(B, messages.FeedRequest(mount, -1))
    world.send(C, messages.FeedRequest(other, -1))
    world.step(ConnectionCongested(B))
    for _ in range(3):
        world.append(ALICE, C)
        world.run()
        world.commit()
        world.run()
    assert ids_in_feed(world, B) == []
    assert ids_in_feed(world, C) == [0, 1, 2]
    assert world.partition.wake_at_ms is None
    world.step(ConnectionDrained(B))
    world.run()
    assert ids_in_feed(world, B) == [0, 1, 2]


def test_evicted_data_is_fetched_once_for_all_clients() -> None:
    world = World()
    world.open(2)
    first = world.mount(ALICE, A, mark=-1, feed=True)
    second = world.mount(BOB, B, mark=-1, feed=True)
    (fetch,) = world.fetches
    assert (fetch.message.first, fetch.message.last, fetch.message.reader) == (0, 2, True)
    assert fetch.message.session_id == 1
    world.step(FetchAnswered(fetch.token, headers(fetch, 3)))
    world.run()
    assert ids_in_feed(world, A) == ids_in_feed(world, B) == [0, 1, 2]
    assert isinstance(world.answer(first), messages.Mounted)
    assert isinstance(world.answer(second), messages.Mounted)


def test_a_storage_answer_with_the_wrong_range_is_not_delivered() -> None:
    world = World()
    world.open(2)
    mount = world.mount(ALICE, A, mark=-1, feed=True)
    for _ in range(5):
        fetch = world.fetches[-1]
        shifted = headers(fetch, 4).records[raw_records.HEADER_DTYPE.itemsize :]
        found = dataclasses.replace(
            headers(fetch, 3), records=shifted, records_crc=zlib.crc32(shifted)
        )
        world.step(FetchAnswered(fetch.token, found))
        world.now_ms += 1_000
        world.run()
    assert ids_in_feed(world, A) == []
    assert len({each.replica for each in world.fetches}) == 3
    fetch = world.fetches[-1]
    world.step(FetchAnswered(fetch.token, headers(fetch, 3)))
    world.run()
    assert isinstance(world.answer(mount), messages.Mounted)


# --- reads


def request_range(
    world: World,
    first: int,
    last: int,
    *,
    bytes_max: int = 1 << 20,
    form: RangeForm = RangeForm.WHOLE,
    headers: tuple[int, ...] = (),
) -> ReqId:
    message = messages.RangeRequest(world.req_id(ALICE), first, last, bytes_max, form, headers)
    return world.send(A, message)


def range_answer(world: World, req_id: ReqId) -> messages.RangeData:
    message = world.answer(req_id)
    assert isinstance(message, messages.RangeData)
    return message


def range_bytes(fetch: Fetch, data: messages.RangeData, records: Buffer) -> messages.RangeBytes:
    """Return the answer of another partition in the form of a storage's answer."""
    range_fields = (1, fetch.token, 0, data.first, data.count, data.form)
    return messages.RangeBytes(*range_fields, data.lengths, records, 0, bytes(16), data.lineage)


def test_a_cached_range_is_answered_without_a_storage() -> None:
    world = world_with_mount()
    world.fill(3)
    world.fill(2)
    data = range_answer(world, request_range(world, 1, 100))
    assert (data.first, data.count, data.next, data.high_water_mark) == (1, 4, 5, 4)
    lengths = raw_records.lengths_from_wire(data.lengths, len(data.records))
    assert raw_records.first_bad_record(data.records, lengths) is None
    assert raw_records.ids_of(data.records, lengths).tolist() == [1, 2, 3, 4]
    assert [(entry.first, entry.last) for entry in data.lineage] == [(0, 2), (3, 4)]
    heads = range_answer(world, request_range(world, 1, 3, form=RangeForm.HEADERS))
    assert (heads.count, len(heads.records), heads.lengths) == (3, 84, b"")
    assert world.fetches == []


def test_a_range_is_filtered_by_header() -> None:
    world = world_with_mount()
    world.fill(4)
    data = range_answer(world, request_range(world, 0, 3, headers=(1, 3, 9)))
    assert (data.first, data.count, data.next) == (0, 2, 4)
    lengths = raw_records.lengths_from_wire(data.lengths, len(data.records))
    assert raw_records.ids_of(data.records, lengths).tolist() == [1, 3]
    heads = range_answer(world, request_range(world, 0, 3, headers=(2,), form=RangeForm.HEADERS))
    assert (heads.count, len(heads.records), heads.next) == (1, 28, 4)


def own_headers(world: World, client: ClientId, connection: ConnectionId, last: int) -> ReqId:
    fields = (0, last, 1 << 20, messages.OWN_HEADERS, ())
    return world.send(connection, messages.RangeRequest(world.req_id(client), *fields))


def test_a_client_gets_its_own_headers_only_on_a_connection_that_it_has_mounted() -> None:
    world = world_with_mount()
    world.mount(BOB, B)
    for client, connection in ((ALICE, A), (BOB, B), (ALICE, A)):
        world.append(client, connection)
        world.run()
        world.commit()
    data = range_answer(world, own_headers(world, ALICE, A, 9))
    ids = np.frombuffer(data.records, raw_records.HEADER_DTYPE)
    assert ids["transaction_id"].tolist() == [0, 2]
    assert set(ids["req_id"]["client_id"].tolist()) == {ALICE}
    assert (data.first, data.count, data.next, data.lineage) == (0, 2, 3, ())
    for client, connection in ((ALICE, B), (BOB, A), (ClientId(99), A)):
        error = world.answer(own_headers(world, client, connection, 9))
        assert isinstance(error, messages.ErrorResponse)
        assert error.error_code == errors.NotMounted.code
    none = range_answer(world, own_headers(world, BOB, B, 0))
    assert (none.first, none.count, none.next, none.records) == (0, 0, 1, b"")


def test_own_headers_are_selected_from_the_headers_that_a_storage_returns() -> None:
    world = world_with_mount()
    world.mount(BOB, B)
    for client, connection in ((ALICE, A), (BOB, B)):
        world.append(client, connection)
        world.run()
        world.commit()
    heads = range_answer(world, request_range(world, 0, 1, form=RangeForm.HEADERS))
    world.partition.reads.clear_caches()
    request = own_headers(world, BOB, B, 1)
    (fetch,) = world.fetches
    assert fetch.message.form == RangeForm.HEADERS
    range_fields = (1, fetch.token, 0, 0, 2, RangeForm.HEADERS)
    records = bytes(heads.records)
    crc = zlib.crc32(records)
    answer = messages.RangeBytes(*range_fields, b"", records, crc, bytes(16), heads.lineage)
    world.step(FetchAnswered(fetch.token, answer))
    assert range_answer(world, request).records == records[28:]


def test_a_range_ends_at_its_byte_limit_or_at_the_mark() -> None:
    world = world_with_mount()
    world.fill(4)
    one = range_answer(world, request_range(world, 2, 3, bytes_max=1))
    assert (one.count, one.next) == (1, 3)
    request = request_range(world, 4, 9)
    assert not world.is_answered(request)
    world.prove()
    beyond = range_answer(world, request)
    assert (beyond.count, beyond.next, bytes(beyond.records)) == (0, 4, b"")


def test_a_read_of_the_end_of_the_log_waits_for_a_proof() -> None:
    world = world_with_mount()
    world.fill(1)
    mount = world.mount(BOB, B, feed=True)
    request = [
        request_range(world, 1, 9),
        world.send(A, messages.TransactionDataRequest(world.req_id(ALICE), 1)),
        world.send(B, messages.FeedRequest(mount, 1)),
    ]
    for _ in range(2):  # The later requests share the next proof.
        world.fail_proof()
    codes = {message.req_id: message.error_code for message in world.of(messages.ErrorResponse)}
    assert codes == dict.fromkeys(request, errors.SessionLost.code)


def test_an_invalid_range_is_rejected() -> None:
    world = world_with_mount()
    world.fill(4)
    for first, last in ((-1, 3), (3, 2)):
        assert world.error(request_range(world, first, last)) == errors.BadRequest.code
    bad_form = messages.RangeRequest(world.req_id(ALICE), 0, 1, 10, 7, ())
    assert world.error(world.send(A, bad_form)) == errors.BadRequest.code


def test_equal_ranges_share_a_fetch_that_is_retried_at_the_next_replica() -> None:
    source = world_with_mount()
    source.fill(3)
    whole = range_answer(source, request_range(source, 0, 2))
    world = World()
    world.open(2)
    first, second = request_range(world, 0, 2), request_range(world, 0, 2)
    assert len(world.fetches) == 1
    world.step(FetchFailed(world.fetches[0].token, "refused"))
    assert len(world.fetches) == 2
    assert world.fetches[0].replica != world.fetches[1].replica
    fetch = world.fetches[1]
    world.step(FetchAnswered(fetch.token, range_bytes(fetch, whole, whole.records)))
    assert bytes(range_answer(world, first).records) == bytes(whole.records)
    assert bytes(range_answer(world, second).records) == bytes(whole.records)


def test_a_fetch_that_fails_at_all_replicas_is_reported_and_removed() -> None:
    world = World()
    world.open(2)
    req_id = request_range(world, 0, 2)
    for _ in range(6):
        world.step(FetchFailed(world.fetches[-1].token, "refused"))
        world.now_ms += 1_000
        world.run()
    assert world.error(req_id) == errors.Unreachable.code
    before = len(world.fetches)
    request_range(world, 0, 2)
    assert len(world.fetches) == before + 1


def below_start(fetch: Fetch, first: int) -> FetchFailed:
    return FetchFailed(fetch.token, "log begins at transaction 2", TransactionId(first))


def test_a_read_below_the_start_of_the_log_fails_at_once() -> None:
    world = World()
    world.open(2)
    request = request_range(world, 0, 2)
    data = world.send(A, messages.TransactionDataRequest(world.req_id(ALICE), 1))
    for fetch in list(world.fetches):
        world.step(below_start(fetch, 2))
    for req_id in (request, data):
        answer = world.answer(req_id)
        assert isinstance(answer, messages.ErrorResponse)
        assert (answer.error_code, answer.first_available) == (errors.BeforeLogStart.code, 2)
        assert not answer.retriable
        assert "log begins at transaction 2" in answer.message
    assert len(world.fetches) == 2, "the log begins there for all replicas"


def test_a_read_below_the_log_start_of_one_replica_is_sent_to_another_replica() -> None:
    world = World()
    world.open(2)
    request_range(world, 1, 2)
    world.step(below_start(world.fetches[0], 1))
    assert len(world.fetches) == 2


def test_a_feed_below_the_start_of_the_log_ends_with_an_error() -> None:
    world = World()
    world.open(2)
    mount = world.mount(mark=-1, feed=True)
    world.step(below_start(world.fetches[-1], 2))
    answer = world.answer(mount)
    assert isinstance(answer, messages.ErrorResponse)
    assert (answer.error_code, answer.first_available) == (errors.BeforeLogStart.code, 2)
    assert world.partition.feed.count == 0


def test_a_feed_of_damaged_records_ends_with_an_error_that_names_them() -> None:
    world = World()
    world.open(2)
    mount = world.mount(mark=-1, feed=True)
    while world.partition.feed.count:
        fetch = world.fetches[-1]
        world.step(FetchFailed(fetch.token, "object o: bad", damage_code=errors.ObjectMissing.code))
        if world.fetches[-1] is fetch and world.partition.feed.count:
            assert world.partition.wake_at_ms is not None
            world.now_ms = world.partition.wake_at_ms
            world.run()
    answer = world.answer(mount)
    assert isinstance(answer, messages.ErrorResponse)
    assert (answer.error_code, answer.retriable) == (errors.Unreachable.code, True)
    assert "returned transactions 0.." in answer.message
    assert answer.message.endswith("object o: bad")


def test_appends_in_doubt_have_unknown_outcomes_if_their_batches_have_expired() -> None:
    world = world_with_mount()
    req_id = world.append()
    world.run()
    world.close()
    opened = (SessionId(2), Generation(1), TransactionId(4), GENESIS_CHAIN, True)
    world.report_from_store(
        replication.SessionOpened(*opened),
        replication.SessionSettled(SessionId(2), TransactionId(-1), has_unknown_outcomes=True),
    )
    assert world.error(req_id) == errors.OutcomeUnknown.code
    assert not world.partition.is_owned
    (released,) = [
        effect for effect in world.rest if isinstance(effect, replication.OwnershipReleased)
    ]
    assert "batches of an earlier store session" in released.reason


def test_an_expiry_request_is_passed_to_the_store_and_answered() -> None:
    world = world_with_mount()
    world.store.archived_mark = ArchivedMark(9, GENESIS_CHAIN, 0, 3, 7, "m")
    request = world.send(A, messages.ExpireRequest(world.req_id(ALICE), 5, 77))
    assert world.answer(request) == messages.ExpireResponse(request, 3, False)
    assert world.store.of(replication.ExpireArchive) == [replication.ExpireArchive(5, 77)]
    world.store.expired = (5, 77)
    request = world.send(A, messages.ExpireRequest(world.req_id(ALICE), 5, 77))
    assert world.answer(request) == messages.ExpireResponse(request, 3, True)
    assert len(world.store.of(replication.ExpireArchive)) == 1


def test_an_object_replacement_request_is_passed_to_the_store_and_answered() -> None:
    world = world_with_mount()
    world.store.archived_mark = ArchivedMark(9, GENESIS_CHAIN, 0, 3, 7, "m")
    wanted = replication.ReplaceArchivedObject("o", TransactionId(3), TransactionId(9), 5)

    def answer() -> tuple[object, ...]:
        request = world.send(
            A, messages.ObjectReplacementRequest(world.req_id(ALICE), "o", 3, 9, 5)
        )
        found = world.answer(request)
        assert isinstance(found, messages.ObjectReplacementResponse)
        return found.is_ended, found.is_replaced, found.storage, found.failures

    assert answer() == (False, False, "", ())
    world.store.replaced[wanted] = replication.ReplacementOutcome(True, REPLICAS[0], ("s2: no",))
    assert answer() == (True, True, REPLICAS[0], ("s2: no",))
    world.store.replaced[wanted] = replication.ReplacementOutcome(False, None, ("s2: no",))
    assert answer() == (True, False, "", ("s2: no",))
    assert world.store.of(replication.ReplaceArchivedObject) == 3 * [wanted]


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (4, 3), (0, 10)])
@pytest.mark.parametrize("is_archived", [True, False])
def test_a_replacement_above_the_archived_mark_is_rejected(
    first: int, last: int, is_archived: bool
) -> None:
    world = world_with_mount()
    if is_archived:
        world.store.archived_mark = ArchivedMark(9, GENESIS_CHAIN, 0, 3, 7, "m")
    request = world.send(
        A, messages.ObjectReplacementRequest(world.req_id(ALICE), "o", first, last, 5)
    )
    assert world.error(request) == errors.BadRequest.code
    assert not world.store.of(replication.ReplaceArchivedObject)


@pytest.mark.parametrize("bounds", [(-1, 0), (0, -1)])
def test_an_expiry_with_a_negative_bound_is_rejected(bounds: tuple[int, int]) -> None:
    world = world_with_mount()
    world.store.archived_mark = ArchivedMark(9, GENESIS_CHAIN, 0, 3, 7, "m")
    assert (
        world.error(world.send(A, messages.ExpireRequest(world.req_id(ALICE), *bounds)))
        == errors.BadRequest.code
    )


def test_a_partition_without_an_archive_rejects_an_expiry() -> None:
    world = world_with_mount()
    request = world.send(A, messages.ExpireRequest(world.req_id(ALICE), 5, 0))
    assert world.error(request) == errors.BadRequest.code


def test_a_damaged_record_is_not_sent_to_a_client() -> None:
    source = world_with_mount()
    source.fill(3)
    whole = range_answer(source, request_range(source, 0, 2))
    rotten = bytearray(whole.records)
    rotten[40] ^= 1
    world = World()
    world.open(2)
    req_id = request_range(world, 0, 2)
    fetch = world.fetches[0]
    world.step(FetchAnswered(fetch.token, range_bytes(fetch, whole, bytes(rotten))))
    assert not world.is_answered(req_id)
    assert len(world.fetches) == 2


def test_the_data_of_one_transaction_is_returned() -> None:
    world = world_with_mount()
    world.fill(2, data=b"payload")
    req_id = world.send(A, messages.TransactionDataRequest(world.req_id(ALICE), 1))
    message = world.answer(req_id)
    data, fault = message.result
    assert (bytes(data or b""), fault) == (b"payload", None)
    # The request was rejected because it came too early, but the range is available later.
    early = world.send(A, messages.TransactionDataRequest(world.req_id(ALICE), 2))
    world.prove()
    message = world.answer(early)
    assert message.result[0] is None
    assert "which ends at transaction 1" in (message.result[1] or "")
    world.fill(1, data=b"later")
    late = world.send(A, messages.TransactionDataRequest(world.req_id(ALICE), 2))
    message = world.answer(late)
    assert bytes(message.result[0] or b"") == b"later"


# --- appends ahead of the log


def test_an_append_ahead_of_the_log_is_reported_after_a_proof() -> None:
    world = world_with_mount()
    ahead = world.append(mark=0)
    world.run()
    assert not world.is_answered(ahead)
    world.prove()
    assert world.reason(ahead) is RowOutcomeCode.AHEAD
    behind = world.append()
    world.run()
    world.commit()
    assert world.reason(behind) is RowOutcomeCode.COMMITTED


def test_an_append_ahead_of_the_log_ends_the_mount_if_the_proof_fails() -> None:
    world = world_with_mount()
    ahead = world.append(mark=0)
    world.run()
    world.fail_proof()
    assert world.reason(ahead) is RowOutcomeCode.NOT_MOUNTED
    behind = world.append()
    world.run()
    assert world.reason(behind) is RowOutcomeCode.NOT_MOUNTED
    world.mount()
    again = world.append()
    world.run()
    world.commit()
    assert world.reason(again) is RowOutcomeCode.COMMITTED


def test_a_flush_waits_for_the_answer_of_an_append_ahead_of_the_log() -> None:
    world = world_with_mount()
    ahead = world.append(mark=0)
    world.run()
    flush = world.send(A, messages.FlushRequest(world.req_id(ALICE)))
    assert not world.is_answered(ahead)
    assert not world.is_answered(flush)
    world.prove()
    assert world.reason(ahead) is RowOutcomeCode.AHEAD
    if not world.is_answered(flush):
        world.prove()
    assert isinstance(world.answer(flush), messages.FlushResponse)


@pytest.mark.parametrize("ending", ["close", "move"])
def test_the_end_of_a_session_rejects_an_append_ahead_of_the_log_as_not_mounted(
    ending: str,
) -> None:
    world = world_with_mount()
    ahead = world.append(mark=0)
    world.run()
    if ending == "close":
        world.close()
    else:
        world.step(replication.ReleaseOwnership())
    assert world.reason(ahead) is RowOutcomeCode.NOT_MOUNTED


def test_a_row_ahead_of_the_log_is_rejected_by_the_next_session_as_not_mounted() -> None:
    world = world_with_mount()
    payload = encode_append(
        [0, 0],
        [b"a", b"b"],
        write_locks=[[], []],
        read_locks=[[], []],
        append_locks=[[], []],
        marks=[-1, 2],
    )
    message = messages.AppendBatch(world.req_id(ALICE), -1, payload, zlib.crc32(payload))
    batch = world.send(A, message)
    world.run()
    world.close()
    world.open(
        3, settled=0, follows_own_session=False
    )  # The first row was kept, and other clients wrote after it.
    answer = world.answer(batch)
    assert bytes(answer.reasons) == bytes((RowOutcomeCode.COMMITTED, RowOutcomeCode.NOT_MOUNTED))


# --- marks


def test_an_old_mark_is_proved_before_it_is_reported() -> None:
    world = world_with_mount()
    fresh = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    assert world.answer(fresh) == messages.HighWaterMarkResponse(fresh, -1)
    world.now_ms += world.limits.high_water_mark_staleness_ms_max + 1
    stale = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    assert not world.is_answered(stale)
    (proof,) = world.store.of(replication.ProveMark)
    world.report_from_store(replication.MarkProved(proof.token, TransactionId(-1)))
    assert world.answer(stale) == messages.HighWaterMarkResponse(stale, -1)


def test_a_proved_mark_includes_commits_during_the_proof() -> None:
    """A proof confirms the session; a mark from the start of the proof may be outdated."""
    world = world_with_mount()
    request = world.send(A, messages.ReplicasRequest(world.req_id(ALICE), linearizable=True))
    (proof,) = world.store.of(replication.ProveMark)
    world.append()
    world.run()
    world.commit()
    world.report_from_store(replication.MarkProved(proof.token, TransactionId(-1)))
    message = world.answer(request)
    assert message.high_water_mark == 0


def test_a_session_opening_proves_the_mark_only_as_of_its_zookeeper_write() -> None:
    """If a server is paused while its states are written, another server may replace it."""
    world = World()
    metadata, marker = PartitionMetadata(), PartitionMarker(MarkerState.OPEN)
    world.report_from_store(replication.WriteMetadata(1, metadata, marker, 0, 0))
    world.now_ms += world.limits.high_water_mark_staleness_ms_max + 1
    world.open()
    request = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    assert not world.is_answered(request)
    (proof,) = world.store.of(replication.ProveMark)
    world.report_from_store(replication.MarkProved(proof.token, TransactionId(-1)))
    assert world.answer(request) == messages.HighWaterMarkResponse(request, -1)


def test_a_commit_proves_the_mark_only_as_of_its_submission() -> None:
    world = world_with_mount()
    world.append()
    world.run()
    world.now_ms += world.limits.high_water_mark_staleness_ms_max + 1
    world.commit()
    stale = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    assert not world.is_answered(stale)
    world.append()
    world.run()
    world.commit()
    fresh = world.send(A, messages.HighWaterMarkRequest(world.req_id(ALICE)))
    assert world.answer(fresh) == messages.HighWaterMarkResponse(fresh, 1)


def test_a_linearizable_replica_request_waits_for_a_proof() -> None:
    world = world_with_mount()
    plain = world.send(A, messages.ReplicasRequest(world.req_id(ALICE), linearizable=False))
    assert world.answer(plain) == messages.ReplicasResponse(plain, 1, -1, REPLICAS, KEY, 4)
    proved = world.send(A, messages.ReplicasRequest(world.req_id(ALICE), linearizable=True))
    assert not world.is_answered(proved)
    world.report_from_store(replication.MarkProofFailed(1))
    assert world.error(proved) == errors.SessionLost.code


def test_replicas_are_reported_with_the_archived_mark() -> None:
    world = World(archive_interval_ms=7)
    world.open()
    world.mount()
    chain = GENESIS_CHAIN
    world.store.archived_mark = ArchivedMark(TransactionId(9), chain, 5, TransactionId(3), 77, "m")
    answer = world.answer(world.send(A, messages.ReplicasRequest(world.req_id(ALICE), False)))
    assert answer.unarchived_bytes == -1, "the size is unknown"
    assert answer.archive_interval_ms == 7
    world.store.archive_backlog = replication.ArchiveBacklog(1, 55, 3)
    answer = world.answer(world.send(A, messages.ReplicasRequest(world.req_id(ALICE), False)))
    assert answer.unarchived_bytes == 55
    found = (answer.first_available, answer.archived, answer.manifest, answer.manifest_crc)
    assert found == (3, 9, "m", 77)


def test_a_proof_lost_with_its_session_is_requested_in_the_next_session() -> None:
    world = world_with_mount()
    request = world.send(A, messages.ReplicasRequest(world.req_id(ALICE), linearizable=True))
    world.close()
    assert not world.is_answered(request)
    world.open(-1)
    proofs = world.store.of(replication.ProveMark)
    world.report_from_store(replication.MarkProved(proofs[-1].token, TransactionId(-1)))
    assert isinstance(world.answer(request), messages.ReplicasResponse)


def test_a_flush_is_answered_when_all_earlier_appends_are_final() -> None:
    world = world_with_mount()
    req_id = world.append()
    flush = world.send(A, messages.FlushRequest(world.req_id(ALICE)))
    world.append()
    assert world.partition.wake_at_ms == world.now_ms
    world.run()
    (submit,) = world.store.of(replication.SubmitToSession)
    assert (submit.session_id, submit.batch.first, submit.batch.stamp_ms) == (1, 0, 1_000)
    assert not world.is_answered(flush)
    world.commit()
    assert world.reason(req_id) is RowOutcomeCode.COMMITTED
    assert world.answer(flush) == messages.FlushResponse(flush, 1)


def test_an_unexpected_message_is_reported() -> None:
    world = world_with_mount()
    req_id = world.send(A, messages.HighWaterMarkResponse(world.req_id(ALICE), 3))
    assert world.error(req_id) == errors.BadRequest.code


def test_a_new_owner_requests_and_loads_the_lock_blocks() -> None:
    world = World(lock_load_count_max=100)
    world.open(5, follows_own_session=False)
    (fetch,) = world.fetches
    assert fetch.replica == REPLICAS[0]
    assert isinstance(fetch.message, messages.LockBlocksRequest)
    world.mount()
    appended = world.append(mark=5)
    world.run()
    assert not world.store.of(replication.SubmitToSession)
    world.step(FetchFailed(fetch.token, "away"))
    assert [each.replica for each in world.fetches] == list(REPLICAS[:2])
    end = LogEnd(TransactionId(5), world.chain)
    block = encode(TransactionId(0), end, world.chain, b"")
    last_fetch = world.fetches[-1]
    world.step(FetchAnswered(last_fetch.token, messages.LockBlocks(1, last_fetch.token, 0, block)))
    world.run()
    assert world.store.of(replication.SubmitToSession)
    assert Report("locks.loaded", (("known_from", 0), ("mark", 5))) in world.rest
    world.commit()
    assert world.reason(appended) is RowOutcomeCode.COMMITTED


def test_the_next_session_of_the_same_owner_requests_no_lock_blocks() -> None:
    world = World(lock_load_count_max=100)
    world.open(-1, follows_own_session=False)
    world.mount()
    world.fill(3)
    world.close()
    world.open(2)
    assert world.fetches == []


def test_an_abandoned_partition_does_not_repeat_a_failed_lock_block_request() -> None:
    world = World(lock_load_count_max=100)
    world.open(5, follows_own_session=False)
    (fetch,) = world.fetches
    world.step(replication.ReleaseOwnership())
    world.step(FetchFailed(fetch.token, "away"))
    assert world.fetches == [fetch]
    assert world.partition.wake_at_ms is None
