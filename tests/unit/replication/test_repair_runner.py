"""Unit tests of `waltz_core.replication.repair_runner`: two replicas at a time."""

from dataclasses import replace

import pytest

from tests.unit.replication.model_storage import Entry, crcs_of, make_record
from tests.unit.replication.replication_world import LIMITS, A, B, C, ReplicationWorld, wire
from waltz_core.errors import BadRequest
from waltz_core.records.record import GENESIS_CHAIN, next_chain
from waltz_core.replication import session_events


def lag_behind(world, replica, *, batches=8):
    """Let one replica miss some batches, then begin a new session."""
    world.open()
    for _ in range(batches):
        world.submit(2)
        for name in world.names:
            while name != replica and world.requests[name]:
                world.deliver(name)
    world.sent.clear()
    world.step(session_events.Checkpoint())


def run_until(world, kind):
    """Step until a storage has a request of this kind; return the storage."""

    def requested():
        return [
            name
            for name in world.names
            if any(isinstance(message, kind) for message in world.requests.get(name, ()))
        ]

    world.step_until(requested)
    return requested()[0]


def test_a_repair_requests_one_range_at_a_time():
    world = ReplicationWorld()
    lag_behind(world, C)
    run_until(world, wire.RangeRaw)
    ranges = sum(isinstance(m, wire.RangeRaw) for name in world.names for m in world.requests[name])
    assert ranges == 1
    world.reopen()
    world.run_for(100)
    assert world.logs()[C] == world.logs()[A]


def test_the_source_of_a_copy_is_undamaged_and_has_the_mark_or_the_goal():
    world = ReplicationWorld()
    world.storages[A].disk.damaged = set()
    lag_behind(world, C)
    world.storages[A].disk.damaged = {3}
    world.storages[A].disk.provisional = None
    world.reopen()
    world.run_for(100)
    copied = world.all_sent(wire.RangeRaw, A)
    assert not any(message.first <= 3 <= message.last for message in copied)
    assert world.logs()[C] == world.logs()[B]
    assert not world.storages[A].disk.damaged


def test_a_replica_is_not_truncated_to_match_a_log_other_than_the_goal(world):
    """The first replica's log has diverged, and the last replica has lost the end of its log."""
    world.submit()
    world.deliver(A)
    world.down = {A}
    world.lose(A)
    world.reopen()
    for _ in range(2):
        world.append()
    disk = world.storages[C].disk
    world.storages[C].disk = replace(disk, entries=disk.entries[:1], suspect=True)
    assert world.logs() == {A: [0], B: [1, 2], C: [1]}
    world.down = set()
    world.sent.clear()
    world.step(session_events.Checkpoint())
    world.answer_zookeeper()
    while world.dials:
        world.connect()
    for name in (C, A, B):
        world.deliver(name)
    world.silent.add(B)  # the only source
    world.run()
    world.silent.clear()
    world.reopen()
    world.wait(2_000)
    world.reopen()
    assert world.logs() == {A: [1, 2], B: [1, 2], C: [1, 2]}
    assert world.all_sent(wire.Truncate, A)
    assert not world.all_sent(wire.Truncate, C)


