"""Unit tests of `waltz_core.replication.originals`: sessions over storages of the original."""

import zlib
from copy import deepcopy
from random import Random

import pytest

from tests.original_storage import PREFIX
from tests.unit.replication.bench import A, B, C, wire
from tests.unit.replication.model_storage import make_batch
from tests.unit.replication.original_bench import OriginalBench
from waltz_core.cluster.model import UNRESOLVED, PartitionMetadata, ReplicaState
from waltz_core.errors import BadRequest, ChecksumMismatch, RemoteProtocolError
from waltz_core.record import (
    ORIGINAL,
    RECORD_HEADER,
    LineageEntry,
    RecordHeader,
    ReqId,
    identity_chain,
)
from waltz_core.replication import events
from waltz_core.replication.events import Committed, SessionClosed, SessionOpened, Settled
from waltz_core.replication.limits import Limits
from waltz_core.replication.original_records import header_bytes
from waltz_core.replication.originals import MIXED, Kinds, LiveBatches, OriginalStorage
from waltz_core.wire import original_messages as original


def kinds(bench, name):
    """The types of the requests to an original, in order."""
    return [payload[0] for payload in bench.models[name].requests]


def test_a_new_partition_opens_appends_and_commits():
    bench = OriginalBench()
    bench.open()
    assert bench.store.has_chains is False
    last = bench.submit(3)
    bench.run()
    assert bench.store.high_water_mark == last == 2
    for name in bench.names:
        assert bench.payloads(name) == [0, 1, 2]
        partition = bench.partition(name)
        assert (partition.saved_session, partition.low_water_mark) == (0, -1)
        # OPEN, LAST_SESSION_INFO, MAX_TRANSACTION_ID, before the mark again, SET_LOW_WATER_MARK,
        # what engages, APPEND: as the original asks, in its order.
        assert kinds(bench, name) == [1, 2, 13, 13, 4, 13, 6]
    assert all(state == ReplicaState(0, UNRESOLVED) for state in bench.metadata.states.values())


def restarted(bench, generation):
    """Another process takes the partition over; return what the old one had on its way."""
    ghosts = [(name, one) for name, queue in bench.requests.items() for one in queue]
    bench.requests.clear()
    bench.dials.clear()
    bench.questions.clear()
    bench.store = bench._new_store(bench.limits)
    bench.own(generation)
    return ghosts


def reopened(bench):
    bench.reopen()
    bench.run()
    return bench.all_told(SessionOpened)[-1]


def test_another_server_finds_the_log_and_fences_the_first():
    bench = OriginalBench()
    bench.open()
    bench.submit(3)
    bench.run()
    bench.submit(1)  # on its way to all three when the server dies
    ghosts = restarted(bench, 2)
    assert len(ghosts) == 3
    assert reopened(bench).high_water_mark == 2
    for name, message in ghosts:
        bench.say(name, message)
    bench.submit(2)
    bench.run()
    assert bench.payloads(A) == bench.payloads(B) == bench.payloads(C) == [0, 1, 2, 4, 5]
    partition = bench.partition(A)
    assert (partition.saved_session, partition.low_water_mark) == (1, 2)


def append_as_an_original(bench, name, number):
    """As an original server has written it; the request id is its own."""
    partition, data = bench.partition(name), number.to_bytes(8, "big")
    header = RECORD_HEADER.pack(partition.last + 1, ReqId(3, 1, 0, number).to_bytes(), 0)
    crc = zlib.crc32(data).to_bytes(4, "big")
    partition.records.append(header + len(data).to_bytes(4, "big") + data + crc)


