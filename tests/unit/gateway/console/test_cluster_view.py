"""The state of the cluster as the console shows it, for healthy and for faulty clusters."""

import asyncio
import dataclasses
from contextlib import nullcontext
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.loops import pass_time, poll_until, run_on_virtual_loop
from tests.unit.ops.test_diagnosis import NODES, ONE, SPARE, TWO, A, B, C, Case, marker_archived_to
from waltz_core import errors
from waltz_core.access.permissions import Grant, Permissions, StoredToken
from waltz_core.access.requirements import ADMINISTER, READ
from waltz_core.administration.cluster_probes import ClusterSnapshot
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.znodes.model import UNRESOLVED, PartitionMetadata, ReplicaState
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.gateway.console import cluster_view
from waltz_core.gateway.console.cluster_view import TIMEOUT_S, ClusterViewer, SharedAnswers
from waltz_core.gateway.console.snapshot_reader import PAUSE_S_MAX
from waltz_core.ops.diagnosis import diagnose
from waltz_core.ops.facts import DiskFacts, Facts, ZooKeeperServerFacts

CONNECT = "zk1:2181,zk2:2181,zk3:2181/waltz/payments"
DENIED = {"failure": "token t1 of ann is revoked", "is_denied": True}
ADMIN_DENIED = {"admin_failure": "ann is not granted administer", "is_denied": True}


class Snapshot:
    """A snapshot whose processes report the facts of the test case."""

    def __init__(self, world):
        self._world = world

    async def probe(self, timeout_s, *, reads_logs):
        assert (timeout_s, reads_logs) == (TIMEOUT_S, False)
        return self._world.case.facts.cluster


class RunningLoop:
    """A task group for the loop of the test; the test does not wait for its tasks."""

    def create_task(self, work, *, name):
        return asyncio.get_running_loop().create_task(work, name=name)


class World:
    """A viewer at a cluster in memory, whose ZooKeeper can fail."""

    def __init__(self, monkeypatch):
        self.case = Case()
        self.error = None
        self.permissions = self
        self.stored = None
        self.read_count = 0
        self.viewer = ClusterViewer(CONNECT, lambda: self, RunningLoop())
        monkeypatch.setattr(ClusterSnapshot, "read", self._read)
        monkeypatch.setattr(cluster_view, "query_zookeeper_servers", self._query_zookeeper)

    async def read(self):
        """Return the permissions in ZooKeeper."""
        if isinstance(self.stored, errors.WaltzError):
            raise self.stored
        return self.stored

    async def view(self, token_hash=""):
        """Return the view after a new read of ZooKeeper."""
        await pass_time(PAUSE_S_MAX + 0.1)
        return await self.viewer.view(token_hash)

    async def read_cluster(self):
        """Answer a read of the cluster's znode."""
        await poll_until(lambda: self.error is not TimeoutError)  # ZooKeeper hangs

    async def _read(self, coordinator):
        assert coordinator is self
        self.read_count += 1
        await poll_until(lambda: self.error is not TimeoutError)  # ZooKeeper hangs
        if self.error is not None:
            raise self.error
        return Snapshot(self)

    async def _query_zookeeper(self, address, timeout_s):
        assert (address.hosts, timeout_s) == (NODES, TIMEOUT_S)
        return self.case.facts.zookeeper_servers

    def fields(self):
        """Return the fields of one view."""
        return asyncio.run(self.viewer.view(""))

    def server(self, number, **changed):
        """Return the fields of a server with changed facts."""
        self.case.server(number, **changed)
        return self.fields()["servers"][number - 1]

    def storage(self, address, **changed):
        """Return the fields of a storage with changed facts."""
        self.case.storage(address, **changed)
        return next(
            storage for storage in self.fields()["storages"] if storage["address"] == address
        )

    def replica(self, address):
        """Return state and reason of a replica of partition 0."""
        replicas = self.fields()["partitions"][0]["replicas"]
        found = next(replica for replica in replicas if replica["storage"] == address)
        return found["state"], found["reason"]


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


