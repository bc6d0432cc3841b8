"""What each server's partitions cost it: how that is measured, told, and believed.

The lead decides from what others have measured, some seconds ago, of partitions that may have moved
since. What a figure is worth is settled here.

Rules:
    1. A load is a mean over the last `window_ms`, in which what is older counts exponentially less.
       It is right from the first sample on, only less certain: what has not been seen counts for
       nothing, not as zero.
    2. A server tells its loads in an ephemeral node of its own, `R/x/load/ID`; nobody else writes
       it, and an original neither writes nor reads one.
    3. A load is believed once it has been measured for a window. Until then a partition that has
       just moved is believed to do what it did: else whoever has taken it would look idle, and be
       given more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.cluster.nodes.node_access import ClusterNodes, decode_node, is_number
from waltz_core.records import strict_json
from waltz_core.records.record import PartitionId, ServerId

_FORMAT: Final = 1
_FIGURE_LIMIT: Final = 1 << 63


class PartitionLoad(NamedTuple):
    """What a partition costs its server a second, and for how long that has been measured."""

    per_s: float
    age_ms: int


@dataclass(slots=True)
class _Meter:
    """One partition's count: where it stood, and the mean so far (rule 1)."""

    total: float
    at_ms: int
    since_ms: int
    sum: float = 0.0


class LoadMeter:
    """Makes loads of counts that only rise."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._meters: dict[PartitionId, _Meter] = {}

    def take(
        self, totals: Mapping[PartitionId, float], now_ms: int
    ) -> dict[PartitionId, PartitionLoad]:
        """Take the counts of all partitions that are served now; return their loads."""
        self._meters = {each: its for each, its in self._meters.items() if each in totals}
        found: dict[PartitionId, PartitionLoad] = {}
        for partition_id, total in totals.items():
            meter = self._meters.get(partition_id)
            if meter is None or total < meter.total:  # New here, or given up and taken up again.
                self._meters[partition_id] = _Meter(total, now_ms, now_ms)
                continue
            took_ms = now_ms - meter.at_ms
            if took_ms <= 0:
                continue
            kept = exp(-took_ms / self._window_ms)
            rate = (total - meter.total) * 1000 / took_ms
            meter.sum = meter.sum * kept + rate * (1 - kept)
            meter.total, meter.at_ms = total, now_ms
            age_ms = now_ms - meter.since_ms
            found[partition_id] = PartitionLoad(
                meter.sum / (1 - exp(-age_ms / self._window_ms)), age_ms
            )
        return found


class LoadBook:
    """What is believed of all partitions' loads (rule 3)."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._believed: dict[PartitionId, float] = {}

    def take(
        self,
        told: Mapping[ServerId, Mapping[PartitionId, PartitionLoad]],
        owners: Mapping[PartitionId, ServerId],
    ) -> dict[PartitionId, float]:
        """Take in what servers tell; return the loads of the partitions of which any is known."""
        for partition_id, owner in owners.items():
            load = told.get(owner, {}).get(partition_id)
            if load is not None and load.age_ms >= self._window_ms:
                self._believed[partition_id] = load.per_s
        self._believed = {each: load for each, load in self._believed.items() if each in owners}
        return dict(self._believed)


def encode_loads(loads: Mapping[PartitionId, PartitionLoad]) -> bytes:
    """Return a node's bytes: JSON, each partition with its load and the age of that."""
    rows = {
        str(partition_id): [round(load.per_s, 1), load.age_ms]
        for partition_id, load in sorted(loads.items())
    }
    return strict_json.to_json({"format": _FORMAT, "loads": rows})


def decode_loads(data: bytes) -> dict[PartitionId, PartitionLoad]:
    """Return what a node says.

    Raises:
        BadFormat: it is not what `encode_loads` makes.
    """
    try:
        values = strict_json.from_json(data)
    except ValueError as error:
        raise errors.BadFormat(f"loads: expected JSON: {error!s:.200}") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise errors.BadFormat(f"loads: expected format {_FORMAT}, found {data!r:.200}")
    rows = values.get("loads")
    if not isinstance(rows, dict) or not all(map(_is_row, rows.items())):
        raise errors.BadFormat(
            f"loads: expected a load and its age for each partition, found {rows!r:.200}"
        )
    return {
        PartitionId(int(name)): PartitionLoad(float(row[0]), row[1]) for name, row in rows.items()
    }


def _is_row(item: tuple[str, object]) -> bool:
    name, row = item
    if not (is_number(name) and isinstance(row, list) and len(row) == 2):
        return False
    load, age_ms = row
    return (type(load) in {int, float} and 0 <= load < _FIGURE_LIMIT) and (
        type(age_ms) is int and 0 <= age_ms < _FIGURE_LIMIT
    )


class LoadBoard:
    """Where servers tell their loads, through one session (rule 2)."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes

    async def tell(self, server_id: ServerId, loads: Mapping[PartitionId, PartitionLoad]) -> None:
        """Say what this server's partitions cost; until the end of its session.

        Raises CoordinatorConflict and CoordinatorOutcomeUnknown, after which it is told next time.
        """
        paths = self._nodes.paths
        await self._nodes.put_own(paths.load(server_id), encode_loads(loads), paths.loads)

    async def withdraw(self, server_id: ServerId) -> None:
        """Say nothing any more of what this server's partitions cost; raises as `tell` does."""
        await self._nodes.remove(self._nodes.paths.load(server_id))

    async def read(
        self,
        server_ids: Iterable[ServerId],
        on_ignored: Callable[[errors.BadFormat], None] = lambda _error: None,
    ) -> dict[ServerId, dict[PartitionId, PartitionLoad]]:
        """Return what these servers tell.

        One that tells nothing is left out: it neither gives nor takes. So is one whose node cannot
        be decoded, of which `on_ignored` is notified.
        """
        told: dict[ServerId, dict[PartitionId, PartitionLoad]] = {}
        for server_id in server_ids:
            path = self._nodes.paths.load(server_id)
            node = await self._nodes.znodes.get(path)
            if node is None:
                continue
            try:
                told[server_id] = decode_node(path, node, decode_loads)
            except errors.BadFormat as error:  # a server of another version, or damage
                on_ignored(error)
        return told
