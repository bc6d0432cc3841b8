"""Appends of a client: queues, retries, order, and the append window."""

import asyncio

import pytest

from tests.loops import run_on_virtual_loop
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.client.scenarios import PARTITION
from waltz_core import errors
from waltz_core.client.model.predecessors import PipelinedState
from waltz_core.client.stream.appends import Appends, AppendWindow, PendingRow, ReportOrder
from waltz_core.client.stream.outcome_tracker import BatchOutcome
from waltz_core.records.batches import decode_append
from waltz_core.records.record import SessionId
from waltz_core.wire.messages import RowOutcomeCode

BATCH_BYTES = b"two rows"
NO_SERVER = errors.Unreachable("no server is there")


class Author:
    """Appends of a partition, and the submissions that they have sent."""

    def __init__(self, batch_rows=1, batch_bytes=100):
        self.sent, self.window = [], AppendWindow(rows_max=100, bytes_max=1 << 20)
        self.appends = Appends(
            PARTITION, self.window, self.sent.append, batch_rows=batch_rows, batch_bytes=batch_bytes
        )

    def append(self, data=b"data", **fields):
        row = PendingRow(data, 0, 0)
        row.deadline_s = asyncio.get_running_loop().time() + 600
        for name, value in fields.items():
            setattr(row, name, value)
        assert self.window.try_take(1, row.size_bytes)
        self.appends.add(row)
        return row.future

    def append_batch(self, order=None):
        assert self.window.try_take(2, len(BATCH_BYTES))
        return self.appends.add_batch(BATCH_BYTES, 2, 0, order)

    def lose(self, token, reason=RowOutcomeCode.NO_SPACE):
        outcome = BatchOutcome.all_rejected(1, reason, high_water_mark=0)
        self.appends.on_submission_settled(token, outcome)


async def wait_until(condition):
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - conditions of all kinds
            await asyncio.sleep(0)


def errors_of(futures):
    return [type(future.exception()) for future in futures]


@run_on_virtual_loop
async def test_an_append_that_times_out_in_the_queue_does_not_delay_others():
    """Earlier appends may be in flight for hours while the partition has no server."""
    window = AppendWindow(rows_max=10, bytes_max=1 << 20)
    assert window.try_take(8, 100)
    loop = asyncio.get_running_loop()
    large, small, other = (loop.create_task(window.take(rows, 1)) for rows in (5, 1, 3))
    await asyncio.sleep(0)
    assert not small.done()  # appends keep their order
    large.cancel()
    await asyncio.wait([large, small])
    other.cancel()
    await asyncio.wait([other])
    assert not window._waiting
    window.release(9, 101)
    assert window.is_empty


@run_on_virtual_loop
async def test_delayed_appends_fail_when_the_partition_is_abandoned():
    author = Author()
    held = author.append()
    author.lose(1)
    later = author.append()
    assert len(author.sent) == 1
    author.appends.abandon(NO_SERVER)
    assert errors_of([held, later]) == [errors.Unreachable] * 2
    assert author.window.is_empty
    assert not author.appends.has_pending


@run_on_virtual_loop
async def test_appends_that_wait_for_an_abandoned_submission_are_not_sent(monkeypatch):
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author = Author()
    futures = [author.append(), author.append()]
    author.lose(1)
    # Now the window waits for the second append only.
    await wait_until(lambda: author.appends._pause is None)
    author.appends.abandon(NO_SERVER)
    assert len(author.sent) == 2
    assert errors_of(futures) == [errors.Unreachable] * 2
    assert not author.appends.has_pending


@pytest.mark.parametrize("token", [1, 2])
@run_on_virtual_loop
async def test_delayed_appends_are_resent_in_their_order(monkeypatch, token):
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author = Author()
    for data in (b"one", b"two"):
        author.append(data)
    author.lose(token)
    author.lose(3 - token)
    await wait_until(lambda: len(author.sent) == 4)
    assert [message.content.data for message in author.sent] == [b"one", b"two"] * 2