# --- a healthy cluster


def test_a_healthy_cluster_is_shown(world):
    world.case.cluster(name="pay")
    world.case.partition(marker=marker_archived_to(80))
    fields = world.fields()
    assert (fields["name"], fields["partition_count"]) == ("pay", 2)
    assert (fields["zookeeper_error"], fields["is_settled"]) == ("", True)
    assert abs(fields["time_ms"] - cluster_view.now_ms()) < 60_000
    assert fields["zookeeper"] == [
        {"address": node, "state": "up", "mode": "follower", "error": ""} for node in NODES
    ]
    assert fields["servers"][0] == {
        "address": ONE,
        "state": "up",
        "error": "",
        "latency_ms": 0.0,
        "open": [0],
        "not_open": [],
        "preferred": [],
        "unreachable_storages": [],
    }
    assert [storage["address"] for storage in fields["storages"]] == [A, B, C, SPARE]
    assert fields["storages"][0] == {
        "address": A,
        "group": 0,
        "state": "up",
        "error": "",
        "latency_ms": 0.0,
        "replica_count": 2,
        "free_bytes": 1 << 40,
        "size_bytes": None,
        "is_full": False,
        "days_until_full": None,
        "append_latency_ms": None,
    }
    first, second = fields["partitions"]
    assert first == {
        "partition": 0,
        "state": "open",
        "owner": ONE,
        "error": "",
        "session_id": 7,
        "high_water_mark": 90,
        "archived_mark": 80,
        "replicas": [
            {"storage": each, "state": "in_sync", "last_id": 90, "reason": ""} for each in (A, B, C)
        ],
    }
    assert (second["owner"], second["archived_mark"]) == (TWO, None)


def test_disks_and_latencies_are_shown(world):
    disk = DiskFacts(50 << 20, True, 100 << 20, 10 << 20)
    world.case.server(1, append_latencies={A: (30, 1_500), B: (30, 900)})
    world.case.server(2, append_latencies={A: (30, 2_500)})
    storage = world.storage(A, disk=disk)
    assert (storage["free_bytes"], storage["size_bytes"]) == (50 << 20, 100 << 20)
    assert (storage["is_full"], storage["days_until_full"]) == (True, 5.0)
    assert storage["append_latency_ms"] == 2.5
    assert world.storage(B, disk=None)["free_bytes"] is None


# --- members


@pytest.mark.parametrize(
    ("changed", "state", "error"),
    [
        ({"mode": "leader"}, "up", ""),
        ({"mode": "", "failure": "refused"}, "down", "refused"),
        ({"mode": ""}, "down", "it is not part of a quorum"),
    ],
)
def test_the_state_of_a_zookeeper_server_is_shown(world, changed, state, error):
    world.case.node(**changed)
    found = world.fields()["zookeeper"][0]
    assert (found["state"], found["error"]) == (state, error)


@pytest.mark.parametrize(
    ("changed", "state", "error"),
    [
        ({"failure": "refused", "served_partitions": {}}, "down", "refused"),
        ({**DENIED, "served_partitions": {}}, "unknown", "token t1 of ann is revoked"),
        ({"connection_errors": (f"{TWO}: refused",)}, "up", f"{TWO}: refused"),
    ],
)
def test_the_state_of_a_server_is_shown(world, changed, state, error):
    server = world.server(1, **changed)
    assert (server["state"], server["error"]) == (state, error)


def test_the_partitions_of_a_server_are_shown(world):
    server = world.server(
        1,
        served_partitions={1: False, 0: True},
        preferred_partitions=(1, 0),
        unreachable_storages=(C, A),
    )
    assert (server["open"], server["not_open"], server["preferred"]) == ([0], [1], [0, 1])
    assert server["unreachable_storages"] == [A, C]


