"""Unit tests of `waltz_core.replication.repairs`: two replicas at a time."""

from dataclasses import replace

from tests.unit.replication.bench import LIMITS, A, B, Bench, C, wire
from waltz_core.errors import BadRequest
from waltz_core.replication import events


def behind(bench, replica, *, batches=8):
    """Let one replica miss some batches, then begin a new session."""
    bench.open()
    for _ in range(batches):
        bench.submit(2)
        for name in bench.names:
            while name != replica and bench.requests[name]:
                bench.deliver(name)
    bench.sent.clear()
    bench.step(events.Checkpoint())


def run_until(bench, kind):
    """Go on, one thing at a time, until a request of a kind is under way; return who has it."""
    while True:
        for name in bench.names:
            if any(isinstance(message, kind) for message in bench.requests.get(name, ())):
                return name
        if bench.dials:
            bench.connect()
        elif ready := [name for name in bench.names if bench.requests.get(name)]:
            bench.deliver(ready[0])
        else:
            bench.ask_zookeeper()


def test_one_step_at_a_time():
    bench = Bench()
    behind(bench, C)
    run_until(bench, wire.RangeRaw)
    ranges = sum(isinstance(m, wire.RangeRaw) for name in bench.names for m in bench.requests[name])
    assert ranges == 1
    bench.reopen()
    bench.wait(100)
    bench.run()
    assert bench.logs()[C] == bench.logs()[A]


def test_the_source_is_marked_or_at_the_goal_and_whole():
    bench = Bench()
    bench.storages[A].disk.damaged = set()
    behind(bench, C)
    bench.storages[A].disk.damaged = {3}
    bench.storages[A].disk.provisional = None
    bench.reopen()
    bench.wait(100)
    bench.run()
    copied = bench.all_sent(wire.RangeRaw, A)
    assert not any(message.first <= 3 <= message.last for message in copied)
    assert bench.logs()[C] == bench.logs()[B]
    assert not bench.storages[A].disk.damaged


def test_a_source_that_does_not_answer_is_left_for_another():
    bench = Bench()
    behind(bench, C)
    source = run_until(bench, wire.RangeRaw)
    bench.silent = {source}
    other = next(name for name in (A, B) if name != source)
    for _ in range(8):
        bench.run()
        bench.wait(LIMITS.answer_ms_max // 4)
    assert bench.all_sent(wire.RangeRaw, other)
    assert bench.logs()[C] == bench.logs()[other]


def test_the_wanting_replica_is_lost_while_its_copy_is_under_way():
    bench = Bench()
    behind(bench, C)
    source = run_until(bench, wire.RangeRaw)
    bench.lose(C)
    message = bench.requests[source].popleft()
    answer = bench.storages[source].handle(message)
    bench.step(events.ReplicaAnswered(message.session_id, source, answer))
    bench.reopen()
    bench.wait(3000)
    bench.reopen()
    bench.wait(100)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.logs()[C] == bench.logs()[A]


def test_a_goal_is_chosen_anew_when_nobody_has_it_any_more():
    """The only log at the mark is gone before anybody is marked: another credible one may do."""
    bench = Bench()
    behind(bench, C)
    while bench.store.session is None or bench.store.session.repairs.goal is None:
        if bench.dials:
            bench.connect()
        elif ready := [name for name in bench.names if bench.requests.get(name)]:
            bench.deliver(ready[-1])
        else:
            bench.ask_zookeeper()
    usher = next(
        name
        for name, one in bench.store.session.replicas.items()
        if one.repair is not None and one.repair.reaches(bench.store.session.repairs.goal)
    )
    bench.down = {usher}
    bench.lose(usher)
    for _ in range(4):
        bench.run()
        bench.wait(100)
    survivors = [name for name in bench.names if name != usher]
    assert bench.store.readable_replicas == survivors
    assert bench.logs()[survivors[0]] == bench.logs()[survivors[1]]


def test_a_log_that_contradicts_the_decided_one_below_its_mark_is_set_aside():
    bench = Bench()
    behind(bench, C)
    bench.run()
    bench.wait(100)
    bench.run()
    other = Bench()
    other.numbers = 500
    other.open()
    for _ in range(8):
        other.submit(2)
    other.run()
    mine = bench.storages[C].disk
    bench.storages[C].disk = replace(mine, entries=other.storages[C].disk.entries, confirmed=15)
    bench.step(events.Checkpoint())
    bench.run()
    bench.wait(100)
    bench.run()
    assert "nothing in common" in bench.reports("replica.refused")[-1]["reason"]
    assert bench.store.readable_replicas == [A, B]
    assert bench.storages[C].last == 15


def test_a_marked_replica_that_cannot_be_mended_stays():
    bench = Bench()
    bench.open()
    for _ in range(3):
        bench.submit(2)
    bench.run()
    bench.step(events.Checkpoint())
    bench.reopen()
    for name in bench.names:
        bench.storages[name].disk.damaged = {1}
    real = bench.storages[B].handle

    def refuses(message):
        if isinstance(message, wire.Repair):
            prefix = (message.session_id, message.sequence, 0)
            return wire.Nack(*prefix, BadRequest.code, message.session_id, "no")
        return real(message)

    bench.storages[B].handle = refuses
    bench.step(events.Checkpoint())
    bench.reopen()
    bench.wait(100)
    bench.run()
    # Nobody had it at first. One replica is made whole by hand, so the others can be mended.
    bench.storages[C].disk.damaged = set()
    bench.step(events.Checkpoint())
    bench.reopen()
    bench.wait(100)
    bench.run()
    assert not bench.storages[A].disk.damaged
    assert bench.storages[B].disk.damaged == {1}
    assert bench.store.open_session is not None
    assert B not in bench.store.readable_replicas or bench.reports("replica.not_mended")
