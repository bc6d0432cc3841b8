"""The registry of writes: scenarios in memory, lost answers, and the encoding."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.loops import run_on_virtual_loop
from tests.unit.cluster.test_coordinator import FAULTS, ROOT, MemoryWorld, with_cluster
from tests.write_registry_contract import MARKS, SCENARIOS
from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.write_registry import (
    TaskAttempt,
    TaskState,
    WriteRegistry,
    WriteState,
    check_write_name,
)
from waltz_core.cluster.znodes.interface import CreateNode, DeleteNode
from waltz_core.cluster.znodes.node_access import ClusterNodes
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault


@pytest.mark.parametrize("check_scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(check_scenario):
    asyncio.run(check_scenario(MemoryWorld(), ROOT))


@run_on_virtual_loop
async def test_an_attempt_reads_the_current_znode_after_a_sync(monkeypatch):
    """The session's ZooKeeper server may lag, so the state is current only after a sync."""
    _, session, coordinator = await with_cluster()
    writes, calls = coordinator.writes, []
    await writes.begin("w", MARKS, 5)
    await writes.enter("w", 0, "r", coordinator.next_client_id)
    for name in ("sync", "get"):
        monkeypatch.setattr(session, name, record_calls(getattr(session, name), name, calls))
    await writes.check("w", 0, 1)
    assert calls == ["sync", "get", "get"]
    await writes.finish("w", {}, 9)
    assert calls[3:] == ["sync", "get", "get"]


@run_on_virtual_loop
async def test_a_paused_task_does_not_begin_a_write_that_was_removed_meanwhile(monkeypatch):
    """If the task began the write, its rows would enter the log twice.

    Before its pause, the task found no later writes.
    """
    world, paused_session, coordinator = await with_cluster()
    other = Coordinator(await world.znodes(), ROOT).writes
    await other.begin("s-5", MARKS, 5, in_series=True)
    original_write = paused_session.write

    async def write(operations):
        monkeypatch.undo()
        await other.begin("s-6", MARKS, 5, in_series=True)
        await other.finish("s-6", {}, 5)
        await other.begin("s-7", MARKS, 5, in_series=True)
        await other.forget("s-6")
        return await original_write(operations)

    monkeypatch.setattr(paused_session, "write", write)
    with pytest.raises(errors.ConnectionSuperseded, match="s-7, has started"):
        await coordinator.writes.begin("s-6", MARKS, 5, in_series=True)
    assert await other.read("s-6") is None


def restart_before_next_write(session, monkeypatch, other, principal=None):
    """Let another process remove the write "w" and begin it again, before the session's next write.

    The new nodes have the same versions as the earlier nodes.
    """
    original_write, coordinator = session.write, other
    registry = other.writes.for_principal(principal) if principal else other.writes

    async def write(operations):
        monkeypatch.undo()
        await other.writes.forget("w")
        await registry.begin("w", {0: 99}, 5)
        await registry.enter("w", 0, "r", coordinator.next_client_id)
        return await original_write(operations)

    monkeypatch.setattr(session, "write", write)


@run_on_virtual_loop
async def test_a_paused_process_does_not_finish_a_write_that_was_begun_again_meanwhile(monkeypatch):
    """If the process finished it, the rows of the new write would be regarded as committed."""
    world, paused_session, coordinator = await with_cluster()
    other = Coordinator(await world.znodes(), ROOT)
    await other.writes.begin("w", MARKS, 5)
    restart_before_next_write(paused_session, monkeypatch, other)
    with pytest.raises(
        errors.ConnectionSuperseded, match="removed, and another run has started it again"
    ):
        await coordinator.writes.finish("w", {"rows": 1}, 9)
    assert await other.writes.read("w") == WriteState({0: 99}, 5)


@run_on_virtual_loop
async def test_an_attempt_cannot_finish_a_write_after_a_later_attempt_has_taken_over_its_task(
    monkeypatch,
):
    """The later attempt may append rows that a lock has rejected in this attempt."""
    world, paused_session, coordinator = await with_cluster()
    other = Coordinator(await world.znodes(), ROOT)
    await other.writes.begin("w", MARKS, 5)
    await coordinator.writes.enter("w", 0, "r", coordinator.next_client_id)
    original_write = paused_session.write

    async def write(operations):
        monkeypatch.undo()
        await other.writes.enter("w", 0, "r", other.next_client_id)
        return await original_write(operations)

    monkeypatch.setattr(paused_session, "write", write)
    with pytest.raises(errors.ConnectionSuperseded, match="attempt 2 of the task has taken over"):
        await coordinator.writes.finish("w", {"rows": 1}, 9, task_attempt=TaskAttempt(0, 1))
    assert not (await other.writes.read("w")).is_done


