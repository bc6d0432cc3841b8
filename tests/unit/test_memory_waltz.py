"""The fault settings of `MemoryWaltz`: repeatable effects on appends, contexts and feeds."""

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.client_contract import RecordingCallbacks, RecordingContext
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import (
    AsyncCallbacks,
    Callbacks,
    PoisonPolicy,
    RowOutcomeCode,
    lock,
    transactional,
)
from waltz_core.client.stream import appends
from waltz_core.config import ClientConfig
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.records.batches import encode_append
from waltz_core.server.partition_events import PartitionLimits
from waltz_core.wire.messages import RejectionsRequest, WireProtocol

SHORT = ClientConfig(request_timeout_ms=200, retry_interval_ms_min=1, retry_interval_ms_max=20)


def test_waltz_memory_is_empty_and_issues_client_ids(waltz_memory):
    with waltz_memory.client(client_id=77) as client:
        assert client.high_water_marks() == dict.fromkeys(range(4), -1)
        assert client.append(b"one", partition=3, header=5).result() == 0
        assert client.client_id == 77
    (only,) = waltz_memory.transactions(3)
    assert (only.transaction_id, only.header, only.data) == (0, 5, b"one")
    assert only.req_id.client_id == 77
    assert waltz_memory.transactions(0) == []


# --- errors of applications


def until(condition):
    deadline = time.monotonic() + TEST_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class CountingCallbacks(Callbacks):
    """Counts transactions, and runs a given function for each."""

    def __init__(self, act, answer=PoisonPolicy.STOP):
        self.act, self.answer, self.applied, self.errors = act, answer, 0, []

    def apply_transaction(self, transaction):
        returned = self.act()
        self.applied += 1
        return returned

    def uncaught_exception(self, partition, transaction_id, error):
        self.errors.append(error)
        return self.answer


async def return_none():
    """Return None; a call without `await` returns a coroutine."""


@pytest.mark.parametrize(
    ("act", "answer", "error"),
    [
        (lambda: sys.exit(3), PoisonPolicy.STOP, errors.UsageError),
        (return_none, PoisonPolicy.STOP, errors.UsageError),
        (lambda: 1 / 0, None, ZeroDivisionError),
        (lambda: 1 / 0, "skip", ZeroDivisionError),  # not a valid policy
    ],
)
def test_a_failing_callback_ends_only_its_feed(waltz_memory, act, answer, error):
    callbacks = CountingCallbacks(act, answer)
    with waltz_memory.client() as client:
        client.append(b"poison", partition=0).result()
        client.subscribe(callbacks, [0])
        until(lambda: client.partitions == ())
        assert client.append(b"and it continues", partition=0).result() == 1
    assert [type(each) for each in callbacks.errors] == [error]


def test_system_exit_in_a_context_ends_only_the_context(waltz_memory):
    @transactional(partition=0)
    def exits_in_context(builder):
        sys.exit(3)

    @transactional(partition_by=lambda: sys.exit(3))
    def exits_in_partition_function(builder):
        return False

    with waltz_memory.client() as client:
        for context in (exits_in_context(), exits_in_partition_function()):
            with pytest.raises(errors.UsageError, match="raised SystemExit on a worker thread"):
                client.submit(context).result(TEST_TIMEOUT_S)
        assert client.append(b"and it continues", partition=0).result() == 0


def test_stop_iteration_from_user_code_raises_a_runtime_error_at_once(waltz_memory):
    @transactional(partition=0)
    def raises_stop_iteration(builder):
        return next(iter(()))

    class RaisesStopIteration(CountingCallbacks):
        def client_high_water_mark(self, partition):
            return next(iter(()))

    with waltz_memory.client() as client, pytest.raises(RuntimeError, match="StopIteration"):
        client.submit(raises_stop_iteration()).result(TEST_TIMEOUT_S)
    with waltz_memory.client() as client, pytest.raises(RuntimeError, match="StopIteration"):
        client.subscribe(RaisesStopIteration(return_none), [0])
    callbacks = CountingCallbacks(lambda: next(iter(())))
    with waltz_memory.client() as client:
        client.append(b"poison", partition=0).result()
        client.subscribe(callbacks, [0])
        until(lambda: client.partitions == ())
    assert [type(error) for error in callbacks.errors] == [RuntimeError]


