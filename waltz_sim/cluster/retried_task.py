"""A Spark task with two attempts under one client ID, in the simulation.

The first attempt has read the generation, and is paused before it mounts. The second attempt mounts
with a higher connection sequence, appends all rows, and disconnects. Then the first attempt
continues: it mounts and appends the same rows. The server's fences must reject the first attempt
(`server/append/mounts.py`, rule 1).

Rules:
    1. The rows have the same request IDs in both attempts. So if the log contains a row twice,
       AtMostOnce is violated.
    2. The first attempt continues only when the log contains all rows of the second attempt.
       Without this rule, the appends of the two attempts could alternate, and an attempt would have
       to read back the rows in the log (`client/stream/write_claim.py`).
    3. Without `Setup.has_new_owner_ids`, a restarted owner keeps its generation, so no fence would
       reject the first attempt. In such a world, the first attempt does not continue after the
       owner's death.
"""

import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

from waltz_core.errors import ConnectionSuperseded, GenerationMismatch
from waltz_core.records.record import BEFORE_FIRST, ClientId, ReqId
from waltz_core.wire.messages import (
    LATEST_MARK,
    AppendRequest,
    ErrorResponse,
    Message,
    Mounted,
    MountWriter,
)
from waltz_sim.world.network import NEAR, Handlers, SimLink
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_sim.cluster.simulated_cluster import SimCluster

ROW_COUNT: Final = 3
POLL_INTERVAL_US: Final = 10_000
POLLS_MAX: Final = 300
RETRY_US: Final = 50_000
ATTEMPTS_MAX: Final = 100
# The errors that end an attempt: the attempt is fenced, or its generation has ended.
FENCING_ERROR_CODES: Final = (ConnectionSuperseded.code, GenerationMismatch.code)
_NO_LOCKS: Final[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = ((), (), ())


class RetriedTask(Process):
    """One task; `on_rows_written` is called when all rows of its second attempt are in the log."""

    def __init__(self, cluster: "SimCluster", on_rows_written: "Callable[[], None]") -> None:
        super().__init__(cluster.world, "task")
        self._cluster = cluster
        self._on_rows_written = on_rows_written
        self._client_id = ClientId(cluster.coordinator.next_client_id())
        self._generation = cluster.coordinator.assignment.generation
        self._rows = cluster.workload.record_rows(self.name, [_NO_LOCKS] * ROW_COUNT)
        owner = cluster.owner
        assert owner is not None
        self._owner, self._incarnation = owner, owner.incarnation
        self._is_over = False
        self._attempt(2)
        self._poll_rows(POLLS_MAX)

    def continue_first_attempt(self) -> None:
        """Let the first attempt continue."""
        self._is_over = False
        self._attempt(1)

    def _poll_rows(self, tries_left: int) -> None:
        """End the second attempt when the log contains all of its rows (rule 2)."""
        if all(row.transaction_id != BEFORE_FIRST for row in self._rows):
            self._is_over = True  # ends the second attempt
            for link in list(self.links.values()):
                self._cluster.network.close(link, NEAR)
            self._on_rows_written()
        elif tries_left:
            self.call_after_us(POLL_INTERVAL_US, lambda: self._poll_rows(tries_left - 1))

    def _attempt(self, sequence: int, tries_left: int = ATTEMPTS_MAX) -> None:
        """Mount with a connection sequence, and append all rows; retry as a client does."""
        cluster, owner = self._cluster, self._cluster.owner

        has_restarted = self._owner.incarnation != self._incarnation
        if has_restarted and not cluster.setup.has_new_owner_ids:  # rule 3
            return

        def retry() -> None:
            if tries_left and not self._is_over:
                self.call_after_us(RETRY_US, lambda: self._attempt(sequence, tries_left - 1))

        def mount(link: SimLink) -> None:
            request = MountWriter(self._req_id(0), sequence, LATEST_MARK, wants_feed=False)
            cluster.network.send(link, NEAR, request)

        if owner is None:
            retry()
            return
        cluster.network.dial(
            self,
            owner,
            Handlers(partial(self._on_message, retry), lambda _link, _reason: retry()),
            on_opened=mount,
            on_failed=lambda _reason: retry(),
            accept=owner.accept,
        )

    def _on_message(self, retry: "Callable[[], None]", link: SimLink, message: Message) -> None:
        network = self._cluster.network
        if isinstance(message, Mounted):
            # The rows are sent once: a client reads the outcome instead of resending.
            self._is_over = True
            for number, row in enumerate(self._rows, 1):
                request = (BEFORE_FIRST, (), (), (), 7, row.data, zlib.crc32(row.data))
                network.send(link, NEAR, AppendRequest(self._req_id(number), *request))
        elif isinstance(message, ErrorResponse):
            network.close(link, NEAR)
            if message.error_code in FENCING_ERROR_CODES:
                self._is_over = True
            retry()

    def _req_id(self, sequence: int) -> ReqId:
        return ReqId(self._client_id, self._generation, self._cluster.partition_id, sequence)
