"""Collects the facts about a cluster: queries ZooKeeper, servers and storages.

`ops/diagnosis.py` evaluates the answers.

Rules:
    1. Each query has a timeout, and independent queries run concurrently.
    2. If a process does not answer, the probe waits for one or two timeouts, and then sends no
       further queries to this process.
    3. Queries change nothing. They raise no errors: an error becomes part of the facts.
    4. Connections use the settings of `member_connections.py`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict, TypeVar

from waltz_core.administration import member_connections
from waltz_core.administration.member_queries import damaged_record_count
from waltz_core.client.links.connections import ServerLink, ServerLinks
from waltz_core.client.links.storage_admin import StorageAdmin, admin_connection
from waltz_core.cluster.change import replica_steps
from waltz_core.cluster.change.storage_changes import StorageLayout
from waltz_core.cluster.coordinator import ClusterView, Coordinator, PartitionView, ServersView
from waltz_core.cluster.membership.reachability import ReachReport
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.connect_string import ConnectString, parse_connect_string, split_address
from waltz_core.errors import (
    AuthenticationFailed,
    ClusterKeyMismatch,
    ClusterNotFound,
    PermissionDenied,
    TlsFailed,
    Unavailable,
    WaltzError,
)
from waltz_core.ops.facts import (
    ArchiveFacts,
    ClusterFacts,
    DiskFacts,
    Facts,
    LocalFacts,
    PartitionFacts,
    ReplicaFacts,
    ServerFacts,
    StorageFacts,
    ZooKeeperServerFacts,
)
from waltz_core.parallel import run_parallel
from waltz_core.records.record import (
    BEFORE_FIRST,
    PartitionId,
    ReplicaId,
    ReqId,
    ServerId,
    SessionId,
    TransactionId,
)
from waltz_core.transport import net
from waltz_core.transport.tls import failure_text
from waltz_core.wire.admin_messages import (
    CheckCluster,
    Done,
    HeldRequest,
    HeldResponse,
    MetricsRequest,
    MetricsResponse,
    RecordListRequest,
    RecordListResponse,
    ReplicaRequest,
    ReplicaResponse,
    SessionInfoRequest,
    SessionInfoResponse,
    StorageRequest,
    StorageResponse,
)
from waltz_core.wire.messages import (
    AppendTimesRequest,
    AppendTimesResponse,
    CheckConnectivityRequest,
    CheckConnectivityResponse,
    ClientMessage,
    HighWaterMarkRequest,
    HighWaterMarkResponse,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    RangeData,
    RangeForm,
    RangeRequest,
    ReplicasRequest,
    ReplicasResponse,
    WireProtocol,
)

CONCURRENT_PROBES_MAX: Final = 32
# The logs of a storage are divided into this number of lists, which are read concurrently. If the
# read of one log hangs, only the following logs of the same list are delayed.
CONCURRENT_LISTS_MAX: Final = 8
# If reading a clock takes longer, the result is not accurate to one second.
CLOCK_READ_MS_MAX: Final = 500.0
NO_CLIENT_ID: Final = -1
# If a process answers with one of these errors, the process works, but the doctor needs another
# token.
DENIAL_ERRORS: Final = (AuthenticationFailed, PermissionDenied)
# A storage reports this text for a log without an error, until it has opened the log
# (storage/service/admin_execution.py).
OPENING_REASON: Final = "the storage has not opened its log"
NOT_SERVING_TEXT, NOT_ALLOWED_TEXT = b"not currently serving", b"is not executed because"
ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT", bound=ClientMessage)
ItemT = TypeVar("ItemT")
ProbeProgress: TypeAlias = Callable[[int, int, str], None]


def _ignore_progress(_done_count: int, _count: int, _what: str) -> None:
    """Ignore the progress of queries."""


async def gather_facts(connect: str, *, timeout_s: float, local: LocalFacts | None = None) -> Facts:
    """Query all processes; raises BadConfig if the connect string is not valid."""
    address = parse_connect_string(connect)
    initial_facts = Facts(connect, local=local)
    async with asyncio.TaskGroup() as tasks:
        zookeepers = tasks.create_task(query_zookeeper_servers(address, timeout_s))
        cluster = tasks.create_task(_gather_cluster_facts(address, initial_facts, timeout_s))
    return replace(await cluster, zookeeper_servers=await zookeepers)


async def _query_concurrently(
    items: Iterable[ItemT], query: Callable[[ItemT], Awaitable[ResultT]]
) -> list[ResultT]:
    """Query all items, a limited number concurrently; return the answers in order.

    Raises the first error unchanged, not inside an `ExceptionGroup`.
    """
    permits = asyncio.Semaphore(CONCURRENT_PROBES_MAX)

    async def limited(item: ItemT) -> ResultT:
        async with permits:
            return await query(item)

    return await run_parallel(limited(item) for item in items)


def _ms_since(start_s: float) -> float:
    return round((time.monotonic() - start_s) * 1000, 2)


def _now_ms() -> float:
    return time.time_ns() / 1_000_000


async def _accepts_connections(address: str, timeout_s: float) -> bool:
    """Whether a process accepts connections at an address, even if it does not answer."""
    host, port = net.split_address(address)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()
        return True
    return False


class _ProbeFailure(TypedDict):
    """The facts about a process that could not be queried (see `facts.py`, rule 2)."""

    failure: str
    is_silent: bool
    is_tls_mismatch: bool
    is_denied: bool


async def _probe_failure(error: WaltzError, address: str, timeout_s: float) -> _ProbeFailure:
    """Return the facts about a process that could not be queried."""
    is_tls_mismatch = isinstance(error, TlsFailed)
    is_denied = isinstance(error, DENIAL_ERRORS)
    has_answered = is_tls_mismatch or is_denied
    is_silent = not has_answered and await _accepts_connections(address, timeout_s)
    return {
        "failure": _short_error_text(error, address),
        "is_silent": is_silent,
        "is_tls_mismatch": is_tls_mismatch,
        "is_denied": is_denied,
    }


def _short_error_text(error: Exception, address: str) -> str:
    """Return the text of an error without address and hint: each finding has its own hint."""
    return str(error).removeprefix(f"{address}: ").partition(". Hint: ")[0]


# --- ZooKeeper


async def query_zookeeper_servers(
    address: ConnectString, timeout_s: float
) -> tuple[ZooKeeperServerFacts, ...]:
    """Query the ZooKeeper servers of a connect string concurrently."""
    return tuple(
        await _query_concurrently(
            address.hosts, lambda each: _query_zookeeper_server(each, timeout_s)
        )
    )


async def _query_zookeeper_server(address: str, timeout_s: float) -> ZooKeeperServerFacts:
    """Query one ZooKeeper server with its command `srvr`."""
    host, port = net.split_address(address)
    start_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"srvr")
                answer = await reader.read(-1)
            finally:
                writer.transport.abort()
    except TimeoutError:
        is_silent = await _accepts_connections(address, timeout_s)
        return ZooKeeperServerFacts(address, f"no answer within {timeout_s:g} s", is_silent)
    except OSError as error:
        return ZooKeeperServerFacts(address, failure_text(error))
    return ZooKeeperServerFacts(address, mode=zookeeper_mode(answer), latency_ms=_ms_since(start_s))


def zookeeper_mode(answer: bytes) -> str:
    """Return the mode in an answer to `srvr`; empty if the server has no quorum."""
    if NOT_ALLOWED_TEXT in answer:
        return "not reported"
    for line in answer.decode("utf-8", "replace").splitlines():
        title, _, value = line.partition(":")
        if title == "Mode":
            return value.strip()
    return "" if NOT_SERVING_TEXT in answer or not answer else "not reported"


async def _gather_cluster_facts(
    address: ConnectString, initial_facts: Facts, timeout_s: float
) -> Facts:
    """Read the cluster from ZooKeeper, and query its processes."""
    timeout_ms = round(timeout_s * 1000)
    try:
        async with zookeeper_session.open_session(
            address, connect_timeout_ms=timeout_ms, request_timeout_ms=timeout_ms
        ) as coordinator:
            snapshot = await ClusterSnapshot.read(coordinator)
    except ClusterNotFound:
        return replace(initial_facts, is_cluster_missing=True)
    except Unavailable as error:
        return replace(initial_facts, zookeeper_failure=str(error))
    except WaltzError as error:
        return replace(initial_facts, access_error=str(error))
    return replace(initial_facts, cluster=await snapshot.probe(timeout_s, initial_facts.local))


async def query_cluster(
    coordinator: Coordinator, *, timeout_s: float, on_progress: ProbeProgress
) -> ClusterFacts:
    """Query the processes of one cluster; call `on_progress` for each process that answers."""
    return await (await ClusterSnapshot.read(coordinator)).probe(timeout_s, None, on_progress)


class _ProbeCounter:
    """Counts the processes that have answered, and reports the other processes."""

    def __init__(self, on_progress: ProbeProgress) -> None:
        self._on_progress = on_progress
        self._pending_names: dict[str, None] = {}
        self._done_count = 0

    async def track(self, name: str, probe: Awaitable[ResultT]) -> ResultT:
        self._pending_names[name] = None
        answer = await probe
        del self._pending_names[name]
        self._done_count += 1
        waiting_names = ", ".join(self._pending_names)
        progress_text = f"waiting for {waiting_names}" if waiting_names else "all have answered"
        self._on_progress(
            self._done_count, self._done_count + len(self._pending_names), progress_text
        )
        return answer


class ClusterSnapshot:
    """The state of a cluster in ZooKeeper: it determines the processes to query."""

    def __init__(
        self,
        view: ClusterView,
        servers: ServersView,
        layout: StorageLayout,
        storage_ids: Mapping[ReplicaId, str],
        partitions: Sequence[PartitionView],
        reach_reports: Mapping[ServerId, ReachReport],
    ) -> None:
        self.view, self.servers, self.layout = view, servers, layout
        self.reach_reports = reach_reports
        self.storage_ids, self.partitions = storage_ids, partitions
        self.partition_count = view.params.partition_count
        self.assigned_replicas = replica_steps.placement_of(layout.assignment, self.partition_count)

    @staticmethod
    async def read(coordinator: Coordinator) -> "ClusterSnapshot":
        """Read the state of the cluster from ZooKeeper."""
        view = await coordinator.read_cluster()
        ids = await coordinator.read_storage_ids()
        numbers = map(PartitionId, range(view.params.partition_count))
        servers = await coordinator.read_servers()
        return ClusterSnapshot(
            view,
            servers,
            await coordinator.storages.read_layout(),
            {address: storage_id.hex for address, storage_id in ids.items()},
            await _query_concurrently(numbers, coordinator.read_partition),
            await coordinator.reachability.read(servers.servers),
        )

    async def probe(
        self,
        timeout_s: float,
        local: LocalFacts | None = None,
        on_progress: ProbeProgress = _ignore_progress,
        *,
        reads_logs: bool = True,
    ) -> ClusterFacts:
        """Query the servers and storages of the cluster concurrently.

        Without `reads_logs`, storages read no records. So the probe does not detect logs whose
        reads hang.
        """
        servers = self.servers.servers
        counter = _ProbeCounter(on_progress)
        async with asyncio.TaskGroup() as tasks:
            response = {
                key: tasks.create_task(
                    counter.track(
                        f"server {each.address}", _ServerProbe(self, key, timeout_s).probe()
                    )
                )
                for key, each in servers.items()
            }
            storages = [
                tasks.create_task(
                    counter.track(
                        f"storage {each}",
                        _StorageProbe(self, each, timeout_s, local, reads_logs=reads_logs).probe(),
                    )
                )
                for each in self.layout.assignment.partitions
            ]
        partitions = {
            PartitionId(number): PartitionFacts(each.metadata, each.marker)
            for number, each in enumerate(self.partitions)
        }
        for task in response.values():
            for partition_id, answers in (await task)[1].items():
                partitions[partition_id] = replace(partitions[partition_id], **answers._asdict())
        return ClusterFacts(
            self.partition_count,
            self.servers.is_settled,
            self.servers.owners,
            {int(each): (await task)[0] for each, task in response.items()},
            {facts.address: facts for facts in [await each for each in storages]},
            self.assigned_replicas,
            self.layout.groups,
            partitions,
            str(self.view.store.cluster_key),
            self.view.params.name,
        )


# --- servers


class _PartitionAnswers(NamedTuple):
    """A server's answers about one partition; the fields are those of `PartitionFacts`."""

    high_water_mark: TransactionId | None
    high_water_mark_error: str = ""
    commit_stamp_ahead_ms: float | None = None
    oldest_unarchived_age_s: float | None = None
    unarchived_bytes: int | None = None
    archive_interval_ms: int = 0


