"""The asyncio client against the server's own partition machine, over TCP, in one process."""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from tests.loops import run_on_virtual_loop
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.client.memory_cluster import IN_MEMORY_CONFIG, KEY, memory_cluster, two_clients
from waltz_core import errors
from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.client import (
    LATEST,
    AsyncCallbacks,
    AsyncWaltzClient,
    ClusterInfo,
    PoisonPolicy,
    RowOutcomeCode,
    TransactionContext,
    lock,
    partition_of,
)
from waltz_core.client.links import outage_log
from waltz_core.client.stream import appends
from waltz_core.records.batches import encode_append
from waltz_core.server.partition_events import PartitionLimits


async def wait_until(condition):
    while not condition():  # noqa: ASYNC110 - conditions of all kinds
        await asyncio.sleep(0.005)


def batch_of(*rows: bytes, write_locks=None, header: int = 0) -> bytes:
    none = [[] for _ in rows]
    return encode_append(
        [header] * len(rows),
        list(rows),
        write_locks=write_locks or none,
        read_locks=none,
        append_locks=none,
    )


# ---------------------------------------------------------------------------------------------
# the cluster


@run_on_virtual_loop
async def test_a_client_describes_its_cluster():
    async with (
        memory_cluster(partition_count=3) as cluster,
        cluster.client().open_during() as client,
    ):
        assert client.cluster() == ClusterInfo("test", KEY.bytes, 3)
        assert client.partition_count == 3
        assert client.client_id is None  # a client that only reads needs no client ID
        assert await client.high_water_marks() == {0: -1, 1: -1, 2: -1}
        assert await client.mount() == {0: -1, 1: -1, 2: -1}
        assert client.client_id == FIRST_ISSUED_ID


@run_on_virtual_loop
async def test_invalid_calls_are_reported_in_one_sentence():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        with pytest.raises(errors.UnknownPartition, match=r"partition 2.*partitions 0\.\.1"):
            await client.high_water_mark(2)
        with pytest.raises(errors.UnknownPartition):
            await client.append(b"x", partition=-1)
        with pytest.raises(errors.TooLarge, match="4194304 bytes, found 4194305"):
            await client.append(b"x" * (4 * 1024 * 1024 + 1))
        with pytest.raises(errors.BadRequest, match="expected bytes, found str"):
            await client.append("text")
        with pytest.raises(errors.BadRequest, match="32-bit"):
            await client.append(b"x", write_locks=[1 << 40])
        with pytest.raises(errors.BadRequest, match="at least one row"):
            await client.append_batch(0, b"", 0, client_high_water_mark=-1)


class FixedPartition(TransactionContext):
    """Appends to one partition."""

    def __init__(self, partition):
        super().__init__()
        self._partition = partition

    def partition_id(self, partition_count):
        return self._partition

    def execute(self, builder):
        builder.data = b"context"
        return True


@run_on_virtual_loop
async def test_a_client_that_is_opened_for_some_partitions_appends_only_to_them():
    async with (
        memory_cluster(partition_count=4) as cluster,
        cluster.client().open_during() as whole,
    ):
        await (await whole.append(b"x", partition=2))
        at = AsyncWaltzClient.at(whole.layout(), IN_MEMORY_CONFIG, client_id=7, partitions=[3, 1])
        async with at as client:
            assert await client.high_water_marks() == {1: -1, 3: -1}
            assert await client.mount() == {1: -1, 3: -1}
            for _ in range(4):
                await (await client.append(b"in turn"))
            assert await client.high_water_marks() == {1: 1, 3: 1}
            # The list of partitions restricts appends and defaults; other partitions can be read.
            assert await client.high_water_mark(2) == 0