def test_an_argument_other_than_a_context_is_reported(waltz_memory):
    async def submit(wrong):
        async with waltz_memory.async_client() as client:
            await client.submit(wrong)

    @transactional(partition=0)
    def never_called(builder):
        return False

    with waltz_memory.client() as client:
        for wrong in (None, never_called):
            with pytest.raises(
                errors.UsageError, match="decorated with @transactional returns; found "
            ):
                client.submit(wrong)
            with pytest.raises(
                errors.UsageError, match="decorated with @transactional returns; found "
            ):
                asyncio.run(submit(wrong))


def test_use_on_another_event_loop_raises_without_closing_the_client(waltz_memory):
    async def append(client):
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await (await client.append(b"x", partition=0))

    async def begin():
        return await waltz_memory.async_client()

    with asyncio.Runner() as runner:
        client = runner.run(begin())
        for wrong in (append(client), client.close()):
            with (
                pytest.raises(errors.UsageError, match="was opened on another event loop"),
                ThreadPoolExecutor(1) as another,  # this thread already has an event loop
            ):
                another.submit(asyncio.run, wrong).result()
        assert runner.run(append(client)) == 0
        runner.run(client.close())


def test_callbacks_of_the_other_client_class_are_rejected(waltz_memory):
    class SyncWithAsyncMethod(Callbacks):
        async def apply_transaction(self, transaction):
            """Do nothing: the client rejects these callbacks before any call."""

    class AsyncWithoutAwait(AsyncCallbacks):
        async def apply_transaction(self, transaction):
            """Do nothing: the client rejects these callbacks before any call."""

    async def subscribe_plain():
        async with waltz_memory.async_client() as client:
            await client.subscribe(CountingCallbacks(return_none))

    with waltz_memory.client() as client:
        for wrong in (SyncWithAsyncMethod(), AsyncWithoutAwait()):
            with pytest.raises(errors.UsageError, match="is an async function, which WaltzClient"):
                client.subscribe(wrong)
        for wrong in (None, SyncWithAsyncMethod):
            with pytest.raises(errors.UsageError, match="expected an object of class Callbac"):
                client.subscribe(wrong)
    with pytest.raises(errors.UsageError, match="CountingCallbacks has plain functions, but Async"):
        asyncio.run(subscribe_plain())


# --- rejections and failures


def test_only_the_requested_number_of_locked_appends_is_rejected(waltz_memory):
    locks = [lock("a")]
    with waltz_memory.client() as client:
        waltz_memory.reject_next(2)
        client.append(b"free", partition=0).result()  # without locks, so without conflicts
        client.append(b"free", partition=0, append_locks=locks).result()
        for kind in ("write_locks", "read_locks"):
            with pytest.raises(errors.LockFailed):
                client.append(b"late", partition=0, **{kind: locks}).result()
        client.append(b"in time", partition=0, write_locks=locks).result()
    assert [transaction.data for transaction in waltz_memory.transactions(0)] == [
        b"free",
        b"free",
        b"in time",
    ]


def test_the_loser_and_the_winner_of_a_lock_are_listed(waltz_memory):
    """Two clients append with the same lock. The owner lists the rejected append and the winner."""
    seat, before_ms = lock("seat", "12F"), time.time_ns() // 1_000_000
    with waltz_memory.client() as anna, waltz_memory.client() as boris:
        assert boris.recent_rejections(1) == []
        mark = boris.high_water_mark(1)
        winner = anna.append(b"Anna", partition=1, write_locks=[seat]).result()
        with pytest.raises(errors.LockFailed) as failed:
            boris.append(
                b"Boris", partition=1, write_locks=[seat], client_high_water_mark=mark
            ).result()
        (found,) = anna.recent_rejections(1)
        assert (found.reason, found.conflicting) == (RowOutcomeCode.LOCK, winner)
        assert found.conflicting == failed.value.conflicting
        assert (found.req_id.client_id, found.req_id.partition_id) == (boris.client_id, 1)
        assert before_ms <= found.time_ms <= time.time_ns() // 1_000_000
        assert anna.recent_rejections(0) == []
    (only,) = waltz_memory.transactions(1)
    assert only.req_id != found.req_id


@pytest.mark.parametrize("side", ["versions_accepted", "versions_offered"])
def test_a_request_for_recent_rejections_to_an_older_server_fails_without_a_disconnect(
    monkeypatch, side
):
    older = [each for each in getattr(WireProtocol.CLIENT, side) if each < RejectionsRequest.since]
    monkeypatch.setattr(WireProtocol.CLIENT, side, tuple(older))
    with MemoryWaltz() as waltz, waltz.client() as client:
        with pytest.raises(errors.BadRequest, match="expected client protocol L 9 or later"):
            client.recent_rejections(0)
        assert client.append(b"one", partition=0).result() == 0


