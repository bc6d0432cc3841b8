"""What the simulated applications do.

Why it stands alone: a checker finds only what an application would have noticed, so applications
here do all that the log is for: they append alone and in batches, under all kinds of locks, at old
and new marks, try again after a refusal, follow the feed, ask for marks, die and come back.

Rules:
    1. Each client works in a loop of its own, drawn from its own chance.
    2. Every row has a number that nobody else has, and is in the books before it is sent.
"""

import zlib
from typing import TYPE_CHECKING, Final

from waltz_core.batches import encode_append
from waltz_core.client import events
from waltz_core.client.monitor import Parcel, Single
from waltz_core.record import BEFORE_FIRST, TransactionId
from waltz_core.sim.history import Operation, data_of
from waltz_core.wire.messages import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from waltz_core.sim.clients import SimClient
    from waltz_core.sim.cluster import SimCluster

# The write, read and append locks of one row.
Locks = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
PENDING_MAX: Final = 4
RETRIES_MAX: Final = 3


class Workload:
    """All applications of a world."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._numbers = 0
        self._tokens = 0
        self._parcels: dict[int, list[Operation]] = {}
        self.is_over = False

    @property
    def pending_count(self) -> int:
        """How many parcels wait for an outcome."""
        return len(self._parcels)

    def operations_of(self, token: int) -> "Sequence[Operation]":
        """Return the rows of a parcel."""
        return self._parcels[token]

    def begin(self, client: "SimClient") -> None:
        """Let a client that has just started do something, again and again."""
        _Application(self, self._cluster, client).begin()

    def parcel(self, client: "SimClient", rows: "Sequence[Locks]", mark: int) -> Parcel:
        """Enter rows in the books (write, read and append locks of each) and pack them."""
        self._tokens += 1
        operations = []
        for write, read, append in rows:
            self._numbers += 1
            operation = Operation(
                self._numbers, client.name, None, write, read, append, mark, self._world.now_us
            )
            operations.append(operation)
            self._cluster.checks.history.operations[self._numbers] = operation
        self._parcels[self._tokens] = operations
        size = 8 + 8 * (self._numbers % 5)
        if len(operations) == 1:
            write, read, append = rows[0]
            data = data_of(operations[0].number, size)
            content = Single(7, data, write, read, append)
            return Parcel(self._tokens, 1, TransactionId(mark), content, zlib.crc32(data))
        payload = encode_append(
            [7] * len(rows),
            [data_of(each.number, size) for each in operations],
            write_locks=[each.write for each in operations],
            read_locks=[each.read for each in operations],
            append_locks=[each.append for each in operations],
        )
        return Parcel(self._tokens, len(rows), TransactionId(mark), payload, zlib.crc32(payload))

    def ended(self, token: int) -> "list[Operation]":
        """Take a parcel out: its outcome is known, or never will be."""
        return self._parcels.pop(token)

    def drop(self, client: "SimClient") -> None:
        """Forget the parcels of a client that has died."""
        for token, operations in list(self._parcels.items()):
            if operations[0].client == client.name:
                del self._parcels[token]


class _Application:
    """One life of one client's application."""

    def __init__(self, workload: Workload, cluster: "SimCluster", client: "SimClient") -> None:
        self._workload = workload
        self._cluster = cluster
        self._client = client
        self._chance = client.chance
        self._rng = client.rng
        self._waiting = 0
        self._retries = 0

    def begin(self) -> None:
        client = self._client
        client.on_settled = self._settled
        client.on_refused = self._refused
        if self._chance() < 0.6:
            client.subscribe(TransactionId(BEFORE_FIRST))
        self._later()

    def _later(self) -> None:
        think_us = self._cluster.setup.think_ms * 1_000
        self._client.after(int(self._chance() * 2 * think_us) + 100, self._go)

    def _go(self) -> None:
        if self._workload.is_over:
            return
        if self._waiting < PENDING_MAX:
            roll = self._chance()
            if roll >= self._cluster.setup.batch_share:
                self._append([self._row()], self._mark())
            else:
                rows = [self._row() for _ in range(2 + int(self._chance() * 5))]
                self._append(rows, self._mark())
        self._later()

    def _mark(self) -> int:
        """The mark that the application has seen: mostly all, sometimes less."""
        mark: int = self._client.mark
        if self._chance() < 0.2:
            mark = max(BEFORE_FIRST, mark - int(self._chance() * 10))
        return mark

    def _row(self) -> Locks:
        return self._some(0.5), self._some(0.3), self._some(0.2)

    def _some(self, share: float) -> tuple[int, ...]:
        if self._chance() >= share:
            return ()
        keys = self._cluster.setup.keys
        count = 1 if self._chance() < 0.8 else 2
        return tuple(sorted({int(self._chance() * keys) for _ in range(count)}))

    def _append(self, rows: "Sequence[Locks]", mark: int) -> None:
        self._waiting += 1
        self._client.append(self._workload.parcel(self._client, rows, mark))

    def _settled(self, effect: events.Settled) -> None:
        operations = self._workload.ended(effect.token)
        self._waiting -= 1
        again = [
            (each.write, each.read, each.append)
            for each, reason in zip(operations, effect.outcome.reasons.tolist(), strict=True)
            if reason == Reason.LOCK
        ]
        if again and self._retries < RETRIES_MAX and not self._workload.is_over:
            self._retries += 1
            self._cluster.checks.count("retry after a refusal")
            self._append(again, self._client.mark)
        else:
            self._retries = 0

    def _refused(self, effect: events.Refused) -> None:
        self._workload.ended(effect.token)
        self._waiting -= 1
