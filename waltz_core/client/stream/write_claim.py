"""The claim of one attempt of a task in an exactly-once write.

Before each mount, a client that writes for an attempt of a task checks that no later attempt has
begun. In all other respects, it is a normal client.

Rules (docs/spark.md, "Exactly once"; `cluster/write_registry.py`):
    1. An attempt uses the task's client ID, and mounts with connection sequences from attempt *
       2**32 on. So the highest attempt that has mounted fences the others, as long as the
       generation lasts.
    2. In a later generation, the server does not know which attempts were fenced. So `check` runs
       before each mount, after the generation for the mount was read. If the generation has changed
       since, the server rejects the mount.
    3. After a write is finished, no row is appended: `is_done` is true.
    4. Normally the Spark driver begins a write. If a task then finds no write, the write is over,
       and the task stops. The tasks of a series (a stream's micro-batches) begin their write
       themselves, because no driver does.
"""

from collections.abc import Mapping

from waltz_core.access.client_ids import ClientIdentity
from waltz_core.client.links.write_requests import EnteredTask, RegistryClient, WriteRequests
from waltz_core.cluster.write_registry import TaskState, WriteState, check_write_name
from waltz_core.errors import ConnectionSuperseded, Unreachable

SEQUENCES_PER_ATTEMPT = 1 << 32


class TaskClaim:
    """One attempt of one task of a write.

    Args:
        connect: the connect string of the cluster.
        write: the write's name; letters, digits, "-", "_", ".".
        task: the task's number, the same in each attempt.
        run: the name of one execution of the whole job.
        begin_arguments: if this task may begin the write (rule 4): the starting marks by partition,
            and the time in ms for which the write is kept. The values of the first task apply.

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
        begin_arguments: tuple[Mapping[int, int], int] | None = None,
    ) -> None:
        check_write_name(write)
        self.write = write
        self.task = task
        self.run = run
        self._connect = connect
        self._begin_arguments = begin_arguments
        self._writes: WriteRequests | None = None
        self._write_state: WriteState | None = None
        self._task: EnteredTask | None = None

    async def open(self, user: RegistryClient) -> None:
        """Enter the write, unless the write is done.

        Raises:
            Unavailable: neither a server nor ZooKeeper answers.
            ConnectionSuperseded: the write was removed.
            PermissionDenied: the write belongs to another principal.
        """
        writes = self._writes = WriteRequests(self._connect, user)
        try:
            await self._enter_write(writes)
        except BaseException:
            await writes.close()
            raise

    async def _enter_write(self, writes: WriteRequests) -> None:
        if self._begin_arguments is not None:
            state: WriteState | None = await writes.begin(
                self.write, *self._begin_arguments, in_series=True
            )
        else:
            state = await writes.read(self.write)
        if state is None:
            raise ConnectionSuperseded(
                f"write {self.write}: another run has completed this write or taken it over, and "
                "the state of the write was removed"
            )
        self._write_state = state
        if not state.is_done:
            self._task = await writes.enter(self.write, self.task, self.run)

    async def close(self) -> None:
        """End the session with ZooKeeper if there is one; the claim keeps its state."""
        if self._writes is not None:
            await self._writes.close()

    @property
    def is_done(self) -> bool:
        """Whether the write was done when this attempt began (rule 3)."""
        assert self._write_state is not None, "call `open` first"
        return self._write_state.is_done

    @property
    def marks(self) -> dict[int, int]:
        """The starting marks of the write, by partition."""
        assert self._write_state is not None, "call `open` first"
        return dict(self._write_state.marks)

    @property
    def state(self) -> TaskState:
        """The state of the task: its client ID, its attempt and its runs."""
        return self._entered_task.state

    @property
    def _entered_task(self) -> EnteredTask:
        assert self._task is not None, "a write that is done has no attempts"
        return self._task

    @property
    def identity(self) -> ClientIdentity:
        """The client ID of the task, with its proof."""
        return self._entered_task.identity

    @property
    def connection_sequence(self) -> int:
        """The number from which this attempt's connection sequences count (rule 1)."""
        return self.state.attempt * SEQUENCES_PER_ATTEMPT

    async def check(self) -> None:
        """Check that this attempt may mount (rule 2).

        Raises:
            ConnectionSuperseded: a later attempt has begun, or the write is over.
            Unavailable: neither a server nor ZooKeeper answers.
        """
        await self._open_writes().check(self.write, self.task, self.state.attempt)

    async def other_clients(self) -> set[int]:
        """Return the client IDs of other tasks of the write: tasks that other runs have begun."""
        tasks = await self._open_writes().tasks(self.write, self.run)
        return {
            client_id
            for task, client_id in tasks.client_ids_of_other_runs.items()
            if task != self.task
        }

    def _open_writes(self) -> WriteRequests:
        if self._writes is None:
            raise Unreachable(f"write {self.write}: the client was closed")
        return self._writes