def test_a_context_that_is_always_rejected_expires(waltz_memory):
    with waltz_memory.client() as client:
        waltz_memory.reject_next(1_000_000)
        context = RecordingContext(0)
        context.retries_max = 5
        with pytest.raises(errors.LockFailed):
            client.submit(context).result()
        assert context.has_ended.wait(TEST_TIMEOUT_S)
        assert context.hooks == ["lock failure"] * 6 + ["expiration"]
    assert waltz_memory.transactions(0) == []


@pytest.mark.parametrize("error", [errors.BadRequest, errors.TooLarge, errors.ClientAheadOfLog])
def test_a_failed_append_is_not_in_the_log(waltz_memory, error):
    with waltz_memory.client() as client:
        waltz_memory.fail_next_append(2, error("as planned"))
        failed = [client.append(b"%d" % i, partition=0) for i in range(3)]
        for future in failed[:2]:
            with pytest.raises(error):
                future.result()
        assert failed[2].result() == 0
    assert [transaction.data for transaction in waltz_memory.transactions(0)] == [b"2"]


@pytest.mark.parametrize("error", [errors.Overloaded, errors.NoSpace, errors.SessionLost])
def test_clients_retry_until_the_request_timeout(waltz_memory, monkeypatch, error):
    monkeypatch.setattr(appends, "RESEND_WHEN_FULL_DELAY_S", 0.005)
    with waltz_memory.client() as client:
        waltz_memory.fail_next_append(2, error("as planned"))
        assert client.append(b"repaired", partition=0).result() == 0
    with waltz_memory.client(replace(SHORT, request_timeout_ms=1_000)) as client:
        waltz_memory.fail_next_append(1_000_000, error("as planned"))
        with pytest.raises(error):
            client.append(b"abandoned", partition=0).result()
        waltz_memory.fail_next_append(0, error("as planned"))
        assert client.append(b"after", partition=0).result() == 1


def test_an_injected_failure_fails_the_whole_batch(waltz_memory):
    none = [[], []]
    rows = encode_append([0, 0], [b"a", b"b"], write_locks=none, read_locks=none, append_locks=none)
    with waltz_memory.client() as client:
        waltz_memory.fail_next_append(1, errors.BadRequest("not this one"))
        with pytest.raises(errors.BadRequest, match="not this one"):
            client.append_batch(0, rows, 2, client_high_water_mark=-1).result()
        outcome = client.append_batch(0, rows, 2, client_high_water_mark=-1).result()
        assert outcome.transaction_ids.tolist() == [0, 1]


def test_a_context_is_retried_after_a_failure(waltz_memory):
    with waltz_memory.client() as client:
        waltz_memory.fail_next_append(2, errors.Overloaded("as planned"))
        context = RecordingContext(0)
        assert client.submit(context).result() == 0
        assert len(context.marks) == 3


@pytest.mark.parametrize("enters_log", [True, False])
def test_a_client_continues_after_an_unknown_outcome(waltz_memory, enters_log):
    # Long enough for the following requests of the client, too.
    patient = replace(SHORT, request_timeout_ms=2_000)
    with waltz_memory.client(patient) as client, waltz_memory.client() as other:
        waltz_memory.fail_next_append(1, errors.OutcomeUnknown("no server"), enters_log=enters_log)
        context = RecordingContext(0)
        with pytest.raises(errors.OutcomeUnknown):
            client.submit(context).result()
        assert context.has_ended.wait(TEST_TIMEOUT_S)
        assert context.hooks == [("exception", errors.OutcomeUnknown)]
        assert len(waltz_memory.transactions(0)) == enters_log
        for number, each in enumerate((other, client)):
            assert each.append(b"next", partition=0).result() == enters_log + number


def test_fail_next_append_rejects_errors_that_appends_never_raise(waltz_memory):
    for error in (errors.DataLoss("?"), errors.WaltzError("?"), errors.Unreachable("?")):
        with pytest.raises(errors.BadRequest, match=type(error).__name__):
            waltz_memory.fail_next_append(1, error)


# --- faults


def faulty_run(seed: int) -> tuple[int, list[bytes]]:
    with MemoryWaltz(1, seed=seed, fault_rate=0.3) as waltz, waltz.client() as client:
        for i in range(25):
            assert client.append(b"%d" % i).result() == i
        return waltz.fault_count, [transaction.data for transaction in waltz.transactions(0)]


