"""Partitions are subscribed, paused and resumed while a client runs."""

import asyncio
import contextlib
from collections import defaultdict

import pytest

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import memory_cluster, two_clients
from tests.unit.client.test_async_client import SHORT_TIMEOUTS, CounterContext, batch_of, wait_until
from waltz_core import errors
from waltz_core.client import LATEST, AsyncCallbacks, PoisonPolicy, TransactionContext, lock
from waltz_core.client.read.feed_delivery import DELIVERY_S_MAX


class ResumingCallbacks(AsyncCallbacks):
    """Keeps the applied IDs, and resumes after the last one."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = defaultdict(list)
        self.mark_requests: list[int] = []
        self.state = {"value": 0}
        self.errors: list[tuple[int, int]] = []
        self.poison: set[tuple[int, int]] = set()
        self.policy = PoisonPolicy.STOP
        self.may_continue = asyncio.Event()
        self.may_continue.set()
        self.is_applying = False

    async def client_high_water_mark(self, partition):
        self.mark_requests.append(partition)
        seen = self.seen[partition]
        return seen[-1] if seen else -1

    async def apply_transaction(self, transaction):
        self.is_applying = True
        await self.may_continue.wait()
        place = (transaction.partition_id, transaction.transaction_id)
        if place in self.poison:
            raise ValueError("poison")
        if transaction.header == 3:
            self.state["value"] = await transaction.value()
        self.seen[transaction.partition_id].append(transaction.transaction_id)
        self.is_applying = False

    async def uncaught_exception(self, partition, transaction_id, error):
        self.errors.append((partition, transaction_id))
        return self.policy


class RepeatedContext(CounterContext):
    """Counts its attempts."""

    attempts = 0

    def execute(self, builder):
        self.attempts += 1
        return super().execute(builder)


async def write(client, partition, count):
    payload = batch_of(*(b"%d" % i for i in range(count)))
    await (await client.append_batch(partition, payload, count, client_high_water_mark=-1))


@run_on_virtual_loop
async def test_partitions_are_paused_and_resumed_from_their_mark():
    async with (
        memory_cluster(partition_count=3) as cluster,
        cluster.client().open_during() as client,
    ):
        callbacks = ResumingCallbacks()
        assert client.partitions == ()
        await client.subscribe(callbacks, [0, 1])
        assert client.partitions == (0, 1)
        for number in range(3):
            await write(client, number, 5)
        await wait_until(lambda: len(callbacks.seen[0]) == len(callbacks.seen[1]) == 5)
        await client.set_partitions([1, 2])
        assert client.partitions == (1, 2)
        for number in range(3):
            await write(client, number, 5)
        await wait_until(lambda: len(callbacks.seen[1]) == len(callbacks.seen[2]) == 10)
        assert callbacks.seen[0] == list(range(5))
        await client.set_partitions(range(3))
        await wait_until(lambda: len(callbacks.seen[0]) == 10)
        assert all(callbacks.seen[number] == list(range(10)) for number in range(3))
        assert callbacks.mark_requests == [0, 1, 2, 0]
        await client.set_partitions([])
        assert client.partitions == ()


@run_on_virtual_loop
async def test_a_subscription_begins_at_the_mark_of_the_application():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await write(client, 0, 5)
        callbacks = ResumingCallbacks()
        callbacks.seen[0].append(2)
        await client.subscribe(callbacks, [0])
        # The loop has not run since then, so a context that is submitted here takes this mark.
        assert client._partitions[0].mark == 2


@run_on_virtual_loop
async def test_a_feed_from_latest_starts_at_the_mark_of_the_log():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await write(client, 0, 5)
        callbacks = ResumingCallbacks()
        callbacks.seen[0].append(LATEST)
        callbacks.may_continue.clear()
        await client.subscribe(callbacks, [0])
        partition = client._partitions[0]
        await wait_until(lambda: partition.applier.mark == 4)
        await write(client, 0, 5)
        await wait_until(lambda: callbacks.is_applying)
        # The client has received ten transactions; the application has applied five.
        assert (partition.stream.high_water_mark, partition.mark) == (9, 4)
        callbacks.may_continue.set()
        await wait_until(lambda: callbacks.seen[0][-1] == 9)
        assert partition.mark == 9


@run_on_virtual_loop
async def test_a_transaction_counts_as_applied_while_the_next_callback_blocks():
    second_began = asyncio.Event()

    class SlowCallbacks(ResumingCallbacks):
        async def apply_transaction(self, transaction):
            loop = asyncio.get_running_loop()
            until_s = loop.time() + 2 * DELIVERY_S_MAX
            while transaction.transaction_id == 0 and loop.time() < until_s:  # noqa: ASYNC110 - time has to pass
                await asyncio.sleep(DELIVERY_S_MAX)
            if transaction.transaction_id > 0:
                second_began.set()
                await self.may_continue.wait()

    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await write(client, 0, 10)
        callbacks = SlowCallbacks()
        callbacks.may_continue.clear()
        await client.subscribe(callbacks, [0])
        await second_began.wait()
        assert client._partitions[0].mark == 0
        callbacks.may_continue.set()


@run_on_virtual_loop
async def test_a_feed_ends_after_the_transaction_that_is_being_applied():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = ResumingCallbacks()
        await write(client, 0, 100)
        callbacks.may_continue.clear()
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.is_applying)
        setting = asyncio.get_running_loop().create_task(client.set_partitions([]))
        while client.partitions:  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0)
        assert not setting.done()
        callbacks.may_continue.set()
        await setting
        assert callbacks.seen[0] == [0]


@run_on_virtual_loop
async def test_a_feed_that_a_failing_transaction_has_stopped_can_be_started_again():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = ResumingCallbacks()
        callbacks.poison.add((0, 2))
        await client.subscribe(callbacks, [0])
        await write(client, 0, 5)
        await wait_until(lambda: callbacks.errors)
        await wait_until(lambda: client.partitions == ())
        callbacks.poison.clear()
        await client.set_partitions([0])
        await wait_until(lambda: len(callbacks.seen[0]) >= 5)
        assert callbacks.seen[0] == list(range(5))


@run_on_virtual_loop
async def test_a_feed_can_end_while_a_transaction_is_retried():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = ResumingCallbacks()
        callbacks.policy = PoisonPolicy.RETRY
        callbacks.poison.add((0, 0))
        await client.subscribe(callbacks, [0])
        await write(client, 0, 1)
        await wait_until(lambda: len(callbacks.errors) >= 3)
        await client.set_partitions([])
        assert callbacks.seen[0] == []


@run_on_virtual_loop
async def test_a_context_waits_while_its_partition_is_paused():
    """A context computes from applied transactions; without a feed, these would be outdated."""
    async with two_clients() as (_, first_client, second_client):
        callbacks_of_one, callbacks = ResumingCallbacks(), ResumingCallbacks()
        await first_client.subscribe(callbacks_of_one, [0])
        await second_client.subscribe(callbacks, [0])
        await (await first_client.submit(CounterContext(callbacks_of_one.state)))
        await wait_until(lambda: callbacks.state["value"] == 1)
        callbacks.may_continue.clear()
        for _ in range(2):
            await (await first_client.submit(CounterContext(callbacks_of_one.state)))
        await wait_until(lambda: callbacks.is_applying)
        context = RepeatedContext(callbacks.state)
        future = await second_client.submit(context)
        await wait_until(lambda: "lock failure" in context.called_hooks)
        async with asyncio.TaskGroup() as group:
            pausing = group.create_task(second_client.set_partitions([]))
            await wait_until(lambda: second_client.partitions == ())
            assert not pausing.done()
            callbacks.may_continue.set()
        assert callbacks.state["value"] == 2
        await second_client.set_partitions([0])
        await future
        await wait_until(lambda: callbacks.state["value"] == 4)
        assert context.attempts == 2, "no attempt without a newer state"


@run_on_virtual_loop
async def test_a_context_expires_if_its_partition_stays_paused():
    async with two_clients() as (_, first_client, second_client):
        callbacks = ResumingCallbacks()
        await second_client.subscribe(callbacks, [0])
        callbacks.may_continue.clear()
        await (await first_client.submit(CounterContext({"value": 0})))
        await wait_until(lambda: callbacks.is_applying)
        context = RepeatedContext(callbacks.state)
        context.timeout_ms = 300
        future = await second_client.submit(context)
        await wait_until(lambda: "lock failure" in context.called_hooks)
        async with asyncio.TaskGroup() as group:
            group.create_task(second_client.set_partitions([]))
            callbacks.may_continue.set()
        with pytest.raises(errors.LockFailed):
            await future
        assert context.attempts == 1


@run_on_virtual_loop
async def test_invalid_partitions_and_filters_are_reported():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        with pytest.raises(errors.UsageError, match="subscribe first"):
            await client.set_partitions([0])
        callbacks = ResumingCallbacks()
        for headers, message in (
            ([], "1 to 1000 headers, found 0"),
            (range(1_001), "found 1001"),
            ([1 << 31], "32-bit"),
        ):
            with pytest.raises(errors.BadRequest, match=message):
                await client.subscribe(callbacks, headers=headers)
        assert client.partitions == ()
        await client.subscribe(callbacks, [0])
        with pytest.raises(errors.UnknownPartition):
            await client.set_partitions([0, 9])
        with pytest.raises(errors.BadRequest, match="is already subscribed"):
            await client.subscribe(callbacks, [0])
        assert client.partitions == (0,)


@run_on_virtual_loop
async def test_calling_set_partitions_in_a_callback_is_a_usage_error():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:

        class ImpatientCallbacks(ResumingCallbacks):
            async def apply_transaction(self, transaction):
                await client.set_partitions([1])

        callbacks = ImpatientCallbacks()
        failures = []

        async def uncaught(partition, transaction_id, error):
            failures.append(error)
            return PoisonPolicy.STOP

        callbacks.uncaught_exception = uncaught
        await client.subscribe(callbacks, [0])
        await write(client, 0, 1)
        await wait_until(lambda: failures)
        assert isinstance(failures[0], errors.UsageError)
        assert "call it outside of callbacks." in str(failures[0])


# ---------------------------------------------------------------------------------------------
# filters


async def write_headers(client, partition, *headers):
    for header in headers:
        await (await client.append(b"%d" % header, partition=partition, header=header))


class DataCallbacks(ResumingCallbacks):
    """Reads the data of each transaction."""

    def __init__(self, mark: int = -1) -> None:
        super().__init__()
        self.start = mark
        self.payloads: list[bytes] = []

    async def client_high_water_mark(self, partition):
        return self.start

    async def apply_transaction(self, transaction):
        self.payloads.append(await transaction.data())
        self.seen[transaction.partition_id].append(transaction.transaction_id)


@run_on_virtual_loop
async def test_a_filtered_feed_delivers_matching_transactions_and_the_mark_advances():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await write_headers(client, 0, 7, 8, 9, 8, 8)
        callbacks = DataCallbacks()
        await client.subscribe(callbacks, [0], headers=[7, 9])
        await wait_until(lambda: len(callbacks.seen[0]) == 2)
        await write_headers(client, 0, 8, 8, 7, 8)
        partition = client._partitions[0]
        await wait_until(lambda: partition.mark == 8)
        assert callbacks.seen[0] == [0, 2, 7]
        assert callbacks.payloads == [b"7", b"9", b"7"]
        cluster.servers[0].cut()
        await write_headers(client, 0, 8, 9)
        await wait_until(lambda: partition.mark == 10)
        assert callbacks.seen[0] == [0, 2, 7, 10]


@run_on_virtual_loop
async def test_a_filtered_feed_catches_up_in_filtered_ranges():
    async with memory_cluster() as cluster, cluster.client(SHORT_TIMEOUTS).open_during() as client:
        rows = 2_000
        for number in range(5):
            payload = batch_of(*[b"x" * 20] * rows, header=number)
            await (await client.append_batch(0, payload, rows, client_high_water_mark=-1))
        callbacks = DataCallbacks()
        await client.subscribe(callbacks, [0], headers=[1, 4])
        await wait_until(lambda: client._partitions[0].mark == 5 * rows - 1)
        expected = [*range(rows, 2 * rows), *range(4 * rows, 5 * rows)]
        assert callbacks.seen[0] == expected
        assert callbacks.payloads == [b"x" * 20] * len(expected)


@run_on_virtual_loop
async def test_a_context_is_computed_again_after_a_conflict_with_a_filtered_out_transaction():
    async with two_clients() as (_, first_client, second_client):
        callbacks = DataCallbacks()
        await second_client.subscribe(callbacks, [0], headers=[99])
        marks = []
        context = CounterContext({"value": 0})
        plain = context.execute

        def execute(builder):
            if not marks:  # the first attempt is already outdated
                builder.client_high_water_mark = -1
            marks.append(builder.client_high_water_mark)
            return plain(builder)

        context.execute = execute
        await write_headers(first_client, 0, 1, 1)
        await (await first_client.append(b"", partition=0, header=1, write_locks=[lock("counter")]))
        await (await second_client.submit(context))
        assert marks == [-1, 2]
        await wait_until(lambda: context.called_hooks[-1] == "applied")
        assert context.called_hooks == ["lock failure", "completed True", "applied"]
        assert callbacks.seen[0] == []


class WithdrawContext(TransactionContext):
    """Withdraws from an account after calling `compute`; records the mark of each attempt."""

    timeout_ms = 300

    def __init__(self, compute=lambda: None) -> None:
        super().__init__()
        self.compute = compute
        self.marks: list[int] = []

    def partition_id(self, partition_count):
        return 0

    async def execute(self, builder):
        self.marks.append(builder.client_high_water_mark)
        await self.compute()
        builder.set_transaction_data(b"-100")
        builder.set_write_locks([lock("account")])
        return True


@run_on_virtual_loop
async def test_after_a_partition_was_unsubscribed_appends_use_only_the_applied_mark():
    """After a partition was unsubscribed, it gets a new context, and an append without a mark."""
    account = [lock("account")]
    async with two_clients() as (_, first_client, second_client):
        callbacks = ResumingCallbacks()
        await second_client.subscribe(callbacks, [0])
        await (await first_client.append(b"1", partition=0, write_locks=account))
        await wait_until(lambda: callbacks.seen[0] == [0])
        await second_client.set_partitions([])
        later_append = await first_client.append(
            b"2", partition=0, write_locks=account, client_high_water_mark=0
        )
        await later_append
        # From this append, the client learns the end of the log.
        await (await second_client.append(b"3", partition=0))
        with pytest.raises(errors.LockFailed):
            await (await second_client.append(b"4", partition=0, write_locks=account))
        context = WithdrawContext()
        with pytest.raises(errors.Unavailable, match="had paused"):
            await (await second_client.submit(context))
        assert context.marks == []
        # The old mark applies until the application returns one for the resumed partition.
        callbacks.may_continue.clear()
        await second_client.set_partitions([0])
        with pytest.raises(errors.LockFailed):
            await (await second_client.append(b"5", partition=0, write_locks=account))
        callbacks.may_continue.set()
        await wait_until(lambda: callbacks.seen[0] == [0, 1, 2])
        assert await (await second_client.append(b"6", partition=0, write_locks=account)) == 3


@run_on_virtual_loop
async def test_a_deadline_ends_a_context_whose_function_execute_waits():
    async with two_clients() as (_, one, _two):
        context = WithdrawContext(asyncio.Event().wait)
        with pytest.raises(errors.Unavailable, match=r"after 300 ms .* execute was still running"):
            await (await one.submit(context))


@run_on_virtual_loop
async def test_a_deadline_ends_attempts_that_never_wait():
    """Another client writes the lock at each attempt; the client gets each conflict at once."""
    async with two_clients() as (_, first_client, second_client):

        async def write_concurrently():
            await (await second_client.append(b"", partition=0, append_locks=[lock("account")]))

        context = WithdrawContext(write_concurrently)
        with pytest.raises((errors.LockFailed, errors.Unavailable)):
            await (await first_client.submit(context))
        assert context.marks


@run_on_virtual_loop
async def test_exception_cancelled_error_in_a_callback_is_handled_by_its_error_policy():
    class CancellingCallbacks(ResumingCallbacks):
        async def apply_transaction(self, transaction):
            raise asyncio.CancelledError

    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = CancellingCallbacks()
        await client.subscribe(callbacks, [0])
        await write(client, 0, 2)
        await wait_until(lambda: callbacks.errors == [(0, 0)])
        applier = client._partitions[0].applier
        await wait_until(lambda: applier.stopped is not None)
        with pytest.raises(errors.Unavailable, match="CancelledError"):
            await applier.wait_until_applied(1)


@run_on_virtual_loop
async def test_a_cancelled_close_continues_and_the_next_call_of_close_waits_for_its_end():
    async with memory_cluster() as cluster:
        client = cluster.client()
        await client.open()
        await client.subscribe(ResumingCallbacks(), [0])
        closed, close = [], client.links.close

        async def noted(reason):
            await close(reason)
            closed.append(reason)

        client.links.close = noted
        closing = asyncio.get_running_loop().create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await client.close()
        assert closed
        assert not client._tasks


@run_on_virtual_loop
async def test_a_context_that_waits_for_a_feed_ends_when_its_client_closes():
    """The context waits in the caller's task, which is not cancelled."""
    async with memory_cluster() as cluster:
        client = cluster.client()
        await client.open()
        await client.subscribe(ResumingCallbacks(), [0])
        await client.set_partitions([])
        context = WithdrawContext()
        context.timeout_ms = None
        loop = asyncio.get_running_loop()
        submitting = loop.create_task(client.submit(context))
        await wait_until(lambda: client._partitions[0].is_ready)
        await client.close()
        with pytest.raises(errors.Unavailable, match="the client was closed"):
            await (await submitting)
        assert context.marks == []