@pytest.mark.parametrize(
    ("changed", "state", "error"),
    [
        ({"failure": "refused", "replicas": {}}, "down", "refused"),
        ({**DENIED, "replicas": {}}, "unknown", "token t1 of ann is revoked"),
        ({**ADMIN_DENIED, "replicas": {}}, "unknown", "ann is not granted administer"),
        ({"admin_failure": "no answer", "is_hanging": True}, "down", "no answer"),
        ({"belongs_to_cluster": False}, "down", "the storage belongs to another cluster"),
    ],
)
def test_the_state_of_a_storage_is_shown(world, changed, state, error):
    storage = world.storage(A, **changed)
    assert (storage["state"], storage["error"]) == (state, error)


def test_the_view_is_denied_if_all_answering_members_deny_it(world):
    world.case.server(1, **DENIED)
    world.case.server(2, failure="refused")
    with pytest.raises(errors.PermissionDenied, match="is revoked"):
        world.fields()
    world.case.server(2, failure="")
    assert [server["state"] for server in world.fields()["servers"]] == ["unknown", "up"]
    world.case = Case()
    for number in (1, 2):
        world.case.server(number, failure="refused")
    assert {server["state"] for server in world.fields()["servers"]} == {"down"}
    world.case.storage(B, **ADMIN_DENIED)
    with pytest.raises(errors.PermissionDenied, match="ann is not granted administer"):
        world.fields()


# --- partitions and replicas


@pytest.mark.parametrize(
    ("change", "state", "owner"),
    [
        (lambda case: case.cluster(owners={}), "no_owner", None),
        (lambda case: case.cluster(servers={}), "no_owner", None),
        (lambda case: case.server(1, served_partitions={0: False}), "closed", ONE),
        (lambda case: case.server(1, failure="refused", served_partitions={}), "closed", ONE),
        (lambda case: case.server(1, **DENIED, served_partitions={}), "unknown", ONE),
    ],
)
def test_the_state_of_a_partition_is_shown(world, change, state, owner):
    change(world.case)
    found = world.fields()["partitions"][0]
    assert (found["state"], found["owner"]) == (state, owner)


@pytest.mark.parametrize(
    ("down", "mark", "state"),
    [((A,), None, "open"), ((A, B), None, "no_quorum"), ((A, B), 90, "open")],
)
def test_a_partition_is_open_if_a_quorum_answers_or_its_owner_reports_a_mark(
    world, down, mark, state
):
    for each in down:
        world.case.storage(each, failure="refused")
    world.case.partition(high_water_mark=mark)
    assert world.fields()["partitions"][0]["state"] == state


def test_a_partition_whose_owner_does_not_answer_has_no_high_water_mark(world):
    world.case.partition(high_water_mark=None, high_water_mark_error="no answer", metadata=None)
    found = world.fields()["partitions"][0]
    assert (found["high_water_mark"], found["error"]) == (None, "no answer")
    assert (found["session_id"], found["archived_mark"]) == (None, None)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"is_online": False}, ("unavailable", "offline")),
        ({"is_present": False}, ("unavailable", "missing")),
        ({"is_opening": True}, ("unavailable", "opening")),
        ({"is_stuck": True}, ("unavailable", "stuck")),
        ({"open_error": "bad checksum"}, ("unavailable", "bad checksum")),
        ({"is_suspect": True}, ("out_of_sync", "its log is not trusted")),
        ({}, ("in_sync", "")),
    ],
)
def test_a_replica_has_the_state_that_its_storage_reports(world, changed, expected):
    world.case.replica(A, **changed)
    assert world.replica(A) == expected
    assert world.replica(B) == ("in_sync", "")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"failure": "refused", "replicas": {}}, ("unavailable", "refused")),
        ({"admin_failure": "no answer", "is_hanging": True}, ("unavailable", "no answer")),
        (
            {"belongs_to_cluster": False, "replicas": {}},
            ("unavailable", "the storage belongs to another cluster"),
        ),
        ({**DENIED, "replicas": {}}, ("unknown", "token t1 of ann is revoked")),
        ({**ADMIN_DENIED, "replicas": {}}, ("unknown", "ann is not granted administer")),
        # Servers use the data port, not the admin port.
        ({"admin_failure": "refused", "found_admin_port": 5299, "replicas": {}}, ("in_sync", "")),
    ],
)
def test_the_state_of_a_replica_depends_on_its_storage(world, changed, expected):
    world.case.storage(A, **changed)
    assert world.replica(A) == expected