@run_on_virtual_loop
async def test_an_append_outside_of_the_client_s_partitions_is_rejected():
    locks = {partition_of(lock("it", n), 4): lock("it", n) for n in range(100)}
    async with (
        memory_cluster(partition_count=4) as cluster,
        cluster.client().open_during() as whole,
    ):
        at = AsyncWaltzClient.at(whole.layout(), IN_MEMORY_CONFIG, client_id=7, partitions=[3, 1])
        async with at as client:
            await (await client.append(b"x", write_locks=[locks[3]]))
            with pytest.raises(
                errors.BadRequest,
                match=r"first lock chooses partition 2, .* opened for, "
                r"\[1, 3\]",
            ):
                await client.append(b"x", write_locks=[locks[2]])
            await (await client.append(b"x", write_locks=[locks[2]], partition=1))
            outside = (
                r"partition 0 is not one of the partitions that this client was opened for, "
                r"\[1, 3\]"
            )
            with pytest.raises(errors.BadRequest, match=outside):
                await client.append(b"x", partition=0)
            with pytest.raises(errors.BadRequest, match=outside):
                await client.append_batch(0, batch_of(b"x"), 1, client_high_water_mark=-1)
            with pytest.raises(errors.BadRequest, match=outside):
                await client.submit(FixedPartition(0))
            assert await (await client.submit(FixedPartition(3))) == 1
        assert await whole.high_water_marks() == {0: -1, 1: 0, 2: -1, 3: 1}


@run_on_virtual_loop
async def test_the_partitions_of_a_client_must_exist():
    async with (
        memory_cluster(partition_count=2) as cluster,
        cluster.client().open_during() as whole,
    ):
        for wrong, error in (([2], errors.UnknownPartition), ([], errors.BadConfig)):
            with pytest.raises(error):
                await AsyncWaltzClient.at(whole.layout(), IN_MEMORY_CONFIG, partitions=wrong)
        with pytest.raises(errors.BadRequest, match="expected a list"):
            AsyncWaltzClient.at(whole.layout(), IN_MEMORY_CONFIG, partitions=1)


@run_on_virtual_loop
async def test_the_error_for_a_root_without_a_cluster_names_the_command():
    async with memory_cluster() as cluster:
        client = cluster.client(root="/elsewhere")
        with pytest.raises(errors.BadConfig, match=r"waltz-core cluster create"):
            await client.open()


@run_on_virtual_loop
async def test_a_fork_of_a_client_is_reported():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # no code of the parent's loop may run in the child
            try:
                client._check_usable()
            except errors.UsageError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
        os.close(writer)
        assert b"cannot be used in the forked process" in os.read(reader, 1_000)
        os.close(reader)


# ---------------------------------------------------------------------------------------------
# appends


@run_on_virtual_loop
async def test_many_appends_are_sent_in_one_frame_and_a_few_in_separate_frames():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        server = cluster.servers[0]
        server.received.clear()
        futures = [await client.append(b"x", partition=0) for _ in range(500)]
        await asyncio.wait(futures)
        assert Counter(server.received)["AppendBatch"] == 1
        server.received.clear()
        futures = [await client.append(b"x", partition=0) for _ in range(3)]
        await asyncio.wait(futures)
        assert Counter(server.received) == {"AppendRequest": 3}


@run_on_virtual_loop
async def test_rows_are_gathered_while_earlier_rows_are_in_flight():
    with mock.patch.object(appends, "GATHERING_S_MAX", 60.0):
        async with memory_cluster() as cluster, cluster.client().open_during() as client:
            await client.mount([0])
            server = cluster.servers[0]
            server.partitions[0].store.is_holding = True
            first = await client.append(b"first", partition=0)
            await wait_until(lambda: server.partitions[0].store.held_batches)
            server.received.clear()
            futures = []
            for _ in range(50):
                futures.append(await client.append(b"x", partition=0))
                await asyncio.sleep(0)
            assert server.received == []
            server.release(0)
            assert await first == 0
            assert sorted([await future for future in futures]) == list(range(1, 51))
            assert server.received == ["AppendBatch"]


@run_on_virtual_loop
async def test_rows_do_not_wait_long_for_a_slow_answer():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        server = cluster.servers[0]
        server.partitions[0].store.is_holding = True
        first = await client.append(b"first", partition=0)
        await wait_until(lambda: server.partitions[0].store.held_batches)
        server.received.clear()
        second = await client.append(b"second", partition=0)
        await wait_until(lambda: server.received == ["AppendRequest"])
        assert not first.done()
        server.release(0)
        assert [await first, await second] == [0, 1]


@run_on_virtual_loop
async def test_an_append_goes_to_the_partition_of_its_first_lock_or_round_robin():
    async with (
        memory_cluster(partition_count=4) as cluster,
        cluster.client().open_during() as client,
    ):
        name = lock("account", 7)
        await (await client.append(b"x", append_locks=[name]))
        assert len(cluster.logs[partition_of(name, 4)].rows()) == 1
        for _ in range(4):
            await (await client.append(b"y"))
        assert [len(log.rows()) >= 1 for log in cluster.logs] == [True] * 4