def test_a_cluster_that_originals_made_and_served_is_taken_over():
    """ZooKeeper has none of our nodes, and replica states as an original server writes them."""
    bench = OriginalBench(state=None)
    for name, count in ((A, 9), (B, 7), (C, 5)):
        for number in range(100, 100 + count):
            append_as_an_original(bench, name, number)
        partition = bench.partition(name)
        partition.saved_session = partition.session = 5
        partition.low_water_mark = partition.local_low_water_mark = 3
    states = dict.fromkeys((A, B, C), ReplicaState(5, UNRESOLVED))
    bench.metadata, bench.metadata_version = PartitionMetadata(1, 5, states), 4
    bench.own(2)
    assert reopened(bench).high_water_mark == 6  # what two of three have
    bench.submit(2)
    bench.run()
    expected = [*range(100, 107), 0, 1]
    assert [bench.payloads(name) for name in (A, B, C)] == [expected] * 3
    assert set(bench.metadata.states.values()) == {ReplicaState(6, UNRESOLVED)}
    assert bench.metadata.session_id == bench.partition(B).saved_session == 6


def test_a_replica_that_an_original_server_has_closed_is_cut_where_it_was():
    """Its log goes on above the mark, with what was never acknowledged."""
    bench = OriginalBench(state=None)
    for name in (A, B, C):
        for number in range(100, 105):
            append_as_an_original(bench, name, number)
    for name, numbers in ((A, (200, 201)), (B, (200, 201)), (C, (300,))):
        for number in numbers:
            append_as_an_original(bench, name, number)
    for name, session, mark in ((A, 6, 4), (B, 6, 4), (C, 5, 1)):
        partition = bench.partition(name)
        partition.saved_session = partition.session = session
        partition.low_water_mark = partition.local_low_water_mark = mark
    states = {A: ReplicaState(6, UNRESOLVED), B: ReplicaState(6, UNRESOLVED), C: ReplicaState(5, 4)}
    bench.metadata, bench.metadata_version = PartitionMetadata(1, 6, states), 9
    bench.own(2)
    assert reopened(bench).high_water_mark == 6
    for _ in range(3):
        bench.wait(3_000)
        bench.run()
    assert bench.payloads(C) == bench.payloads(A) == [*range(100, 105), 200, 201]
    cuts = [payload[PREFIX.size :] for payload in bench.models[C].asked(5)]
    assert cuts == [(4).to_bytes(8, "big") + b"\0"]
    assert bench.store.readable_replicas == [A, B, C]


def test_a_storage_that_was_away_is_filled_up_in_the_running_session():
    bench = OriginalBench()
    bench.down = {C}
    bench.open()
    for count in (1, 5, 2, 9):
        bench.submit(count)
        bench.run()
    bench.down = set()
    bench.wait(5_000)
    bench.run()
    bench.wait(5_000)
    bench.run()
    assert bench.store.open_session == 0
    assert bench.store.readable_replicas == [A, B, C]
    bench.submit(1)
    bench.run()
    assert bench.payloads(C) == list(range(18)) == bench.payloads(A)
    # At the mark of the session, as the rule is; the original would take a higher one.
    assert bench.partition(C).low_water_mark == -1


def test_one_that_is_behind_by_more_than_is_kept_in_memory_is_copied_from_another():
    limits = Limits(lag_bytes_max=500, range_bytes_max=300)
    bench = OriginalBench(limits=limits)
    bench.down = {B}
    bench.open()
    for _ in range(60):
        bench.submit(3)
        bench.run()
    bench.down = set()
    for _ in range(10):
        bench.wait(5_000)
        bench.run()
    assert bench.payloads(B) == list(range(180))
    assert any(payload[0] == 17 for name in (A, C) for payload in bench.models[name].requests)
    assert bench.store.readable_replicas == [A, B, C]


def test_what_was_never_acknowledged_and_is_another_ones_is_cut():
    bench = OriginalBench()
    bench.open()
    bench.submit(4)
    bench.run()
    bench.submit(3)
    while bench.requests[A]:
        bench.deliver(A)  # only A has 4, 5 and 6
    bench.down = {A}
    restarted(bench, 2)
    assert reopened(bench).high_water_mark == 3
    bench.submit(2)  # 4 and 5, others
    bench.run()
    bench.down = set()
    for _ in range(5):
        bench.wait(5_000)
        bench.run()
    assert bench.payloads(A) == bench.payloads(B) == [0, 1, 2, 3, 7, 8]
    assert bench.store.readable_replicas == [A, B, C]