@run_on_virtual_loop
async def test_a_paused_process_cannot_enter_a_write_that_another_principal_has_begun_again(
    monkeypatch,
):
    world, paused_session, coordinator = await with_cluster()
    other = Coordinator(await world.znodes(), ROOT)
    await other.writes.begin("w", MARKS, 5)
    restart_before_next_write(paused_session, monkeypatch, other, "other")
    with pytest.raises(errors.PermissionDenied, match="belongs to another principal than mine"):
        await coordinator.writes.for_principal("mine").enter(
            "w", 0, "r", coordinator.next_client_id
        )
    assert (await other.writes.read("w")) == WriteState({0: 99}, 5, principal="other")


@run_on_virtual_loop
async def test_a_paused_attempt_does_not_replace_the_client_id_of_another_principal(monkeypatch):
    """If the attempt replaced the client ID, both principals would use one ID.

    Then the next attempt of the other principal would not find its rows.
    """
    world, paused_session, coordinator = await with_cluster()
    other = Coordinator(await world.znodes(), ROOT)
    own_writes = coordinator.writes.for_principal("mine")
    await own_writes.begin("w", MARKS, 5)
    first = await own_writes.enter("w", 0, "r", coordinator.next_client_id)
    restart_before_next_write(paused_session, monkeypatch, other, "other")
    with pytest.raises(errors.PermissionDenied, match="belongs to another principal than mine"):
        await own_writes.enter("w", 0, "r", coordinator.next_client_id)
    assert (await other.writes.read_tasks("w"))[0].client_id == first.client_id + 1


@pytest.mark.parametrize("writes_before", [0, 1, 2])
@run_on_virtual_loop
async def test_an_expired_write_that_was_restarted_is_not_removed(monkeypatch, writes_before):
    """After a removal, the write's tasks would get other client IDs, and append rows once more."""
    world, paused_session, other_coordinator = await with_cluster()
    coordinator = Coordinator(await world.znodes(), ROOT)
    other, remaining_writes = coordinator.writes, [writes_before]
    await other.begin("w", MARKS, 5)
    await other.enter("w", 0, "r", coordinator.next_client_id)
    world.zookeeper.advance(10)
    original_write = paused_session.write

    async def write(operations):
        if operations[0].path.endswith("/w") or "/w/" in operations[0].path:
            remaining_writes[0] -= 1
        if remaining_writes[0] < 0:
            monkeypatch.undo()
            assert await other.forget("w")
            await other.begin("w", MARKS, 5)
            await other.enter("w", 0, "r", coordinator.next_client_id)
        return await original_write(operations)

    monkeypatch.setattr(paused_session, "write", write)
    assert await other_coordinator.writes.forget_expired() == []
    assert not (await other.read("w")).is_done
    assert (await other.enter("w", 0, "r", coordinator.next_client_id)).attempt == 2


@run_on_virtual_loop
async def test_a_write_ends_before_its_tasks_are_removed(monkeypatch):
    """If tasks were removed first, a task that enters meanwhile would get a new client ID."""
    _, session, coordinator = await with_cluster()
    writes, removals = coordinator.writes, []
    await writes.begin("w", MARKS, 5)
    await writes.enter("w", 0, "r", coordinator.next_client_id)
    original_write = session.write

    async def write(operations):
        if isinstance(operations[0], DeleteNode):
            with pytest.raises(errors.ConnectionSuperseded, match="already finished"):
                await writes.enter("w", 1, "r", coordinator.next_client_id)
            removals.append(operations)
        return await original_write(operations)

    monkeypatch.setattr(session, "write", write)
    await writes.forget("w")
    assert len(removals) == 2, "the task, then the write"
    assert await writes.read("w") is None


def record_calls(call, name, calls):
    async def call_and_record(*args):
        calls.append(name)
        return await call(*args)

    return call_and_record


@FAULTS
@run_on_virtual_loop
async def test_a_lost_answer_uses_up_one_attempt(fault):
    _, session, coordinator = await with_cluster()
    writes = coordinator.writes
    session.faults += [fault] * 2
    assert (await writes.begin("w", MARKS, 5)).marks == MARKS
    client_id = await coordinator.next_client_id()

    async def next_id():
        return client_id

    was_done = fault is WriteFault.REPLY_LOST
    session.faults.append(fault)
    assert (await writes.enter("w", 0, "r", next_id)).attempt == 1 + was_done
    session.faults.append(fault)
    assert (await writes.enter("w", 0, "r", next_id)).attempt == 2 + 2 * was_done
    session.faults.append(fault)
    assert (await writes.finish("w", {"rows": 1}, 9)).summary == {"rows": 1}
    session.faults.append(fault)
    await writes.forget("w")
    assert await writes.read("w") is None


