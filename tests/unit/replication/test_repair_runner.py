"""Unit tests of `waltz_core.replication.repair_runner`: two replicas at a time."""

from dataclasses import replace

import pytest

from tests.unit.replication.bench import LIMITS, A, B, Bench, C, wire
from tests.unit.replication.model_storage import Entry, crcs_of, make_record
from waltz_core.errors import BadRequest
from waltz_core.records.record import GENESIS_CHAIN, next_chain
from waltz_core.replication import session_events


def lag_behind(bench, replica, *, batches=8):
    """Let one replica miss some batches, then begin a new session."""
    bench.open()
    for _ in range(batches):
        bench.submit(2)
        for name in bench.names:
            while name != replica and bench.requests[name]:
                bench.deliver(name)
    bench.sent.clear()
    bench.step(session_events.Checkpoint())


def run_until(bench, kind):
    """Step until a storage has a request of this kind; return the storage."""

    def requested():
        return [
            name
            for name in bench.names
            if any(isinstance(message, kind) for message in bench.requests.get(name, ()))
        ]

    bench.step_until(requested)
    return requested()[0]


def test_a_repair_requests_one_range_at_a_time():
    bench = Bench()
    lag_behind(bench, C)
    run_until(bench, wire.RangeRaw)
    ranges = sum(isinstance(m, wire.RangeRaw) for name in bench.names for m in bench.requests[name])
    assert ranges == 1
    bench.reopen()
    bench.run_for(100)
    assert bench.logs()[C] == bench.logs()[A]


def test_the_source_of_a_copy_is_undamaged_and_has_the_mark_or_the_goal():
    bench = Bench()
    bench.storages[A].disk.damaged = set()
    lag_behind(bench, C)
    bench.storages[A].disk.damaged = {3}
    bench.storages[A].disk.provisional = None
    bench.reopen()
    bench.run_for(100)
    copied = bench.all_sent(wire.RangeRaw, A)
    assert not any(message.first <= 3 <= message.last for message in copied)
    assert bench.logs()[C] == bench.logs()[B]
    assert not bench.storages[A].disk.damaged


def test_a_replica_is_not_truncated_to_match_a_log_other_than_the_goal(bench):
    """The first replica has another history, and the last replica has lost the end of its log."""
    bench.submit()
    bench.deliver(A)
    bench.down = {A}
    bench.lose(A)
    bench.reopen()
    for _ in range(2):
        bench.append()
    disk = bench.storages[C].disk
    bench.storages[C].disk = replace(disk, entries=disk.entries[:1], suspect=True)
    assert bench.logs() == {A: [0], B: [1, 2], C: [1]}
    bench.down = set()
    bench.sent.clear()
    bench.step(session_events.Checkpoint())
    bench.answer_zookeeper()
    while bench.dials:
        bench.connect()
    for name in (C, A, B):
        bench.deliver(name)
    bench.silent.add(B)  # the only source
    bench.run()
    bench.silent.clear()
    bench.reopen()
    bench.wait(2_000)
    bench.reopen()
    assert bench.logs() == {A: [1, 2], B: [1, 2], C: [1, 2]}
    assert bench.all_sent(wire.Truncate, A)
    assert not bench.all_sent(wire.Truncate, C)