def test_what_was_in_flight_is_told_by_the_identity_of_its_records():
    bench = OriginalBench()
    bench.open()
    bench.submit(2)
    bench.run()
    bench.submit(3)
    for name in (A, B):
        bench.deliver(name)
    for _ in range(2):  # never acknowledged to anybody
        del bench.told[:]
    bench.lose(A)
    opened = reopened(bench)
    assert opened.unbroken
    settled = bench.all_told(Settled)[-1]
    assert settled.committed_last == opened.high_water_mark == 4


def test_what_is_in_flight_and_not_in_the_log_is_told_as_lost():
    bench = OriginalBench()
    bench.open()
    bench.submit(2)
    bench.run()
    bench.submit(3)
    for queue in bench.requests.values():
        queue.clear()
    bench.lose(A)
    bench.reopen()
    assert bench.all_told(Settled)[-1].committed_last == 1
    assert bench.all_told(SessionClosed)


def test_a_mark_that_cannot_be_taken_back_is_decided_for():
    """C has been marked by a session that never opened; the others would decide for less."""
    bench = OriginalBench()
    bench.open()
    bench.submit(2)
    bench.run()
    bench.submit(2)
    bench.deliver(C)
    partition = bench.partition(C)
    partition.saved_session, partition.low_water_mark = 1, 3
    states = dict.fromkeys((A, B, C), ReplicaState(0, UNRESOLVED))
    bench.metadata = PartitionMetadata(1, 1, states)
    restarted(bench, 2)
    while bench.questions:
        bench.ask_zookeeper()
    for name in (A, B):  # they would be enough to decide
        bench.connect()
        for _ in range(4):
            bench.deliver(name)
    assert bench.store.session.recovery.mark is None
    assert reopened(bench).high_water_mark == 3
    assert bench.payloads(A) == bench.payloads(B) == [0, 1, 2, 3]


def test_who_is_not_heard_soon_is_not_waited_for():
    bench = OriginalBench()
    bench.open()
    bench.submit(2)
    bench.run()
    bench.silent = {C}
    restarted(bench, 2)
    bench.run()
    assert bench.store.session.recovery.mark is None
    bench.wait(bench.limits.grace_ms)
    assert bench.store.session.recovery.mark == 1


def test_a_log_that_lost_its_end_is_not_believed():
    bench = OriginalBench()
    bench.open()
    bench.submit(4)
    bench.run()
    bench.step(events.Checkpoint())
    reopened(bench)
    assert bench.partition(A).low_water_mark == 3
    del bench.partition(A).records[2:]
    bench.down = {B}
    restarted(bench, 2)
    for _ in range(5):
        bench.run()
        bench.wait(1_000)
    assert bench.store.open_session is None
    assert bench.store.session.recovery.unknown == [A, B]
    bench.down = set()
    assert reopened(bench).high_water_mark == 3
    assert bench.payloads(A) == [0, 1, 2, 3]


def test_another_cluster_is_refused_before_its_session_is_raised():
    bench = OriginalBench()
    bench.models[A].cluster_key = bytes(16)
    bench.open()
    assert kinds(bench, A) == [1]
    assert "cluster key" in bench.reports("replica.refused")[0]["reason"]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda model: model.partitions.clear(), "UnknownPartition"),
        (lambda model: setattr(model.partitions[0], "is_available", False), "Unavailable"),
    ],
)
def test_what_a_storage_refuses_is_understood(break_it, reason):
    bench = OriginalBench()
    break_it(bench.models[B])
    bench.open()
    assert bench.reports("replica.refused")[0]["reason"].startswith(reason)
    assert bench.store.readable_replicas == [A, C]


def test_a_storage_bound_to_a_later_session_fences():
    bench = OriginalBench()
    bench.partition(A).session = 7
    bench.own()
    bench.run()
    assert bench.reports("session.abandoned")[0]["reason"].startswith("SessionFenced")


def test_a_fenced_owner_proves_no_mark():
    bench = OriginalBench()
    bench.open()
    bench.submit(1)
    bench.run()
    bench.step(events.ProveMark(5))
    for name in (A, B):
        bench.partition(name).session = 9
    bench.run(questions=False)
    assert bench.all_told(events.MarkUnproved)
    assert not bench.all_told(events.MarkProved)


