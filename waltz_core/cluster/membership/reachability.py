"""Determines which servers may own partitions: those to which other servers can connect.

Three components use this module (decision 027): each server, which tries to connect to the others
(`server/process/failure_detector.py`); the leader, which assigns partitions (`registration.py`);
and the doctor.

Rules:
    1. Each server publishes, in the ephemeral node `R/x/reach/ID`, the other servers to which it
       has connected. A server with an open partition is a *witness*: the open partition proves that
       its network and its TLS settings work. A witness also publishes the servers to which it
       cannot connect. Waltz 0.13 neither writes nor reads these nodes.
    2. A server is unreachable for a witness after `FAILURES_MIN` failed attempts in a row, over at
       least `FAILING_MS`. It is reachable again after a connection has lasted for `STABLE_MS`.
    3. A server to which no witness can connect owns no partitions. Exception: the server may own
       partitions if another server in the current assignment has connected to it. Without this
       exception, the following could happen: after a restart of all storages, the first witness is
       a server that is cut off from the others, and excludes them all.
    4. A server that is new owns no partitions before a witness has connected to it.
    5. Rules 3 and 4 exclude a server only if at least one other server is a witness. If these rules
       exclude all servers, all servers may own partitions.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from waltz_core import errors
from waltz_core.cluster.znodes.interface import Signal
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node, is_number
from waltz_core.records import strict_json
from waltz_core.records.record import ServerId

FAILURES_MIN: Final = 3
FAILING_MS: Final = 5_000
STABLE_MS: Final = 5_000
REASON_CHARS_MAX: Final = 200
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class ReachReport:
    """The report of one server; `unreachable` contains the reason of the last failure."""

    reachable: frozenset[ServerId] = frozenset()
    unreachable: Mapping[ServerId, str] = field(default_factory=dict)
    is_witness: bool = True

    def as_non_witness(self) -> "ReachReport":
        """Return the report of a server that is not a witness (rule 1)."""
        return ReachReport(self.reachable, is_witness=False)

    def to_bytes(self) -> bytes:
        """Return the bytes of a node, as JSON."""
        rows = {str(server_id): reason for server_id, reason in sorted(self.unreachable.items())}
        reached = sorted(self.reachable)
        values = {"format": _FORMAT, "reached": reached, "unreachable": rows}
        return strict_json.to_json(values | {"witness": self.is_witness})

    @staticmethod
    def from_bytes(data: bytes) -> "ReachReport":
        """Decode the node's bytes; raises BadFormat for bytes that `to_bytes` does not make."""
        try:
            values = strict_json.from_json(data)
        except ValueError as error:
            raise errors.BadFormat(
                f"reachability report of a server is not valid JSON: {error!s:.200}"
            ) from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise errors.BadFormat(
                f"reachability report of a server: expected format {_FORMAT}, found {data!r:.200}"
            )
        reached, rows = values.get("reached"), values.get("unreachable")
        if not (
            isinstance(reached, list) and isinstance(rows, dict) and _are_server_ids(reached, rows)
        ):
            raise errors.BadFormat(
                f"reachability report of a server: expected server IDs, found {data!r:.200}"
            )
        unreachable = {ServerId(int(server_id)): str(reason) for server_id, reason in rows.items()}
        is_witness = values.get("witness") is not False
        return ReachReport(
            frozenset(ServerId(int(server_id)) for server_id in reached), unreachable, is_witness
        )


def _are_server_ids(*lists: Iterable[object]) -> bool:
    return all(is_number(str(server_id)) for values in lists for server_id in values)


@dataclass(slots=True)
class _Peer:
    failure_count: int = 0
    failing_since_ms: int = 0
    connected_since_ms: int | None = None
    is_known: bool = False  # the server was reached, or is unreachable
    why_unreachable: str = ""


