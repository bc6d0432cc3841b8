"""A cluster with `access = "on"`: permissions of each principal at each port, and revocations."""

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.commands import run_command
from tests.fault.load import paused_process, start_zookeeper, wait_until
from tests.integration.permitted_cluster import (
    DENIED_PARTITION,
    PERMISSIONS,
    PERMITTED_PARTITION,
    ClusterAccess,
    permitted_cluster,
)
from tests.sample_messages import sample_message
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.access.client_ids import NO_PROOF
from waltz_core.access.requirements import AccessVerb, Requirement, RequirementByField, Scope
from waltz_core.client import Callbacks, Transaction, WaltzClient, lock
from waltz_core.client.links.directory import Owner
from waltz_core.client.read import ranges
from waltz_core.client.read.ranges import RangeQuery, ReaderConnection, ReplicaReader, ReplicaSet
from waltz_core.config import ClientConfig
from waltz_core.errors import (
    ERROR_CLASSES_BY_CODE,
    ClientIdDenied,
    LockFailed,
    NotMounted,
    OutcomeUnknown,
    PermissionDenied,
    Unavailable,
    Unreachable,
    WaltzError,
)
from waltz_core.records.record import ReqId
from waltz_core.transport import descriptor_passing, net, tls
from waltz_core.wire.admin_messages import AdminRejected
from waltz_core.wire.codec import message_classes
from waltz_core.wire.messages import (
    OWN_HEADERS,
    ClientIdRequest,
    ClientIdResponse,
    ClientMessage,
    ErrorResponse,
    Message,
    Mounted,
    MountRequest,
    MountWriter,
    Nack,
    RangeData,
    RangeRequest,
    WireProtocol,
)
from waltz_core.wire.record_locations import TICKET_BYTES, encode_segment, socket_name_of

IS_LINUX = pytest.mark.skipif(
    not descriptor_passing.IS_SUPPORTED, reason="abstract socket names exist only on Linux"
)


@pytest.fixture(scope="module")
def running_cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[ClusterAccess]:
    with permitted_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster


@pytest.fixture
def access(running_cluster: ClusterAccess) -> ClusterAccess:
    """The initial permissions."""
    running_cluster.write(PERMISSIONS)
    return running_cluster


# ---------------------------------------------------------------------------------------------
# each message of each protocol at its port


def requirement_of(message: Message) -> Requirement | None:
    declared = message.requires
    if isinstance(declared, RequirementByField):
        declared = declared.requirements[getattr(message, declared.field)]
    return declared if isinstance(declared, Requirement) else None


def is_permitted(verb: AccessVerb, requirement: Requirement, partition: int) -> bool:
    """Whether one verb for the partition `PERMITTED_PARTITION` permits a request."""
    has_verb = verb in requirement.verbs
    if requirement.scope is Scope.NAMED:
        has_verb = has_verb and partition == PERMITTED_PARTITION
    is_enough = len(requirement.verbs) == 1 or not requirement.needs_all
    return has_verb and is_enough and requirement.scope is not Scope.ALL


def requests(protocol: WireProtocol, partition: int) -> list[Message]:
    """Return every request of a protocol, each form of it once."""
    messages_found = []
    for message_class in message_classes(protocol):
        declared = message_class.requires
        if isinstance(declared, RequirementByField):
            messages_found += [
                sample_message(message_class, partition, **{declared.field: value})
                for value in declared.requirements
            ]
        elif isinstance(declared, Requirement):
            messages_found.append(sample_message(message_class, partition))
    return messages_found


async def denied_requests(
    protocol: WireProtocol, address: str, connect: str, wanted: list[Message]
) -> set[Message]:
    """Send each request on a separate connection; return the denied requests."""
    denied = set()
    context = tls.dial_context(ClientConfig(), connect)
    for request in wanted:
        link = await net.dial(protocol, address, ssl=context)
        link.send(request)
        (answer, *_) = await link.receive()
        code = {
            ErrorResponse: lambda answer: answer.error_code,
            Nack: lambda answer: answer.error_code,
            AdminRejected: lambda answer: answer.error_code,
        }.get(type(answer), lambda _: 0)(answer)
        if ERROR_CLASSES_BY_CODE.get(code) is PermissionDenied:
            denied.add(request)
        link.abort("done")
    return denied