def test_a_mark_below_which_zookeeper_closed_a_replica_holds_up_no_cut():
    """The mark of a session that never opened: correctness.md 2.1 F."""
    bench = OriginalBench()
    bench.open()
    bench.submit(3)
    bench.run()
    partition = bench.partition(C)
    for name in (A, B):
        partition_of = bench.partition(name)
        assert partition_of.last == 2
    # C has one more, and its mark at it, of a session that died before its second write.
    partition.records.append(
        partition.records[2][:7] + b"\3" + bytes(16) + partition.records[2][24:]
    )
    partition.low_water_mark = 3
    states = {A: (0, UNRESOLVED), B: (0, UNRESOLVED), C: (0, 2)}
    bench.metadata = PartitionMetadata(
        1, 1, {name: ReplicaState(*state) for name, state in states.items()}
    )
    restarted(bench, 2)
    reopened(bench)
    for _ in range(3):
        bench.submit(2)
        bench.run()
        bench.wait(15_000)
        bench.run()
    # It is not marked below the mark that it has: the storage refuses. A later session takes it in.
    bench.step(events.Checkpoint())
    reopened(bench)
    for _ in range(3):
        bench.wait(15_000)
        bench.run()
    assert bench.payloads(C) == bench.payloads(A)
    assert bench.store.readable_replicas == [A, B, C]


# ---------------------------------------------------------------------------------------------
# originals and ours


def test_one_original_among_ours_takes_no_part():
    bench = OriginalBench(originals=[C])
    bench.open()
    bench.submit(2)
    bench.run()
    assert bench.store.readable_replicas == [A, B]
    assert bench.store.has_chains
    assert bench.models[C].requests == []
    assert {one["reason"] for one in bench.reports("replica.refused")} == {MIXED}


@pytest.mark.parametrize("ours", [A, C])
def test_one_of_ours_among_originals_takes_no_part(ours):
    bench = OriginalBench(originals=[name for name in (A, B, C) if name != ours])
    bench.open()
    bench.submit(2)
    bench.run()
    assert bench.store.readable_replicas == [name for name in (A, B, C) if name != ours]
    assert not bench.store.has_chains
    assert bench.storages[ours].payloads() == []


# ---------------------------------------------------------------------------------------------
# what translates, alone


def translator(*, state=None, live=None):
    return OriginalStorage(4, 0, live=live or LiveBatches(4), state=state)


def info(asked, session=3, low=5, local=5):
    return original.LastSessionInfoResponse(4, asked.sequence, 0, session, low, local)


def top(asked, last):
    return original.MaxTransactionIdResponse(4, asked.sequence, 0, last)


def headers(asked):
    found = [
        RecordHeader(at, ReqId(1, 1, 0, at), 0)
        for at in range(asked.first, asked.first + asked.count_max)
    ]
    return original.RecordHeaderListResponse(4, asked.sequence, 0, tuple(found))


def prepared(state, *, session=3, low=5, last=9):
    return heard_of(translator(state=state), session=session, low=low, last=last)


def heard_of(one, *, session=3, low=5, last=9):
    (opening,) = one.ask(wire.Prepare(4, 1, 0, bytes(16), bytes(16), bytes(16), 1))
    asked, told = one.take(wire.SuccessResponse(-1, -1, -1))
    assert opening.sequence == -1
    assert told is None
    assert one.take(top(asked[1], last)) == ([], None)  # in any order
    (asked,), told = one.take(info(asked[0], session, low))
    assert told is None
    nothing, told = one.take(headers(asked))
    assert nothing == []
    return told


