"""The state of applications, computed from the log: accounts, lists and guards.

Lock checks should make the log serializable: each transaction must be valid at its position in the
log, although it was computed at an earlier mark. This module checks that result directly. Every
transaction carries the values that it read. If a replay of the log finds other values, the history
is not serializable.

Rules:
    1. A checked transaction reads two values at its mark. It has a write lock on a value that it
       changes, and a read lock on a value that it only reads.
    2. The values that it writes follow from the values that it read and from its number. So the log
       alone determines the written values.
    3. TRANSFER moves money between two accounts (the bank). PUSH appends to a list and states its
       length (list-append). GUARD lets the first of a pair leave only while the second one stays
       (write skew).
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from waltz_sim.guarantees.history import NUMBER_BYTES, Violation

# The kind, the two positions, and the value read at each position.
_BODY: Final = struct.Struct(">BiiQQ")
INITIAL_BALANCE: Final = 100
# The locks of each kind differ from the locks of other kinds and of plain rows.
_LOCKS_PER_KIND: Final = 1_000


class RowKind(IntEnum):
    """The kind of a row (rule 3). A PLAIN row is not a checked transaction."""

    PLAIN = 0
    TRANSFER = 1
    PUSH = 2
    GUARD = 3


class CheckedTransaction(NamedTuple):
    """A transaction that reads the values at two positions, and carries both (rule 1)."""

    kind: RowKind
    first: int
    second: int

    @property
    def write_locks(self) -> tuple[int, ...]:
        """The locks on the values that it changes."""
        if self.kind is RowKind.TRANSFER:
            return self._lock(self.first), self._lock(self.second)
        return (self._lock(self.first),)

    @property
    def read_locks(self) -> tuple[int, ...]:
        """The locks on the values that it only reads."""
        return (self._lock(self.second),) if self.kind is RowKind.GUARD else ()

    def _lock(self, position: int) -> int:
        return self.kind * _LOCKS_PER_KIND + position


def _writes_of(data: bytes) -> list[tuple[tuple[int, int], int]]:
    """Return what a checked transaction writes, as ((kind, position), value); else nothing."""
    if len(data) != NUMBER_BYTES + _BODY.size:
        return []
    kind, first, second, *read = _BODY.unpack_from(data, NUMBER_BYTES)
    number = int.from_bytes(data[:NUMBER_BYTES], "big")
    match kind:
        case RowKind.PLAIN:
            return []
        case RowKind.TRANSFER:
            # A transfer from an account to itself changes nothing.
            amount = min(number % 10, read[0]) if first != second else 0
            return [((kind, first), read[0] - amount), ((kind, second), read[1] + amount)]
        case RowKind.PUSH:
            # The value of a list is its length and its last element.
            value = (((read[0] >> 40) + 1) << 40) | (number & ((1 << 40) - 1))
            return [((kind, first), value)]
        case RowKind.GUARD:
            return [((kind, first), 0 if read == [1, 1] else 1)]
        case _:
            raise AssertionError(f"unknown row kind {kind}")


class _Versions:
    """All versions of one value, each with the ID of the transaction that wrote it."""

    __slots__ = ("ids", "values")

    def __init__(self, value: int) -> None:
        self.ids = [-1]
        self.values = [value]

    def at(self, mark: int) -> int:
        return self.values[bisect_right(self.ids, mark) - 1]

    def add(self, transaction_id: int, value: int) -> None:
        self.ids.append(transaction_id)
        self.values.append(value)


class Ledger:
    """The state of all applications at every ID of one log."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, int], _Versions] = {}
        self.checked_count = 0

    def encode_body(
        self, checked: CheckedTransaction, mark: int, predecessors: Iterable[bytes] = ()
    ) -> bytes:
        """Return the data of a checked transaction, without its number, computed at a mark.

        The transaction also depends on in-flight rows after the mark; `predecessors` has their
        data.
        """
        after: dict[tuple[int, int], int] = {}
        for data in predecessors:
            after.update(_writes_of(data))
        values = [
            after.get((checked.kind, position), self._versions_of(checked.kind, position).at(mark))
            for position in (checked.first, checked.second)
        ]
        return _BODY.pack(checked.kind, checked.first, checked.second, *values)

    def replay(self, transaction_id: int, data: bytes) -> None:
        """Replay the next transaction of the log; raise Violation if it read other values.

        Rows that are not checked transactions are skipped.
        """
        if len(data) != NUMBER_BYTES + _BODY.size:
            return
        kind, first, second, *read = _BODY.unpack_from(data, NUMBER_BYTES)
        if kind == RowKind.PLAIN:
            return
        left, right = self._versions_of(kind, first), self._versions_of(kind, second)
        now = [left.at(transaction_id), right.at(transaction_id)]
        if read != now:
            raise Violation(
                "Serializable",
                f"transaction {transaction_id} ({RowKind(kind).name} {first}, {second}) was "
                f"computed from the values {read}, expected {now}",
            )
        self.checked_count += 1
        for key, value in _writes_of(data):
            self._versions_of(*key).add(transaction_id, value)

    def check_final_state(self) -> None:
        """Check that some serial order leads to the current state; raise Violation if none does."""
        last = {key: versions.values[-1] for key, versions in self._versions.items()}
        accounts = [value for (kind, _), value in last.items() if kind == RowKind.TRANSFER]
        if sum(accounts) != INITIAL_BALANCE * len(accounts):
            raise Violation(
                "Serializable", f"the sum of {len(accounts)} accounts is {sum(accounts)}"
            )
        for (kind, position), value in last.items():
            if kind == RowKind.GUARD and value == 0 and last.get((kind, position ^ 1)) == 0:
                raise Violation(
                    "Serializable",
                    f"expected at least one guard of each pair to stay, but guards {position} "
                    f"and {position ^ 1} have both left",
                )

    def _versions_of(self, kind: int, position: int) -> _Versions:
        found = self._versions.get((kind, position))
        if found is None:
            value = {RowKind.TRANSFER: INITIAL_BALANCE, RowKind.PUSH: 0, RowKind.GUARD: 1}[
                RowKind(kind)
            ]
            found = self._versions[kind, position] = _Versions(value)
        return found