class HookRecordingContext(WithdrawContext):
    """Records its outcome."""

    timeout_ms = 60_000

    def __init__(self, compute) -> None:
        super().__init__(compute)
        self.outcomes: list[object] = []

    def on_completion(self, result):
        self.outcomes.append(result)

    def on_expiration(self):
        self.outcomes.append("expired")

    def on_exception(self, error):
        self.outcomes.append(type(error))


@run_on_virtual_loop
async def test_exception_cancelled_error_in_a_context_is_the_outcome_of_the_context():
    """The caller was not cancelled, and the client is not closed."""
    async with two_clients() as (_, one, two):

        async def cancelled():
            raise asyncio.CancelledError

        first = HookRecordingContext(cancelled)
        with pytest.raises(RuntimeError, match="CancelledError"):
            await (await one.submit(first))
        assert first.outcomes == [RuntimeError]

        async def refused_then_cancelled():
            if len(later.marks) > 1:
                raise asyncio.CancelledError
            await (await two.append(b"", partition=0, append_locks=[lock("account")]))

        later = HookRecordingContext(refused_then_cancelled)
        with pytest.raises(RuntimeError, match="CancelledError"):
            await (await one.submit(later))
        assert later.outcomes == [RuntimeError]


@run_on_virtual_loop
async def test_cancelling_a_call_of_submit_raises_exception_cancelled_error():
    async with two_clients() as (_, one, _two):
        submitting = asyncio.get_running_loop().create_task(
            one.submit(HookRecordingContext(asyncio.Event().wait))
        )
        await wait_until(lambda: 0 in one._partitions and one._partitions[0].is_ready)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting


