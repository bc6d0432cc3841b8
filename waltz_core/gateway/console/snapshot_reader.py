"""Reads the state of the cluster in ZooKeeper, for all callers of the console together.

Rules:
    1. Only one read runs at a time. After each read, the reader pauses for the time that the read
       took, but at most for `PAUSE_S_MAX`. So many callers cause no more load on ZooKeeper than one
       caller.
    2. A request waits for a read for a limited time. After this time, the request uses the result
       of the previous read. The read continues, because a read of many partitions takes longer than
       a request may wait.
    3. If a read does not end in time, one small read shows whether ZooKeeper answers.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from waltz_core import errors
from waltz_core.administration.cluster_probes import ClusterSnapshot
from waltz_core.cluster.coordinator import Coordinator

if TYPE_CHECKING:
    from waltz_core.access.permissions import Permissions

_log = logging.getLogger(__name__)

WAIT_S: Final = 0.4
FIRST_WAIT_S: Final = 5.0
READ_S_MAX: Final = 60.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.4, 2.0
NO_ANSWER_TEXT: Final = "ZooKeeper did not answer in time"
_TIMEOUT_TEXT: Final = f"no answer within {2 * WAIT_S:g} s"


class SnapshotReader:
    """The latest state of the cluster and its permissions (rules 1 to 3)."""

    def __init__(self, coordinator: Callable[[], Coordinator], tasks: asyncio.TaskGroup) -> None:
        self._coordinator, self._tasks = coordinator, tasks
        self._snapshot: ClusterSnapshot | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._failure: errors.WaltzError | None = None  # the error of the last read
        self._read_start_s = self._next_read_s = 0.0
        self._permissions: Permissions | errors.BadConfig | None = None

    async def read(self) -> tuple[ClusterSnapshot, str]:
        """Return the state in ZooKeeper; if the state is from an earlier read, also the error.

        Raises:
            CoordinatorUnavailable: ZooKeeper does not answer, and was never read.
        """
        if self._read_task is None and _now_s() >= self._next_read_s:
            self._read_start_s = _now_s()
            self._read_task = self._tasks.create_task(self._read(), name="console_snapshot")
        if self._read_task is not None:
            await asyncio.wait(
                [self._read_task], timeout=FIRST_WAIT_S if self._snapshot is None else WAIT_S
            )
        if self._failure is not None and not isinstance(self._failure, errors.Unavailable):
            raise self._failure.with_traceback(None)
        error = "" if self._failure is None else str(self._failure) or NO_ANSWER_TEXT
        if self._read_task is not None and not error:
            error = await self._zookeeper_error()
        if self._snapshot is None:
            raise errors.CoordinatorUnavailable(error or NO_ANSWER_TEXT)
        return self._snapshot, error

    async def known_permissions(self) -> "Permissions | None":
        """Return the permissions of the last read; None if the cluster has no access control.

        Raises:
            CoordinatorUnavailable: ZooKeeper was never read.
            PermissionDenied: the gateway's user in ZooKeeper may not read the permissions.
        """
        if self._snapshot is None:
            await self.read()
        if isinstance(self._permissions, errors.BadConfig):
            raise errors.PermissionDenied(
                "no server or storage answers, and the gateway cannot read the permissions in "
                "ZooKeeper. Hint: use `waltz-core doctor`."
            )
        return self._permissions

    async def _zookeeper_error(self) -> str:
        """Return the error if ZooKeeper does not answer a small read (rule 3)."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._coordinator().read_cluster()
        except (TimeoutError, errors.Unavailable) as error:
            return str(error) or _TIMEOUT_TEXT
        return ""

    def close(self) -> None:
        """Stop reading, because the gateway stops."""
        if self._read_task is not None:
            self._read_task.cancel()

    async def _read(self) -> None:
        """Read the state once; an error is kept for the requests."""
        try:
            async with asyncio.timeout(READ_S_MAX):
                coordinator = self._coordinator()
                self._permissions = await _read_permissions(coordinator)
                self._snapshot = await ClusterSnapshot.read(coordinator)
        except TimeoutError:
            self._failure = errors.CoordinatorUnavailable(NO_ANSWER_TEXT)
        except errors.WaltzError as error:
            self._failure = error
        except Exception:  # noqa: BLE001 - the top of a task
            _log.exception("console.snapshot_failed")
            self._failure = errors.WaltzError(
                "internal error in the gateway. Hint: the log of the gateway has the details."
            )
        else:
            self._failure = None
        finally:
            self._read_task = None
            pause_s = min(max(PAUSE_S_MIN, _now_s() - self._read_start_s), PAUSE_S_MAX)
            self._next_read_s = _now_s() + (pause_s if self._failure is None else 0.0)


async def _read_permissions(coordinator: Coordinator) -> "Permissions | errors.BadConfig | None":
    """Return the permissions, or the error if the gateway's user in ZooKeeper may not read them."""
    try:
        return await coordinator.permissions.read()
    except errors.BadConfig as error:
        return error


def _now_s() -> float:
    return asyncio.get_running_loop().time()