class Reachability:
    """The results of one server's attempts to connect to other servers (rule 2)."""

    def __init__(self) -> None:
        self._peers: dict[ServerId, _Peer] = {}

    def keep_only(self, server_ids: Collection[ServerId]) -> None:
        """Forget all servers except these."""
        self._peers = {
            server_id: peer for server_id, peer in self._peers.items() if server_id in server_ids
        }

    def note_connection(self, server_id: ServerId, now_ms: int) -> None:
        """Record a connection to a server."""
        peer = self._peers.setdefault(server_id, _Peer())
        peer.failure_count = 0
        if peer.connected_since_ms is None:
            peer.connected_since_ms = now_ms
        peer.is_known = True

    def note_failure(self, server_id: ServerId, reason: str, now_ms: int) -> None:
        """Record a failed attempt to connect to a server."""
        peer = self._peers.setdefault(server_id, _Peer())
        peer.connected_since_ms = None
        if peer.failure_count == 0:
            peer.failing_since_ms = now_ms
        peer.failure_count += 1
        failing_ms = now_ms - peer.failing_since_ms
        if peer.failure_count >= FAILURES_MIN and failing_ms >= FAILING_MS:
            peer.is_known = True
            # A host name from ZooKeeper may contain a lone surrogate, which UTF-8 cannot encode.
            reason = reason.encode("utf-8", "backslashreplace").decode()
            peer.why_unreachable = (reason or "no reason")[:REASON_CHARS_MAX]

    def report(self, now_ms: int) -> ReachReport:
        """Return the report to publish now."""
        for peer in self._peers.values():
            since_ms = peer.connected_since_ms
            if since_ms is not None and now_ms - since_ms >= STABLE_MS:
                peer.why_unreachable = ""
        reasons = {
            server_id: peer.why_unreachable
            for server_id, peer in self._peers.items()
            if peer.is_known
        }
        return ReachReport(
            frozenset(server_id for server_id, reason in reasons.items() if not reason),
            {server_id: reason for server_id, reason in reasons.items() if reason},
        )


def eligible_servers(
    live: Collection[ServerId],
    assigned: Collection[ServerId],
    reports: Mapping[ServerId, ReachReport],
) -> frozenset[ServerId]:
    """Return the live servers that may own partitions (rules 3 to 5); never an empty set.

    `assigned` are the servers in the current assignment.
    """

    def may_own(server_id: ServerId) -> bool:
        others = {
            other_id: report
            for other_id, report in reports.items()
            if other_id != server_id and other_id in live
        }
        witnesses = [report for report in others.values() if report.is_witness]
        if not witnesses:
            return True
        if server_id not in assigned:
            return any(server_id in report.reachable for report in witnesses)
        if not all(server_id in report.unreachable for report in witnesses):
            return True
        return any(
            server_id in report.reachable
            for other_id, report in others.items()
            if other_id in assigned
        )

    return frozenset(filter(may_own, live)) or frozenset(live)


class PublishedReachability:
    """Publishes and reads reports, through one session (rule 1)."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._published: tuple[int, ReachReport] | None = None  # the session and the report

    async def publish(self, server_id: ServerId, report: ReachReport) -> None:
        """Publish the report of this server until the session ends.

        Raises CoordinatorConflict, CoordinatorOutcomeUnknown and CoordinatorUnavailable; the next
        call tries again.
        """
        publication = self._nodes.znodes.session_number, report
        if publication == self._published:
            return
        self._published = None  # a write that fails may still arrive
        path = self._nodes.paths.reach_report(server_id)
        await self._nodes.put_ephemeral(path, report.to_bytes(), self._nodes.paths.reach_reports)
        self._published = publication

    async def read(
        self, server_ids: Iterable[ServerId], signal: Signal | None = None
    ) -> dict[ServerId, ReachReport]:
        """Return the reports of these servers; nodes that cannot be decoded are left out."""
        paths = self._nodes.paths
        reports: dict[ServerId, ReachReport] = {}
        listing = await self._nodes.znodes.children(paths.reach_reports, signal)
        names = () if listing is None else listing.names
        for server_id in server_ids:
            if str(server_id) not in names:
                continue
            node = await self._nodes.znodes.get(paths.reach_report(server_id), signal)
            if node is None:
                continue
            try:
                reports[server_id] = decode_node(
                    paths.reach_report(server_id), node, ReachReport.from_bytes
                )
            except errors.BadFormat:
                continue  # a server of another version, or damage
        return reports
