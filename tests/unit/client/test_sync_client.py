"""The sync client when one thread closes it while another one uses it."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import Callbacks, TransactionContext, WaltzClient, lock
from waltz_core.client.api.sync_client import WORKERS_MAX
from waltz_core.client.api.thread_outcome import ThreadOutcome
from waltz_core.client.links.directory import ClusterInfo, ClusterLayout
from waltz_core.client.read import data_cache
from waltz_core.client.read.data_cache import DataBudget, DataCache
from waltz_core.client.read.feed_delivery import DELIVERY_S_MAX
from waltz_core.memory_waltz import MemoryWaltz

LAYOUT = ClusterLayout(
    "127.0.0.1:1/never_asked", ClusterInfo("shop", bytes(16), 3), {0: ("a:1", 1)}
)


class FunctionCallbacks(Callbacks):
    """Calls a function for each transaction."""

    def __init__(self, apply) -> None:
        self.apply = apply

    def client_high_water_mark(self, partition):
        return -1

    def apply_transaction(self, transaction):
        self.apply(transaction)

    def uncaught_exception(self, partition, transaction_id, error):
        raise error


class CopyContext(TransactionContext):
    """Appends a row to another partition."""

    def __init__(self, partition: int) -> None:
        super().__init__()
        self.partition = partition
        self.locks: list[int] = []

    def partition_id(self, partition_count):
        return self.partition

    def execute(self, builder):
        builder.set_transaction_data(b"copy")
        builder.set_write_locks(self.locks)
        return True


def test_callbacks_that_wait_for_contexts_do_not_deadlock():
    """There is one more callback than threads for contexts."""
    count = WORKERS_MAX + 1
    barrier, completed = threading.Barrier(count), []
    with MemoryWaltz(2 * count) as log, log.client() as client, log.client() as writer:

        def apply(transaction):
            barrier.wait(TEST_TIMEOUT_S)
            client.submit(CopyContext(count + transaction.partition_id)).result(TEST_TIMEOUT_S)
            completed.append(transaction.partition_id)

        client.subscribe(FunctionCallbacks(apply), range(count))
        for partition in range(count):
            writer.append(b"x", partition=partition).result(TEST_TIMEOUT_S)
        for partition in range(count):
            wait_until(lambda partition=partition: log.transactions(count + partition))
        wait_until(lambda: len(completed) == count)
        assert sorted(completed) == list(range(count))


async def wait_forever(*_, **__):
    await asyncio.Event().wait()


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.005)


def test_the_error_for_a_timed_out_wait_for_an_outcome_names_the_cause():
    outcome = ThreadOutcome(lambda: "partition 0: the client is not connected yet")
    with pytest.raises(
        TimeoutError, match="no outcome within 0 s: partition 0: the client is not connected yet"
    ):
        outcome.result(0)
    outcome.set_exception(TimeoutError("of the application"))
    with pytest.raises(TimeoutError, match="of the application"):
        outcome.result(0)
    with MemoryWaltz() as waltz, waltz.client() as client:
        appended = client.append(b"x", partition=0)
        assert isinstance(appended, ThreadOutcome)
        assert appended.result() == 0


def test_a_closed_client_cannot_be_used_in_a_with_statement():
    client = WaltzClient.at(LAYOUT)
    client.close()
    with pytest.raises(errors.UsageError, match="the client is closed"):
        client.__enter__()


def test_tasks_started_during_the_shutdown_are_cancelled():
    """A callback's thread may request data after the client's loop has stopped."""
    client, has_started, late_tasks = WaltzClient.at(LAYOUT), threading.Event(), []

    async def replaced():
        has_started.set()
        try:
            await wait_forever()
        finally:
            late_tasks.append(asyncio.get_running_loop().create_task(wait_forever()))

    request = asyncio.run_coroutine_threadsafe(replaced(), client._loop)
    assert has_started.wait(TEST_TIMEOUT_S)
    client.close()
    assert request.cancelled()  # keeps a reference to the task; the loop has only a weak one
    assert [task.cancelled() for task in late_tasks] == [True]


def test_a_transaction_counts_as_applied_while_the_next_callback_blocks():
    """The second transaction blocks; the error of a context reports the first one as applied."""
    second_began, may_continue = threading.Event(), threading.Event()

    def apply(transaction):
        until_s = time.monotonic() + 2 * DELIVERY_S_MAX
        while transaction.transaction_id == 0 and time.monotonic() < until_s:
            time.sleep(DELIVERY_S_MAX)
        if transaction.transaction_id == 1:
            second_began.set()
            may_continue.wait(TEST_TIMEOUT_S)

    with MemoryWaltz(1) as log, log.client() as writer:
        seat_lock = lock("seat", 1)
        for _ in range(10):
            writer.append(b"x", partition=0, append_locks=[seat_lock]).result(TEST_TIMEOUT_S)
        with log.client() as client:
            client.subscribe(FunctionCallbacks(apply))
            assert second_began.wait(TEST_TIMEOUT_S)
            for timeout_ms in (500, 5_000, 50_000):
                context = CopyContext(0)
                context.locks, context.timeout_ms = [seat_lock], timeout_ms
                with pytest.raises(errors.Unavailable) as caught:
                    client.submit(context).result(TEST_TIMEOUT_S)
                if isinstance(caught.value, errors.ViewBehind):
                    break
                # On a busy machine, the context may end before it is rejected. The next context has
                # more time.
            may_continue.set()
    assert isinstance(caught.value, errors.ViewBehind)
    assert (caught.value.applied, caught.value.high_water_mark) == (0, 9)


def test_a_callback_may_close_a_client_that_another_thread_closes():
    """The callback and the other thread do not wait for each other."""
    callback_began, closing, has_closed = threading.Event(), threading.Event(), threading.Event()
    with MemoryWaltz(1) as log, log.client() as writer:
        client = log.client()

        def apply(_transaction):
            callback_began.set()
            assert closing.wait(TEST_TIMEOUT_S)
            client.close()
            has_closed.set()

        client.subscribe(FunctionCallbacks(apply))
        writer.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        assert callback_began.wait(TEST_TIMEOUT_S)
        closer = threading.Thread(target=client.close)
        closer.start()
        wait_until(client._loop.is_closed)
        closing.set()
        closer.join(20)  # less than the time for which `close` waits for callbacks
        assert not closer.is_alive()
        assert has_closed.is_set()


def test_ctrl_c_during_a_range_read_raises_keyboard_interrupt(monkeypatch):
    with MemoryWaltz(1) as log, log.client() as client:
        client.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        is_requested = threading.Event()

        async def wait_forever(*_, **__):
            is_requested.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(client._client.requests, "fetch_range", wait_forever)
        chunks = client.read_range(0, 0, 0)
        main = threading.get_ident()

        raised = threading.Event()

        def raise_once(*_):
            if not raised.is_set():
                raised.set()
                raise KeyboardInterrupt

        def interrupt():
            assert is_requested.wait(TEST_TIMEOUT_S)
            # Python delays a signal that arrives just before its thread waits for a lock.
            while not raised.wait(0.05):
                signal.pthread_kill(main, signal.SIGINT)

        before = signal.signal(signal.SIGINT, raise_once)
        try:
            signal_thread = threading.Thread(target=interrupt)
            signal_thread.start()
            with pytest.raises(KeyboardInterrupt):
                next(chunks)
            signal_thread.join()
        finally:
            signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_a_fetch_is_submitted_ends_the_fetch(monkeypatch):
    """The fetch has begun, and no caller has its future yet."""
    with MemoryWaltz(1) as log, log.client() as client:
        client.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        is_requested, run_threadsafe = threading.Event(), asyncio.run_coroutine_threadsafe

        async def wait_forever(*_, **__):
            is_requested.set()
            await asyncio.Event().wait()

        def run_and_interrupt(call, loop):
            run_threadsafe(call, loop)
            assert is_requested.wait(TEST_TIMEOUT_S)
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_threadsafe)
            raise KeyboardInterrupt

        monkeypatch.setattr(client._client.requests, "fetch_range", wait_forever)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_and_interrupt)
        reader = threading.Thread(target=lambda: list_interrupted(client), daemon=True)
        reader.start()
        reader.join(TEST_TIMEOUT_S)
        assert not reader.is_alive()


def list_interrupted(client):
    with pytest.raises(KeyboardInterrupt):
        next(client.read_range(0, 0, 0))


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.add_owners(LAYOUT),
        lambda client: client.high_water_mark(0),
        lambda client: client.append(b"x", partition=0),
    ],
)
def test_a_call_fails_if_the_client_closes_before_the_call_reaches_the_event_loop(
    monkeypatch, call
):
    """The client is closed after the check that it is open, before the call is in its loop."""
    client = WaltzClient.at(LAYOUT)
    check_usable = client._check_usable

    def check_and_close():
        check_usable()
        client.close()

    monkeypatch.setattr(client, "_check_usable", check_and_close)
    with pytest.raises(errors.UsageError, match="the client is closed"):
        call(client)


def test_a_call_after_the_end_of_the_event_loop_fails_and_does_not_hang(monkeypatch):
    """Between the end of its thread and its close, a loop accepts calls and never runs them."""
    client = WaltzClient.at(LAYOUT)
    join, finished = client._thread.join, []

    def join_and_use(*_):
        join()
        with pytest.raises(errors.UsageError, match="the client is closed"):
            client._wait_for_result(client._client.high_water_mark(0))
        finished.append(True)

    monkeypatch.setattr(client._thread, "join", join_and_use)
    client.close()
    assert finished


@pytest.mark.parametrize("is_closed_first", [True, False])
def test_a_signal_handler_may_close_the_client_during_a_call(monkeypatch, is_closed_first):
    """The handler runs on the interrupted thread, at any point of its code."""
    client = WaltzClient.at(LAYOUT)
    run_threadsafe, finished = asyncio.run_coroutine_threadsafe, []

    def submit_and_interrupt(call, loop):
        monkeypatch.undo()
        if is_closed_first:
            client.close()
        given = run_threadsafe(call, loop)
        client.close()
        return given

    def call_client():
        with pytest.raises(errors.UsageError, match="the client is closed"):
            client.high_water_mark(0)
        finished.append(True)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_and_interrupt)
    client._client.high_water_mark = wait_forever
    caller_thread = threading.Thread(target=call_client, daemon=True)
    caller_thread.start()
    caller_thread.join(TEST_TIMEOUT_S)
    assert finished


def test_a_signal_handler_may_close_the_client_during_its_close(monkeypatch):
    client = WaltzClient.at(LAYOUT)
    wait = client._wait_for_result

    def wait_and_be_interrupted(call):
        monkeypatch.undo()
        client.close()
        return wait(call)

    monkeypatch.setattr(client, "_wait_for_result", wait_and_be_interrupted)
    closer = threading.Thread(target=client.close, daemon=True)
    closer.start()
    closer.join(TEST_TIMEOUT_S)
    assert not closer.is_alive()


def test_a_waiting_call_fails_when_another_thread_closes_the_client(monkeypatch):
    client = WaltzClient.at(LAYOUT)
    call_began, finished = threading.Event(), []

    async def wait_forever(*_, **__):
        call_began.set()
        await asyncio.Event().wait()

    def call_client():
        with pytest.raises(errors.UsageError, match="the client is closed"):
            client.high_water_mark(0)
        finished.append(True)

    monkeypatch.setattr(client._client, "high_water_mark", wait_forever)
    caller_thread = threading.Thread(target=call_client)
    caller_thread.start()
    assert call_began.wait(TEST_TIMEOUT_S)
    client.close()
    caller_thread.join(TEST_TIMEOUT_S)
    assert finished


class ChangingState:
    """A partition or feed that calls `change` whenever a thread reads it."""

    def __init__(self, change) -> None:
        self._change = change

    @property
    def appends(self):
        self._change()
        return SimpleNamespace(has_pending=False)

    @property
    def is_delivering(self):
        self._change()
        return True


def test_a_thread_may_read_the_partitions_while_they_change(monkeypatch):
    with MemoryWaltz(1) as waltz, waltz.client() as client:
        inner = client._client
        partitions, feeds = {}, {}
        partitions[0] = ChangingState(lambda: partitions.setdefault(1, None))
        feeds[0] = ChangingState(lambda: feeds.pop(1, None))
        feeds[1] = feeds[0]
        monkeypatch.setattr(inner, "_partitions", partitions)
        monkeypatch.setattr(inner.subscriptions, "_feeds", feeds)
        assert not client.has_pending
        assert client.partitions == (0,)
        monkeypatch.undo()


def test_ctrl_c_while_a_client_is_closed_ends_all_waiting_calls(monkeypatch):
    """The loop ends before all outcomes are known. Other threads get the outcomes known by then."""
    with MemoryWaltz(1) as waltz:
        client = waltz.client()
        client.mount([0])
        waltz.delay_ms = 1_000 * TEST_TIMEOUT_S
        futures = [client.append(b"one", partition=0), client.submit(CopyContext(0))]

        def wait_and_be_interrupted(call):
            outcome = asyncio.run_coroutine_threadsafe(call, client._loop)
            deadline_s = time.monotonic() + TEST_TIMEOUT_S
            while client._client._close_task is None:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            outcome.cancel()
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "_wait_for_result", wait_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.close()
        for future in futures:
            with pytest.raises(errors.OutcomeUnknown):
                future.result(TEST_TIMEOUT_S)


def test_a_fetch_after_the_end_of_the_event_loop_reports_a_closed_client(monkeypatch):
    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # as if the loop had ended just now
    cache = DataCache(
        None, None, mark=lambda: 7, bytes_max=1_000, budget=DataBudget(1_000), loop=loop
    )
    with pytest.raises(errors.Unavailable, match="the client is closed"):
        cache.data_of_blocking(3)


def test_an_unfinished_fetch_of_a_stopped_loop_leaves_no_coroutine(monkeypatch):
    monkeypatch.setattr(data_cache, "POLL_INTERVAL_S", 0.001)
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "is_closed", lambda: True)  # the loop ends before the call runs
    cache = DataCache(
        None, None, mark=lambda: 7, bytes_max=1_000, budget=DataBudget(1_000), loop=loop
    )
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: None)
    with pytest.raises(errors.Unavailable, match="the client is closed"):
        cache.data_of_blocking(3)
    gc.collect()
    monkeypatch.undo()
    loop.close()


class CancelledContext(CopyContext):
    """Raises the error of a cancelled future."""

    def execute(self, builder):
        raise CancelledError


def test_exception_cancelled_error_in_a_context_is_the_error_of_the_context():
    with MemoryWaltz(1) as log, log.client() as client:
        future = client.submit(CancelledContext(0))
        with pytest.raises(RuntimeError, match="CancelledError"):
            future.result(TEST_TIMEOUT_S)


def test_exception_cancelled_error_in_the_error_policy_stops_the_feed():
    def apply(_transaction):
        raise CancelledError

    with MemoryWaltz(1) as log, log.client() as client:
        client.subscribe(FunctionCallbacks(apply))  # `uncaught_exception` raises the same error
        client.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        applier = client._client._partitions[0].applier
        wait_until(lambda: applier.stopped is not None)
        assert client.partitions == ()


@pytest.mark.parametrize("is_closed_by", ["thread", "callback"])
def test_every_call_of_close_waits_for_running_callbacks(is_closed_by):
    """A callback or another thread may already be closing the client.

    A new client in the same process must not apply while a callback of this one still applies.
    """
    callback_began, may_end, ended = threading.Event(), threading.Event(), []
    with MemoryWaltz(1) as log, log.client() as writer:
        client = log.client()

        def apply(_transaction):
            if is_closed_by == "callback":
                client.close()
            callback_began.set()
            may_end.wait(TEST_TIMEOUT_S)
            ended.append(True)

        client.subscribe(FunctionCallbacks(apply))
        writer.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        assert callback_began.wait(TEST_TIMEOUT_S)
        closing_threads = [threading.Thread(target=client.close) for _ in range(2)]
        closing_threads[0].start()
        wait_until(client._loop.is_closed)
        closing_threads[1].start()
        closing_threads[1].join(0.2)
        assert all(closing_thread.is_alive() for closing_thread in closing_threads)
        assert not ended
        may_end.set()
        for closing_thread in closing_threads:
            closing_thread.join(TEST_TIMEOUT_S)
        assert ended == [True]


def test_a_callback_waits_for_the_callbacks_of_another_client_that_it_closes():
    callback_began, may_end, closing, ended = (threading.Event() for _ in range(4))
    with MemoryWaltz(1) as log, log.client() as writer, log.client() as first_client:
        second_client = log.client()

        def apply_slowly(_transaction):
            callback_began.set()
            may_end.wait(TEST_TIMEOUT_S)

        def close_other(_transaction):
            second_client.set_partitions([0])  # the other client has no running callback
            closing.set()
            second_client.close()
            ended.set()

        second_client.subscribe(FunctionCallbacks(apply_slowly))
        writer.append(b"x", partition=0).result(TEST_TIMEOUT_S)
        assert callback_began.wait(TEST_TIMEOUT_S)
        first_client.subscribe(FunctionCallbacks(close_other))
        assert closing.wait(TEST_TIMEOUT_S)
        wait_until(second_client._loop.is_closed)
        assert not ended.wait(0.2)
        may_end.set()
        assert ended.wait(TEST_TIMEOUT_S)


def test_hooks_that_wait_for_contexts_do_not_deadlock():
    count = WORKERS_MAX + 1
    barrier, completed = threading.Barrier(count), []
    with MemoryWaltz(2 * count) as log, log.client() as client:

        class FailingContext(CopyContext):
            def on_completion(self, result):
                barrier.wait(TEST_TIMEOUT_S)
                completed.append(
                    client.submit(CopyContext(count + self.partition)).result(TEST_TIMEOUT_S)
                )

        futures = [client.submit(FailingContext(partition)) for partition in range(count)]
        assert [future.result(TEST_TIMEOUT_S) for future in futures] == [0] * count
        wait_until(lambda: len(completed) == count or barrier.broken)
        assert completed == [0] * count


NOT_CLOSED = """
import time

from waltz_core.client import Callbacks, TransactionContext
from waltz_core.memory_waltz import MemoryWaltz


class Applying(Callbacks):
    def apply_transaction(self, transaction):
        time.sleep(0.01)


class Late(TransactionContext):
    def partition_id(self, partition_count):
        return 1

    def execute(self, builder):
        time.sleep(0.01)
        builder.set_transaction_data(1)
        builder.set_write_locks([7])
        return True


client = MemoryWaltz(partition_count=4).client()
client.subscribe(Applying())
for number in range(40):
    client.append(b"x", partition=0)
for number in range(5):
    client.submit(Late())
raise RuntimeError("boom")
"""


def test_a_client_that_is_not_closed_when_the_program_fails_adds_no_tracebacks(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(NOT_CLOSED)
    ended = subprocess.run(
        [sys.executable, "-W", "default:a WaltzClient:ResourceWarning", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.count("RuntimeError: boom\n") == 1
    assert ended.stderr.count("a WaltzClient was not closed") <= 1
    assert "feed.stopped" not in ended.stderr
