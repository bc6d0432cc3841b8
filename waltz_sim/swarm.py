"""Runs many seeds on all cores.

This is the only module of the simulator that uses operating system processes and real time. A seed
has the same result in each process.

Rules:
    1. Seeds are processed in order, several at a time. The result does not depend on the number of
       processes, unless a time limit ends the run.
    2. If a process dies, the whole run fails: a seed without a result is not a good seed.
    3. Only the parent process handles an interrupt: it terminates the children at once. The
       children ignore the signal and print nothing, also while they start.
    4. On Linux, the children are killed when their parent exits for any reason. Without this rule,
       they would wait for seeds forever.
"""

import ctypes
import gc
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from itertools import count, islice
from multiprocessing import active_children, get_context, parent_process
from typing import Final

from waltz_sim.coverage import Coverage, sum_verdicts
from waltz_sim.run import DEFAULT_GENERATOR, ScheduleGenerator, run_seed

CHUNK_SEEDS: Final = 8
PROGRESS_INTERVAL_S: Final = 5.0
POLL_INTERVAL_S: Final = 0.2  # the longest delay until an interrupt is handled
# A world is full of reference cycles, and is released as a whole. More frequent garbage collections
# would find nothing, and cost some percent of the time.
COLLECTION_THRESHOLD: Final = 200_000
_PR_SET_PDEATHSIG: Final = 1

OnProgress = Callable[[Coverage, float], None]


def sweep(  # noqa: PLR0913 - what to run, how, and where to report
    first: int,
    seed_count: int | None = None,
    *,
    jobs: int,
    seconds: float | None = None,
    generator: ScheduleGenerator = DEFAULT_GENERATOR,
    on_progress: OnProgress | None = None,
    sums: Coverage | None = None,
) -> Coverage:
    """Run `seed_count` seeds from `first` on, or for `seconds`; return the sums of their results.

    It must be called on the main thread. `on_progress` is called every few seconds with the sums so
    far and the elapsed seconds. If `sums` is given, the results are added to `sums`, so that the
    results are available after an interrupt.
    """
    assert seed_count is not None or seconds is not None
    began_s = reported_s = time.monotonic()
    end_s = None if seconds is None else began_s + seconds
    chunks = _chunks(first, seed_count, end_s)
    sums = Coverage() if sums is None else sums
    with closing(_run_all(chunks, jobs, partial(run_chunk, generator=generator))) as parts:
        for part in parts:
            sums.merge(part)
            now_s = time.monotonic()
            if on_progress is not None and now_s - reported_s >= PROGRESS_INTERVAL_S:
                reported_s = now_s
                on_progress(sums, now_s - began_s)
    return sums


def _chunks(first: int, seed_count: int | None, end_s: float | None) -> Iterator[range]:
    starts = count(first, CHUNK_SEEDS)
    for start in starts:
        if end_s is not None and time.monotonic() >= end_s:
            return
        stop = start + CHUNK_SEEDS
        if seed_count is not None:
            stop = min(stop, first + seed_count)
        if start >= stop:
            return
        yield range(start, stop)


def _run_all(
    chunks: Iterator[range], jobs: int, run_one: Callable[[range], Coverage]
) -> Generator[Coverage, None, None]:
    """Run chunks of seeds on `jobs` processes; always queue some, so that no process is idle."""
    if jobs == 1:
        with _reduced_collections():
            yield from map(run_one, chunks)
        return
    # Processes are spawned, not forked: a fork of a process with threads may hang.
    with (
        _deferred_interrupts() as raise_deferred,
        ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare_process) as pool,
        _children_end_on_failure(),
    ):
        with _children_ignore_interrupts():
            pending: set[Future[Coverage]] = {
                pool.submit(run_one, chunk) for chunk in islice(chunks, 2 * jobs)
            }
        while pending:
            raise_deferred()
            done, pending = wait(pending, POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            pending |= {pool.submit(run_one, chunk) for chunk in islice(chunks, len(done))}
            for future in done:
                yield future.result()


@contextmanager
def _deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer interrupts inside the block; yield a function that raises a deferred interrupt.

    The end of the block also raises a deferred interrupt. If an interrupt were raised while a child
    starts, the child would not get its input. If an interrupt were raised during a wait, it would
    leave locks behind, and the pool's own thread would wait for these locks.
    """
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))

    def raise_deferred() -> None:
        if interrupts and callable(before):
            before(interrupts.pop(), None)

    try:
        yield raise_deferred
        raise_deferred()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _children_end_on_failure() -> Iterator[None]:
    """Terminate the processes that were started inside the block if the block fails."""
    others = active_children()
    try:
        yield
    except BaseException:
        for child in active_children():
            if child not in others:
                child.terminate()
        raise


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Let the processes that start inside the block ignore interrupts (rule 3)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_process() -> None:
    """Prepare a new process of the pool."""
    _reduce_collections()
    if sys.platform.startswith("linux"):
        _end_with_parent()


def _end_with_parent() -> None:
    """Request a signal that kills this process when its parent exits (rule 4)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    assert parent is not None
    if not parent.is_alive():  # The parent exited before the request, so no signal follows.
        sys.exit(1)


def _reduce_collections() -> None:
    """Collect garbage rarely, and do not examine imported modules, which are never released."""
    gc.freeze()
    gc.set_threshold(COLLECTION_THRESHOLD)


@contextmanager
def _reduced_collections() -> Iterator[None]:
    """Reduce garbage collection inside the block, in a process that continues after it."""
    before = gc.get_threshold()
    _reduce_collections()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def run_chunk(seeds: range, *, generator: ScheduleGenerator = DEFAULT_GENERATOR) -> Coverage:
    """Run the seeds of a chunk in order; return their sums with the CPU time."""
    began_s = time.process_time()
    sums = sum_verdicts(run_seed(seed, generator) for seed in seeds)
    sums.cpu_s = time.process_time() - began_s
    return sums