@run_on_virtual_loop
async def test_an_invalid_mark_is_reported_by_the_call():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        sentence = r"expected a transaction ID, or -1 for none, found \[0\] \(list\)"
        with pytest.raises(errors.BadRequest, match=sentence):
            await client.append(b"a", partition=0, client_high_water_mark=[0])
        with pytest.raises(errors.BadRequest, match=sentence):
            await client.append_batch(0, batch_of(b"a"), 1, client_high_water_mark=[0])
        with pytest.raises(errors.BadRequest, match=sentence):
            await client.subscribe(RecordingCallbacks(mark=[0]), [0])
        context = CounterContext({"value": 0})

        def execute(builder):
            builder.client_high_water_mark = [0]
            return CounterContext.execute(context, builder)

        context.execute = execute
        with pytest.raises(errors.BadRequest, match=sentence):
            await (await client.submit(context))


@run_on_virtual_loop
async def test_a_batch_reports_every_row():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        payload = batch_of(b"a", b"b", b"c", write_locks=[[1], [1], [2]])
        outcome = await (await client.append_batch(0, payload, 3, client_high_water_mark=-1))
        assert outcome.transaction_ids.tolist() == [0, -1, 1]
        assert outcome.reasons.tolist() == [
            RowOutcomeCode.COMMITTED,
            RowOutcomeCode.LOCK,
            RowOutcomeCode.COMMITTED,
        ]
        assert outcome.conflicting.tolist() == [-1, 0, -1]
        with pytest.raises(errors.BadRequest, match="Arrow"):
            await (await client.append_batch(0, b"nonsense", 1, client_high_water_mark=-1))


@run_on_virtual_loop
async def test_appends_wait_while_the_window_is_full():
    config = replace(IN_MEMORY_CONFIG, in_flight_count_max=10)
    async with memory_cluster() as cluster, cluster.client(config).open_during() as client:
        await client.mount([0])
        server = cluster.servers[0]
        server.partitions[0].store.is_holding = True
        futures = [await client.append(b"x", partition=0) for _ in range(10)]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.append(b"y", partition=0))
            await wait_until(lambda: len(server.partitions[0].store.held_batches) > 0)
            assert not waiting.done()
            server.release(0)
        assert await waiting.result() == 10
        assert [await future for future in futures] == list(range(10))


@run_on_virtual_loop
async def test_batches_stay_within_the_servers_row_limit():
    limits = PartitionLimits(lock_slot_count=10_007, lock_load_count_max=0, batch_rows_max=30)
    async with (
        memory_cluster(limits=limits) as cluster,
        cluster.client().open_during() as client,
    ):
        futures = [await client.append(b"x", partition=0) for _ in range(100)]
        assert sorted([await future for future in futures]) == list(range(100))


# ---------------------------------------------------------------------------------------------
# faults


@run_on_virtual_loop
async def test_rows_lost_with_a_session_are_resent_and_lost_batches_are_reported():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        server = cluster.servers[0]
        store = server.partitions[0].store
        store.is_holding = True
        futures = [await client.append(b"%d" % i, partition=0) for i in range(20)]
        batch = await client.append_batch(0, batch_of(b"a", b"b"), 2, client_high_water_mark=-1)
        await wait_until(lambda: store.held_batches and server.received.count("AppendBatch") == 2)
        store.is_holding = False
        server.lose_session(0, committed=0)
        assert (await batch).reasons.tolist() == [RowOutcomeCode.LOST] * 2
        assert sorted([await future for future in futures]) == list(range(20))
        assert sorted(data for _, _, data in cluster.logs[0].rows()) == sorted(
            b"%d" % i for i in range(20)
        )


@run_on_virtual_loop
async def test_without_a_server_an_append_fails_definitely():
    config = replace(IN_MEMORY_CONFIG, request_timeout_ms=1_000)
    async with memory_cluster() as cluster, cluster.client(config).open_during() as client:
        await client.mount()
        assert client.pending_reason() == "the servers have not answered yet"
        await cluster.stop_server(cluster.servers[0])
        await wait_until(lambda: not client._partitions[0].is_ready)
        future = await client.append(b"x", partition=0)
        assert client.pending_reason().startswith("partition 0 is not mounted: ")
        with pytest.raises(errors.Unreachable, match="not in the log"):
            await future
        with pytest.raises(errors.Unavailable, match="within 1000 ms:"):
            await client.high_water_mark(0)