@run_on_virtual_loop
async def test_all_waits_for_a_feed_end_if_the_feed_cannot_continue():
    """For example, the process has no free thread on which to apply."""
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = ResumingCallbacks()
        await client.subscribe(callbacks, [0])

        def raise_no_thread(_partition_id):
            raise RuntimeError("can't start new thread")

        client.subscriptions.data_cache = raise_no_thread
        applier = client._partitions[0].applier
        applier._consumer._source_of = raise_no_thread
        await write(client, 0, 1)
        with pytest.raises(errors.Unavailable, match="can't start new thread"):
            await applier.wait_until_applied(0)
        assert callbacks.errors == [(0, 0)]


@run_on_virtual_loop
async def test_a_deadline_ends_a_context_whose_partition_cannot_be_mounted():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:

        async def wait_forever(*_, **__):
            await asyncio.Event().wait()

        client.directory.owner = wait_forever
        context = HookRecordingContext(lambda: None)
        context.timeout_ms = 50
        with pytest.raises(errors.Unavailable, match=r"after 50 ms .* had not mounted"):
            await (await client.submit(context))
        assert context.outcomes == ["expired"]


@run_on_virtual_loop
async def test_a_deadline_ends_a_context_that_waits_for_the_limit_of_appends_in_flight():
    async with two_clients() as (_, one, _two):
        await (await one.append(b"", partition=0))
        window = one._partitions[0].window
        await window.take(10**9, 0)

        async def return_at_once():
            pass

        context = HookRecordingContext(return_at_once)
        context.timeout_ms = 50
        with pytest.raises(errors.Unavailable, match=r"after 50 ms .* limit of appends in flight"):
            await (await one.submit(context))
        assert context.outcomes == ["expired"]
        window.release(10**9, 0)
        assert window.is_empty


