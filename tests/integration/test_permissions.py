"""A cluster with `access = "on"`: what each principal may do at each port, and revocations."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.certificates import Certificates
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.tls_cluster import daemons_with_access, tls_cluster
from tests.sample_messages import sample_of
from waltz_core.access.permissions import Grant, KnownToken, Permissions
from waltz_core.access.requirements import AccessVerb, ByField, Requirement, Scope
from waltz_core.access.tokens import hash_of
from waltz_core.client import Callbacks, Transaction, WaltzClient
from waltz_core.cluster.znodes import access_node
from waltz_core.config import ClientConfig
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.errors import BY_CODE, PermissionDenied, WaltzError
from waltz_core.local import LocalCluster
from waltz_core.transport import net, tls
from waltz_core.wire.admin_messages import AdminRejected
from waltz_core.wire.codec import message_classes
from waltz_core.wire.messages import ErrorResponse, Message, Nack, WireProtocol

DAEMONS = ("storage-1", "server-1")
MINE, OTHER = 1, 3
LATER_MS = 1 << 50
# Each has a token; the first byte of its secret is the place in this list.
PRINCIPALS = ("nothing", "writer", *(each.value for each in AccessVerb))
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    grants=(
        Grant("localhost", False, AccessVerb.REPLICATE, None),
        Grant("writer", False, AccessVerb.READ, ((MINE, MINE),)),
        Grant("writer", False, AccessVerb.APPEND, ((MINE, MINE),)),
        *(Grant(each.value, False, each, ((MINE, MINE),)) for each in AccessVerb),
    ),
    tokens={
        hash_of(bytes([number]) * 32): KnownToken(f"t{number}", name, LATER_MS)
        for number, name in enumerate(PRINCIPALS)
    },
)


class Access:
    """The permissions of the cluster in ZooKeeper, and connect strings of principals."""

    def __init__(self, cluster: LocalCluster, authorities: str, directory: Path) -> None:
        self.cluster = cluster
        self._place = parse_connect_string(cluster.connect)
        self._authorities = authorities
        self._directory = directory
        self._zookeeper = KazooClient(",".join(self._place.hosts))
        self._zookeeper.start()
        self._revision = 0

    def write(self, permissions: Permissions) -> None:
        """Write the next revision, and wait until every daemon has read it."""
        self._revision += 1
        data = access_node.encode(dataclasses.replace(permissions, revision=self._revision))
        path = f"{self._place.root}/x/access"
        if self._zookeeper.exists(path):
            self._zookeeper.set(path, data)
        else:
            self._zookeeper.create(path, data)
        self.await_read()

    def await_read(self) -> None:
        """Wait until every daemon has read the latest revision."""
        line = f"access.revision revision={self._revision}\n"
        for name in DAEMONS:
            log = self.cluster.log_path(name)
            wait_until(f"{name} reads", lambda log=log: line in log.read_text())

    def connect(self, principal: str) -> str:
        """Return the connect string of a principal."""
        file = self._directory / principal
        file.write_text((bytes([PRINCIPALS.index(principal)]) * 32).hex())
        place = self.cluster.connect.partition("?")[0]
        return f"{place}?tls={self._authorities}&token_file={file}"

    def close(self) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Access]:
    with enforced_access(tmp_path_factory, certificates, PERMISSIONS) as made:
        yield made


@contextmanager
def enforced_access(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, permissions: Permissions
) -> Iterator[Access]:
    """As an operator introduces it: first "report", then permissions, then "on"."""
    settings = {"principal_pattern": "DNS=(localhost)"}
    with (
        daemons_with_access("report", **settings),
        tls_cluster(tmp_path_factory, certificates) as cluster,
    ):
        made = Access(cluster, certificates.authorities, tmp_path_factory.mktemp("tokens"))
        made.write(permissions)
        with daemons_with_access("on", **settings):
            for name in DAEMONS:
                cluster.kill(name)
                cluster.log_path(name).write_text("")
                cluster.start(name)
            made.await_read()
            yield made
        made.close()


@pytest.fixture
def access(started: Access) -> Access:
    """The permissions as they were first."""
    started.write(PERMISSIONS)
    return started


# ---------------------------------------------------------------------------------------------
# each message of each protocol at its port


def requirement_of(message: Message) -> Requirement | None:
    declared = message.requires
    if isinstance(declared, ByField):
        declared = declared.requirements[getattr(message, declared.field)]
    return declared if isinstance(declared, Requirement) else None


def is_permitted(verb: AccessVerb, requirement: Requirement, partition: int) -> bool:
    """Whether a principal may do it that has one verb, for the partition `MINE`."""
    has_verb = verb in requirement.verbs
    if requirement.scope is Scope.OWN:
        has_verb = has_verb and partition == MINE
    is_enough = len(requirement.verbs) == 1 or not requirement.is_all
    return has_verb and is_enough and requirement.scope is not Scope.ALL


def requests(protocol: WireProtocol, partition: int) -> list[Message]:
    """Return every request of a protocol, each form of it once."""
    made = []
    for each in message_classes(protocol):
        declared = each.requires
        if isinstance(declared, ByField):
            made += [
                sample_of(each, partition, **{declared.field: value})
                for value in declared.requirements
            ]
        elif isinstance(declared, Requirement):
            made.append(sample_of(each, partition))
    return made


async def denied_requests(
    protocol: WireProtocol, address: str, connect: str, wanted: list[Message]
) -> set[Message]:
    """Send requests, each on a connection of its own; return those that were denied."""
    denied = set()
    context = tls.dialing(ClientConfig(), connect)
    for request in wanted:
        link = await net.dial(protocol, address, ssl=context)
        link.send(request)
        (answer, *_) = await link.receive()
        code = {
            ErrorResponse: lambda answer: answer.error_code,
            Nack: lambda answer: answer.error_code,
            AdminRejected: lambda answer: answer.error_code,
        }.get(type(answer), lambda _: 0)(answer)
        if BY_CODE.get(code) is PermissionDenied:
            denied.add(request)
        link.abort("done")
    return denied


@pytest.mark.parametrize(
    "protocol", [WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN]
)
@pytest.mark.parametrize("verb", [*AccessVerb, None])
def test_every_request_is_denied_without_its_verb(
    access: Access, protocol: WireProtocol, verb: AccessVerb | None
):
    member = access.cluster.member("server-1" if protocol is WireProtocol.CLIENT else "storage-1")
    port = member.admin_port if protocol is WireProtocol.ADMIN else member.port
    principal = "nothing" if verb is None else verb.value
    expected = [
        request
        for partition in (MINE, OTHER)
        for request in requests(protocol, partition)
        if (found := requirement_of(request)) is not None
        and (verb is None or not is_permitted(verb, found, partition))
    ]
    assert expected
    denied = asyncio.run(
        denied_requests(protocol, f"127.0.0.1:{port}", access.connect(principal), expected)
    )
    assert [request for request in expected if request not in denied] == []


# ---------------------------------------------------------------------------------------------
# clients


def test_a_client_may_do_what_is_granted_and_nothing_else(access: Access):
    with WaltzClient(access.connect("writer")) as client:
        first = client.append(b"mine", partition=MINE).result()
        for replicas in (None, client.replicas(MINE)):
            chunks = client.read_range(MINE, first, first, replicas=replicas)
            assert [row.data for chunk in chunks for row in chunk.rows()] == [b"mine"]
        with pytest.raises(PermissionDenied, match="for partition 3, and writer is not granted"):
            client.append(b"other", partition=OTHER).result()
        for replicas in (None, client.replicas(MINE)):
            with pytest.raises(
                PermissionDenied, match="for partition 3, and writer is not granted read"
            ):
                list(client.read_range(OTHER, 0, 0, replicas=replicas))
        assert client.append(b"mine again", partition=MINE).result() > first
    with WaltzClient(access.connect("nothing")) as client, pytest.raises(PermissionDenied):
        client.high_water_mark(MINE)
    done = run_command("storage", "list", "--connect", access.connect("writer"))
    assert done.returncode == 1
    assert "writer is not granted administer" in done.stderr


class Fed(Callbacks):
    """Keeps what a feed delivers."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []

    def client_high_water_mark(self, partition: int) -> int:
        return -1

    def apply_transaction(self, transaction: Transaction) -> None:
        self.fed.append(transaction.data())


