"""Plans moves of partitions between servers, so that all servers have about the same load.

A move pauses every client of the partition. So partitions move only if the gain is worth this
pause.

Rules:
    1. A partition that any live server prefers is not moved (assignment.py).
    2. Partitions move from a server with a load above the servers' average, the source, to the
       least loaded server, the target. The gain of a move is the decrease of the greater of their
       two loads.
       - A rebalancing begins only under two conditions: the load of the source is more than a
         quarter above the average, and the gain is more than an eighth of the average. Both
         conditions must hold for `sustained_ms`, so that noise and short peaks are ignored.
       - For `rebalancing_ms` after the beginning, a gain of more than a twentieth of the average is
         sufficient, so that the rebalancing is completed.
       - Each move makes the loads of two servers more even. So with constant loads, the moves end.
    3. A partition that was moved stays for `cooldown_ms`; at most `moves_max` partitions move at
       one time.
    4. `IDLE_LOAD` is added to the load of each partition, so that idle partitions are spread by
       count.
    5. No partition is left without an owner: a plan moves only partitions that have an owner, and
       names the next owner.
    6. Even during a rebalancing, a server is a source only after it was overloaded for
       `sustained_ms`. Reason: servers publish their loads one after the other. When all servers
       continue after a pause, the first server that publishes its loads seems overloaded for a
       moment.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from waltz_core.records.record import PartitionId, ServerId

# The load that is added to each partition (rule 4); a partition with a lower load is nearly idle. A
# load of 1 is about one KiB of appended data per second (server/process/partition_cost.py).
IDLE_LOAD: Final = 10.0


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """The thresholds for a move; see the module's rules."""

    cooldown_ms: int
    sustained_ms: int
    rebalancing_ms: int
    excess_min_to_begin: float = 0.25
    gain_min_to_begin: float = 0.125
    gain_min_to_continue: float = 0.05
    moves_max: int = 16


class _BalanceMove(NamedTuple):
    """Partitions that could move from one server to another, and the gain of this move."""

    gain: float
    partitions: tuple[PartitionId, ...]
    target: ServerId


class Balancer:
    """Plans moves, and remembers earlier ones; see the module's rules."""

    def __init__(self, limits: BalanceLimits) -> None:
        self._limits = limits
        self._last_move_ms: dict[PartitionId, int] = {}
        self._rebalancing_until_ms: int | None = None
        self._uneven_since_ms: int | None = None
        self._overloaded_since_ms: dict[ServerId, int] = {}

    def on_partitions_moved(self, partition_ids: Collection[PartitionId], now_ms: int) -> None:
        """Record that these partitions have moved (rule 3)."""
        self._last_move_ms.update(dict.fromkeys(partition_ids, now_ms))

    def reset_history(self) -> None:
        """Forget earlier observations after a gap in the observed loads (rules 2 and 6)."""
        self._uneven_since_ms = None
        self._overloaded_since_ms = {}

    def plan_moves(
        self,
        owners: Mapping[PartitionId, ServerId],
        preferred: Collection[PartitionId],
        loads: Mapping[PartitionId, float],
        servers: Collection[ServerId],
        now_ms: int,
    ) -> dict[PartitionId, ServerId]:
        """Return the moves to make now: partition and target server.

        `servers` are the servers with known loads; all other servers are neither sources nor
        targets. `preferred` are the partitions that any server prefers. A partition without a known
        load does not move.
        """
        self._forget_old_moves(now_ms)
        pinned = {*preferred, *self._last_move_ms}
        server_loads: dict[ServerId, dict[PartitionId, float]] = {each: {} for each in servers}
        for partition_id, owner in owners.items():
            if owner in server_loads:
                server_loads[owner][partition_id] = IDLE_LOAD + loads.get(partition_id, 0.0)
        if len(server_loads) < 2:
            self.reset_history()
            return {}
        movable = {each for each in loads if each not in pinned}
        is_rebalancing = self._is_rebalancing(server_loads, movable, now_ms)
        possible_moves = self._compute_moves(
            {each: dict(partition_loads) for each, partition_loads in server_loads.items()}, movable
        )
        sources = {owners[each] for each in possible_moves}
        self._overloaded_since_ms = {
            each: self._overloaded_since_ms.get(each, now_ms) for each in sources
        }
        if not is_rebalancing:
            return {}
        before_ms = now_ms - self._limits.sustained_ms
        ready_sources = {
            each for each, at_ms in self._overloaded_since_ms.items() if at_ms <= before_ms
        }
        # The moves are planned again with the ready sources only (rule 6). A selection of moves of
        # the first plan is not sufficient, because a move may depend on a move from another source.
        return self._compute_moves(
            server_loads, {each for each in movable if owners[each] in ready_sources}
        )

    def _compute_moves(
        self,
        server_loads: dict[ServerId, dict[PartitionId, float]],
        movable: Collection[PartitionId],
    ) -> dict[PartitionId, ServerId]:
        """Return the moves that make the loads of the servers more even (rule 2)."""
        moves: dict[PartitionId, ServerId] = {}
        movable = set(movable)
        while len(moves) < self._limits.moves_max:
            best_move = _best_move(server_loads, movable, self._limits.gain_min_to_continue)
            if best_move is None:
                break
            source, move = best_move
            for partition_id in move.partitions[: self._limits.moves_max - len(moves)]:
                moves[partition_id] = move.target
                server_loads[move.target][partition_id] = server_loads[source].pop(partition_id)
                movable.discard(partition_id)
        return moves

    def _forget_old_moves(self, now_ms: int) -> None:
        oldest_ms = now_ms - self._limits.cooldown_ms
        self._last_move_ms = {
            partition_id: at_ms
            for partition_id, at_ms in self._last_move_ms.items()
            if at_ms > oldest_ms
        }

    def _is_rebalancing(
        self,
        server_loads: Mapping[ServerId, Mapping[PartitionId, float]],
        movable: Collection[PartitionId],
        now_ms: int,
    ) -> bool:
        """Whether a rebalancing is in progress; a lasting imbalance begins one (rule 2)."""
        limits = self._limits
        best_move = _best_move(
            server_loads, movable, limits.gain_min_to_begin, limits.excess_min_to_begin
        )
        if best_move is None:
            self._uneven_since_ms = None
        elif self._uneven_since_ms is None:
            self._uneven_since_ms = now_ms
        since_ms = self._uneven_since_ms
        if since_ms is not None and now_ms - since_ms >= limits.sustained_ms:
            self._rebalancing_until_ms = now_ms + limits.rebalancing_ms
        until_ms = self._rebalancing_until_ms
        return until_ms is not None and now_ms < until_ms