@run_on_virtual_loop
async def test_appends_to_a_failed_stream_fail_instead_of_waiting_for_the_server():
    """If the stream waited, the client would regard the server as silent and watch ZooKeeper."""
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        partition = client._partitions[0]
        step = partition.stream.step

        def failing(event, now_ms):
            step(event, now_ms)
            raise AssertionError("a bug")

        with mock.patch.object(partition.stream, "step", failing):
            future = await client.append(b"x", partition=0)
            with pytest.raises(errors.OutcomeUnknown, match="has failed:"):
                await future
        assert partition.stream.has_pending
        assert not partition._is_waiting()
        # Later appends fail instead of waiting for the failed stream machine.
        for future in (
            await client.append(b"x", partition=0),
            await client.append_batch(0, batch_of(b"y", b"z"), 2, client_high_water_mark=-1),
        ):
            with pytest.raises(
                errors.WaltzError,
                match="the client's state machine for partition 0 has failed: Ass",
            ):
                await asyncio.wait_for(future, TEST_TIMEOUT_S)
        assert not client.has_pending


@run_on_virtual_loop
async def test_closing_waits_for_pending_appends_and_reports_unknown_outcomes():
    config = replace(IN_MEMORY_CONFIG, request_timeout_ms=1_000)
    async with memory_cluster() as cluster:
        client = cluster.client(config)
        async with client.open_during():
            futures = [await client.append(b"x", partition=0) for _ in range(100)]
        assert [future.result() for future in futures] == list(range(100))
        with pytest.raises(errors.UsageError, match="closed"):
            await client.append(b"x")
        await client.close()
        async with cluster.client(config).open_during() as client:
            await client.mount([0])
            cluster.servers[0].partitions[0].store.is_holding = True
            future = await client.append(b"x", partition=0)
        with pytest.raises(errors.OutcomeUnknown):
            await future


# ---------------------------------------------------------------------------------------------
# contexts


class CounterContext(TransactionContext):
    """Adds one to a counter that is built from the feed."""

    def __init__(self, state: dict, partition: int = 0) -> None:
        super().__init__()
        self.state = state
        self.partition = partition
        self.called_hooks: list[str] = []

    def partition_id(self, partition_count):
        return self.partition

    def execute(self, builder):
        builder.set_header(3)
        builder.set_transaction_data(self.state["value"] + 1)
        builder.set_write_locks([lock("counter")])
        return True

    def on_completion(self, result):
        self.called_hooks.append(f"completed {result}")

    def on_application(self):
        self.called_hooks.append("applied")

    def on_lock_failure(self):
        self.called_hooks.append("lock failure")

    def on_exception(self, error):
        self.called_hooks.append(f"exception {type(error).__name__}")

    def on_expiration(self):
        self.called_hooks.append("expired")


class RecordingCallbacks(AsyncCallbacks):
    """Keeps the value of the counter and the IDs of the applied transactions."""

    def __init__(self, mark: int = -1) -> None:
        self.start = mark
        self.seen: list[int] = []
        self.state = {"value": 0}
        self.errors: list[tuple[int, Exception]] = []
        self.poison: dict[int, int] = {}
        self.policy = PoisonPolicy.STOP
        self.reads_data = True

    async def client_high_water_mark(self, partition):
        return self.start

    async def apply_transaction(self, transaction):
        if self.poison.get(transaction.transaction_id, 0) > 0:
            self.poison[transaction.transaction_id] -= 1
            raise ValueError("poison")
        if self.reads_data and transaction.header == 3:
            self.state["value"] = await transaction.value()
        self.seen.append(transaction.transaction_id)

    async def uncaught_exception(self, partition, transaction_id, error):
        self.errors.append((transaction_id, error))
        return self.policy