class _ServerProbe:
    """Sends the queries of the doctor to one server."""

    def __init__(self, snapshot: ClusterSnapshot, server_id: int, timeout_s: float) -> None:
        servers = snapshot.servers.servers
        number, descriptor = next(each for each in servers.items() if each[0] == server_id)
        errors_by_server = {
            servers[reporter_id].address: report.unreachable[number]
            for reporter_id, report in snapshot.reach_reports.items()
            if number in report.unreachable
        }
        self._facts = ServerFacts(
            descriptor.address,
            tuple(descriptor.preferred),
            is_excluded_as_unreachable=number in snapshot.servers.excluded,
            connection_errors=tuple(
                f"{address}: {error}" for address, error in errors_by_server.items()
            ),
        )
        self._owned_partitions = [
            partition_id
            for partition_id, owner in snapshot.servers.owners.items()
            if owner.server_id == server_id
        ]
        marks = [
            None if each.marker is None else each.marker.archived for each in snapshot.partitions
        ]
        self._archived_last_ids = [BEFORE_FIRST if each is None else each.last for each in marks]
        self._has_archive = any(each is not None for each in marks)
        self._timeout_s = timeout_s

    async def probe(self) -> tuple[ServerFacts, dict[PartitionId, _PartitionAnswers]]:
        links = ServerLinks(
            dial_timeout_s=self._timeout_s,
            late_answers_s=0.0,
            mark_suspect=None,
            ssl=member_connections.ssl_context(),
        )
        address, began_s = self._facts.address, time.monotonic()
        try:
            link = await links.get(address)
            facts = replace(self._facts, latency_ms=_ms_since(began_s))
            return await self._query(link, facts)
        except WaltzError as error:
            return replace(self._facts, **await _probe_failure(error, address, self._timeout_s)), {}
        finally:
            await links.close("answered")

    async def _query(
        self, link: ServerLink, facts: ServerFacts
    ) -> tuple[ServerFacts, dict[PartitionId, _PartitionAnswers]]:
        health = await link.request(
            PartitionsHealthResponse,
            PartitionsHealthRequest,
            client_id=NO_CLIENT_ID,
            partition_id=0,
            timeout_s=self._timeout_s,
        )
        served = {PartitionId(partition_id): is_open for partition_id, is_open in health.healthy}
        async with asyncio.TaskGroup() as tasks:
            unreachable_task = tasks.create_task(self._query_unreachable_storages(link))
            open_partitions = [
                partition_id for partition_id in self._owned_partitions if served.get(partition_id)
            ]
            marks = tasks.create_task(
                _query_concurrently(
                    open_partitions, lambda partition_id: self._query_partition(link, partition_id)
                )
            )
        facts = replace(
            facts,
            served_partitions=served,
            unreachable_storages=await unreachable_task,
            append_latencies=await self._query_append_latencies(link),
        )
        return facts, dict(zip(open_partitions, await marks, strict=True))

    async def _query_unreachable_storages(self, link: ServerLink) -> tuple[ReplicaId, ...]:
        """Return the storages to which the server cannot connect."""
        try:
            answer = await link.request(
                CheckConnectivityResponse,
                CheckConnectivityRequest,
                client_id=NO_CLIENT_ID,
                partition_id=0,
                timeout_s=self._timeout_s,
            )
        except WaltzError:
            # There are two harmless reasons. The server may be waiting for a storage that does not
            # answer; this storage has its own finding. Or it is a 0.13 server, which does not
            # support the request.
            return ()
        return tuple(ReplicaId(name) for name, is_reachable in answer.reachable if not is_reachable)

    async def _query_append_latencies(
        self, link: ServerLink
    ) -> Mapping[ReplicaId, tuple[int, int]]:
        """Return the storages' append latencies that the server has measured."""
        if link.is_legacy_server:
            return {}
        try:
            response = await link.request(
                AppendTimesResponse,
                AppendTimesRequest,
                client_id=NO_CLIENT_ID,
                partition_id=0,
                timeout_s=self._timeout_s,
            )
        except WaltzError:
            return {}  # an older server closes the connection; so this request must be the last one
        figures = zip(response.second_counts, response.medians_us, strict=True)
        return dict(zip(map(ReplicaId, response.storages), figures, strict=True))

    async def _query_partition(
        self, link: ServerLink, partition_id: PartitionId
    ) -> _PartitionAnswers:
        """Query the high-water mark and the archive state of a partition, like a client."""
        try:
            mark = await self._request_for_partition(
                link, HighWaterMarkResponse, HighWaterMarkRequest, partition_id
            )
        except WaltzError as error:
            return _PartitionAnswers(None, str(error))
        last = TransactionId(mark.high_water_mark)
        ahead_ms = await self._query_commit_stamp_ahead_ms(link, partition_id, last)
        unarchived_s = await self._query_oldest_unarchived_age_s(link, partition_id, last)
        byte_count, interval_ms = await self._query_archive(link, partition_id)
        return _PartitionAnswers(last, "", ahead_ms, unarchived_s, byte_count, interval_ms)

    async def _query_archive(
        self, link: ServerLink, partition_id: PartitionId
    ) -> tuple[int | None, int]:
        """Return roughly how many bytes are not archived, and the archiver's interval in ms."""
        if self._archived_last_ids[partition_id] == BEFORE_FIRST:
            return None, 0

        def request(req_id: ReqId) -> ClientMessage:
            return ReplicasRequest(req_id, linearizable=False)

        try:
            answer = await self._request_for_partition(
                link, ReplicasResponse, request, partition_id
            )
        except WaltzError:
            return None, 0  # other findings report the error
        byte_count = None if answer.unarchived_bytes < 0 else answer.unarchived_bytes
        return byte_count, answer.archive_interval_ms

    async def _query_oldest_unarchived_age_s(
        self, link: ServerLink, partition_id: PartitionId, last: TransactionId
    ) -> float | None:
        """Return the age in seconds of the oldest transaction that is not archived."""
        if not self._has_archive:
            return None
        oldest = TransactionId(self._archived_last_ids[partition_id] + 1)
        if oldest > last:
            return 0.0
        ahead_ms = await self._query_commit_stamp_ahead_ms(link, partition_id, oldest)
        return None if ahead_ms is None else max(0.0, round(-ahead_ms / 1000, 1))

    async def _query_commit_stamp_ahead_ms(
        self, link: ServerLink, partition_id: PartitionId, last: TransactionId
    ) -> float | None:
        """Return the time by which a transaction's commit stamp is in the future."""
        if last < 0:
            return None

        def request(req_id: ReqId) -> ClientMessage:
            return RangeRequest(req_id, last, last, 1, RangeForm.HEADERS, ())

        try:
            response = await self._request_for_partition(link, RangeData, request, partition_id)
        except WaltzError:
            return None  # a 0.13 server has no commit times; other findings report other errors
        return response.lineage[-1].stamp_ms - _now_ms() if response.lineage else None

    async def _request_for_partition(
        self,
        link: ServerLink,
        answer: type[AnswerT],
        request: Callable[[ReqId], ClientMessage],
        partition_id: PartitionId,
    ) -> AnswerT:
        return await link.request(
            answer,
            request,
            client_id=NO_CLIENT_ID,
            partition_id=partition_id,
            timeout_s=self._timeout_s,
        )