@pytest.mark.parametrize(
    ("state", "is_confirmed"),
    [
        (None, True),
        (ReplicaState(3, UNRESOLVED), True),
        (ReplicaState(3, 5), True),
        (ReplicaState(3, 4), False),
        (ReplicaState(2, UNRESOLVED), False),  # ZooKeeper has never heard that session 3 opened
    ],
)
def test_whether_a_mark_is_confirmed_is_told_by_zookeeper(state, is_confirmed):
    told = prepared(state)
    assert told.mark_confirmed is is_confirmed
    assert (told.last_session, told.low_water_mark, told.synced_max) == (3, 5, 9)
    assert told.chain == identity_chain(RECORD_HEADER.pack(9, ReqId(1, 1, 0, 9).to_bytes(), 0))
    assert not told.suspect


@pytest.mark.parametrize(
    ("state", "trusted"),
    [
        (ReplicaState(3, UNRESOLVED), 9),  # engaged in the session of its last mark
        (ReplicaState(2, UNRESOLVED), 9),  # and marked in a later one that never opened
        (ReplicaState(4, UNRESOLVED), 5),  # its disk is of before the session it was engaged in
        (ReplicaState(3, 7), 7),
        (ReplicaState(3, 12), 9),
        (ReplicaState(4, 7), 5),
        (ReplicaState(-1, 7), 5),  # never engaged: what it has is of another time
        (None, 5),
    ],
)
def test_how_far_a_log_is_trusted_is_told_by_zookeeper(state, trusted):
    one = translator(state=state)
    heard_of(one)
    assert one.trusted == trusted


def test_a_log_shorter_than_its_mark_is_suspect():
    assert prepared(None, low=10, last=9).suspect


def test_an_answer_to_nothing_is_refused():
    with pytest.raises(RemoteProtocolError):
        translator().take(wire.SuccessResponse(4, 0, 0))


def test_an_answer_of_another_kind_is_refused():
    one = translator()
    (asked,) = one.ask(wire.Heartbeat(4, 1, 0))
    with pytest.raises(RemoteProtocolError, match="expected MaxTransactionIdResponse"):
        one.take(wire.SuccessResponse(4, asked.sequence, 0))


def test_headers_of_other_transactions_are_no_answer():
    one = translator()
    (asked,) = one.ask(wire.RangeRaw(4, 1, 0, 5, 9, 1 << 20, 0, whole_batches=False, reader=False))
    assert (asked.first, asked.count_max) == (4, 1)
    other = (RecordHeader(3, ReqId(1, 1, 0, 3), 0),)
    with pytest.raises(RemoteProtocolError, match="expected transaction 4, found 3"):
        one.take(original.RecordHeaderListResponse(4, asked.sequence, 0, other))


def test_what_an_original_does_not_have_is_refused():
    one = translator()
    (asked,) = one.ask(wire.Repair(4, 1, 0, 0, b"", b"", 0))
    _, told = one.take(top(asked, 5))
    assert told == wire.Nack(4, 1, 0, BadRequest.code, -1, "an original has no such request")


def test_one_failure_answers_an_append_of_several_parts():
    one = translator()
    batch = make_batch(0, range(5000), 0)
    entry = LineageEntry(0, 4999, 4, 0, bytes(16))
    fields = (0, batch.lengths, batch.records, batch.records_crc, bytes(16), (entry,))
    asked = one.ask(wire.AppendRaw(4, 1, 0, *fields))
    assert [len(each.records) for each in asked] == [4096, 904]
    refused = original.FailureResponse(4, asked[0].sequence, 0, "transaction out of order", ())
    _, told = one.take(refused)
    assert isinstance(told, wire.Nack)
    assert one.take(wire.SuccessResponse(4, asked[1].sequence, 0)) == ([], None)


def test_nothing_is_cut_below_a_confirmed_mark_nor_from_another_log():
    one = translator()
    one._floor = 5
    (asked,) = one.ask(wire.Truncate(4, 1, 0, 4, 4, bytes(16)))
    assert isinstance(asked, original.MaxTransactionIdRequest)
    _, told = one.take(top(asked, 9))
    assert told.error_code == BadRequest.code
    (asked,) = one.ask(wire.Truncate(4, 2, 0, 7, 6, bytes(16)))
    assert (asked.first, asked.count_max) == (6, 1)
    _, told = one.take(headers(asked))
    assert told.error_code == ChecksumMismatch.code


