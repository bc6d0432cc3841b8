"""Threads for blocking work: each outcome is reported once, on the loop's thread, in order."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast

import pytest

from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.storage.service.work import Work, WorkResult
from waltz_core.storage.service.writer_threads import CallThreads, WriteOutcome, WriterThreads
from waltz_core.transport import net


class Piece:
    """A piece of work: runs a function, and records the thread that ran it."""

    def __init__(self, do: Callable[[], WorkResult]) -> None:
        self._do = do
        self.thread: threading.Thread | None = None

    def run(self, clock_s: Callable[[], float]) -> WorkResult:
        assert clock_s() > 0
        self.thread = threading.current_thread()
        return self._do()


def work(do: Callable[[], WorkResult] = WorkResult) -> Work:
    return cast("Work", Piece(do))


class Recorder:
    """Records the outcomes, and the thread that reported each of them."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Work, WriteOutcome]] = []
        self.threads: set[int] = set()

    def __call__(self, piece: Work, outcome: WriteOutcome) -> None:
        self.outcomes.append((piece, outcome))
        self.threads.add(threading.get_ident())


@run_on_loop
async def test_a_result_is_reported_once_on_the_thread_of_the_event_loop():
    recorder = Recorder()
    writers = WriterThreads(2, recorder)
    result = WorkResult(appended_count=3)
    piece = work(lambda: result)
    writers.run(piece)
    await poll_until(lambda: recorder.outcomes)
    assert recorder.outcomes == [(piece, result)]
    assert recorder.threads == {threading.get_ident()}
    thread = cast("Piece", piece).thread
    assert thread is not None
    assert thread is not threading.current_thread()
    assert thread.daemon, "rule 3: a process ends despite a thread that a disk holds"
    writers.end()
    await asyncio.to_thread(thread.join, TEST_TIMEOUT_S)
    assert not thread.is_alive()
    assert len(recorder.outcomes) == 1


@pytest.mark.parametrize("error", [OSError("gone"), AssertionError("ours"), SystemExit(3)])
def test_an_error_of_a_piece_is_returned_as_its_outcome(error: BaseException):
    async def scenario() -> None:
        def fail() -> WorkResult:
            raise error

        recorder = Recorder()
        writers = WriterThreads(1, recorder)
        writers.run(work(fail))
        writers.run(work())
        await poll_until(lambda: len(recorder.outcomes) == 2)
        assert recorder.outcomes[0][1] is error
        assert isinstance(recorder.outcomes[1][1], WorkResult), "the thread continues"
        writers.end()

    net.run(scenario())


@run_on_loop
async def test_one_thread_runs_the_pieces_in_order():
    recorder = Recorder()
    writers = WriterThreads(1, recorder)
    pieces = [work() for _ in range(50)]
    for piece in pieces:
        writers.run(piece)
    await poll_until(lambda: len(recorder.outcomes) == len(pieces))
    assert [piece for piece, _ in recorder.outcomes] == pieces
    writers.end()


@run_on_loop
async def test_an_idle_thread_keeps_no_reference_to_its_last_call():
    recorder = Recorder()
    writers = WriterThreads(1, recorder)
    writers.run(work())
    await poll_until(lambda: recorder.outcomes)
    ((piece, _),) = recorder.outcomes
    kept = weakref.ref(cast("Piece", piece))
    del piece
    recorder.outcomes.clear()
    await poll_until(lambda: kept() is None)
    writers.end()


@run_on_loop
async def test_a_hanging_piece_delays_neither_other_pieces_nor_the_shutdown():
    recorder, held = Recorder(), threading.Event()

    def hang() -> WorkResult:
        assert held.wait(TEST_TIMEOUT_S)
        return WorkResult()

    writers = WriterThreads(2, recorder)
    hanging, other = work(hang), work()
    writers.run(hanging)
    writers.run(other)
    await poll_until(lambda: recorder.outcomes)
    assert recorder.outcomes[0][0] is other
    writers.end()  # The call does not wait.
    assert len(recorder.outcomes) == 1
    held.set()
    await poll_until(lambda: len(recorder.outcomes) == 2)
    assert recorder.outcomes[1][0] is hanging


def test_an_outcome_after_the_end_of_the_loop_is_dropped():
    recorder, held = Recorder(), threading.Event()
    raised: SimpleQueue[object] = SimpleQueue()

    def hang() -> WorkResult:
        assert held.wait(TEST_TIMEOUT_S)
        return WorkResult()

    async def scenario() -> Work:
        writers = WriterThreads(1, recorder)
        piece = work(hang)
        writers.run(piece)
        writers.end()
        await poll_until(lambda: cast("Piece", piece).thread)
        return piece

    before, threading.excepthook = threading.excepthook, raised.put
    try:
        thread = cast("Piece", asyncio.run(scenario())).thread
        held.set()
        assert thread is not None
        thread.join(TEST_TIMEOUT_S)
    finally:
        threading.excepthook = before
    assert not thread.is_alive()
    assert raised.empty()
    assert recorder.outcomes == []


# ---- helpers


def test_each_call_of_a_helper_thread_has_one_outcome() -> None:
    with CallThreads(2, "helper") as helpers:
        assert not helpers.is_busy
        may_end = threading.Event()
        waits = [helpers.submit(may_end.wait, TEST_TIMEOUT_S) for _ in range(2)]
        later, fails = helpers.submit(divmod, 7, 2), helpers.submit(divmod, 7, 0)
        dropped = helpers.submit(divmod, 7, 3)
        assert dropped.cancel()
        assert helpers.is_busy
        may_end.set()
        assert all(wait.result(TEST_TIMEOUT_S) for wait in waits)
        assert later.result(TEST_TIMEOUT_S) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            fails.result(TEST_TIMEOUT_S)
        assert helpers.submit(divmod, 7, 4).result(TEST_TIMEOUT_S) == (1, 3)
        assert not helpers.is_busy


def test_shutdown_does_not_wait_for_helper_threads() -> None:
    helpers = CallThreads(1, "helper")
    may_end = threading.Event()
    waits = helpers.submit(may_end.wait, TEST_TIMEOUT_S)
    helpers.shutdown()
    assert not waits.done()
    may_end.set()
    assert waits.result(TEST_TIMEOUT_S)