def test_lost_appends_and_answers_are_retried_and_determined_by_the_seed():
    one, same, other = faulty_run(1), faulty_run(1), faulty_run(2)
    assert one == same
    assert one[0] != other[0]
    assert one[0] > 5
    assert one[1] == other[1] == [b"%d" % i for i in range(25)]


def test_answers_have_the_configured_delay():
    with MemoryWaltz(1, delay_ms=(30, 60)) as waltz, waltz.client() as client:
        client.mount()
        began = time.monotonic()
        futures = [client.append(b"") for _ in range(20)]
        assert [future.result() for future in futures] == list(range(20))
        assert time.monotonic() - began >= 0.03
        waltz.delay_ms = 0
        assert waltz.delay_ms == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_ms": -1},
        {"delay_ms": (3, 2)},
        {"fault_rate": 1.5},
        {"fault_rate": -0.1},
        {"partition_count": 0},
    ],
)
def test_fault_settings_have_bounds(wrong):
    with pytest.raises(errors.BadRequest):
        MemoryWaltz(**wrong)


# --- the feed


def test_a_suspended_feed_holds_back_committed_transactions(waltz_memory):
    with waltz_memory.client() as client:
        ledger = RecordingCallbacks(-1)
        client.subscribe(ledger, [0])
        client.append(b"a", partition=0).result()
        ledger.wait_until(lambda: ledger.applied_ids == [0])
        waltz_memory.suspend_feed()
        # A client that has not applied the transaction lags, and continues to lag.
        won = client.append(b"b", partition=0, append_locks=[lock("recorded")]).result()
        for timeout_ms in (100, 1_000, 10_000, 100_000):
            context = RecordingContext(0)
            context.timeout_ms = timeout_ms
            with pytest.raises(errors.Unavailable) as timeout_error:
                client.submit(context).result()
            if "lock failure" in context.hooks:
                break
            # On a busy machine, the context may end before its append is rejected. The next context
            # has more time.
        assert isinstance(timeout_error.value, errors.ViewBehind)
        assert (ledger.applied_ids, context.marks) == ([0], [0])
        waltz_memory.resume_feed()
        ledger.wait_until(lambda: ledger.applied_ids == [0, won])
        assert client.submit(RecordingContext(0)).result() == won + 1


def test_a_subscription_to_a_suspended_feed_waits_and_can_be_closed(waltz_memory):
    with waltz_memory.client() as client:
        client.append(b"a", partition=0).result()
        waltz_memory.suspend_feed()
        ledger = RecordingCallbacks(-1)
        client.subscribe(ledger, [0])
        client.append(b"b", partition=0).result()
    assert ledger.applied_ids == []
    waltz_memory.resume_feed()


# --- open and close


def test_closing_memory_waltz_closes_its_clients_and_ends_its_thread():
    waltz = MemoryWaltz(1)
    client = waltz.client()
    client.append(b"a").result()
    waltz.close()
    waltz.close()
    with pytest.raises(errors.UsageError, match="closed"):
        client.append(b"b")
    assert not [each for each in threading.enumerate() if each.name == "waltz-memory"]
    assert [transaction.data for transaction in waltz.transactions(0)] == [b"a"]
    with pytest.raises(errors.UnknownPartition):
        waltz.transactions(1)


def test_pending_retries_end_with_the_client(monkeypatch):
    monkeypatch.setattr(appends, "RESEND_WHEN_FULL_DELAY_S", 600)
    with MemoryWaltz(1) as waltz:
        waltz.fail_next_append(2, errors.NoSpace("the disk is full"))
        with waltz.client(SHORT) as client:
            futures = [client.append(b"held", partition=0) for _ in range(2)]
        for future in futures:
            with pytest.raises(errors.Unreachable):
                future.result(TEST_TIMEOUT_S)
        assert waltz.transactions(0) == []


def test_a_partition_in_memory_needs_no_checkpoint(monkeypatch):
    """In memory, there is no replica whose mark a checkpoint would move."""
    limits = partial(PartitionLimits, checkpoint_interval_ms=1)
    monkeypatch.setattr("waltz_core.server.process.server_in_memory.PartitionLimits", limits)
    rows, none = [b""] * 16_000, [[]] * 16_000
    payload = encode_append(
        [0] * 16_000, rows, write_locks=none, read_locks=none, append_locks=none
    )
    with MemoryWaltz(1) as waltz, waltz.client() as client:
        for _ in range(16):
            client.append_batch(0, payload, 16_000, client_high_water_mark=-1).result(
                TEST_TIMEOUT_S
            )
        assert client.append(b"one more", partition=0).result(TEST_TIMEOUT_S) == 16 * 16_000