def test_a_replica_that_is_not_engaged_is_out_of_sync(world):
    engaged = ReplicaState(7, UNRESOLVED)
    world.case.states({A: ReplicaState(6, 50), B: engaged, C: engaged})
    assert world.replica(A) == ("out_of_sync", "")
    world.case.states({B: engaged, C: engaged})
    assert world.replica(A) == ("out_of_sync", "")
    world.case.partition(metadata=PartitionMetadata())
    assert world.replica(B)[0] == "out_of_sync"


# --- ZooKeeper does not answer (rule 2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.CoordinatorUnavailable("no connection"), "no connection"),
        (TimeoutError, "no answer within 0.8 s"),
    ],
)
@run_on_virtual_loop
async def test_without_zookeeper_the_view_has_the_members_of_the_last_read(
    monkeypatch, error, message
):
    world = World(monkeypatch)
    world.error = error
    with pytest.raises(errors.CoordinatorUnavailable, match=message.partition(" within")[0]):
        await world.view()
    world.error = None
    assert (await world.view())["zookeeper_error"] == ""
    world.error = error
    world.case.storage(A, failure="refused")
    world.case.facts = Facts(
        CONNECT,
        tuple(ZooKeeperServerFacts(node, "refused") for node in NODES),
        cluster=world.case.facts.cluster,
    )
    fields = await world.view()
    assert fields["zookeeper_error"] == message
    assert {each["state"] for each in fields["zookeeper"]} == {"down"}
    assert fields["storages"][0]["state"] == "down"  # members are queried as usual
    world.error = None
    assert (await world.view())["zookeeper_error"] == ""


@run_on_virtual_loop
async def test_many_callers_wait_for_zookeeper_at_the_same_time(monkeypatch):
    world = World(monkeypatch)
    await world.view()
    world.error = TimeoutError
    began_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        views = [tasks.create_task(world.view()) for _ in range(5)]
    assert {view.result()["zookeeper_error"] for view in views} == {"no answer within 0.8 s"}
    assert asyncio.get_running_loop().time() - began_s < PAUSE_S_MAX + 2 * TIMEOUT_S
    world.error = None


@run_on_virtual_loop
async def test_an_outage_of_zookeeper_during_a_read_is_reported(monkeypatch):
    coordinator = MemoryZooKeeper(asyncio.Event).coordinator("/w")
    await coordinator.create_cluster(NewCluster("w", 2, UUID(int=7)))

    async def read_partition(_partition):
        raise errors.CoordinatorUnavailable("no answer")

    monkeypatch.setattr(coordinator, "read_partition", read_partition)
    with pytest.raises(errors.CoordinatorUnavailable, match="no answer"):
        await ClusterViewer(CONNECT, lambda: coordinator, RunningLoop()).view("")


def test_a_deleted_cluster_is_an_error(world):
    world.error = errors.ClusterNotFound("there is no cluster")
    with pytest.raises(errors.ClusterNotFound):
        world.fields()


# --- findings


def findings_of(world, facts=None, *, connect=CONNECT, token_hash=""):
    facts = facts or world.case.facts

    async def lasting_findings(found_connect, *, timeout_s, displayed_connect):
        assert found_connect == connect
        shown = dataclasses.replace(facts, connect=displayed_connect)
        return shown, diagnose(shown)

    async def run():
        viewer = ClusterViewer(connect, lambda: world, RunningLoop())
        with patch.object(cluster_view, "lasting_findings", lasting_findings):
            return (await viewer.findings(token_hash))["findings"]

    return asyncio.run(run())