class LateLoop:
    """A loop that runs timers at once and returns plain handles, as uvloop does for late timers."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_at(self, when_s, callback):
        del when_s
        return self._loop.call_soon(callback)


@run_on_virtual_loop
async def test_appends_that_are_delayed_twice_are_resent_even_if_the_event_loop_is_late():
    author = Author()
    author.appends._loop = LateLoop()
    for data in (b"one", b"two"):
        author.append(data)
    author.lose(1)
    author.lose(2)
    await wait_until(lambda: len(author.sent) == 4)
    assert [message.content.data for message in author.sent] == [b"one", b"two"] * 2


PIPELINED_STATE = PipelinedState(SessionId(3), PARTITION, 1, 0, 5, (), frozenset())


@pytest.mark.parametrize(
    "reason", [RowOutcomeCode.LOST, RowOutcomeCode.OVERLOADED, RowOutcomeCode.LOCK]
)
@pytest.mark.parametrize(
    "fields", [{"is_attempt": True}, {"pipelined_state": PIPELINED_STATE}, {"deadline_s": 0.0}, {}]
)
@run_on_virtual_loop
async def test_appends_that_must_be_computed_again_are_not_resent(monkeypatch, fields, reason):
    """Appends of a context are computed again, as are appends that depend on a lost one."""
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_DELAY_S", 0)
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author = Author()
    future = author.append(**fields)
    author.lose(1, reason)
    if not fields and reason is not RowOutcomeCode.LOCK:
        await wait_until(lambda: len(author.sent) == 2)
        return
    assert future.done()
    assert not author.appends.has_pending
    assert len(author.sent) == 1
    if "is_attempt" in fields:
        assert future.result().reason == reason
    else:
        assert future.exception() is not None


@run_on_virtual_loop
async def test_the_error_of_an_append_over_a_limit_names_the_retry_pause():
    author = Author()
    future = author.append(deadline_s=0.0)
    outcome = BatchOutcome.all_rejected(
        1,
        RowOutcomeCode.OVERLOADED,
        high_water_mark=0,
        detail="etl is over a limit",
        retry_after_ms=700,
    )
    author.appends.on_submission_settled(1, outcome)
    error = future.exception()
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_ms == 700
    assert "was not appended (OVERLOADED: etl is over a limit)" in str(error)


@run_on_virtual_loop
async def test_a_batch_waits_for_delayed_appends(monkeypatch):
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author = Author()
    author.append()
    author.lose(1)
    author.append_batch(ReportOrder())
    author.append()
    assert len(author.sent) == 1
    await wait_until(lambda: len(author.sent) == 4)
    assert [message.row_count for message in author.sent] == [1, 1, 2, 1]


@run_on_virtual_loop
async def test_a_waiting_batch_fails_if_its_partition_is_abandoned_or_earlier_rows_are_lost(
    monkeypatch,
):
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author, order = Author(), ReportOrder()
    author.append()
    author.lose(1)
    lost = author.append_batch(order)
    order.reported_count += 1
    assert (await lost).reasons.tolist() == [RowOutcomeCode.LOST] * 2
    author.lose(2)
    unsent = author.append_batch()
    author.appends.abandon(NO_SERVER)
    assert errors_of([unsent]) == [errors.Unreachable]
    assert author.window.is_empty


@run_on_virtual_loop
async def test_a_waiting_batch_is_lost_if_an_earlier_append_of_the_same_order_is_lost(monkeypatch):
    monkeypatch.setattr("waltz_core.client.stream.appends.RESEND_WHEN_FULL_DELAY_S", 0)
    author, order = Author(), ReportOrder()
    first = author.append_batch(order)
    author.append()
    author.lose(2)
    later = author.append_batch(order)
    author.appends.on_submission_settled(
        1, BatchOutcome.all_rejected(2, RowOutcomeCode.LOST, high_water_mark=0)
    )
    assert (await first).reasons.tolist() == [RowOutcomeCode.LOST] * 2
    order.processed_count += 1  # the writer has received only the first outcome
    last_batch = author.append_batch(order)
    await wait_until(lambda: len(author.sent) == 3)
    assert [message.row_count for message in author.sent] == [2, 1, 1]
    for each in (later, last_batch):
        assert (await each).reasons.tolist() == [RowOutcomeCode.LOST] * 2
    order.processed_count += 2
    author.append_batch(order)
    assert author.sent[-1].row_count == 2


@run_on_virtual_loop
async def test_each_row_of_a_submission_is_validated_with_its_own_mark():
    author = Author(batch_rows=9, batch_bytes=1 << 20)
    for mark in (7, 3, 7, 9, 7, 7, 7, 7, 7):
        author.append(mark=mark, write_locks=(mark,))
    (submission,) = author.sent
    rows = decode_append(submission.content, rows_max=9, bytes_max=1 << 20)
    assert rows.marks.tolist() == [7, 3, 7, 9, 7, 7, 7, 7, 7]
    assert rows.write_locks.values.tolist() == rows.marks.tolist()


@run_on_virtual_loop
async def test_a_submission_over_the_servers_limit_is_sent_in_two_parts():
    author = Author(batch_rows=9, batch_bytes=1 << 20)
    for number in range(9):
        author.append(b"%d" % number)
    author.appends.on_rejected(1, errors.TooLarge("nine rows"))
    parts = [
        decode_append(submission.content, rows_max=9, bytes_max=1 << 20)
        for submission in author.sent[1:]
    ]
    data = [part.data.to_pylist() for part in parts]
    assert data == [[b"0", b"1", b"2", b"3"], [b"4", b"5", b"6", b"7", b"8"]]


@pytest.mark.parametrize("rows", [1, 9])
@run_on_virtual_loop
async def test_appends_keep_their_order_but_attempts_of_contexts_do_not(rows):
    for is_attempt in (False, True):
        author = Author(batch_rows=rows, batch_bytes=1 << 20)
        for _ in range(rows):
            author.append(is_attempt=is_attempt)
        assert [message.keeps_order for message in author.sent] == [not is_attempt]


@run_on_virtual_loop
async def test_a_dependent_append_carries_no_mark_above_its_predecessors():
    for mark, sent, session_id in ((4, 4, 3), (5, 8, 3), (6, 8, 3)):
        row = PendingRow(b"data", 0, 0)
        row.set_pipelined_state(
            PipelinedState(SessionId(3), PARTITION, 1, 5, 8, (), frozenset()), mark
        )
        assert (row.mark, row.pipelined_state.session_id) == (sent, session_id)


@run_on_virtual_loop
async def test_window_space_is_granted_in_order_and_returned_when_unused():
    window = AppendWindow(rows_max=10, bytes_max=1 << 20)
    assert window.try_take(8, 1)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(window.take(5, 1))
        await asyncio.sleep(0)
        assert not window.try_take(1, 1), "another caller waits already"
        group.create_task(window.take(1, 1))
        await asyncio.sleep(0)
        window.release(8, 1)
        large.cancel()  # at the moment at which it gets space
    assert large.cancelled()
    window.release(1, 1)
    assert window.is_empty