@run_on_virtual_loop
async def test_concurrent_contexts_lose_no_update():
    async with two_clients() as (cluster, first_client, second_client):
        contexts = []
        for client in (first_client, second_client):
            callbacks = RecordingCallbacks()
            await client.subscribe(callbacks)
            contexts += [(client, CounterContext(callbacks.state)) for _ in range(15)]
        futures = [await client.submit(context) for client, context in contexts]
        ids = [await future for future in futures]
        assert sorted(ids) == list(range(30))
        rows = cluster.logs[0].rows()
        assert [data for _, _, data in rows] == [bytes([i]) for i in range(1, 31)]
        assert sum(c.called_hooks.count("lock failure") for _, c in contexts) > 0
        await wait_until(lambda: all(c.called_hooks[-1] == "applied" for _, c in contexts))
        assert all(c.called_hooks[-2] == "completed True" for _, c in contexts)


@run_on_virtual_loop
async def test_a_context_without_data_is_rejected():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        context = CounterContext({"value": 0})
        context.execute = lambda builder: True
        with pytest.raises(errors.BadRequest, match="the transaction data"):
            await (await client.submit(context))
        assert context.called_hooks == ["exception BadRequest"]


@run_on_virtual_loop
async def test_retries_end_at_their_limit():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append(b"x", partition=0, write_locks=[lock("counter")]))
        context = CounterContext({"value": 0})
        context.retries_max = 2
        marks = []

        def execute(builder):
            marks.append(builder.client_high_water_mark)
            builder.client_high_water_mark = -1  # it can be lowered, but not raised
            return CounterContext.execute(context, builder)

        context.execute = execute
        with pytest.raises(errors.LockFailed):
            await (await client.submit(context))
        assert context.called_hooks == ["lock failure"] * 3 + ["expired"]
        assert marks == [0, 0, 0]


@run_on_virtual_loop
async def test_a_context_waits_at_most_its_timeout():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        callbacks = RecordingCallbacks()
        callbacks.poison[0] = 1  # the feed stops at the first transaction
        await client.subscribe(callbacks)
        await (await client.append(b"x", partition=0, append_locks=[lock("counter")]))
        await wait_until(lambda: callbacks.errors)
        context = CounterContext({"value": 0})
        context.timeout_ms = 100
        with pytest.raises(errors.WaltzError):
            await (await client.submit(context))
        assert context.called_hooks[0] == "lock failure"


# ---------------------------------------------------------------------------------------------
# the feed


@run_on_virtual_loop
async def test_data_of_consecutive_transactions_is_fetched_together():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        payload = batch_of(*(b"%d" % i for i in range(300)))
        await (await client.append_batch(0, payload, 300, client_high_water_mark=-1))
        found = []

        class ReadingCallbacks(RecordingCallbacks):
            async def apply_transaction(self, transaction):
                found.append(await transaction.data())

        cluster.servers[0].received.clear()
        await client.subscribe(ReadingCallbacks(), [0])
        await wait_until(lambda: len(found) == 300)
        assert found == [b"%d" % i for i in range(300)]
        assert Counter(cluster.servers[0].received)["RangeRequest"] <= 3


@pytest.mark.parametrize(
    ("policy", "seen", "calls"),
    [
        (PoisonPolicy.SKIP, [0, 1, 3, 4], [2]),
        (PoisonPolicy.RETRY, [0, 1, 2, 3, 4], [2, 2, 2]),
        (PoisonPolicy.STOP, [0, 1], [2]),
    ],
)
@run_on_virtual_loop
async def test_a_poison_transaction_is_handled_by_the_policy_of_the_application(
    policy, seen, calls
):
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append_batch(0, batch_of(*[b"x"] * 5), 5, client_high_water_mark=-1))
        callbacks = RecordingCallbacks()
        callbacks.policy = policy
        callbacks.poison[2] = 3 if policy is PoisonPolicy.RETRY else 1
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.seen == seen and len(callbacks.errors) == len(calls))
        assert [transaction_id for transaction_id, _ in callbacks.errors] == calls
        assert all(str(error) == "poison" for _, error in callbacks.errors)


@run_on_virtual_loop
async def test_an_application_ahead_of_the_log_is_reported_with_an_error():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append(b"x", partition=0))
        callbacks = RecordingCallbacks(mark=70)
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.errors)
        ((transaction_id, error),) = callbacks.errors
        assert transaction_id == 71
        assert isinstance(error, errors.ClientAheadOfLog)
        assert "partition 0" in str(error)
        assert "the client's high-water mark 70 is above the log's high-water mark 0" in str(error)


