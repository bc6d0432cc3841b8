"""Measures, publishes and evaluates the load of each partition.

The loads that the leader uses are some seconds old, and the partitions may have moved meanwhile.

Rules:
    1. A load is the mean of the samples of about the last `window_ms`, with exponentially
       decreasing weights. The time before the first sample has no weight: it does not count as a
       load of zero. So the first loads of a partition are already usable, but less exact.
    2. A server publishes its loads in its ephemeral node `R/x/load/ID`. No other process writes
       this node, and Waltz 0.13 neither writes nor reads such nodes.
    3. The leader uses a load only after a server has measured this load for a whole window. Until
       then, a partition that has just moved keeps its previous load. Without this rule, the new
       server of the partition would seem idle, and would get more partitions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node, is_number
from waltz_core.records import strict_json
from waltz_core.records.record import PartitionId, ServerId

_FORMAT: Final = 1
_NUMBER_LIMIT: Final = 1 << 63


class PartitionLoad(NamedTuple):
    """The load of a partition per second, and how long it has been measured."""

    per_s: float
    measured_for_ms: int


@dataclass(slots=True)
class _PartitionMeter:
    """The last counter value of one partition, and its mean load so far (rule 1)."""

    total: float
    counted_at_ms: int
    since_ms: int
    weighted_sum: float = 0.0


class LoadMeter:
    """Computes the loads of partitions from counters."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._meters: dict[PartitionId, _PartitionMeter] = {}

    def update(
        self, totals: Mapping[PartitionId, float], now_ms: int
    ) -> dict[PartitionId, PartitionLoad]:
        """Record the counters of all partitions that this server owns; return their loads."""
        self._meters = {
            partition_id: meter
            for partition_id, meter in self._meters.items()
            if partition_id in totals
        }
        loads: dict[PartitionId, PartitionLoad] = {}
        for partition_id, total in totals.items():
            meter = self._meters.get(partition_id)
            if meter is None or total < meter.total:  # New here, or closed and opened again.
                self._meters[partition_id] = _PartitionMeter(total, now_ms, now_ms)
                continue
            elapsed_ms = now_ms - meter.counted_at_ms
            if elapsed_ms <= 0:
                continue
            old_weight = exp(-elapsed_ms / self._window_ms)
            rate = (total - meter.total) * 1000 / elapsed_ms
            meter.weighted_sum = meter.weighted_sum * old_weight + rate * (1 - old_weight)
            meter.total, meter.counted_at_ms = total, now_ms
            measured_for_ms = now_ms - meter.since_ms
            loads[partition_id] = PartitionLoad(
                meter.weighted_sum / (1 - exp(-measured_for_ms / self._window_ms)), measured_for_ms
            )
        return loads


class LoadAverages:
    """The loads that the leader uses for all partitions (rule 3)."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._confirmed_loads: dict[PartitionId, float] = {}

    def update(
        self,
        reported: Mapping[ServerId, Mapping[PartitionId, PartitionLoad]],
        owners: Mapping[PartitionId, ServerId],
    ) -> dict[PartitionId, float]:
        """Record published loads; return the loads of all partitions with a known load."""
        for partition_id, owner in owners.items():
            load = reported.get(owner, {}).get(partition_id)
            if load is not None and load.measured_for_ms >= self._window_ms:
                self._confirmed_loads[partition_id] = load.per_s
        self._confirmed_loads = {
            number: load for number, load in self._confirmed_loads.items() if number in owners
        }
        return dict(self._confirmed_loads)


def encode_loads(loads: Mapping[PartitionId, PartitionLoad]) -> bytes:
    """Return the bytes of a node: JSON with the load of each partition and the age of the load."""
    rows = {
        str(partition_id): [round(load.per_s, 1), load.measured_for_ms]
        for partition_id, load in sorted(loads.items())
    }
    return strict_json.to_json({"format": _FORMAT, "loads": rows})


def decode_loads(data: bytes) -> dict[PartitionId, PartitionLoad]:
    """Decode the node's bytes.

    Raises:
        BadFormat: the bytes are not those of a load node.
    """
    try:
        values = strict_json.from_json(data)
    except ValueError as error:
        raise errors.BadFormat(
            f"the published loads of a server are not valid JSON: {error!s:.200}"
        ) from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise errors.BadFormat(
            f"published loads of a server: expected format {_FORMAT}, found {data!r:.200}"
        )
    rows = values.get("loads")
    if not isinstance(rows, dict) or not all(map(_is_load_row, rows.items())):
        raise errors.BadFormat(
            "published loads of a server: expected a load and its age for each partition, "
            f"found {rows!r:.200}"
        )
    return {
        PartitionId(int(name)): PartitionLoad(float(row[0]), row[1]) for name, row in rows.items()
    }


def _is_load_row(item: tuple[str, object]) -> bool:
    name, row = item
    if not (is_number(name) and isinstance(row, list) and len(row) == 2):
        return False
    load, measured_for_ms = row
    return (type(load) in {int, float} and 0 <= load < _NUMBER_LIMIT) and (
        type(measured_for_ms) is int and 0 <= measured_for_ms < _NUMBER_LIMIT
    )


class PublishedLoads:
    """Publishes and reads loads, through one session (rule 2)."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes

    async def publish(
        self, server_id: ServerId, loads: Mapping[PartitionId, PartitionLoad]
    ) -> None:
        """Publish the loads of this server's partitions until its session ends.

        Raises CoordinatorConflict and CoordinatorOutcomeUnknown; the next call tries again.
        """
        paths = self._nodes.paths
        await self._nodes.put_ephemeral(paths.load(server_id), encode_loads(loads), paths.loads)

    async def withdraw(self, server_id: ServerId) -> None:
        """Remove the loads of this server; raises like `publish`."""
        await self._nodes.delete_if_exists(self._nodes.paths.load(server_id))

    async def read(
        self,
        server_ids: Iterable[ServerId],
        on_ignored: Callable[[errors.BadFormat], None] = lambda _error: None,
    ) -> dict[ServerId, dict[PartitionId, PartitionLoad]]:
        """Return the loads that these servers have published.

        A server without published loads is omitted: it is neither a source nor a target. A server
        whose node cannot be decoded is omitted, too; `on_ignored` is called with the error.
        """
        reported: dict[ServerId, dict[PartitionId, PartitionLoad]] = {}
        for server_id in server_ids:
            path = self._nodes.paths.load(server_id)
            node = await self._nodes.znodes.get(path)
            if node is None:
                continue
            try:
                reported[server_id] = decode_node(path, node, decode_loads)
            except errors.BadFormat as error:  # a server of another version, or damage
                on_ignored(error)
        return reported