def _best_move(
    server_loads: Mapping[ServerId, Mapping[PartitionId, float]],
    movable: Collection[PartitionId],
    gain_min: float,
    excess_min: float = 0.0,
) -> tuple[ServerId, _BalanceMove] | None:
    """Return the best move from the most loaded server, if its gain is sufficient (rule 2).

    `gain_min` and `excess_min` are fractions of the servers' average load.
    """
    totals = {
        server_id: sum(partition_loads.values())
        for server_id, partition_loads in server_loads.items()
    }
    target = min(totals, key=lambda server_id: (totals[server_id], server_id))
    mean = sum(totals.values()) / len(totals)
    for source in sorted(totals, key=lambda server_id: (-totals[server_id], server_id)):
        if source == target or totals[source] <= (1 + excess_min) * mean:
            continue
        partition_loads = {
            partition_id: load
            for partition_id, load in server_loads[source].items()
            if partition_id in movable
        }
        move = _move_between(partition_loads, totals[source], totals[target], target)
        if move.gain > gain_min * mean:
            return source, move
    return None


def _move_between(
    partition_loads: Mapping[PartitionId, float],
    source_load: float,
    target_load: float,
    target: ServerId,
) -> _BalanceMove:
    """Return the move that makes the loads of two servers most even.

    The move contains a single partition, or several partitions. The total load of several
    partitions is at most half of the difference of the loads.
    """
    capacity = (source_load - target_load) / 2
    moved_partitions: list[PartitionId] = []
    moved = 0.0
    best_move = _BalanceMove(0.0, (), target)
    for partition_id in sorted(partition_loads, key=lambda each: (-partition_loads[each], each)):
        load = partition_loads[partition_id]
        single_gain = source_load - max(source_load - load, target_load + load)
        if single_gain > best_move.gain:
            best_move = _BalanceMove(single_gain, (partition_id,), target)
        if moved + load <= capacity:
            moved_partitions.append(partition_id)
            moved += load
    # If at most half of the difference moves, the source keeps the greater load. In this case, the
    # gain is the whole moved load.
    return (
        best_move
        if best_move.gain >= moved
        else _BalanceMove(moved, tuple(moved_partitions), target)
    )