def test_no_mark_is_set_where_the_log_does_not_end():
    one = translator()
    (asked,) = one.ask(wire.SetLowWaterMark(4, 1, 0, 8, bytes(16)))
    (asked,), _ = one.take(top(asked, 7))
    nothing, told = one.take(headers(asked))
    assert nothing == []
    assert told.error_code == BadRequest.code


def test_the_newest_ids_are_told_as_batches_of_their_own():
    one = translator()
    (asked,) = one.ask(wire.LineageRequest(4, 1, 0, 0, 2000))
    assert (asked.first, asked.count_max) == (976, 1025)
    part = headers(asked)
    short = original.RecordHeaderListResponse(4, asked.sequence, 0, part.headers[:1000])
    (asked,), told = one.take(short)
    assert told is None
    _, told = one.take(headers(asked))
    assert [entry[:3] for entry in told.lineage[::1023]] == [
        (977, 977, ORIGINAL),
        (2000,) * 2 + (ORIGINAL,),
    ]
    assert told.chain_before == identity_chain(header_bytes(part.headers[0]))


def test_live_batches_are_known_again():
    live = LiveBatches(4)
    chains = [bytes([n]) * 16 for n in range(5)]
    entries = [LineageEntry(10 * n, 10 * n + 9, 4, 77, chains[n + 1]) for n in range(1, 4)]
    assert not live.begin_at(10)
    copied = LineageEntry(0, 9, ORIGINAL, 0, chains[1])
    live.add(chains[0], [copied])
    live.add(chains[1], entries[:1])
    live.add(chains[1], entries)  # another replica, later
    assert [at for at in range(45) if live.begin_at(at)] == [10, 20, 30, 40]
    before, found = live.between(20, 39)
    assert before == entries[0].chain
    assert [entry[:3] for entry in found] == [(20, 29, 4), (30, 39, 4)]
    assert [entry.chain for entry in found] == [entry.chain for entry in entries[1:]]
    assert live.between(10, 25) == (chains[1], (entries[0]._replace(stamp_ms=0),))


def test_of_many_live_batches_only_the_next_ones_are_told():
    live = LiveBatches(4)
    ends = [*range(9, 3000, 10), 9_999]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    live.add(
        bytes(16),
        [LineageEntry(*each, 4, 0, bytes(16)) for each in zip(firsts, ends, strict=True)],
    )
    assert live.between(0, 9_999)[1][-1].last == 1019
    assert [entry[:2] for entry in live.between(3000, 9_999)[1]] == [(3000, 9_999)]


def test_who_keeps_a_partition():
    def kinds(*ours):
        return Kinds(4, 0, (A, B, C), dict.fromkeys(ours, bytes(16)))

    assert kinds(A, B).refuses(is_original=True, has_begun=False)
    assert not kinds(A, B).refuses(is_original=False, has_begun=True)
    few = kinds(A)
    assert not few.refuses(is_original=False, has_begun=False)
    assert few.refuses(is_original=True, has_begun=True)  # ours, not registered yet
    assert not few.refuses(is_original=True, has_begun=False)
    assert few.are_originals
    assert few.refuses(is_original=False, has_begun=False)
    assert not few.refuses(is_original=True, has_begun=True)


# ---------------------------------------------------------------------------------------------
# whatever happens