def test_a_revoked_grant_ends_appends_and_feeds(access: Access):
    fed = Fed()
    with (
        WaltzClient(access.connect("writer")) as writer,
        WaltzClient(access.connect("read")) as reader,
    ):
        reader.subscribe(fed, [MINE])
        writer.append(b"before", partition=MINE).result()
        wait_until("the feed delivers", lambda: b"before" in fed.fed)
        access.write(dataclasses.replace(PERMISSIONS, grants=PERMISSIONS.grants[:1]))
        with pytest.raises(PermissionDenied):
            writer.append(b"after", partition=MINE).result()
        wait_until("the feed has ended", lambda: reader.partitions == ())
        access.write(PERMISSIONS)
        with WaltzClient(access.connect("writer")) as other:
            other.append(b"later", partition=MINE).result()
        assert fed.fed[-1] == b"before"


def test_a_feed_with_a_revoked_token_continues_when_it_is_valid_again(access: Access):
    """A client may get a new token at any time, so it retries."""
    fed = Fed()
    others = {key: each for key, each in PERMISSIONS.tokens.items() if each.principal != "read"}
    with (
        WaltzClient(access.connect("writer")) as writer,
        WaltzClient(access.connect("read")) as reader,
    ):
        reader.subscribe(fed, [MINE])
        writer.append(b"before", partition=MINE).result()
        wait_until("the feed delivers", lambda: b"before" in fed.fed)
        log = access.cluster.log_path("server-1")
        access.write(dataclasses.replace(PERMISSIONS, tokens=others))
        writer.append(b"after", partition=MINE).result()
        wait_until("it is rejected", lambda: "access.token_rejected" in log.read_text())
        assert fed.fed[-1] == b"before"
        access.write(PERMISSIONS)
        wait_until("the feed continues", lambda: fed.fed[-1] == b"after")


def test_servers_without_replicate_serve_nothing_until_it_is_granted_again(access: Access):
    config = ClientConfig(request_timeout_ms=2_000)
    with WaltzClient(access.connect("writer"), config) as client:
        client.append(b"before", partition=MINE).result()
        access.write(dataclasses.replace(PERMISSIONS, grants=PERMISSIONS.grants[1:]))
        with pytest.raises(WaltzError):
            client.append(b"without", partition=MINE).result()
    access.write(PERMISSIONS)

    def works() -> bool:
        try:
            with WaltzClient(access.connect("writer"), config) as client:
                return client.append(b"after", partition=MINE).result() > 0
        except WaltzError:
            return False

    wait_until("the storage accepts the server again", works)


def test_permissions_stay_while_zookeeper_is_away(access: Access):
    with WaltzClient(access.connect("writer")) as client:
        client.append(b"before", partition=MINE).result()
        access.cluster.kill("zookeeper")
        try:
            client.append(b"meanwhile", partition=MINE).result()
            with pytest.raises(PermissionDenied):
                client.append(b"other", partition=OTHER).result()
        finally:
            access.cluster.start("zookeeper")