def test_an_unresponsive_source_is_replaced_by_another():
    bench = Bench()
    lag_behind(bench, C)
    source = run_until(bench, wire.RangeRaw)
    bench.silent = {source}
    other = next(name for name in (A, B) if name != source)
    for _ in range(8):
        bench.run()
        bench.wait(LIMITS.answer_ms_max // 4)
    assert bench.all_sent(wire.RangeRaw, other)
    assert bench.logs()[C] == bench.logs()[other]


def change_answers(bench, replica, kind, **fields):
    """Let a storage carry out requests of a kind, and change fields of its answers."""
    real = bench.storages[replica].handle

    def handle(message):
        answer = real(message)
        return replace(answer, **fields) if isinstance(message, kind) else answer

    bench.storages[replica].handle = handle


@pytest.mark.parametrize("fields", [{"synced_max": 16}, {"synced_max": 14}, {"chain": bytes(16)}])
def test_a_replica_with_a_mark_on_another_log_is_not_ready(fields):
    bench = Bench()
    lag_behind(bench, C)
    change_answers(bench, A, wire.SetLowWaterMark, **fields)
    bench.reopen()
    assert (
        "expected a log that ends at transaction 15"
        in bench.reports("replica.rejected")[0]["reason"]
    )
    assert bench.store.readable_replicas == [B, C]


def test_a_replica_with_an_unsynced_copy_is_not_ready():
    bench = Bench()
    lag_behind(bench, C)
    change_answers(bench, C, wire.AppendRaw, synced_max=2)
    bench.reopen()
    assert "synced up to transaction 3, found 2" in bench.reports("replica.rejected")[0]["reason"]
    assert bench.store.readable_replicas == [A, B]


def test_a_copy_from_a_source_with_other_batches_is_truncated_and_repeated():
    """The difference is detected only at the end, when the first batches are already on disk."""
    bench = Bench()
    lag_behind(bench, C, batches=4)
    disk, chain, forged = bench.storages[A].disk, GENESIS_CHAIN, []
    for entry in disk.entries[:-1]:
        line = entry.lineage
        records = tuple(make_record(line.first + at, 99) for at in range(2))
        chain = next_chain(chain, line.first, line.last, 0, crcs_of(records))
        forged.append(Entry(line._replace(chain=chain), records))
    disk.entries[:-1] = forged
    run_until(bench, wire.RangeRaw)
    assert bench.requests[A]
    bench.reopen()
    for _ in range(5):
        bench.wait(1_000)
        bench.run()
    assert {each["replica"] for each in bench.reports("replica.source_unusable")} == {A}
    assert bench.all_sent(wire.Truncate, C)
    assert bench.logs()[C] == bench.logs()[B]


def test_a_copy_ends_when_its_target_is_lost():
    bench = Bench()
    lag_behind(bench, C)
    source = run_until(bench, wire.RangeRaw)
    bench.lose(C)
    message = bench.requests[source].popleft()
    answer = bench.storages[source].handle(message)
    bench.step(session_events.ReplicaResponded(message.session_id, source, answer))
    bench.reopen()
    bench.wait(3000)
    bench.reopen()
    bench.run_for(100)
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.logs()[C] == bench.logs()[A]


def test_a_goal_is_chosen_again_when_no_replica_has_it():
    """The only log up to the mark is lost; another trusted log becomes the goal."""
    bench = Bench()
    lag_behind(bench, C)
    while bench.store.session is None or bench.store.session.repairs.goal is None:
        if bench.dials:
            bench.connect()
        elif ready := [name for name in bench.names if bench.requests.get(name)]:
            bench.deliver(ready[-1])
        else:
            bench.answer_zookeeper()
    only_source = next(
        name
        for name, one in bench.store.session.replicas.items()
        if one.repair is not None and one.repair.reaches(bench.store.session.repairs.goal)
    )
    bench.down = {only_source}
    bench.lose(only_source)
    for _ in range(4):
        bench.run()
        bench.wait(100)
    survivors = [name for name in bench.names if name != only_source]
    assert bench.store.readable_replicas == survivors
    assert bench.logs()[survivors[0]] == bench.logs()[survivors[1]]


def test_the_goal_is_the_log_of_a_trusted_replica(bench):
    """The first replica's log ends at the mark, too, but in a batch that was never committed."""
    bench.submit()
    bench.deliver(A)
    bench.down = {A}
    bench.lose(A)
    bench.reopen()
    bench.wait(bench.limits.opening_grace_ms)
    bench.append()
    assert bench.logs() == {A: [0], B: [1], C: [1]}
    bench.down = set()
    bench.step(session_events.Checkpoint())
    bench.reopen()
    bench.wait(2_000)
    bench.reopen()
    assert bench.logs() == {A: [1], B: [1], C: [1]}


def test_a_replica_that_diverges_below_its_mark_is_rejected():
    bench = Bench()
    lag_behind(bench, C)
    bench.run_for(100)
    other = Bench()
    other.numbers = 500
    other.open()
    for _ in range(8):
        other.submit(2)
    other.run()
    diverged = bench.storages[C].disk
    bench.storages[C].disk = replace(diverged, entries=other.storages[C].disk.entries, confirmed=15)
    bench.step(session_events.Checkpoint())
    bench.run_for(100)
    assert "no common end of a batch" in bench.reports("replica.rejected")[-1]["reason"]
    assert bench.store.readable_replicas == [A, B]
    assert bench.storages[C].last == 15


def reject_repairs(bench, replica):
    """Let a replica reject repairs; return its original handler."""
    storage = bench.storages[replica]
    real = storage.handle

    def handle(message):
        if isinstance(message, wire.Repair):
            prefix = (message.session_id, message.sequence, 0)
            return wire.Nack(*prefix, BadRequest.code, message.session_id, "no")
        return real(message)

    storage.handle = handle
    return real


def bench_with_mark(*, above=3):
    """Return a bench of replicas with mark 5 and N batches above it."""
    bench = Bench()
    bench.open()
    bench.append(2, batches=3)
    bench.step(session_events.Checkpoint())
    bench.reopen()
    bench.append(2, batches=above)
    bench.wait(1000)
    bench.run()
    assert [one.disk.confirmed for one in bench.storages.values()] == [5, 5, 5]
    bench.sent.clear()
    return bench


def test_irreparable_damage_below_the_old_mark_does_not_delay_the_mark():
    bench = bench_with_mark()
    bench.storages[B].disk.damaged = {1}
    real = reject_repairs(bench, B)
    bench.step(session_events.Checkpoint())
    bench.reopen()
    assert bench.store.readable_replicas == [A, B, C]
    assert [one["replica"] for one in bench.reports("replica.repair_rejected")] == [B]
    assert not bench.reports("replica.rejected")
    # The repair is repeated when the replica reports the damage again.
    bench.storages[B].handle = real
    report_damage(bench, B)
    bench.run()
    assert not bench.storages[B].disk.damaged


def test_damage_above_the_old_mark_is_repaired_before_the_mark_is_set():
    bench = bench_with_mark()
    bench.storages[B].disk.damaged = {7}
    real = reject_repairs(bench, B)
    bench.step(session_events.Checkpoint())
    bench.reopen()
    bench.run_for(LIMITS.answer_ms_max // 2)
    # The replica has received the records of each other replica, but gets no mark.
    assert len(bench.all_sent(wire.Repair, B)) == 2
    assert bench.all_sent(wire.RangeRaw, A)
    assert bench.all_sent(wire.RangeRaw, C)
    assert not bench.all_sent(wire.SetLowWaterMark, B)
    assert bench.store.readable_replicas == [A, C]
    # The replica stays in the session, and gets another request later.
    assert not bench.reports("replica.rejected")
    bench.storages[B].handle = real
    bench.wait(LIMITS.answer_ms_max)
    bench.run_for(1000)
    assert not bench.storages[B].disk.damaged
    assert bench.store.readable_replicas == [A, B, C]


def test_damage_that_grew_during_a_repair_is_repaired_from_its_new_start():
    bench = bench_with_mark()
    storage = bench.storages[B]
    storage.disk.damaged = {7}
    bench.step(session_events.Checkpoint())
    while run_until(bench, wire.Repair) != B:
        bench.deliver(B)
    real = reject_repairs(bench, B)
    report_damage(bench, B, 6)
    bench.deliver(B)
    storage.handle = real
    bench.run()
    assert [one.first for one in bench.all_sent(wire.Repair, B)] == [7, 6, 7]
    assert not storage.disk.damaged
    bench.wait(1000)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]


# ---------------------------------------------------------------------------------------------
# damage that is found in a running session


def report_damage(bench, replica, *damaged):
    """Let a replica find damage, and report all known damage to the owner."""
    storage = bench.storages[replica]
    storage.disk.damaged |= set(damaged)
    pairs = b"".join(bad.to_bytes(8, "big") * 2 for bad in sorted(storage.disk.damaged))
    session = storage.disk.promised
    bench.step(
        session_events.ReplicaResponded(session, replica, wire.DamageFound(session, 0, 0, pairs))
    )


def running_bench(*, batches=4):
    bench = Bench()
    bench.open()
    bench.append(2, batches=batches)
    bench.sent.clear()
    return bench


def test_damage_is_repaired_within_the_running_session():
    bench = running_bench()
    session = bench.store.open_session_id
    report_damage(bench, B, 0, 5)
    bench.run()
    assert not bench.storages[B].disk.damaged
    assert bench.store.open_session_id == session
    filled = [(each["replica"], each["ids"]) for each in bench.reports("replica.repaired")]
    assert filled == [(B, "0..0"), (B, "5..5")]
    assert bench.reports("replica.damaged")[0]["ids"] == "0..0,5..5"
    assert all(each["is_live"] for each in bench.reports("replica.repaired"))


def test_appends_continue_while_damage_is_repaired():
    bench = running_bench()
    report_damage(bench, B, 1)
    last = bench.submit(2)
    assert [type(message) for message in bench.requests[B]] == [wire.AppendRaw]
    bench.run()
    assert bench.store.high_water_mark == last
    assert not bench.storages[B].disk.damaged


def test_unsynced_records_are_not_requested_from_a_peer():
    bench = running_bench()
    bench.silent = {A, C}
    last = bench.submit(2)
    bench.deliver(B)
    report_damage(bench, B, last)
    assert not bench.all_sent(wire.RangeRaw)
    bench.silent = set()
    bench.run()
    assert bench.all_sent(wire.RangeRaw)
    assert not bench.storages[B].disk.damaged


def test_a_peer_with_the_same_damage_gets_no_request():
    bench = running_bench()
    report_damage(bench, A, 3)
    report_damage(bench, B, 3)
    report_damage(bench, B, 3, 6)
    bench.run()
    assert {message.first for message in bench.all_sent(wire.RangeRaw, A)} == {6}
    assert not bench.storages[A].disk.damaged
    assert not bench.storages[B].disk.damaged


def test_damage_of_all_replicas_does_not_hide_other_damage():
    bench = running_bench()
    for name in (A, B, C):
        report_damage(bench, name, 1)
    report_damage(bench, C, 1, 4)
    bench.run()
    assert bench.storages[C].disk.damaged == {1}
    assert bench.store.open_session_id is not None


def test_a_replica_that_reports_an_incomplete_range_is_dropped():
    bench = running_bench()
    session = bench.store.open_session_id
    bench.step(
        session_events.ReplicaResponded(session, B, wire.DamageFound(session, 0, 0, bytes(8)))
    )
    assert "pairs of transaction IDs, found 1" in bench.reports("replica.rejected")[-1]["reason"]


def test_early_damage_reports_are_followed_by_a_full_request():
    bench = running_bench()
    bench.step(session_events.Checkpoint())
    bench.step_until(lambda: bench.requests.get(B))
    session = bench.requests[B][0].session_id
    bench.storages[B].disk.damaged = {2}
    notice = wire.DamageFound(session, 0, 0, (2).to_bytes(8, "big") * 2)
    bench.step(session_events.ReplicaResponded(session, B, notice))
    bench.reopen()
    bench.run_for(100)
    assert not bench.storages[B].disk.damaged
    assert bench.store.readable_replicas == [A, B, C]