class Chaos:
    """Random schedules; whoever was told of a commit finds it again, at its place."""

    def __init__(self, seed, *, is_reusing=False):
        self.is_reusing = is_reusing  # all that is ever appended at an id has one request id
        self.random = Random(seed)
        self.bench = OriginalBench()
        self.bench.rng = self.random
        self.bench.store = self.bench._new_store(self.bench.limits)
        self.bench.own()
        self.generation = 1
        self.ghosts = []
        self.submitted = {}  # session -> id -> number
        self.committed = {}  # id -> number
        self.copy = None  # of one replica's disk
        self.rolled_back = False
        self.appends = 0

    def go(self, steps):
        for _ in range(steps):
            self._step()
            self._learn()

    def heal(self):
        bench = self.bench
        bench.down = set()
        self.generation += 1
        bench.own(self.generation)
        for _ in range(12):
            for _ in range(5):
                bench.run()
                bench.wait(3_000)
                self._learn()
            # Marks of sessions that never opened are left behind, and all are taken in again.
            for _ in range(5):
                self._submit()
            bench.run()
            bench.step(events.Checkpoint())
        for _ in range(12):
            bench.run()
            bench.wait(3_000)
        self._submit()
        bench.run()
        bench.wait(100)
        self._learn()
        logs = [bench.payloads(name) for name in bench.names]
        assert logs[0] == logs[1] == logs[2]
        for at, number in self.committed.items():
            assert logs[0][at] == number
        return len(self.committed)

    def _step(self):
        bench, chance = self.bench, self.random.random()
        names = [name for name in bench.names if bench.requests.get(name)]
        if chance < 0.45 and names:
            bench.deliver(self.random.choice(names))
        elif chance < 0.6 and bench.dials:
            bench.connect()
        elif chance < 0.7 and bench.questions:
            bench.ask_zookeeper(self.random.choice(["ok", "ok", "ok", "lost", "away"]))
        elif chance < 0.85 and bench.store.open_session is not None:
            self._submit()
        elif chance < 0.9:
            bench.wait(self.random.choice([1, 20, 500]))
        elif chance < 0.94 and bench.requests:
            self._cut(self.random.choice(sorted(bench.requests)))
        else:
            self._strike(chance)

    def _strike(self, chance):
        bench = self.bench
        if chance < 0.96:
            bench.down = set(self.random.sample(bench.names, self.random.choice([0, 0, 1])))
        elif chance < 0.965:
            self._roll_back()
        elif chance < 0.975:
            self.generation += 1
            self.ghosts += restarted(bench, self.generation)
        elif self.ghosts:
            bench.say(*self.ghosts.pop(0))

    def _submit(self):
        bench = self.bench
        first = bench.store.next_transaction_id
        if self.is_reusing:
            self.appends += 1
            bench.numbers = (self.appends << 31) + first
        number = bench.numbers
        last = bench.submit(self.random.choice([1, 1, 3]))
        session = self.submitted.setdefault(bench.store.open_session, {})
        session.update((at, number + at - first) for at in range(first, last + 1))

    def _cut(self, name):
        bench = self.bench
        session = bench.store.session
        if session is None or session.replicas[name].stage.name in ("ABSENT", "DIALLING"):
            return
        self.ghosts += [(name, one) for one in bench.requests[name]]
        bench.restart_storage(name)
        bench.lose(name)

    def _roll_back(self):
        """Put an older disk in, once, where its session shows it: more an original cannot tell."""
        bench = self.bench
        if self.copy is None:
            name = self.random.choice(bench.names)
            self.copy = name, deepcopy(bench.partition(name))
            return
        name, disk = self.copy
        state = bench.metadata.states.get(name)
        if disk is None or state is None or disk.saved_session >= state.session_id:
            return
        session = bench.store.session
        if session is not None and session.replicas[name].is_connected:
            bench.lose(name)
        self.ghosts = [one for one in self.ghosts if one[0] != name]
        bench.models[name].partitions[0] = disk
        bench.restart_storage(name)
        self.copy = name, None
        self.rolled_back = True

    def _learn(self):
        bench = self.bench
        for told in bench.told:
            if isinstance(told, Committed):
                for at, number in self.submitted[told.session_id].items():
                    if at <= told.last:
                        assert self.committed.setdefault(at, number) == number
            elif isinstance(told, SessionOpened) and self.committed:
                assert told.high_water_mark >= max(self.committed)
        bench.told.clear()


@pytest.mark.parametrize("is_reusing", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_no_schedule_loses_what_was_committed(part, is_reusing):
    seeds = range(25 * part, 25 * part + 25)
    runs = [Chaos(seed, is_reusing=is_reusing) for seed in seeds]
    committed = 0
    for chaos in runs:
        chaos.go(400)
        committed += chaos.heal()
    assert committed > 100
    assert any(chaos.rolled_back for chaos in runs)