def test_a_finding_contains_its_command_as_a_change_of_the_console(world):
    case = world.case
    assert findings_of(world) == []
    case.server(1, failure="refused", served_partitions={})
    (finding,) = findings_of(world)
    assert finding.pop("sentence").startswith(f"server {ONE} is registered in ZooKeeper, but")
    assert finding == {
        "name": "server-unavailable",
        "area": "servers",
        "subject": ONE,
        "partition": None,
        "command": f"waltz-core cluster remove-server {ONE} --connect {CONNECT}",
        "change": {"name": "remove-server", "arguments": {"server": ONE}},
    }
    (finding,) = findings_of(world, Facts(CONNECT, zookeeper_failure="no answer"))
    assert (finding["name"], finding["change"]) == ("zookeeper-unavailable", None)


def test_findings_require_the_same_permission_as_the_view(world):
    case = world.case
    for number in (1, 2):
        case.server(number, **DENIED, served_partitions={})
    with pytest.raises(errors.PermissionDenied):
        findings_of(world)


@pytest.mark.parametrize(
    "facts",
    [
        Facts(CONNECT, access_error="auth file /etc/waltz/zk.admin cannot be read"),
        Facts(CONNECT, zookeeper_failure="TLS file /etc/waltz/ca.pem cannot be read"),
        Facts(CONNECT, is_cluster_missing=True),
        None,
    ],
)
def test_findings_do_not_show_the_files_of_the_gateway(world, facts):
    world.case.server(1, failure="refused", served_partitions={})
    connect = f"{CONNECT}?auth=/etc/waltz/zk.admin&tls=/etc/waltz/ca.pem"
    findings = findings_of(world, facts, connect=connect)
    assert findings
    assert "/etc/waltz" not in str(findings)
    if facts is None:
        shown = f"{CONNECT}?auth=FILE&tls=FILE"
        assert findings[0]["command"].endswith(f"remove-server {ONE} --connect '{shown}'")
        assert findings[0]["change"] == {"name": "remove-server", "arguments": {"server": ONE}}


# --- a caller whose token no member has checked (rule 5)

ADMINISTRATOR = "aa" * 32
READER = "bb" * 32
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    grants=(Grant("ann", False, ADMINISTER, None), Grant("eve", False, READ, None)),
    tokens={
        ADMINISTRATOR: StoredToken("t1", "ann", 1 << 50),
        READER: StoredToken("t2", "eve", 1 << 50),
    },
)


@pytest.mark.parametrize(
    ("token_hash", "error"),
    [
        ("", errors.PermissionDenied),
        (READER, errors.PermissionDenied),
        ("cc" * 32, errors.AuthenticationFailed),
        (ADMINISTRATOR, None),
    ],
)
def test_the_gateway_checks_the_caller_itself_if_no_member_answers(world, token_hash, error):
    expected = nullcontext() if error is None else pytest.raises(error)
    world.stored = PERMISSIONS
    for number in (1, 2):
        world.case.server(number, failure="refused", served_partitions={})
    for each in (A, B, C, SPARE):
        world.case.storage(each, failure="refused")
    with expected:
        asyncio.run(world.viewer.view(token_hash))
    with expected:
        findings_of(world, token_hash=token_hash)
    with expected:
        findings_of(world, Facts(CONNECT, is_cluster_missing=True), token_hash=token_hash)
    world.case.storage(A, failure="")
    asyncio.run(world.viewer.view(token_hash))  # the storage has checked the token


