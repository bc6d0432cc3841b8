"""The claim of a task's attempt in an exactly-once write.

A client that writes for an attempt of a task checks, before each mount, that no later attempt has
begun; otherwise it is like any client.

Rules (docs/spark.md, "Exactly once"; `cluster/writes.py`):
    1. An attempt appends with the task's client id, and mounts with connection sequences from
       attempt * 2**32 on: the highest attempt that has mounted fences the others, for as long as
       the generation lasts.
    2. `check` runs before each mount, after the mount's generation was read: a server of a later
       generation does not know which attempts were fenced, but rejects an older generation.
    3. A write that is done is not entered again: `is_done` is true, and nothing is appended.
    4. Only the tasks of a series (a stream's micro-batches), which have no driver for it, begin a
       write. Otherwise a write that does not exist is over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from waltz_core.access.client_ids import ClientIdentity
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
        series: if this task may begin the write (rule 4), the marks from which it starts, by
            partition, and for how many ms it is kept; those of the first task apply.

    Raises:
        BadRequest: the name is not valid.
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
        """Enter the write, unless it is done.

        Raises:
            CoordinatorUnavailable: ZooKeeper does not answer.
            ConnectionSuperseded: the write was removed.
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
            raise ConnectionSuperseded(
                f"write {self.write}: it was completed or superseded, and then removed"
            )
        self._write_state = state
        if not state.is_done:
            self._task_state = await writes.enter(
                self.write, self.task, self.run, coordinator.next_client_id
            )

    async def close(self) -> None:
        """End the session with ZooKeeper; the claim is kept."""
        if self._coordinator is not None:
            await self._coordinator.close()

    @property
    def is_done(self) -> bool:
        """Whether the write was done when this attempt began (rule 3)."""
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
    def identity(self) -> ClientIdentity:
        """The client ID of the task."""
        return ClientIdentity(self.state.client_id)

    @property
    def connection_sequence(self) -> int:
        """Where this attempt's connection sequences begin (rule 1)."""
        return self.state.attempt * SEQUENCES_OF_ATTEMPT

    async def check(self) -> None:
        """Check that this attempt may mount (rule 2).

        Raises:
            ConnectionSuperseded: a later attempt has begun, or the write is over.
            CoordinatorUnavailable: ZooKeeper does not answer.
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
    """Begin a write unless it was begun; return its summary if it is done already, else None."""
    async with zookeeper_session.connected(connect) as coordinator:
        state = await coordinator.writes.begin(write, marks, keep_ms)
        return None if state.summary is None else dict(state.summary)


async def summary_of_write(connect: str, write: str) -> dict[str, Any] | None:
    """Return the summary of a write; None while it runs, and for an unknown one."""
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
    """Mark a write as done; return its summary, which is that of the first caller.

    Raises:
        ConnectionSuperseded: the write was removed.
    """
    async with zookeeper_session.connected(connect) as coordinator:
        state = await coordinator.writes.finish(write, summary, keep_ms)
        assert state.summary is not None
        return dict(state.summary)


async def forget_writes(connect: str, names: Sequence[str]) -> list[str]:
    """Remove writes by name, and some expired ones; return their names."""
    async with zookeeper_session.connected(connect) as coordinator:
        writes = coordinator.writes
        for name in names:
            await writes.forget(name)
        return [*names, *await writes.forget_expired()]