# --- storages


def archive_facts(gauges: Mapping[str, Mapping[str, Any]]) -> ArchiveFacts | None:
    """Derive the facts about the archive from a storage's gauges; None without an archive."""
    gauge = gauges.get("waltz-storage.archive")
    if gauge is None:
        return None
    field_names = {fact.name for fact in fields(ArchiveFacts)}
    return ArchiveFacts(
        **{name: fact for name, fact in gauge["value"].items() if name in field_names}
    )


class _StorageProbe:
    """Sends the queries of the doctor to one storage."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        address: ReplicaId,
        timeout_s: float,
        local: LocalFacts | None,
        *,
        reads_logs: bool = True,
    ) -> None:
        self._snapshot, self._address, self._timeout_s = snapshot, address, timeout_s
        self._reads_logs = reads_logs
        self._host, port = split_address(address)
        members = () if local is None else local.members
        local_ports = [member.admin_port for member in members if member.address == address]
        registered_port = snapshot.layout.admin_ports.get(address, port + 1)
        # Possible admin ports: the registered port, the ports of local processes, and the data port
        # plus 1.
        self._admin_ports = list(
            dict.fromkeys([registered_port, *filter(None, local_ports), port + 1])
        )
        admin = f"{self._host}:{registered_port}"
        registered_id = snapshot.storage_ids.get(address)
        self._facts = StorageFacts(address, admin, registered_storage_id=registered_id)

    async def probe(self) -> StorageFacts:
        began_s = time.monotonic()
        try:
            link = await member_connections.dial(
                WireProtocol.STORAGE, self._address, timeout_s=self._timeout_s
            )
        except WaltzError as error:
            return replace(
                self._facts, **await _probe_failure(error, self._address, self._timeout_s)
            )
        link.abort("answered")
        facts = replace(self._facts, latency_ms=_ms_since(began_s))
        try:
            async with admin_connection(
                facts.admin_address, ssl=member_connections.ssl_context()
            ) as admin:
                return await self._query(admin, facts)
        except ClusterKeyMismatch:
            return replace(facts, belongs_to_cluster=False)
        except (WaltzError, TimeoutError) as error:
            if isinstance(error, DENIAL_ERRORS):
                error_text = _short_error_text(error, facts.admin_address)
                return replace(facts, admin_failure=error_text, is_denied=True)
            error_text = str(error).removeprefix(f"{facts.admin_address}: ")
            error_text = error_text or f"no answer within {self._timeout_s:g} s"
            port = await self._find_admin_port()
            is_hanging = (
                isinstance(error, TimeoutError) and port == split_address(facts.admin_address)[1]
            )
            return replace(
                facts, admin_failure=error_text, is_hanging=is_hanging, found_admin_port=port
            )

    async def _query(self, admin: StorageAdmin, facts: StorageFacts) -> StorageFacts:
        store = self._snapshot.view.store
        async with asyncio.timeout(self._timeout_s):
            await admin.request(Done, CheckCluster, store.cluster_key.bytes, store.partition_count)
            availability = dict((await admin.request(HeldResponse, HeldRequest)).available)
        assigned = self._snapshot.layout.assignment.partitions[self._address]
        all_partitions = sorted({*availability, *assigned})
        async with asyncio.timeout(self._timeout_s):
            response = await admin.request(StorageResponse, StorageRequest)
        facts = await self._add_gauges(admin, facts)
        facts = replace(facts, storage_id=bytes(response.storage_id).hex())
        replicas = {
            PartitionId(each): await self._query_replica(admin, each) for each in all_partitions
        }
        stuck_partitions = await self._stuck_partitions(replicas) if self._reads_logs else set()
        return replace(
            facts,
            replicas={
                each: replace(response, is_stuck=each in stuck_partitions)
                for each, response in replicas.items()
            },
        )

    async def _stuck_partitions(
        self, replicas: Mapping[PartitionId, ReplicaFacts]
    ) -> set[PartitionId]:
        """Return the served partitions whose logs do not answer a read (rule 2)."""
        served = [
            partition_id
            for partition_id, replica in replicas.items()
            if replica.is_served and replica.last_id >= 0
        ]
        lists = [
            served[first_index::CONCURRENT_LISTS_MAX]
            for first_index in range(min(CONCURRENT_LISTS_MAX, len(served)))
        ]
        first_stuck = await _query_concurrently(
            lists, lambda partition_id: self._first_stuck_partition(partition_id, replicas)
        )
        return {partition_id for partition_id in first_stuck if partition_id is not None}

    async def _first_stuck_partition(
        self, partitions: Sequence[PartitionId], replicas: Mapping[PartitionId, ReplicaFacts]
    ) -> PartitionId | None:
        """Read the last record of one log after the other; return the first log that hangs."""
        with suppress(WaltzError):
            async with admin_connection(
                self._facts.admin_address, ssl=member_connections.ssl_context()
            ) as admin:
                for partition in partitions:
                    last = replicas[partition].last_id
                    try:
                        # An error is an answer; other findings report its cause.
                        with suppress(WaltzError):
                            async with asyncio.timeout(self._timeout_s):
                                await admin.request(
                                    RecordListResponse, RecordListRequest, partition, last, 1
                                )
                    except TimeoutError:
                        return partition
        return None

    async def _add_gauges(self, admin: StorageAdmin, facts: StorageFacts) -> StorageFacts:
        """Add facts about disk, clock and archive from the gauges; older storages lack some."""
        async with asyncio.timeout(self._timeout_s):
            before_ms = _now_ms()
            answer = await admin.request(MetricsResponse, MetricsRequest)
            after_ms = _now_ms()
        gauges = json.loads(bytes(answer.json))["gauges"]

        def gauge(name: str) -> int | None:
            entry = gauges.get(f"waltz-storage.{name}")
            return None if entry is None else int(entry["value"])

        free_bytes, is_full, clock_ms = gauge("free-bytes"), gauge("is-full"), gauge("clock-ms")
        sizes = gauge("size-bytes"), gauge("filling-bytes-per-day")
        space = None if free_bytes is None else DiskFacts(free_bytes, bool(is_full), *sizes)
        archive = archive_facts(gauges)
        ahead_ms = None
        if clock_ms is not None and after_ms - before_ms < CLOCK_READ_MS_MAX:
            ahead_ms = round(clock_ms - (before_ms + after_ms) / 2, 1)
        return replace(facts, disk=space, clock_ahead_ms=ahead_ms, archive=archive)

    async def _query_replica(self, admin: StorageAdmin, partition: int) -> ReplicaFacts:
        async with asyncio.timeout(self._timeout_s):
            response = await admin.request(ReplicaResponse, ReplicaRequest, partition)
            if response.is_held and response.reason == OPENING_REASON:
                marks = await admin.request(SessionInfoResponse, SessionInfoRequest, partition)
                return ReplicaFacts(
                    is_online=response.is_available,
                    is_served=response.is_served,
                    is_opening=True,
                    last_session_id=SessionId(marks.last_session),
                    last_id=TransactionId(max(marks.low_water_mark, marks.local_low_water_mark)),
                )
        return ReplicaFacts(
            response.is_held,
            response.is_available,
            response.is_served,
            response.reason,
            response.is_suspect,
            SessionId(response.last_session),
            TransactionId(response.synced_max),
            damaged_record_count(response),
        )

    async def _find_admin_port(self) -> int | None:
        """Try all possible admin ports; return the storage's port, or None."""
        results = await _query_concurrently(self._admin_ports, self._is_admin_port)
        return next(
            (
                port
                for port, is_admin_port in zip(self._admin_ports, results, strict=True)
                if is_admin_port
            ),
            None,
        )

    async def _is_admin_port(self, port: int) -> bool:
        with suppress(WaltzError, TimeoutError):
            async with (
                asyncio.timeout(self._timeout_s),
                admin_connection(
                    f"{self._host}:{port}", ssl=member_connections.ssl_context()
                ) as admin,
            ):
                response = await admin.request(StorageResponse, StorageRequest)
                return response.address == self._address
        return False