def test_a_gateway_that_cannot_read_the_permissions_relies_on_the_checks_of_members(world):
    world.stored = errors.BadConfig("ZooKeeper denies access to /w/x/access")
    assert asyncio.run(world.viewer.view(READER))["zookeeper_error"] == ""
    for number in (1, 2):
        world.case.server(number, failure="refused", served_partitions={})
    for each in (A, B, C, SPARE):
        world.case.storage(each, failure="refused")
    with pytest.raises(errors.PermissionDenied, match="cannot read the permissions"):
        asyncio.run(world.viewer.view(ADMINISTRATOR))


# --- reads of ZooKeeper


@run_on_virtual_loop
async def test_reads_of_zookeeper_are_shared_and_rate_limited(monkeypatch):
    world = World(monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(world.viewer.view(""))
    await world.viewer.view("")
    assert world.read_count == 1
    await world.view()
    assert world.read_count == 2


@run_on_virtual_loop
async def test_a_slow_read_continues_after_the_request_times_out(monkeypatch):
    world = World(monkeypatch)
    read = world._read

    async def slow_read(coordinator):
        await pass_time(8.0)
        return await read(coordinator)

    monkeypatch.setattr(ClusterSnapshot, "read", slow_read)
    with pytest.raises(errors.CoordinatorUnavailable):
        await world.viewer.view("")
    assert (await world.viewer.view(""))["zookeeper_error"] == ""
    assert world.read_count == 1
    await pass_time(PAUSE_S_MAX + 0.1)  # the next read is as slow, but no error
    assert (await world.viewer.view(""))["zookeeper_error"] == ""
    await pass_time(8.0)
    assert world.read_count == 2


# --- shared answers (rule 4)


class Query:
    """A query that ends when the test permits it."""

    def __init__(self):
        self.count = 0
        self.may_end = asyncio.Event()
        self.error = None

    async def __call__(self):
        self.count += 1
        number = self.count
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return number


@run_on_virtual_loop
async def test_concurrent_requests_of_one_caller_share_one_answer():
    answers, query, other = SharedAnswers(1.0), Query(), Query()
    other.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        same = [tasks.create_task(answers.get("ann", query)) for _ in range(3)]
        await poll_until(lambda: query.count)
        assert await answers.get("bob", other) == 1  # does not wait for ann's query
        query.may_end.set()
    assert [each.result() for each in same] == [1, 1, 1]
    assert await answers.get("ann", query) == 1
    assert other.count == 1


@run_on_virtual_loop
async def test_an_answer_is_cached_for_one_second(monkeypatch):
    monkeypatch.setattr(cluster_view.time, "monotonic", asyncio.get_running_loop().time)
    answers, query = SharedAnswers(1.0), Query()
    query.may_end.set()
    assert [await answers.get("ann", query), await answers.get("ann", query)] == [1, 1]
    await pass_time(1.1)
    assert await answers.get("ann", query) == 2
    await pass_time(1.1)
    await answers.get("bob", query)
    assert (list(answers._answers), list(answers._locks)) == (["bob"], ["bob"])


@run_on_virtual_loop
async def test_an_error_is_cached_for_one_second(monkeypatch):
    monkeypatch.setattr(cluster_view.time, "monotonic", asyncio.get_running_loop().time)
    answers, query = SharedAnswers(1.0), Query()
    query.error = errors.Unavailable("no answer")
    query.may_end.set()
    for _ in range(3):  # a caller without permission does not cause a query with each request
        with pytest.raises(errors.Unavailable):
            await answers.get("ann", query)
    query.error = None
    await pass_time(1.1)
    assert await answers.get("ann", query) == 2


@run_on_virtual_loop
async def test_a_cancelled_request_does_not_affect_the_requests_that_wait_for_it():
    answers, query = SharedAnswers(1.0), Query()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(answers.get("ann", query))
        others = [tasks.create_task(answers.get("ann", query)) for _ in range(3)]
        await poll_until(lambda: query.count)
        first.cancel()
        await poll_until(lambda: query.count == 2)
        query.may_end.set()
    assert first.cancelled()
    assert [other.result() for other in others] == [2, 2, 2]
