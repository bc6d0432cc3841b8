"""What applications make of the log: accounts, lists and guards, told by their transactions.

That locks are checked is a means; the end is that transactions which were computed at some mark are
as good as if each had been computed at its own place in the log. This looks at the end alone: every
transaction carries what it had read, and whoever replays the log finds it true, or the history is
not serializable.

Rules:
    1. A deal reads two things at its mark, and holds a lock on each that it reads: a write lock on
       what it changes, a read lock on what it leaves.
    2. What it writes follows from what it read and from its number, so the log alone tells it.
    3. TRANSFER moves money between two accounts (the bank), PUSH appends to a list and says how
       long that was (list-append), GUARD lets the first of a pair leave only while the second stays
       (write skew).
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from waltz_sim.promises.history import NUMBER_BYTES, Violation

# Kind, first, second, what was read of either.
_BODY: Final = struct.Struct(">BiiQQ")
BALANCE: Final = 100
# Locks of the kinds are apart from each other, and from those of plain rows.
_LOCKS_OF_KIND: Final = 1_000


class RowKind(IntEnum):
    """What a row is about (rule 3); PLAIN rows say nothing."""

    PLAIN = 0
    TRANSFER = 1
    PUSH = 2
    GUARD = 3


class Deal(NamedTuple):
    """A transaction that says what it has read."""

    kind: RowKind
    first: int
    second: int

    @property
    def write(self) -> tuple[int, ...]:
        """The locks on what it changes."""
        if self.kind is RowKind.TRANSFER:
            return self._lock(self.first), self._lock(self.second)
        return (self._lock(self.first),)

    @property
    def read(self) -> tuple[int, ...]:
        """The locks on what it only reads."""
        return (self._lock(self.second),) if self.kind is RowKind.GUARD else ()

    def _lock(self, place: int) -> int:
        return self.kind * _LOCKS_OF_KIND + place


def _written_by(data: bytes) -> list[tuple[tuple[int, int], int]]:
    """Return what a transaction writes, things and their values (rule 2); none if it is no deal."""
    if len(data) != NUMBER_BYTES + _BODY.size:
        return []
    kind, first, second, *read = _BODY.unpack_from(data, NUMBER_BYTES)
    number = int.from_bytes(data[:NUMBER_BYTES], "big")
    match kind:
        case RowKind.PLAIN:
            return []
        case RowKind.TRANSFER:
            # From an account to itself: it stays as it is.
            amount = min(number % 10, read[0]) if first != second else 0
            return [((kind, first), read[0] - amount), ((kind, second), read[1] + amount)]
        case RowKind.PUSH:
            # The length of the list, and what is last in it.
            value = (((read[0] >> 40) + 1) << 40) | (number & ((1 << 40) - 1))
            return [((kind, first), value)]
        case RowKind.GUARD:
            return [((kind, first), 0 if read == [1, 1] else 1)]
        case _:
            raise AssertionError(f"a deal of kind {kind}")


class _Versions:
    """The values that one thing has had."""

    __slots__ = ("ids", "values")

    def __init__(self, value: int) -> None:
        self.ids = [-1]
        self.values = [value]

    def at(self, mark: int) -> int:
        return self.values[bisect_right(self.ids, mark) - 1]

    def put(self, transaction_id: int, value: int) -> None:
        self.ids.append(transaction_id)
        self.values.append(value)


class Ledger:
    """The state of all applications at every mark of one log."""

    def __init__(self) -> None:
        self._things: dict[tuple[int, int], _Versions] = {}
        self.deal_count = 0

    def body(self, deal: Deal, mark: int, predecessors: Iterable[bytes] = ()) -> bytes:
        """Return what a deal carries behind its number that is computed at a mark.

        `predecessors` are the data of what is taken to be there already, behind the mark.
        """
        after: dict[tuple[int, int], int] = {}
        for data in predecessors:
            after.update(_written_by(data))
        values = [
            after.get((deal.kind, place), self._thing(deal.kind, place).at(mark))
            for place in (deal.first, deal.second)
        ]
        return _BODY.pack(deal.kind, deal.first, deal.second, *values)

    def take(self, transaction_id: int, data: bytes) -> None:
        """Replay the next transaction of the log; raises Violation when it has read something else.

        Rows that are no deals are passed over.
        """
        if len(data) != NUMBER_BYTES + _BODY.size:
            return
        kind, first, second, *read = _BODY.unpack_from(data, NUMBER_BYTES)
        if kind == RowKind.PLAIN:
            return
        one, other = self._thing(kind, first), self._thing(kind, second)
        now = [one.at(transaction_id), other.at(transaction_id)]
        if read != now:
            raise Violation(
                "Serializable",
                f"{RowKind(kind).name} {first}, {second} at {transaction_id} had read {read}, "
                f"it is {now}",
            )
        self.deal_count += 1
        for thing, value in _written_by(data):
            self._thing(*thing).put(transaction_id, value)

    def audit(self) -> None:
        """Hold the state against what no serial order can lead to; raises Violation."""
        last = {key: versions.values[-1] for key, versions in self._things.items()}
        accounts = [value for (kind, _), value in last.items() if kind == RowKind.TRANSFER]
        if sum(accounts) != BALANCE * len(accounts):
            raise Violation("Serializable", f"{len(accounts)} accounts hold {sum(accounts)}")
        for (kind, place), value in last.items():
            if kind == RowKind.GUARD and value == 0 and last.get((kind, place ^ 1)) == 0:
                raise Violation("Serializable", f"both guards of the pair of {place} have left")

    def _thing(self, kind: int, place: int) -> _Versions:
        found = self._things.get((kind, place))
        if found is None:
            value = {RowKind.TRANSFER: BALANCE, RowKind.PUSH: 0, RowKind.GUARD: 1}[RowKind(kind)]
            found = self._things[kind, place] = _Versions(value)
        return found