@run_on_virtual_loop
async def test_a_slow_application_uses_bounded_memory_and_receives_all_transactions():
    config = replace(IN_MEMORY_CONFIG, feed_prefetch_count_max=1_000)
    async with memory_cluster() as cluster, cluster.client(config).open_during() as client:
        may_continue = asyncio.Event()

        class SlowCallbacks(RecordingCallbacks):
            async def apply_transaction(self, transaction):
                await may_continue.wait()
                self.seen.append(transaction.transaction_id)

        callbacks = SlowCallbacks()
        await client.subscribe(callbacks, [0])
        rows = 10_000
        payload = batch_of(*[b""] * rows)
        for _ in range(4):
            await (await client.append_batch(0, payload, rows, client_high_water_mark=-1))
        queue = client._partitions[0].applier._queue
        assert sum(len(headers) // 20 for _, headers, _ in queue) <= 2 * rows
        may_continue.set()
        await wait_until(lambda: len(callbacks.seen) == 4 * rows)
        assert callbacks.seen == list(range(4 * rows))


# ---------------------------------------------------------------------------------------------
# outages

# A client with short timeouts, for reads. Appends may take longer on a busy machine, so another
# client appends.
SHORT_TIMEOUTS = replace(
    IN_MEMORY_CONFIG,
    request_timeout_ms=250,
    feed_prefetch_count_max=1_000,
    range_bytes_max=64 * 1024,
)


class BlockingCallbacks(AsyncCallbacks):
    """Has no error policy; the first transaction waits until it may be applied."""

    def __init__(self, mark: int = -1) -> None:
        self.start = mark
        self.tries = 0
        self.seen: list[int] = []
        self.may_continue = asyncio.Event()

    async def client_high_water_mark(self, partition):
        return self.start

    async def apply_transaction(self, transaction):
        self.tries += 1
        await self.may_continue.wait()
        if transaction.header != 3:
            await transaction.data()
        self.seen.append(transaction.transaction_id)


@contextlib.contextmanager
def logged_outages():
    """Yield the list of the log lines about outages."""
    sentence: list[str] = []

    class OutageHandler(logging.Handler):
        def emit(self, record):
            sentence.append(record.getMessage())

    handler, log = OutageHandler(), logging.getLogger(outage_log.__name__)
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield sentence
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@run_on_virtual_loop
async def test_a_feed_waits_for_unavailable_data_without_a_limit():
    async with two_clients(SHORT_TIMEOUTS) as (cluster, writer, client):
        await (await writer.append_batch(0, batch_of(b"a", b"b"), 2, client_high_water_mark=-1))
        callbacks = BlockingCallbacks()
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.tries)
        with logged_outages() as logged:
            await cluster.stop_server(cluster.servers[0])
            callbacks.may_continue.set()
            await wait_until(lambda: callbacks.tries >= 4)
            assert client._partitions[0].applier.stopped is None
            await cluster.add_server()
            await wait_until(lambda: callbacks.seen == [0, 1])
        (waits,) = [line for line in logged if " for=data" in line]
        assert waits.startswith("feed.waiting partition=0 ")
        assert "within 250 ms:" in waits
        assert logged.index(waits) < logged.index("feed.resumed partition=0 waited_for=data")


@run_on_virtual_loop
async def test_a_feed_catches_up_after_an_outage_and_then_continues():
    async with two_clients(SHORT_TIMEOUTS) as (cluster, writer, client):
        rows = 10_000
        payload = batch_of(*[b""] * rows, header=3)
        for _ in range(3):
            await (await writer.append_batch(0, payload, rows, client_high_water_mark=-1))
        callbacks = BlockingCallbacks()
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.tries)
        with logged_outages() as logged:
            await cluster.stop_server(cluster.servers[0])
            callbacks.may_continue.set()
            await wait_until(lambda: any("for=range" in line for line in logged))
            await cluster.add_server()
            await wait_until(lambda: len(callbacks.seen) == 3 * rows)
        await (await writer.append(b"more", partition=0))
        await wait_until(lambda: len(callbacks.seen) == 3 * rows + 1)
        assert callbacks.seen == list(range(3 * rows + 1))