MARKS_BY_PARTITION = st.dictionaries(
    st.integers(0, 1 << 20), st.integers(-1, (1 << 63) - 1), max_size=8
)
SUMMARIES = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8))
RUN_NAMES = st.lists(st.text(max_size=20), max_size=5).map(tuple)


@given(
    st.builds(WriteState, MARKS_BY_PARTITION, st.integers(0, 1 << 50), st.none() | SUMMARIES)
    | st.builds(TaskState, st.integers(1, 1 << 30), st.integers(1, 1 << 40), RUN_NAMES)
)
def test_a_write_and_a_task_round_trip(state):
    assert type(state).from_bytes(state.to_bytes()) == state


def test_a_write_of_format_1_is_read_and_kept_for_a_year():
    """Format 1 has the time of removal, by the clock of the driver that wrote the znode."""
    old = (
        b'{"format":1,"marks":{"0":41},"keep_until_ms":1795472000000,'
        b'"summary":{"committed":7,"rejected":0,"retry":0}}'
    )
    found = WriteState.from_bytes(old)
    assert (found.marks, found.summary["committed"], found.is_done) == ({0: 41}, 7, True)
    assert found.keep_ms == 365 * 24 * 3_600 * 1_000
    assert b'"format":2' in found.to_bytes()


@run_on_virtual_loop
async def test_the_retention_of_a_write_uses_the_clock_of_zookeeper():
    world, _, coordinator = await with_cluster()
    writes = coordinator.writes
    world.zookeeper.advance(5_000)
    await writes.begin("w", MARKS, 1_000)
    world.zookeeper.advance(999)
    assert await writes.forget_expired() == []
    await writes.finish("w", {"rows": 1}, 1_000)
    world.zookeeper.advance(999)
    assert await writes.forget_expired() == []
    world.zookeeper.advance(1)
    assert await writes.forget_expired() == ["w"]
    assert await writes.read("w") is None


@example(b'{"format":2,"marks":{"":1},"keep_ms":5}')
@given(
    st.binary(max_size=60)
    | st.sampled_from([WriteState({0: 1}, 5), TaskState(1, 2)]).flatmap(
        lambda state: st.tuples(st.integers(0, 60), st.binary(min_size=1, max_size=4)).map(
            lambda change: (
                state.to_bytes()[: change[0]] + change[1] + state.to_bytes()[change[0] + 1 :]
            )
        )
    )
)
def test_any_bytes_decode_or_raise_bad_format(data):
    for kind, name in ((WriteState, "an exactly-once write"), (TaskState, "a task of an")):
        message = None
        try:
            value = kind.from_bytes(data)
        except errors.BadFormat as error:
            message = str(error)
        if message is None:
            assert isinstance(value, kind)
        else:
            assert name in message


@run_on_virtual_loop
async def test_impossible_numbers_are_rejected():
    for data in (
        b'{"format":2,"keep_ms":1,"marks":{"%s":1}}' % (5_000 * b"9"),
        b'{"format":2,"keep_ms":1,"marks":{"1":%s}}' % (5_000 * b"9"),
        b'{"format":2,"keep_ms":1,"marks":%s' % (100_000 * b"["),
    ):
        with pytest.raises(
            errors.BadFormat, match=r"exactly-once write(: expected| is not valid JSON)"
        ):
            WriteState.from_bytes(data)

    session = MemoryZooKeeper(asyncio.Event).session()
    for path in ("/w", "/w/x", "/w/x/writes", "/w/x/writes/n-1"):
        await session.write([CreateNode(path)])
    await session.write([CreateNode(f"/w/x/writes/n-{5_000 * '9'}")])
    await session.write([CreateNode(f"/w/x/writes/n-1/{5_000 * '9'}")])
    registry = WriteRegistry(ClusterNodes(session, "/w"))
    assert await registry.read_task_numbers("n-1") == []
    await registry._check_latest_of_series("n-1")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 201])
def test_invalid_write_names_are_rejected(name):
    with pytest.raises(errors.BadRequest, match="name of an exactly-once write: expected"):
        check_write_name(name)


def test_valid_write_names_are_accepted():
    for name in ("a", "stream-1f-7", "Nightly_2026.11", "x" * 200):
        check_write_name(name)
