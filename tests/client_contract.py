"""The contract between a cluster and its clients, tested in memory and on a real cluster.

`test_conformance_memory.py` runs the scenarios over `MemoryWaltz`, without and with faults.
`test_conformance.py` runs them over real processes. A scenario must work with any transactions that
its partition already contains.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import (
    BYTES,
    JSON,
    LATEST,
    Callbacks,
    PoisonPolicy,
    RangeForm,
    Transaction,
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
    partition_of,
)
from waltz_core.records.raw_records import HEADER_DTYPE

MIB = 1024 * 1024


@dataclass
class ScenarioSetup:
    """A Waltz in which a scenario runs, and the partition that belongs to this scenario."""

    open: Callable[[], WaltzClient]
    partition: int


class RecordingCallbacks(Callbacks):
    """Records the applied transactions; can raise an error, or wait until a test releases it."""

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.applied: list[tuple[int, int, bytes]] = []
        self.poison: dict[int, int] = {}  # how often to raise, by transaction
        self.policies: dict[int, PoisonPolicy] = {}  # STOP otherwise
        self.raised: list[int] = []
        self.may_apply = threading.Event()
        self.may_apply.set()
        self._changed = threading.Condition()

    @property
    def applied_ids(self) -> list[int]:
        return [each[0] for each in self.applied]

    def client_high_water_mark(self, partition: int) -> int:
        return self.mark

    def apply_transaction(self, transaction: Transaction) -> None:
        self.may_apply.wait(TEST_TIMEOUT_S)
        transaction_id = transaction.transaction_id
        if self.poison.get(transaction_id, 0):
            self.poison[transaction_id] -= 1
            raise ValueError(f"poison at {transaction_id}")
        data = transaction.data()
        with self._changed:
            self.applied.append((transaction_id, transaction.header, data))
            self._changed.notify_all()

    def uncaught_exception(self, partition: int, transaction_id: int, error: Exception):
        with self._changed:
            self.raised.append(transaction_id)
            self._changed.notify_all()
        return self.policies.get(transaction_id, PoisonPolicy.STOP)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TEST_TIMEOUT_S), (
                self.applied_ids,
                self.raised,
            )


class RecordingContext(TransactionContext):
    """Records its attempts and hooks; other clients may write while it computes."""

    def __init__(
        self, partition: int, rival: Callable[[int], object] | None = None, name: str = "recorded"
    ) -> None:
        super().__init__()
        self._partition = partition
        self._rival = rival
        self._name = name
        self.marks: list[int] = []
        self.hooks: list[object] = []
        self.is_applied = threading.Event()
        self.has_ended = threading.Event()

    def partition_id(self, partition_count: int) -> int:
        return self._partition

    def execute(self, builder: TransactionBuilder) -> bool:
        self.marks.append(builder.client_high_water_mark)
        if self._rival is not None:
            self._rival(len(self.marks))
        builder.set_transaction_data({"attempt": len(self.marks)}, JSON)
        builder.set_write_locks([lock(self._name)])
        return True

    def on_completion(self, result: bool) -> None:
        self.hooks.append(("completion", result))
        self.has_ended.set()

    def on_application(self) -> None:
        self.hooks.append("application")
        self.is_applied.set()

    def on_expiration(self) -> None:
        self.hooks.append("expiration")
        self.has_ended.set()

    def on_exception(self, error: BaseException) -> None:
        self.hooks.append(("exception", type(error)))
        self.has_ended.set()

    def on_lock_failure(self) -> None:
        self.hooks.append("lock failure")


def read_payloads(client: WaltzClient, partition: int, first: int) -> list[bytes]:
    """Return the data of a partition, starting at an ID."""
    payloads = []
    last = client.high_water_mark(partition, linearizable=True)
    for chunk in client.read_range(partition, first, last):
        offset = 0
        for length in chunk.lengths.tolist():
            payloads.append(bytes(chunk.records[offset + 36 : offset + length - 4]))
            offset += length
    return payloads


def append_and_wait(client: WaltzClient, partition: int, data: bytes = b"", **more) -> int:
    return client.append(data, partition=partition, **more).result(TEST_TIMEOUT_S)


def is_log_complete(world: ScenarioSetup) -> bool:
    """Return whether IDs are dense from 0 and each request is in the log once."""
    with world.open() as client:
        last = client.high_water_mark(world.partition, linearizable=True)
        chunks = client.read_range(world.partition, 0, last, form=RangeForm.HEADERS)
        headers = np.concatenate([np.frombuffer(chunk.records, HEADER_DTYPE) for chunk in chunks])
    is_dense = np.array_equal(headers["transaction_id"], np.arange(last + 1))
    return is_dense and np.unique(headers["req_id"]).size == headers.size


# --- appends


def ids_are_dense_and_in_the_order_of_one_clients_appends(world: ScenarioSetup) -> None:
    with world.open() as client:
        first = client.high_water_mark(world.partition) + 1
        rows = [b"%d" % i for i in range(100)]
        futures = [client.append(row, partition=world.partition) for row in rows]
        ids = [future.result(TEST_TIMEOUT_S) for future in futures]
        assert ids == sorted(ids)
        assert read_payloads(client, world.partition, first) == rows
        assert ids == list(range(first, first + 100))


def reads_and_feeds_return_the_appended_bytes(world: ScenarioSetup) -> None:
    rows = [
        (0, b""),
        (-(1 << 31), b"\x00"),
        ((1 << 31) - 1, bytes(range(256))),
        (-1, bytes(4 * MIB)),
        (7, b"last"),
    ]
    with world.open() as client:
        ledger = RecordingCallbacks(client.high_water_mark(world.partition))
        ids = [
            append_and_wait(client, world.partition, data, header=header) for header, data in rows
        ]
        assert read_payloads(client, world.partition, ids[0]) == [data for _, data in rows]
        client.subscribe(ledger, [world.partition])
        ledger.wait_until(lambda: len(ledger.applied) == len(rows))
        assert ledger.applied == [(i, *row) for i, row in zip(ids, rows, strict=True)]


def each_replica_returns_the_same_bytes(world: ScenarioSetup) -> None:
    with world.open() as client:
        first = append_and_wait(client, world.partition, b"one")
        last = append_and_wait(client, world.partition, b"two")
        replicas = client.replicas(world.partition)
        for form in RangeForm:
            bytes_of_replicas, bytes_of_server = (
                [
                    bytes(chunk.records)
                    for chunk in client.read_range(
                        world.partition, first, last, form=form, replicas=each
                    )
                ]
                for each in (replicas, None)
            )
            assert b"".join(bytes_of_replicas) == b"".join(bytes_of_server) != b""


def invalid_appends_are_rejected_and_others_continue(world: ScenarioSetup) -> None:
    with world.open() as client:
        before = client.high_water_mark(world.partition)
        with pytest.raises(errors.TooLarge):
            append_and_wait(client, world.partition, bytes(4 * MIB + 1))
        for partition in (-1, client.partition_count):
            with pytest.raises(errors.UnknownPartition):
                append_and_wait(client, partition)
            with pytest.raises(errors.UnknownPartition):
                client.high_water_mark(partition)
        with pytest.raises(errors.BadRequest):
            append_and_wait(client, world.partition, header=1 << 31)
        with pytest.raises(errors.BadRequest):
            append_and_wait(client, world.partition, write_locks=[1 << 31])
        text = rf"partition {world.partition}: the client's high-water mark {before + 99} is above "
        ahead = {"write_locks": [lock("a")], "client_high_water_mark": before + 99}
        with pytest.raises(
            errors.ClientAheadOfLog, match=rf"{text}the log's high-water mark {before}\. Hint"
        ):
            append_and_wait(client, world.partition, **ahead)
        assert append_and_wait(client, world.partition, write_locks=[lock("a")]) == before + 1


def a_flush_waits_for_earlier_appends(world: ScenarioSetup) -> None:
    with world.open() as client:
        futures = [client.append(b"", partition=world.partition) for _ in range(50)]
        mark = client.flush(world.partition)
        assert mark == max(future.result(TEST_TIMEOUT_S) for future in futures)
        assert not client.has_pending


def marks_of_all_partitions_are_returned(world: ScenarioSetup) -> None:
    with world.open() as client:
        before = client.high_water_marks(linearizable=True)
        assert list(before) == list(range(client.partition_count))
        append_and_wait(client, world.partition)
        after = client.high_water_marks(linearizable=True)
        assert after == before | {world.partition: before[world.partition] + 1}
        assert client.high_water_mark(world.partition) == after[world.partition]


def the_first_lock_chooses_the_partition(world: ScenarioSetup) -> None:
    with world.open() as client:
        hashed = lock("where", 7)
        partition = partition_of(hashed, client.partition_count)
        before = client.high_water_marks()
        transaction_id = client.append(b"", write_locks=[hashed]).result(TEST_TIMEOUT_S)
        assert transaction_id == before[partition] + 1
        append_and_wait(client, world.partition)


def a_closed_client_has_reported_every_outcome(world: ScenarioSetup) -> None:
    with world.open() as reader:
        first = reader.high_water_mark(world.partition) + 1
        client = world.open()
        futures = [client.append(b"%d" % i, partition=world.partition) for i in range(200)]
        client.close()
        assert all(future.done() for future in futures)
        ids = [future.result(0) for future in futures]
        assert ids == list(range(first, first + 200))
        assert read_payloads(reader, world.partition, first) == [b"%d" % i for i in range(200)]
        with pytest.raises(errors.UsageError, match="closed"):
            client.append(b"")
        client.close()


# --- locks


def write_and_append_locks_reject_only_later_write_and_read_locks(world: ScenarioSetup) -> None:
    kinds = ("write_locks", "read_locks", "append_locks")
    with world.open() as first_client, world.open() as second_client:
        for number, (earlier, later) in enumerate(product(kinds, kinds)):
            hashed = [lock("pair", number)]
            mark = first_client.high_water_mark(world.partition)
            won = append_and_wait(
                first_client, world.partition, **{earlier: hashed}, client_high_water_mark=mark
            )
            assert won == mark + 1
            late = second_client.append(
                b"late", partition=world.partition, **{later: hashed}, client_high_water_mark=mark
            )
            if earlier != "read_locks" and later != "append_locks":
                text = rf"transaction {won} .* has written a lock .* high-water mark {mark}"
                with pytest.raises(errors.LockFailed, match=text) as failed:
                    late.result(TEST_TIMEOUT_S)
                assert failed.value.conflicting == won
                assert failed.value.high_water_mark >= won
                mark = won
            else:
                assert late.result(TEST_TIMEOUT_S) == won + 1
            # The log accepts a client that has applied all transactions.
            seen = second_client.high_water_mark(world.partition)
            passed = append_and_wait(
                second_client, world.partition, **{later: hashed}, client_high_water_mark=seen
            )
            assert passed == seen + 1


def one_conflicting_lock_of_many_rejects_an_append(world: ScenarioSetup) -> None:
    with world.open() as client:
        mark = client.high_water_mark(world.partition)
        won = append_and_wait(
            client, world.partition, write_locks=[lock("many", 3)], client_high_water_mark=mark
        )
        many = [lock("many", i) for i in range(6)]
        with pytest.raises(errors.LockFailed) as failed:
            append_and_wait(client, world.partition, read_locks=many, client_high_water_mark=mark)
        assert failed.value.conflicting == won
        del many[3]
        append_and_wait(client, world.partition, write_locks=many, client_high_water_mark=mark)
        append_and_wait(client, world.partition, client_high_water_mark=-1)


# --- contexts


def a_context_is_executed_again_after_it_has_applied_the_winner(world: ScenarioSetup) -> None:
    with world.open() as client, world.open() as other:
        ledger = RecordingCallbacks(client.high_water_mark(world.partition))
        won: list[int] = []
        ids_at_execution: list[list[int]] = []

        def rival(attempt: int) -> None:
            ids_at_execution.append(ledger.applied_ids)
            if attempt <= 2:
                won.append(append_and_wait(other, world.partition, append_locks=[lock("retry")]))

        client.subscribe(ledger, [world.partition])
        context = RecordingContext(world.partition, rival, "retry")
        transaction_id = client.submit(context).result(TEST_TIMEOUT_S)
        assert transaction_id == won[1] + 1
        assert context.marks[0] < won[0] <= context.marks[1] < won[1] <= context.marks[2]
        assert won[0] in ids_at_execution[1]
        assert won[1] in ids_at_execution[2]
        assert context.is_applied.wait(TEST_TIMEOUT_S)
        assert context.hooks == ["lock failure"] * 2 + [("completion", True), "application"]
        assert ledger.applied[-1][2] == JSON.serialize({"attempt": 3})


def a_context_without_a_feed_also_applies_the_winner(world: ScenarioSetup) -> None:
    with world.open() as client, world.open() as other:
        won: list[int] = []

        def rival(attempt: int) -> None:
            if attempt == 1:
                won.append(append_and_wait(other, world.partition, append_locks=[lock("retry")]))

        context = RecordingContext(world.partition, rival, "retry")
        assert client.submit(context).result(TEST_TIMEOUT_S) == won[0] + 1
        assert context.has_ended.wait(TEST_TIMEOUT_S)
        assert context.marks[1] >= won[0]
        assert context.hooks == ["lock failure", ("completion", True)]


def a_context_ends_when_execute_returns_false_or_raises(world: ScenarioSetup) -> None:
    class ReturnsFalse(RecordingContext):
        def execute(self, builder: TransactionBuilder) -> bool:
            return False

    class RaisesError(RecordingContext):
        def execute(self, builder: TransactionBuilder) -> bool:
            raise KeyError("no such account")

    with world.open() as client:
        before = append_and_wait(client, world.partition)
        returns_false, raises_error = ReturnsFalse(world.partition), RaisesError(world.partition)
        assert client.submit(returns_false).result(TEST_TIMEOUT_S) is None
        with pytest.raises(KeyError, match="no such account"):
            client.submit(raises_error).result(TEST_TIMEOUT_S)
        for context, hook in (
            (returns_false, ("completion", False)),
            (raises_error, ("exception", KeyError)),
        ):
            assert context.has_ended.wait(TEST_TIMEOUT_S)
            assert context.hooks == [hook]
        assert client.flush(world.partition) == before


def a_context_ends_when_its_retries_are_used_up(world: ScenarioSetup) -> None:
    with world.open() as client, world.open() as other:
        context = RecordingContext(
            world.partition,
            lambda attempt: append_and_wait(other, world.partition, append_locks=[lock("tired")]),
            "tired",
        )
        context.retries_max = 2
        with pytest.raises(errors.LockFailed):
            client.submit(context).result(TEST_TIMEOUT_S)
        assert context.has_ended.wait(TEST_TIMEOUT_S)
        assert len(context.marks) == 3
        assert context.hooks == ["lock failure"] * 3 + ["expiration"]


def a_context_ends_at_its_timeout(world: ScenarioSetup) -> None:
    with world.open() as client, world.open() as other:
        ledger = RecordingCallbacks(client.high_water_mark(world.partition))
        ledger.may_apply.clear()
        client.subscribe(ledger, [world.partition])
        for timeout_ms in (500, 2_000, 8_000, 32_000):
            context = RecordingContext(
                world.partition,
                lambda attempt: append_and_wait(
                    other, world.partition, append_locks=[lock("late")]
                ),
                "late",
            )
            context.timeout_ms = timeout_ms
            future = client.submit(context)
            with pytest.raises(errors.Unavailable) as ended:
                future.result(TEST_TIMEOUT_S)
            assert context.has_ended.wait(TEST_TIMEOUT_S)
            if "lock failure" in context.hooks:
                break
            # On a busy machine, the context may end before the server has rejected its append. The
            # next context has more time.
        behind = ended.value
        assert isinstance(behind, errors.ViewBehind)
        assert "the callbacks applied no transaction in this time" in str(behind)
        assert behind.applied is not None
        assert behind.applied < (behind.high_water_mark or 0)
        ledger.may_apply.set()
        assert context.hooks == ["lock failure", "expiration"]
        assert len(context.marks) == 1


def two_clients_under_one_lock_lose_no_update(world: ScenarioSetup) -> None:
    class Counter(RecordingCallbacks):
        @property
        def value(self) -> int:
            return int(self.applied[-1][2]) if self.applied else 0

    class Increment(RecordingContext):
        def __init__(self, partition: int, counter: Counter) -> None:
            super().__init__(partition)
            self.counter = counter

        def execute(self, builder: TransactionBuilder) -> bool:
            builder.set_transaction_data(b"%d" % (self.counter.value + 1), BYTES)
            builder.set_write_locks([lock("counter")])
            return True

    with world.open() as first_client, world.open() as second_client:
        start = first_client.high_water_mark(world.partition)
        futures = []
        counters = [(client, Counter(start)) for client in (first_client, second_client)]
        for client, counter in counters:
            client.subscribe(counter, [world.partition])
        for _ in range(10):
            for client, counter in counters:
                futures.append(client.submit(Increment(world.partition, counter)))
        ids = [future.result(TEST_TIMEOUT_S) for future in futures]
        assert sorted(ids) == list(range(start + 1, start + 21))
        assert read_payloads(first_client, world.partition, start + 1) == [
            b"%d" % i for i in range(1, 21)
        ]


def dependent_appends_continue_from_appends_in_flight(world: ScenarioSetup) -> None:
    class Increment(RecordingContext):
        pipelined = True

        def __init__(self, partition: int, counter: RecordingCallbacks) -> None:
            super().__init__(partition, name="followed")
            self.counter = counter

        def execute(self, builder: TransactionBuilder) -> bool:
            mark, _, data = (self.counter.applied or [(self.counter.mark, 0, b"0")])[-1]
            predecessors = builder.predecessors(mark)
            last = int(predecessors[-1].data if predecessors else data)
            builder.set_transaction_data(b"%d" % (last + 1), BYTES)
            builder.set_write_locks([lock("followed")])
            return True

    with world.open() as first_client, world.open() as second_client:
        start = first_client.high_water_mark(world.partition)
        counters = [(client, RecordingCallbacks(start)) for client in (first_client, second_client)]
        for client, counter in counters:
            client.subscribe(counter, [world.partition])
        futures = [
            client.submit(Increment(world.partition, counter))
            for _ in range(20)
            for client, counter in counters
        ]
        ids = [future.result(TEST_TIMEOUT_S) for future in futures]
        assert sorted(ids) == list(range(start + 1, start + 41))
        assert read_payloads(first_client, world.partition, start + 1) == [
            b"%d" % i for i in range(1, 41)
        ]


def an_append_rejected_because_of_one_in_flight_may_depend_on_it(world: ScenarioSetup) -> None:
    with world.open() as client:
        hot = [lock("in flight")]
        mark = append_and_wait(client, world.partition)
        fields = {"partition": world.partition, "write_locks": hot, "pipelined": True}
        first = client.append(b"first", **fields, client_high_water_mark=mark)
        late = client.append(b"late", **fields, client_high_water_mark=mark)
        assert first.result(TEST_TIMEOUT_S) == mark + 1
        with pytest.raises(errors.LockFailed) as caught:
            late.result(TEST_TIMEOUT_S)
        pipelined_state = caught.value.pipelined_state
        assert [predecessor.data for predecessor in pipelined_state.predecessors] == [b"first"]
        again = client.append(b"second", **{**fields, "pipelined": pipelined_state})
        assert again.result(TEST_TIMEOUT_S) == mark + 2


def a_dependent_append_is_not_ahead_of_other_locks(world: ScenarioSetup) -> None:
    with world.open() as client:
        hot, other = [lock("in flight")], [lock("not asked for")]
        mark = append_and_wait(client, world.partition)
        fields = {"partition": world.partition, "write_locks": hot, "pipelined": True}
        first = client.append(b"first", **fields, client_high_water_mark=mark)
        assert first.result(TEST_TIMEOUT_S) == mark + 1
        append_and_wait(client, world.partition, b"other", write_locks=other)
        late = client.append(b"late", **fields, client_high_water_mark=mark)
        with pytest.raises(errors.LockFailed) as caught:
            late.result(TEST_TIMEOUT_S)
        pipelined_state = caught.value.pipelined_state
        assert [predecessor.data for predecessor in pipelined_state.predecessors] == [b"first"]
        fields["write_locks"] = [*hot, *other]
        again = client.append(b"again", **{**fields, "pipelined": pipelined_state})
        with pytest.raises(errors.LockFailed) as caught:
            again.result(TEST_TIMEOUT_S)
        pipelined_state = caught.value.pipelined_state
        assert [predecessor.data for predecessor in pipelined_state.predecessors] == [
            b"first",
            b"other",
        ]
        at_last = client.append(b"at last", **{**fields, "pipelined": pipelined_state})
        assert at_last.result(TEST_TIMEOUT_S) == mark + 3


# --- the feed


def a_feed_begins_after_the_mark_and_has_no_gaps(world: ScenarioSetup) -> None:
    with world.open() as client, world.open() as other:
        ids = [append_and_wait(client, world.partition, b"%d" % i) for i in range(6)]
        ledger = RecordingCallbacks(ids[2])
        client.subscribe(ledger, [world.partition])
        ledger.wait_until(lambda: len(ledger.applied) == 3)
        ids += [append_and_wait(other, world.partition, b"%d" % i) for i in range(6, 9)]
        ledger.wait_until(lambda: len(ledger.applied) == 6)
        assert ledger.applied == [(ids[i], 0, b"%d" % i) for i in range(3, 9)]
        with pytest.raises(errors.BadRequest, match="already"):
            client.subscribe(ledger, [world.partition])


def a_feed_from_latest_begins_at_the_end_of_the_log(world: ScenarioSetup) -> None:
    with world.open() as client:
        before = [append_and_wait(client, world.partition) for _ in range(3)][-1]
        ledger = RecordingCallbacks(LATEST)
        client.subscribe(ledger, [world.partition])
        last = before
        while not ledger.applied:
            last = append_and_wait(client, world.partition)
        ledger.wait_until(lambda: ledger.applied_ids[-1] == last)
        assert ledger.applied_ids == list(range(ledger.applied_ids[0], last + 1))
        assert ledger.applied_ids[0] > before


def a_poison_transaction_is_skipped_or_retried_or_stops_its_partition(world: ScenarioSetup) -> None:
    with world.open() as client:
        other = (world.partition + 1) % client.partition_count
        marks = client.high_water_marks()
        ledger, other_ledger = (
            RecordingCallbacks(marks[world.partition]),
            RecordingCallbacks(marks[other]),
        )
        skipped, again, stops = (ledger.mark + each for each in (2, 3, 5))
        ledger.policies = {skipped: PoisonPolicy.SKIP, again: PoisonPolicy.RETRY}
        ledger.poison = {skipped: 1_000, again: 2, stops: 1_000}
        client.subscribe(ledger, [world.partition])
        client.subscribe(other_ledger, [other])
        for _ in range(6):
            append_and_wait(client, world.partition)
            append_and_wait(client, other)
        ledger.wait_until(lambda: stops in ledger.raised)
        other_ledger.wait_until(lambda: len(other_ledger.applied) == 6)
        assert ledger.raised == [skipped, again, again, stops]
        assert ledger.applied_ids == [skipped - 1, again, stops - 1]


# In these scenarios no connection may break. If a connection breaks, the client sends lost appends
# again after the other appends, and a context counts one more attempt.
SCENARIOS_WITHOUT_FAULTS = (
    ids_are_dense_and_in_the_order_of_one_clients_appends,
    a_closed_client_has_reported_every_outcome,
    a_context_is_executed_again_after_it_has_applied_the_winner,
    a_context_without_a_feed_also_applies_the_winner,
    a_context_ends_when_its_retries_are_used_up,
    a_context_ends_at_its_timeout,
    an_append_rejected_because_of_one_in_flight_may_depend_on_it,
    a_dependent_append_is_not_ahead_of_other_locks,
)
SCENARIOS_UNDER_ANY_FAULTS = (
    reads_and_feeds_return_the_appended_bytes,
    each_replica_returns_the_same_bytes,
    invalid_appends_are_rejected_and_others_continue,
    a_flush_waits_for_earlier_appends,
    marks_of_all_partitions_are_returned,
    the_first_lock_chooses_the_partition,
    write_and_append_locks_reject_only_later_write_and_read_locks,
    one_conflicting_lock_of_many_rejects_an_append,
    a_context_ends_when_execute_returns_false_or_raises,
    two_clients_under_one_lock_lose_no_update,
    dependent_appends_continue_from_appends_in_flight,
    a_feed_begins_after_the_mark_and_has_no_gaps,
    a_feed_from_latest_begins_at_the_end_of_the_log,
    a_poison_transaction_is_skipped_or_retried_or_stops_its_partition,
)
SCENARIOS = SCENARIOS_WITHOUT_FAULTS + SCENARIOS_UNDER_ANY_FAULTS