@run_on_virtual_loop
async def test_a_feed_from_the_end_waits_for_a_server_that_reports_the_end():
    async with two_clients(SHORT_TIMEOUTS) as (cluster, writer, client):
        await (await writer.append(b"old", partition=0))
        callbacks = BlockingCallbacks(mark=LATEST)
        callbacks.may_continue.set()
        with logged_outages() as logged:
            await cluster.stop_server(cluster.servers[0])
            await client.subscribe(callbacks, [0])
            await wait_until(lambda: logged)
            await cluster.add_server()
            await wait_until(lambda: client._partitions[0].stream.has_feed)
        await wait_until(lambda: client._partitions[0].is_ready)
        await (await writer.append(b"new", partition=0))
        await wait_until(lambda: callbacks.seen)
        assert callbacks.seen == [1]


@run_on_virtual_loop
async def test_an_application_may_end_its_feed_in_an_outage():
    class StrictCallbacks(BlockingCallbacks):
        async def uncaught_exception(self, partition, transaction_id, error):
            assert isinstance(error, errors.Unavailable)
            return PoisonPolicy.STOP

    async with two_clients(SHORT_TIMEOUTS) as (cluster, writer, client):
        await (await writer.append(b"a", partition=0))
        callbacks = StrictCallbacks()
        await client.subscribe(callbacks, [0])
        await wait_until(lambda: callbacks.tries)
        await cluster.stop_server(cluster.servers[0])
        callbacks.may_continue.set()
        await wait_until(lambda: client._partitions[0].applier.stopped is not None)
        assert callbacks.tries == 1


# ---------------------------------------------------------------------------------------------
# ranges


@run_on_virtual_loop
async def test_a_range_read_returns_chunks_without_gaps_until_the_reader_or_the_client_closes():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        for i in range(10):
            payload = batch_of(*(b"%d-%d" % (i, j) for j in range(100)))
            await (await client.append_batch(0, payload, 100, client_high_water_mark=-1))
        at, payloads = 250, []
        async for chunk in client.read_range(0, 250, 749, bytes_max=5_000):
            assert chunk.first == at
            assert 0 < chunk.count == chunk.lengths.size < 500
            at = chunk.next
            payloads += [row.data for row in chunk.rows()]
        assert at == 750
        assert payloads == [b"%d-%d" % (i // 100, i % 100) for i in range(250, 750)]
        chunks = client.read_range(0, 0, 999, bytes_max=1_000)
        await anext(chunks)
        await chunks.aclose()
        chunks = client.read_range(0, 0, 999, bytes_max=1_000)
        await anext(chunks)
        await client.close()
        with pytest.raises(errors.WaltzError, match="closed"):
            async for _ in chunks:
                pass


@run_on_virtual_loop
async def test_a_range_past_the_end_of_the_log_is_an_error():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append(b"x", partition=0))
        with pytest.raises(errors.DataLoss, match=r"expected transactions 1\.\.5"):
            async for _ in client.read_range(0, 0, 5):
                pass
        with pytest.raises(errors.BadRequest):
            async for _ in client.read_range(0, 5, 2):
                pass
        assert [c async for c in client.read_range(0, 0, -1)] == []


@run_on_virtual_loop
async def test_reads_continue_without_absent_replicas():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append(b"x", partition=0))
        with mock.patch.object(client.directory, "groups") as request_mock:
            replicas = await client.replicas(0)
        assert replicas.replicas_in_group == ()
        request_mock.assert_not_called()  # the client is in no group
        assert replicas.cluster_key == KEY.bytes
        assert replicas.high_water_mark == 0
        chunks = [c async for c in client.read_range(0, 0, 0, replicas=replicas)]
        assert [c.count for c in chunks] == [1]


@run_on_virtual_loop
async def test_replicas_of_the_clients_group_are_nearby():
    async def groups(storages):
        return dict.fromkeys(storages, 7)

    async with memory_cluster() as cluster:
        grouped_client = cluster.client(replace(IN_MEMORY_CONFIG, group=7))
        with mock.patch.object(
            grouped_client.directory, "groups", side_effect=groups
        ) as request_mock:
            async with grouped_client.open_during() as client:
                (replica,) = (await client.replicas(0)).replicas
                assert (await client.replicas(0)).replicas_in_group == (replica,)
                sets = await client.replica_sets([0, 1], group=8)
                assert [each.replicas_in_group for each in sets.values()] == [(), ()]
                request_mock.side_effect = errors.CoordinatorUnavailable("ZooKeeper is away")
                found = await client.replicas(0)
                assert (found.replicas, found.replicas_in_group) == ((replica,), ())