class CallbacksWithoutMark:
    """Callbacks without a base class and without `client_high_water_mark`."""

    async def apply_transaction(self, transaction):
        raise AssertionError

    async def uncaught_exception(self, partition, transaction_id, error):
        raise AssertionError


@run_on_virtual_loop
async def test_the_error_names_the_method_that_callbacks_lack():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        text = (
            "CallbacksWithoutMark: expected a method client_high_water_mark, found none. Hint: "
            "derive the class from AsyncCallbacks"
        )
        with pytest.raises(errors.UsageError, match=text):
            await client.subscribe(CallbacksWithoutMark())
        assert client.partitions == ()


class SlowMarkCallbacks(ResumingCallbacks):
    """Returns its mark slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.is_mark_requested, self.may_answer = asyncio.Event(), asyncio.Event()

    async def client_high_water_mark(self, partition):
        self.is_mark_requested.set()
        await self.may_answer.wait()
        return await super().client_high_water_mark(partition)


@run_on_virtual_loop
async def test_a_feed_that_is_paused_while_it_starts_applies_no_transactions():
    async with (
        memory_cluster(partition_count=2) as cluster,
        cluster.client().open_during() as client,
    ):
        await write(client, 0, 3)
        callbacks = SlowMarkCallbacks()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.subscribe(callbacks, [0, 1]))
            await callbacks.is_mark_requested.wait()
            await client.set_partitions([])
            assert client.partitions == ()
            callbacks.may_answer.set()
        assert client.partitions == ()
        # The resumed partition begins at its mark, and applies each transaction once.
        await client.set_partitions([0])
        await wait_until(lambda: callbacks.seen[0] == [0, 1, 2])
        assert client.partitions == (0,)


@run_on_virtual_loop
async def test_a_feed_that_is_resumed_while_it_starts_applies_each_transaction_once():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await write(client, 0, 3)
        callbacks = SlowMarkCallbacks()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.subscribe(callbacks, [0]))
            await callbacks.is_mark_requested.wait()
            await client.set_partitions([])
            callbacks.is_mark_requested.clear()
            tasks.create_task(client.set_partitions([0]))
            await callbacks.is_mark_requested.wait()
            callbacks.may_answer.set()
        await wait_until(lambda: callbacks.seen[0] == [0, 1, 2])
        await write(client, 0, 2)
        await wait_until(lambda: callbacks.seen[0][-1] == 4)
        assert callbacks.seen[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_context", [True, False])
@run_on_virtual_loop
async def test_an_append_or_context_waits_until_the_callbacks_have_returned_their_mark(is_context):
    async with two_clients() as (_, client, other):
        locks = [lock("counter")]
        await (await other.append(b"\x01", partition=0, header=3, write_locks=locks))
        callbacks = SlowMarkCallbacks()
        await client.mount([0])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.subscribe(callbacks, [0]))
            await callbacks.is_mark_requested.wait()
            context = RepeatedContext(callbacks.state)
            call = (
                client.submit(context)
                if is_context
                else client.append(b"x", partition=0, write_locks=locks)
            )
            call_task = tasks.create_task(call)
            await client.high_water_mark(0)  # other tasks run; the log's mark is known
            assert not call_task.done()
            callbacks.may_answer.set()
        if is_context:
            assert await call_task.result() == 1
            await wait_until(lambda: callbacks.state == {"value": 2})
        else:
            with contextlib.suppress(errors.LockFailed):  # no error if the feed was faster
                await call_task.result()


@run_on_virtual_loop
async def test_a_context_completes_although_the_feed_failed_to_start():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:

        class BrokenCallbacks(SlowMarkCallbacks):
            async def client_high_water_mark(self, partition):
                await super().client_high_water_mark(partition)
                raise ValueError("no mark")

        callbacks = BrokenCallbacks()
        subscribing = asyncio.get_running_loop().create_task(client.subscribe(callbacks, [0]))
        await callbacks.is_mark_requested.wait()
        async with asyncio.TaskGroup() as tasks:
            submitted = tasks.create_task(client.submit(RepeatedContext({"value": 0})))
            callbacks.may_answer.set()
        with pytest.raises(ValueError, match="no mark"):
            await subscribing
        assert await submitted.result() == 0


@run_on_virtual_loop
async def test_a_wait_for_a_feed_ends_when_the_client_closes():
    async with memory_cluster() as cluster:
        client, callbacks = await cluster.client().open(), SlowMarkCallbacks()
        await client.subscribe(callbacks, [])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.set_partitions([0]))
            await callbacks.is_mark_requested.wait()
            tasks.create_task(client.set_partitions([]))
            await asyncio.sleep(0)
            await client.close()
            callbacks.may_answer.set()
        assert client.partitions == ()
