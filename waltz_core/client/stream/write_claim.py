"""A task's place in a write that must enter the log once, as its client uses it.

A client that writes as somebody's second attempt has to ask, before each mount, whether it still is
the last one; everything else about it is like any client.

Rules (docs/spark.md, "Exactly once"; `cluster/writes.py`):
    1. An attempt appends with the task's client id, and mounts with connection sequences from
       attempt * 2**32 on: whichever attempt mounts last by that order fences the others, for as
       long as the generation lasts.
    2. Before each mount, and after the generation that it names was read, `check` is asked: a
       server of a later generation has forgotten who was fenced, but refuses an older generation.
    3. A write that is done is not entered any more: `is_done` says so, and nothing is appended.
    4. A task begins a write only where nobody else can: the tasks of a series (a stream's
       micro-batches). Otherwise a write that is not there is over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.writes import TaskState, WriteState, check_name
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.declarations import ClientConfig
from waltz_core.errors import ConnectionSuperseded, Unreachable

SEQUENCES_OF_ATTEMPT = 1 << 32


class TaskClaim:
    """One attempt of one task of a write.

    Args:
        connect: the cluster.
        write: the write's name; letters, digits, "-", "_", ".".
        task: the task's number, the same in each attempt.
        run: names one execution of the whole job.
        series: where this task may begin the write (rule 4), the marks from which it starts, by
            partition, and for how many ms it is kept; those of whoever came first hold.

    Raises:
        BadRequest: the write cannot be called so.
    """

    def __init__(
        self,
        connect: str,
        write: str,
        task: int,
        *,
        run: str,
        series: tuple[Mapping[int, int], int] | None = None,
    ) -> None:
        check_name(write)
        self.write = write
        self.task = task
        self.run = run
        self._connect = connect
        self._series = series
        self._coordinator: Coordinator | None = None
        self._write_state: WriteState | None = None
        self._task_state: TaskState | None = None

    async def open(self, config: ClientConfig) -> None:
        """Take the place, unless the write is done.

        Raises:
            CoordinatorUnavailable: ZooKeeper does not answer.
            ConnectionSuperseded: the write is forgotten.
        """
        coordinator = self._coordinator = await zookeeper_session.connect(
            self._connect,
            connect_timeout_ms=config.zookeeper_connect_timeout_ms,
            session_timeout_ms=config.zookeeper_session_timeout_ms,
        )
        try:
            await self._enter(coordinator)
        except BaseException:
            await coordinator.close()
            raise

    async def _enter(self, coordinator: Coordinator) -> None:
        writes = coordinator.writes
        if self._series is not None:
            state: WriteState | None = await writes.begin(self.write, *self._series, in_series=True)
        else:
            state = await writes.read(self.write)
        if state is None:
            raise ConnectionSuperseded(f"write {self.write}: it is over and forgotten")
        self._write_state = state
        if not state.is_done:
            self._task_state = await writes.enter(
                self.write, self.task, self.run, coordinator.next_client_id
            )

    async def close(self) -> None:
        """End the session with ZooKeeper; the place is kept."""
        if self._coordinator is not None:
            await self._coordinator.close()

    @property
    def is_done(self) -> bool:
        """Whether the write was done when this attempt came (rule 3)."""
        assert self._write_state is not None, "open comes first"
        return self._write_state.is_done

    @property
    def marks(self) -> dict[int, int]:
        """The marks from which the write starts."""
        assert self._write_state is not None, "open comes first"
        return dict(self._write_state.marks)

    @property
    def state(self) -> TaskState:
        """Client id, attempt and runs of the task."""
        assert self._task_state is not None, "a write that is done has no attempts"
        return self._task_state

    @property
    def connection_sequence(self) -> int:
        """Where this attempt's connection sequences begin (rule 1)."""
        return self.state.attempt * SEQUENCES_OF_ATTEMPT

    async def check(self) -> None:
        """Return if this attempt may mount (rule 2).

        Raises:
            ConnectionSuperseded: it is over.
            CoordinatorUnavailable: nobody can tell now.
        """
        await self._open_coordinator().writes.check(self.write, self.task, self.state.attempt)

    async def other_clients(self) -> set[int]:
        """Return the client ids of the other tasks that an earlier run has begun."""
        tasks = await self._open_coordinator().writes.tasks(self.write)
        return {
            int(state.client_id)
            for task, state in tasks.items()
            if task != self.task and any(run != self.run for run in state.runs)
        }

    def _open_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise Unreachable(f"write {self.write}: the client was closed")
        return self._coordinator


async def begin_write(
    connect: str, write: str, marks: Mapping[int, int], *, keep_ms: int
) -> dict[str, Any] | None:
    """Begin a write unless it was; return its summary when it is done already, else None."""
    async with zookeeper_session.connected(connect) as coordinator:
        state = await coordinator.writes.begin(write, marks, keep_ms)
        return None if state.summary is None else dict(state.summary)


async def summary_of_write(connect: str, write: str) -> dict[str, Any] | None:
    """Return what a write has come to; None while it goes on, and when it is not known."""
    async with zookeeper_session.connected(connect) as coordinator:
        state = await coordinator.writes.read(write)
        return None if state is None or state.summary is None else dict(state.summary)


async def tasks_of_write(connect: str, write: str) -> list[int]:
    """Return the numbers of the tasks that any run of a write has begun."""
    async with zookeeper_session.connected(connect) as coordinator:
        return await coordinator.writes.task_numbers(write)


async def end_write(
    connect: str, write: str, summary: Mapping[str, Any], *, keep_ms: int
) -> dict[str, Any]:
    """Mark a write as done; return the summary that holds, which is that of whoever was first.

    Raises:
        ConnectionSuperseded: the write is forgotten.
    """
    async with zookeeper_session.connected(connect) as coordinator:
        state = await coordinator.writes.finish(write, summary, keep_ms)
        assert state.summary is not None
        return dict(state.summary)


async def forget_writes(connect: str, names: Sequence[str]) -> list[str]:
    """Remove writes by name, and some of those whose time is over; return which."""
    async with zookeeper_session.connected(connect) as coordinator:
        writes = coordinator.writes
        removed = [*names, *await writes.out_of_time()]
        for name in removed:
            await writes.forget(name)
        return removed