# ---------------------------------------------------------------------------------------------
# clients with a given layout


@run_on_virtual_loop
async def test_large_answers_use_a_separate_connection():
    async with memory_cluster(partition_count=8) as cluster:
        (server,) = cluster.servers
        async with cluster.client().open_during() as client:
            for partition in range(8):
                await (await client.append(b"x", partition=partition))
            assert len(server.links) == 1
            (stream,) = server.links
            for partition in range(8):
                assert [c.count async for c in client.read_range(partition, 0, 0)] == [1]
                assert await client.requests.fetch_data(partition, 0) == b"x"
            assert len(server.links) == 2
            # Marks and flushes use the connection without large answers.
            await client.high_water_marks(linearizable=True)
            await client.flush(3)
            assert len(server.links) == 2
            assert stream in server.links
            (bulk,) = (link for number, link in server.links.items() if number != stream)
            bulk.pause_reading()

            async def read():
                return [c.count async for c in client.read_range(3, 0, 0)]

            async with asyncio.TaskGroup() as tasks:
                pending_read = tasks.create_task(read())
                for mark in range(1, 5):
                    assert await (await client.append(b"y", partition=3)) == mark
                    assert await client.high_water_mark(3) == mark
                assert not pending_read.done()
                bulk.resume_reading()
            assert pending_read.result() == [1]
        async with cluster.client().open_during() as reader:
            async for _ in reader.read_range(0, 0, 0):
                assert len(server.links) == 1  # no connection for appends without an append


@run_on_virtual_loop
async def test_a_later_writer_with_the_same_client_id_replaces_the_earlier_one():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount()
        layout = client.layout()
        newer = AsyncWaltzClient.at(
            layout, IN_MEMORY_CONFIG, client_id=5, connection_sequence=2 << 32
        )
        older = AsyncWaltzClient.at(
            layout, IN_MEMORY_CONFIG, client_id=5, connection_sequence=1 << 32
        )
        async with newer as later_client, older as earlier_client:
            await later_client.mount([0])
            future = await earlier_client.append(b"x", partition=0)
            with pytest.raises(errors.ConnectionSuperseded):
                await future
            assert await (await later_client.append(b"y", partition=0)) == 0


class SlowContext(CounterContext):
    """Computes its first attempt for a while."""

    def __init__(self, state):
        super().__init__(state)
        self.has_begun, self.is_running = asyncio.Event(), asyncio.Event()

    async def execute(self, builder):
        self.has_begun.set()
        await self.is_running.wait()
        builder.set_transaction_data(1)
        return True


@run_on_virtual_loop
async def test_closing_a_client_ends_a_context_in_its_first_attempt():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        context = SlowContext({"value": 0})
        async with asyncio.TaskGroup() as tasks:
            submitted = tasks.create_task(client.submit(context))
            await context.has_begun.wait()
            await client.close()
            context.is_running.set()
        with pytest.raises(errors.Unreachable, match="closed before it sent the append"):
            await submitted.result()
        assert context.called_hooks == ["exception Unreachable"]


@run_on_virtual_loop
async def test_a_cancelled_opening_closes_all_connections():
    async with memory_cluster() as cluster:
        client = cluster.client()
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(client.open())
            while client._main_task is None:  # noqa: ASYNC110 - the last step of the opening
                await asyncio.sleep(0)
            opening.cancel()
        assert opening.cancelled()
        assert client._main_task.done()


@run_on_virtual_loop
async def test_a_flush_waits_for_earlier_appends_only():
    """If a flush waited for later appends, a service that always appends would wait without end."""
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await client.mount([0])
        is_flushed = False

        async def append_on():
            in_flight = [await client.append(b"x", partition=0) for _ in range(3)]
            while not is_flushed:
                in_flight.append(await client.append(b"x", partition=0))
                await in_flight.pop(0)
            await asyncio.wait(in_flight)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(append_on())
            await wait_until(lambda: client.has_pending)
            earlier = await client.append(b"earlier", partition=0)
            async with asyncio.timeout(TEST_TIMEOUT_S / 100):
                mark = await client.flush(0)
            is_flushed = True
            assert earlier.result() <= mark