def test_an_unresponsive_source_is_replaced_by_another_source():
    world = ReplicationWorld()
    lag_behind(world, C)
    source = run_until(world, wire.RangeRaw)
    world.silent = {source}
    other = next(name for name in (A, B) if name != source)
    for _ in range(8):
        world.run()
        world.wait(LIMITS.answer_ms_max // 4)
    assert world.all_sent(wire.RangeRaw, other)
    assert world.logs()[C] == world.logs()[other]


def change_answers(world, replica, kind, **fields):
    """Let a storage carry out requests of a kind, and change fields of its answers."""
    real = world.storages[replica].handle

    def handle(message):
        answer = real(message)
        return replace(answer, **fields) if isinstance(message, kind) else answer

    world.storages[replica].handle = handle


@pytest.mark.parametrize("fields", [{"synced_max": 16}, {"synced_max": 14}, {"chain": bytes(16)}])
def test_a_replica_that_sets_its_mark_on_a_log_other_than_the_goal_is_not_ready(fields):
    world = ReplicationWorld()
    lag_behind(world, C)
    change_answers(world, A, wire.SetLowWaterMark, **fields)
    world.reopen()
    assert (
        "expected a log that ends at transaction 15"
        in world.reports("replica.rejected")[0]["reason"]
    )
    assert world.store.readable_replicas == [B, C]


def test_a_replica_with_an_unsynced_copy_is_not_ready():
    world = ReplicationWorld()
    lag_behind(world, C)
    change_answers(world, C, wire.AppendRaw, synced_max=2)
    world.reopen()
    assert "synced up to transaction 3, found 2" in world.reports("replica.rejected")[0]["reason"]
    assert world.store.readable_replicas == [A, B]


def test_a_copy_from_a_source_with_other_batches_is_truncated_and_repeated():
    """The difference is detected only at the end, when the first batches are already on disk."""
    world = ReplicationWorld()
    lag_behind(world, C, batches=4)
    disk, chain, forged = world.storages[A].disk, GENESIS_CHAIN, []
    for entry in disk.entries[:-1]:
        line = entry.lineage
        records = tuple(make_record(line.first + number, 99) for number in range(2))
        chain = next_chain(chain, line.first, line.last, 0, crcs_of(records))
        forged.append(Entry(line._replace(chain=chain), records))
    disk.entries[:-1] = forged
    run_until(world, wire.RangeRaw)
    assert world.requests[A]
    world.reopen()
    for _ in range(5):
        world.wait(1_000)
        world.run()
    assert {report["replica"] for report in world.reports("replica.source_unusable")} == {A}
    assert world.all_sent(wire.Truncate, C)
    assert world.logs()[C] == world.logs()[B]


def test_a_copy_ends_when_its_target_is_lost():
    world = ReplicationWorld()
    lag_behind(world, C)
    source = run_until(world, wire.RangeRaw)
    world.lose(C)
    message = world.requests[source].popleft()
    answer = world.storages[source].handle(message)
    world.step(session_events.ReplicaResponded(message.session_id, source, answer))
    world.reopen()
    world.wait(3000)
    world.reopen()
    world.run_for(100)
    assert world.store.readable_replicas == [A, B, C]
    assert world.logs()[C] == world.logs()[A]


def test_a_goal_is_chosen_again_when_no_replica_has_it():
    """The only log up to the mark is lost; another trusted log becomes the goal."""
    world = ReplicationWorld()
    lag_behind(world, C)
    while world.store.session is None or world.store.session.repairs.goal is None:
        if world.dials:
            world.connect()
        elif ready := [name for name in world.names if world.requests.get(name)]:
            world.deliver(ready[-1])
        else:
            world.answer_zookeeper()
    only_source = next(
        name
        for name, replica in world.store.session.replicas.items()
        if replica.repair is not None and replica.repair.reaches(world.store.session.repairs.goal)
    )
    world.down = {only_source}
    world.lose(only_source)
    for _ in range(4):
        world.run()
        world.wait(100)
    survivors = [name for name in world.names if name != only_source]
    assert world.store.readable_replicas == survivors
    assert world.logs()[survivors[0]] == world.logs()[survivors[1]]


def test_the_goal_is_the_log_of_a_trusted_replica(world):
    """The first replica's log ends at the mark, too, but in a batch that was never committed."""
    world.submit()
    world.deliver(A)
    world.down = {A}
    world.lose(A)
    world.reopen()
    world.wait(world.limits.opening_grace_ms)
    world.append()
    assert world.logs() == {A: [0], B: [1], C: [1]}
    world.down = set()
    world.step(session_events.Checkpoint())
    world.reopen()
    world.wait(2_000)
    world.reopen()
    assert world.logs() == {A: [1], B: [1], C: [1]}


def test_a_replica_that_diverges_below_its_mark_is_rejected():
    world = ReplicationWorld()
    lag_behind(world, C)
    world.run_for(100)
    other = ReplicationWorld()
    other.numbers = 500
    other.open()
    for _ in range(8):
        other.submit(2)
    other.run()
    diverged = world.storages[C].disk
    world.storages[C].disk = replace(diverged, entries=other.storages[C].disk.entries, confirmed=15)
    world.step(session_events.Checkpoint())
    world.run_for(100)
    assert "no batch end in common" in world.reports("replica.rejected")[-1]["reason"]
    assert world.store.readable_replicas == [A, B]
    assert world.storages[C].last == 15


def reject_repairs(world, replica):
    """Let a replica reject repairs; return its original handler."""
    storage = world.storages[replica]
    real = storage.handle

    def handle(message):
        if isinstance(message, wire.Repair):
            prefix = (message.session_id, message.sequence, 0)
            return wire.Nack(*prefix, BadRequest.code, message.session_id, "no")
        return real(message)

    storage.handle = handle
    return real


def world_with_mark(*, above=3):
    """Return a world of replicas with mark 5 and N batches above it."""
    world = ReplicationWorld()
    world.open()
    world.append(2, batches=3)
    world.step(session_events.Checkpoint())
    world.reopen()
    world.append(2, batches=above)
    world.wait(1000)
    world.run()
    assert [storage.disk.confirmed for storage in world.storages.values()] == [5, 5, 5]
    world.sent.clear()
    return world


def test_irreparable_damage_below_the_old_mark_does_not_delay_the_mark():
    world = world_with_mark()
    world.storages[B].disk.damaged = {1}
    real = reject_repairs(world, B)
    world.step(session_events.Checkpoint())
    world.reopen()
    assert world.store.readable_replicas == [A, B, C]
    assert [report["replica"] for report in world.reports("replica.repair_rejected")] == [B]
    assert not world.reports("replica.rejected")
    # The repair is repeated when the replica reports the damage again.
    world.storages[B].handle = real
    report_damage(world, B)
    world.run()
    assert not world.storages[B].disk.damaged


def test_damage_above_the_old_mark_is_repaired_before_the_mark_is_set():
    world = world_with_mark()
    world.storages[B].disk.damaged = {7}
    real = reject_repairs(world, B)
    world.step(session_events.Checkpoint())
    world.reopen()
    world.run_for(LIMITS.answer_ms_max // 2)
    # The replica has received the records of each other replica, but gets no mark.
    assert len(world.all_sent(wire.Repair, B)) == 2
    assert world.all_sent(wire.RangeRaw, A)
    assert world.all_sent(wire.RangeRaw, C)
    assert not world.all_sent(wire.SetLowWaterMark, B)
    assert world.store.readable_replicas == [A, C]
    # The replica stays in the session, and gets another request later.
    assert not world.reports("replica.rejected")
    world.storages[B].handle = real
    world.wait(LIMITS.answer_ms_max)
    world.run_for(1000)
    assert not world.storages[B].disk.damaged
    assert world.store.readable_replicas == [A, B, C]


def test_damage_that_grew_during_a_repair_is_repaired_from_its_new_start():
    world = world_with_mark()
    storage = world.storages[B]
    storage.disk.damaged = {7}
    world.step(session_events.Checkpoint())
    while run_until(world, wire.Repair) != B:
        world.deliver(B)
    real = reject_repairs(world, B)
    report_damage(world, B, 6)
    world.deliver(B)
    storage.handle = real
    world.run()
    assert [one.first for one in world.all_sent(wire.Repair, B)] == [7, 6, 7]
    assert not storage.disk.damaged
    world.wait(1000)
    world.run()
    assert world.store.readable_replicas == [A, B, C]


# ---------------------------------------------------------------------------------------------
# damage that is found in a running session


def report_damage(world, replica, *damaged):
    """Let a replica find damage, and report all known damage to the owner."""
    storage = world.storages[replica]
    storage.disk.damaged |= set(damaged)
    pairs = b"".join(bad.to_bytes(8, "big") * 2 for bad in sorted(storage.disk.damaged))
    session = storage.disk.promised
    world.step(
        session_events.ReplicaResponded(session, replica, wire.DamageFound(session, 0, 0, pairs))
    )


def running_world(*, batches=4):
    world = ReplicationWorld()
    world.open()
    world.append(2, batches=batches)
    world.sent.clear()
    return world


def test_damage_is_repaired_within_the_running_session():
    world = running_world()
    session = world.store.open_session_id
    report_damage(world, B, 0, 5)
    world.run()
    assert not world.storages[B].disk.damaged
    assert world.store.open_session_id == session
    filled = [(report["replica"], report["ids"]) for report in world.reports("replica.repaired")]
    assert filled == [(B, "0..0"), (B, "5..5")]
    assert world.reports("replica.damaged")[0]["ids"] == "0..0,5..5"
    assert all(report["is_live"] for report in world.reports("replica.repaired"))


def test_appends_continue_while_damage_is_repaired():
    world = running_world()
    report_damage(world, B, 1)
    last = world.submit(2)
    assert [type(message) for message in world.requests[B]] == [wire.AppendRaw]
    world.run()
    assert world.store.high_water_mark == last
    assert not world.storages[B].disk.damaged


def test_unsynced_records_are_not_requested_from_a_peer():
    world = running_world()
    world.silent = {A, C}
    last = world.submit(2)
    world.deliver(B)
    report_damage(world, B, last)
    assert not world.all_sent(wire.RangeRaw)
    world.silent = set()
    world.run()
    assert world.all_sent(wire.RangeRaw)
    assert not world.storages[B].disk.damaged


def test_a_peer_with_the_same_damage_gets_no_request():
    world = running_world()
    report_damage(world, A, 3)
    report_damage(world, B, 3)
    report_damage(world, B, 3, 6)
    world.run()
    assert {message.first for message in world.all_sent(wire.RangeRaw, A)} == {6}
    assert not world.storages[A].disk.damaged
    assert not world.storages[B].disk.damaged


def test_a_record_that_is_damaged_on_all_replicas_does_not_stop_other_repairs():
    world = running_world()
    for name in (A, B, C):
        report_damage(world, name, 1)
    report_damage(world, C, 1, 4)
    world.run()
    assert world.storages[C].disk.damaged == {1}
    assert world.store.open_session_id is not None


def test_a_replica_that_reports_an_incomplete_range_is_dropped():
    world = running_world()
    session = world.store.open_session_id
    world.step(
        session_events.ReplicaResponded(session, B, wire.DamageFound(session, 0, 0, bytes(8)))
    )
    assert "pairs of transaction IDs, found 1" in world.reports("replica.rejected")[-1]["reason"]


def test_damage_reported_before_a_replica_answers_the_prepare_request_is_repaired():
    world = running_world()
    world.step(session_events.Checkpoint())
    world.step_until(lambda: world.requests.get(B))
    session = world.requests[B][0].session_id
    world.storages[B].disk.damaged = {2}
    notice = wire.DamageFound(session, 0, 0, (2).to_bytes(8, "big") * 2)
    world.step(session_events.ReplicaResponded(session, B, notice))
    world.reopen()
    world.run_for(100)
    assert not world.storages[B].disk.damaged
    assert world.store.readable_replicas == [A, B, C]