@pytest.mark.parametrize(
    "protocol", [WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN]
)
@pytest.mark.parametrize("verb", [*AccessVerb, None])
def test_every_request_is_denied_without_its_verb(
    access: ClusterAccess, protocol: WireProtocol, verb: AccessVerb | None
):
    member = access.cluster.member("server-1" if protocol is WireProtocol.CLIENT else "storage-1")
    port = member.admin_port if protocol is WireProtocol.ADMIN else member.port
    principal = "nothing" if verb is None else verb.value
    expected = [
        request
        for partition in (PERMITTED_PARTITION, DENIED_PARTITION)
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
# files of a storage


class Reader:
    """A connection to the storage that has received record locations, and its ticket."""

    def __init__(self, access: ClusterAccess, principal: str, replicas: ReplicaSet) -> None:
        self._context = tls.dial_context(ClientConfig(), access.connect(principal))
        self._replicas = replicas
        self.ticket = b""

    async def connect(self) -> ReaderConnection:
        """Connect, and receive a ticket with the locations of the first permitted record."""
        (address,) = self._replicas.replicas
        connection = await ReaderConnection.open(
            address, self._replicas, timeout_s=TEST_TIMEOUT_S, ssl=self._context
        )
        session_id = self._replicas.session_id
        grant = await connection.request_locations(
            PERMITTED_PARTITION, RangeQuery(0, 0), session_id=session_id, timeout_s=TEST_TIMEOUT_S
        )
        self.ticket = grant.ticket
        return connection

    def is_passed(self, ticket: bytes, partition: int = PERMITTED_PARTITION) -> bool:
        """Whether the storage passes the first file of a partition for a ticket."""
        (address,) = self._replicas.replicas
        name = socket_name_of(self._replicas.cluster_key, address, with_tickets=True)
        request = encode_segment(partition, 0, ticket)
        try:
            os.close(descriptor_passing.request_descriptor(name, request, timeout_s=TEST_TIMEOUT_S))
        except Unreachable as error:
            if "not available" not in str(error):
                raise
            return False
        return True


@pytest.fixture
def replicas(access: ClusterAccess) -> ReplicaSet:
    with WaltzClient(access.connect("writer")) as client:
        client.append(b"mine", partition=PERMITTED_PARTITION).result()
        return client.replicas(PERMITTED_PARTITION)


@IS_LINUX
def test_an_open_file_is_passed_only_for_a_ticket_whose_connection_is_open(
    access: ClusterAccess, replicas: ReplicaSet
):
    async def main():
        one, other = (Reader(access, name, replicas) for name in ("read", "replicate"))
        link, other_link = await one.connect(), await other.connect()
        assert len({one.ticket, other.ticket}) == 2
        for _ in range(2):  # a reader opens several files
            assert one.is_passed(one.ticket)
        assert not one.is_passed(one.ticket, DENIED_PARTITION)
        for number in range(TICKET_BYTES):
            forged = bytearray(one.ticket)
            forged[number] ^= 1
            assert not one.is_passed(bytes(forged))
        assert not one.is_passed(bytes(TICKET_BYTES))
        assert not one.is_passed(one.ticket[:8] + other.ticket[8:])
        earlier = one.ticket
        link.close()
        await asyncio.to_thread(wait_until, "it ends", lambda: not one.is_passed(earlier))
        again = await one.connect()
        assert not one.is_passed(earlier)
        assert one.is_passed(one.ticket)
        assert one.is_passed(other.ticket)
        again.close()
        other_link.close()

    asyncio.run(main())


@IS_LINUX
def test_no_file_is_passed_after_a_revocation(access: ClusterAccess, replicas: ReplicaSet):
    async def main():
        permitted, revoked = Reader(access, "writer", replicas), Reader(access, "read", replicas)
        links = [await each.connect() for each in (permitted, revoked)]
        without = tuple(grant for grant in PERMISSIONS.grants if grant.grantee != "read")
        await asyncio.to_thread(access.write, dataclasses.replace(PERMISSIONS, grants=without))
        assert not revoked.is_passed(revoked.ticket)
        assert permitted.is_passed(permitted.ticket)
        await asyncio.to_thread(access.write, PERMISSIONS)
        assert not revoked.is_passed(revoked.ticket)  # its connection has ended
        for link in links:
            link.close()

    asyncio.run(main())


@IS_LINUX
def test_a_local_reader_reads_files_and_an_older_reader_reads_over_the_connection(
    access: ClusterAccess, replicas: ReplicaSet, monkeypatch: pytest.MonkeyPatch
):
    async def read() -> int:
        """Return how many chunks were read from files."""
        context = tls.dial_context(ClientConfig(), access.connect("read"))
        reader = ReplicaReader(
            PERMITTED_PARTITION, replicas, None, first=0, timeout_s=TEST_TIMEOUT_S, ssl=context
        )
        chunk = await reader.fetch(RangeQuery(0, 0))
        assert chunk.count == reader.from_replica_count == 1
        reader.close()
        return reader.from_local_count

    assert asyncio.run(read()) == 1
    names = []
    monkeypatch.setattr(ranges.descriptor_passing, "is_offered", names.append)
    assert asyncio.run(read()) == 0
    monkeypatch.undo()
    assert [descriptor_passing.is_offered(name) for name in names] == [False, True]


# ---------------------------------------------------------------------------------------------
# clients


def check_rejections(client: WaltzClient) -> None:
    """The owner lists a rejection of this client; the client may not list rejections of others."""
    seat_lock = lock("seat", "12F")
    winner = client.append(
        b"first", partition=PERMITTED_PARTITION, write_locks=[seat_lock]
    ).result()
    late = client.append(
        b"second",
        partition=PERMITTED_PARTITION,
        write_locks=[seat_lock],
        client_high_water_mark=winner - 1,
    )
    with pytest.raises(LockFailed):
        late.result()
    newest = client.recent_rejections(PERMITTED_PARTITION)[0]
    assert (newest.req_id.client_id, newest.conflicting) == (client.client_id, winner)
    with pytest.raises(PermissionDenied, match="for partition 3, but writer has no grant of "):
        client.recent_rejections(DENIED_PARTITION)


def test_a_client_may_send_only_requests_that_are_granted(access: ClusterAccess):
    with WaltzClient(access.connect("writer")) as client:
        first = client.append(b"mine", partition=PERMITTED_PARTITION).result()
        for replicas in (None, client.replicas(PERMITTED_PARTITION)):
            chunks = client.read_range(PERMITTED_PARTITION, first, first, replicas=replicas)
            assert [row.data for chunk in chunks for row in chunk.rows()] == [b"mine"]
        with pytest.raises(PermissionDenied, match="for partition 3, but writer has no grant"):
            client.append(b"other", partition=DENIED_PARTITION).result()
        for replicas in (None, client.replicas(PERMITTED_PARTITION)):
            with pytest.raises(
                PermissionDenied, match="for partition 3, but writer has no grant of read"
            ):
                list(client.read_range(DENIED_PARTITION, 0, 0, replicas=replicas))
        assert client.append(b"mine again", partition=PERMITTED_PARTITION).result() > first
        check_rejections(client)
    with WaltzClient(access.connect("nothing")) as client, pytest.raises(PermissionDenied):
        client.high_water_mark(PERMITTED_PARTITION)
    result = run_command("storage", "list", "--connect", access.connect("writer"))
    assert result.returncode == 1
    assert "writer has no grant of administer" in result.stderr


class RecordingCallbacks(Callbacks):
    """Records the transactions of a feed."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []

    def client_high_water_mark(self, partition: int) -> int:
        return -1

    def apply_transaction(self, transaction: Transaction) -> None:
        self.applied.append(transaction.data())


def test_a_partly_denied_append_command_prints_the_ids_of_the_appended_transactions(
    access: ClusterAccess,
):
    connect = access.connect("writer")
    result = run_command("client", "append", "a", "b", "c", "d", "--connect", connect)
    assert result.returncode == 1
    with WaltzClient(connect) as client:
        assert (
            result.stdout
            == f"{client.high_water_marks([PERMITTED_PARTITION])[PERMITTED_PARTITION]}\n"
        )
    assert "1 of 4 transactions were appended" in result.stderr
    assert "MountWriter requires" in result.stderr


def test_a_revoked_grant_ends_appends_and_feeds(access: ClusterAccess):
    callbacks = RecordingCallbacks()
    with (
        WaltzClient(access.connect("writer")) as writer,
        WaltzClient(access.connect("read")) as reader,
    ):
        reader.subscribe(callbacks, [PERMITTED_PARTITION])
        writer.append(b"before", partition=PERMITTED_PARTITION).result()
        wait_until("the feed delivers", lambda: b"before" in callbacks.applied)
        access.write(dataclasses.replace(PERMISSIONS, grants=PERMISSIONS.grants[:1]))
        # An append that was sent before the client noticed the broken connection may be lost.
        with pytest.raises((PermissionDenied, OutcomeUnknown)):
            writer.append(b"after", partition=PERMITTED_PARTITION).result()
        with pytest.raises(PermissionDenied):
            writer.append(b"after that", partition=PERMITTED_PARTITION).result()
        wait_until("the feed has ended", lambda: reader.partitions == ())
        access.write(PERMISSIONS)
        with WaltzClient(access.connect("writer")) as other:
            other.append(b"later", partition=PERMITTED_PARTITION).result()
        assert callbacks.applied[-1] == b"before"


def test_a_feed_with_a_revoked_token_continues_when_it_is_valid_again(access: ClusterAccess):
    """A client may get a new token at any time, so it retries."""
    callbacks = RecordingCallbacks()
    others = {key: token for key, token in PERMISSIONS.tokens.items() if token.principal != "read"}
    with (
        WaltzClient(access.connect("writer")) as writer,
        WaltzClient(access.connect("read")) as reader,
    ):
        reader.subscribe(callbacks, [PERMITTED_PARTITION])
        writer.append(b"before", partition=PERMITTED_PARTITION).result()
        wait_until("the feed delivers", lambda: b"before" in callbacks.applied)
        log = access.cluster.log_path("server-1")
        access.write(dataclasses.replace(PERMISSIONS, tokens=others))
        writer.append(b"after", partition=PERMITTED_PARTITION).result()
        wait_until("the feed is rejected", lambda: "access.token_rejected" in log.read_text())
        assert callbacks.applied[-1] == b"before"
        access.write(PERMISSIONS)
        wait_until("the feed continues", lambda: callbacks.applied[-1] == b"after")


def test_servers_without_the_verb_replicate_serve_nothing_until_it_is_granted_again(
    access: ClusterAccess,
):
    config = ClientConfig(request_timeout_ms=2_000)
    with WaltzClient(access.connect("writer")) as client:
        client.append(b"before", partition=PERMITTED_PARTITION).result()
    access.write(dataclasses.replace(PERMISSIONS, grants=PERMISSIONS.grants[1:]))
    with WaltzClient(access.connect("writer"), config) as client, pytest.raises(WaltzError):
        client.append(b"without", partition=PERMITTED_PARTITION).result()
    access.write(PERMISSIONS)

    def can_append() -> bool:
        try:
            with WaltzClient(access.connect("writer"), config) as client:
                return client.append(b"after", partition=PERMITTED_PARTITION).result() > 0
        except WaltzError:
            return False

    wait_until("the storage accepts the server again", can_append)


# ---------------------------------------------------------------------------------------------
# client IDs (AC 9)


def restart_server(access: ClusterAccess) -> None:
    """Kill and restart the server; return when the new process owns the partition."""
    generation = owner(access).generation
    access.cluster.kill("server-1")
    start_server(access, generation)


def start_server(access: ClusterAccess, generation: int) -> None:
    """Start the server; return when it owns the partition, in a generation after the given one."""
    access.cluster.log_path("server-1").write_text("")
    access.cluster.start("server-1")
    access.await_applied()
    wait_until("another generation", lambda: owner(access).generation > generation)


def owner(access: ClusterAccess) -> Owner:
    """Return the owner of `PERMITTED_PARTITION`; generation -1 while there is none."""
    with WaltzClient(access.connect("writer")) as client:
        return Owner(*client.layout().owners.get(PERMITTED_PARTITION, ("", -1)))


class Peer:
    """A client with an independent implementation of the protocol."""

    def __init__(self, access: ClusterAccess, principal: str) -> None:
        self._address = f"127.0.0.1:{access.cluster.member('server-1').port}"
        self._context = tls.dial_context(ClientConfig(), access.connect(principal))
        self._generation = owner(access).generation

    def ask(self, *requests: ClientMessage) -> ClientMessage:
        """Send requests on a new connection; return the answer to the last one."""
        return asyncio.run(self._ask(requests))

    async def _ask(self, requests: tuple[ClientMessage, ...]) -> ClientMessage:
        link = await net.dial(WireProtocol.CLIENT, self._address, ssl=self._context)
        for request in requests:
            link.send(request)
            (answer, *_) = await link.receive()
        link.abort("done")
        assert isinstance(answer, ClientMessage)
        return answer

    def new_id(self) -> ClientIdResponse:
        answer = self.ask(ClientIdRequest(ReqId(-1, 0, 0, -1)))
        assert isinstance(answer, ClientIdResponse)
        return answer

    def mount(self, client_id: int, proof: bytes, generation: int | None = None) -> MountWriter:
        generation_sent = self._generation if generation is None else generation
        return MountWriter(
            ReqId(client_id, generation_sent, PERMITTED_PARTITION, -1), 1, -2, False, (), proof
        )

    def outcome(self, client_id: int, proof: bytes, generation: int | None = None) -> object:
        """Return the error of a mount, or `Mounted`; wait until the server has the partition."""
        found: list[type] = []

        def is_final() -> bool:
            answer = self.ask(self.mount(client_id, proof, generation))
            is_error = isinstance(answer, ErrorResponse)
            found.append(ERROR_CLASSES_BY_CODE[answer.error_code] if is_error else type(answer))
            return not issubclass(found[-1], Unavailable)

        wait_until("the partition is open", is_final)
        return found[-1]


def test_a_mount_needs_the_proof_of_its_client_id_in_every_generation_and_after_a_restart(
    access: ClusterAccess,
):
    """Servers store no state about client IDs, so the rule holds after a restart, too."""
    id_of_writer = Peer(access, "writer").new_id()
    for _ in range(2):
        writer, other = Peer(access, "writer"), Peer(access, "append")
        client_id, id_of_other = id_of_writer.client_id, other.new_id()
        assert id_of_other.client_id > client_id
        assert writer.outcome(client_id, id_of_writer.proof) is Mounted
        for generation in range(writer._generation + 2):
            for proof in (id_of_writer.proof, id_of_other.proof, NO_PROOF):
                assert other.outcome(client_id, proof, generation) is ClientIdDenied
            assert other.outcome(5, NO_PROOF, generation) is ClientIdDenied
            old = MountRequest(ReqId(client_id, generation, PERMITTED_PARTITION, -1), -1, 1)
            answer = Peer(access, "read").ask(old)
            assert isinstance(answer, ErrorResponse)
            assert ERROR_CLASSES_BY_CODE[answer.error_code] is ClientIdDenied
        restart_server(access)


def test_a_client_id_from_zookeeper_belongs_to_the_principal_that_mounts_first(
    access: ClusterAccess,
):
    access.write(dataclasses.replace(PERMISSIONS, accepts_0_13=True))
    first, second = Peer(access, "writer"), Peer(access, "append")
    assert first.outcome(1_000, NO_PROOF) is Mounted
    assert second.outcome(1_000, NO_PROOF) is ClientIdDenied
    assert second.outcome(1_001, NO_PROOF) is Mounted
    access.write(PERMISSIONS)
    assert first.outcome(1_000, NO_PROOF) is ClientIdDenied


def test_only_a_mounted_client_gets_the_headers_of_its_own_transactions(access: ClusterAccess):
    with WaltzClient(access.connect("writer")) as client:
        client.append(b"not of the peer", partition=PERMITTED_PARTITION).result()
        written_by = client.client_id
    peer = Peer(access, "append")
    issued = peer.new_id()
    mount = peer.mount(issued.client_id, issued.proof)
    for client_id, is_mounted in ((issued.client_id, True), (written_by, False)):
        req_id = ReqId(client_id, 0, PERMITTED_PARTITION, -2)
        answer = peer.ask(mount, RangeRequest(req_id, 0, 100, 1 << 20, OWN_HEADERS, ()))
        if is_mounted:
            assert isinstance(answer, RangeData)
            assert (answer.count, bytes(answer.records)) == (0, b"")
        else:
            assert isinstance(answer, ErrorResponse)
            assert ERROR_CLASSES_BY_CODE[answer.error_code] is NotMounted


def test_a_principal_with_only_the_verb_append_learns_its_outcomes(access: ClusterAccess):
    """While no append can commit, the server is killed. The client then reads its own rows back."""
    patient = ClientConfig(request_timeout_ms=1_000 * TEST_TIMEOUT_S)
    with (
        WaltzClient(access.connect("append"), patient) as client,
        WaltzClient(access.connect("writer")) as reader,
    ):
        before = reader.high_water_mark(PERMITTED_PARTITION)
        client.append(b"first", partition=PERMITTED_PARTITION).result()
        sent = {}

        def send(count: int) -> None:
            for _ in range(count):
                data = b"row %d" % len(sent)
                sent[data] = client.append(data, partition=PERMITTED_PARTITION)

        send(100)
        list(sent.values())[-1].result()
        # This row is above the mark that the client knows. So the client must read the log after
        # the mount.
        reader.append(b"other", partition=PERMITTED_PARTITION).result()
        generation = owner(access).generation
        with paused_process(access.cluster, "storage-1"):
            send(400)
            access.cluster.kill("server-1")
        start_server(access, generation)
        send(100)
        outcomes = {data: future.result() for data, future in sent.items()}
        with pytest.raises(PermissionDenied):
            list(client.read_range(PERMITTED_PARTITION, 0, 0))
        last = reader.high_water_mark(PERMITTED_PARTITION)
        rows = [
            row
            for chunk in reader.read_range(PERMITTED_PARTITION, before + 1, last)
            for row in chunk.rows()
        ]
        assert {row.data: row.transaction_id for row in rows if row.data in sent} == outcomes
        assert len(rows) == len(outcomes) + 2


def test_a_client_with_the_token_of_another_principal_gets_another_id(access: ClusterAccess):
    connect = access.connect("writer")
    with WaltzClient(connect) as client:
        client.append(b"before", partition=PERMITTED_PARTITION).result()
        client_id = client.client_id
        access.connect("append")
        file = connect.rpartition("token_file=")[2]
        content = Path(file).read_text()
        Path(file).write_text((Path(file).parent / "append").read_text())
        others = {
            key: token for key, token in PERMISSIONS.tokens.items() if token.principal != "writer"
        }
        access.write(dataclasses.replace(PERMISSIONS, tokens=others))
        # An append that was sent before the client noticed the broken connection may be lost.
        with suppress(OutcomeUnknown):
            client.append(b"after", partition=PERMITTED_PARTITION).result()
        client.append(b"after that", partition=PERMITTED_PARTITION).result()
        assert client.client_id > client_id
        Path(file).write_text(content)
        access.write(PERMISSIONS)


def test_an_application_with_a_fixed_client_id_gets_an_error_with_a_hint(access: ClusterAccess):
    with (
        WaltzClient(access.connect("writer"), client_id=77) as client,
        pytest.raises(ClientIdDenied, match=r"argument client_id: .* rejects ID 77"),
    ):
        client.append(b"row", partition=PERMITTED_PARTITION).result()


# ---------------------------------------------------------------------------------------------
# at the end: the session of the fixture ends


def test_permissions_remain_valid_while_zookeeper_is_unavailable(access: ClusterAccess):
    with WaltzClient(access.connect("writer")) as client:
        client.append(b"before", partition=PERMITTED_PARTITION).result()
        access.cluster.kill("zookeeper")
        try:
            client.append(b"meanwhile", partition=PERMITTED_PARTITION).result()
            with pytest.raises(PermissionDenied):
                client.append(b"other", partition=DENIED_PARTITION).result()
        finally:
            start_zookeeper(access.cluster)
