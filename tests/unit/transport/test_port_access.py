"""The principal of a connection over real sockets, and its permissions at a port."""

import contextlib
import dataclasses
import datetime
import logging

import pytest
import trustme

from tests.certificates import LOCAL_HOSTS
from tests.loops import poll_until, run_on_loop
from tests.unit.transport.peer import ANY, Peer
from waltz_core.access.client_ids import FIRST_ISSUED_ID, NO_PROOF
from waltz_core.access.grants import PrincipalGrants
from waltz_core.access.permissions import Grant, Permissions, StoredToken
from waltz_core.access.quotas import IssuedIdLimit
from waltz_core.access.requirements import ADMINISTER, APPEND, READ, REPLICATE
from waltz_core.access.tokens import hash_of
from waltz_core.config import ClientConfig, ServerConfig, StorageConfig
from waltz_core.errors import (
    AuthenticationFailed,
    BadConfig,
    BadRequest,
    ClientIdDenied,
    Overloaded,
    PermissionDenied,
    PermissionsNotLoaded,
    RemoteProtocolError,
    TlsFailed,
    Unreachable,
)
from waltz_core.records.record import ReqId
from waltz_core.transport import net, tls
from waltz_core.transport.admission.port_access import PortAccess
from waltz_core.transport.listening import listen
from waltz_core.wire import authentication, codec
from waltz_core.wire.admin_messages import SetAvailable
from waltz_core.wire.messages import (
    OWN_HEADERS,
    AddPreferredRequest,
    Appended,
    AppendRequest,
    AppendTimesRequest,
    Authenticate,
    Heartbeat,
    MountRequest,
    MountWriter,
    OpenRequest,
    RangeRequest,
    RejectionsRequest,
    ServerPartitionsRequest,
    TransactionDataRequest,
    WireProtocol,
)

PROTOCOLS = pytest.mark.parametrize(
    "protocol", [WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN]
)
NOW_MS = 1_000_000
SECRET = bytes(range(32))
EXPIRED = bytes(range(32, 64))
PERMISSIONS = Permissions(
    5,
    "ops",
    0,
    bytes(32),
    tokens={
        hash_of(SECRET): StoredToken("t1", "spark-etl", NOW_MS + 1),
        hash_of(EXPIRED): StoredToken("t2", "spark-etl", NOW_MS),
    },
)
REVOKED = bytes(range(64, 96))
WITH_REVOKED = dataclasses.replace(
    PERMISSIONS,
    revision=4,
    tokens={**PERMISSIONS.tokens, hash_of(REVOKED): StoredToken("t3", "ann", NOW_MS + 1)},
)


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(tls, "_LAST_LOGGED", {})
    caplog.set_level(logging.DEBUG)
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET.hex()}\n")
    return file


class Port:
    """A listening port, its peers, and the rule by which it identifies them."""

    def __init__(self, context):
        self.context, self.peer, self.address = context, Peer(), ""

    def apply(self, permissions):
        self.context.access.apply(permissions)

    @property
    def principals(self):
        return [link.principal for link in self.peer.links]


@contextlib.asynccontextmanager
async def open_port(files, protocol=WireProtocol.STORAGE, **settings):
    server_settings = (
        {"tls_require_certificate": False, "access": "report"} | files.settings | settings
    )
    port = Port(
        tls.listen_context(StorageConfig(connect="zk:1/w", directory="d", **server_settings))
    )
    if port.context.access is not None:
        port.context.access._clock_ms = lambda: NOW_MS
        port.apply(WITH_REVOKED)
        port.apply(PERMISSIONS)
    listener = await listen(protocol, ANY, 0, port.peer.connected, ssl=port.context)
    port.address = f"{ANY}:{listener.port}"
    try:
        yield port
    finally:
        await listener.close()


async def dial_port(address, connect, protocol=WireProtocol.STORAGE, **settings):
    """Dial like a client with this connect string; return the closed link."""
    context = tls.dial_context(ClientConfig(**settings), connect)
    link = await net.dial(protocol, address, ssl=context)
    link.close("done")
    await link.wait_closed()
    return link


def trusting_connect_string(files, extra=""):
    return f"zk:1/w?tls={files.authorities}{extra}"


# ---------------------------------------------------------------------------------------------
# certificates


def certificate_settings(files_of, tmp_path, name, **options):
    """Write a certificate of an authority; return the settings of a client that presents it."""
    certificate = files_of.issue_cert(*LOCAL_HOSTS, **options)
    file = tmp_path / f"{name}.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(file))
    return {"tls_certificate": str(file)}


@pytest.fixture
def authority(tmp_path):
    """An authority of clients, and the settings of a port that trusts it."""
    ca = trustme.CA()
    file = tmp_path / "clients.pem"
    ca.cert_pem.write_to_path(str(file))
    return ca, {"tls_authorities": str(file)}


@run_on_loop
async def test_the_certificate_determines_the_principal(files, authority, tmp_path):
    ca, settings = authority
    async with open_port(files, **settings) as port:
        shown = certificate_settings(ca, tmp_path, "ann", common_name="ann")
        await dial_port(port.address, trusting_connect_string(files), **shown)
        assert port.principals == ["ann"]
        # Without a certificate, and with a certificate that has no principal.
        await dial_port(port.address, trusting_connect_string(files))
        shown = certificate_settings(ca, tmp_path, "reserved", common_name="other")
        await dial_port(port.address, trusting_connect_string(files), **shown)
        assert port.principals == ["ann", "anonymous", "anonymous"]


@run_on_loop
async def test_a_pattern_can_name_a_host_of_the_certificate(files, authority, tmp_path):
    ca, settings = authority
    pattern = {"principal_pattern": "DNS=(localhost)"}
    async with open_port(files, **settings, **pattern) as port:
        shown = certificate_settings(ca, tmp_path, "ann", common_name="ann")
        await dial_port(port.address, trusting_connect_string(files), **shown)
        assert port.principals == ["localhost"]


async def expect_rejection(address, connect, **settings):
    """Dial with a certificate; TLS 1.3 reports its rejection after the dialer's handshake."""
    with pytest.raises((TlsFailed, Unreachable)) as caught:
        await dial_port(address, connect, **settings)
    return str(caught.value)


@run_on_loop
async def test_a_foreign_or_expired_certificate_is_rejected(files, authority, tmp_path, logged):
    ca, settings = authority
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    async with open_port(files, **settings) as port:
        shown = certificate_settings(trustme.CA(), tmp_path, "foreign", common_name="ann")
        await expect_rejection(port.address, trusting_connect_string(files), **shown)
        await poll_until(lambda: "unable to get local issuer certificate" in logged())
        shown = certificate_settings(ca, tmp_path, "expired", common_name="ann", not_after=past)
        await expect_rejection(port.address, trusting_connect_string(files), **shown)
        await poll_until(lambda: "certificate has expired" in logged())
        assert port.principals == []


@run_on_loop
async def test_without_access_control_no_certificate_is_requested(files, tmp_path):
    foreign = certificate_settings(trustme.CA(), tmp_path, "foreign", common_name="ann")
    async with open_port(files, access="off") as port:
        await dial_port(port.address, trusting_connect_string(files), **foreign)
        assert port.principals == ["anonymous"]


@run_on_loop
async def test_without_explicit_authorities_no_certificate_is_requested(files, tmp_path):
    foreign = certificate_settings(trustme.CA(), tmp_path, "foreign", common_name="ann")
    async with open_port(files, tls_authorities="") as port:
        await dial_port(port.address, trusting_connect_string(files), **foreign)
        assert port.principals == ["anonymous"]


@run_on_loop
async def test_access_control_does_not_relax_a_required_certificate(files, token_file):
    async with open_port(files, tls_require_certificate=True) as port:
        await expect_rejection(
            port.address, trusting_connect_string(files, f"&token_file={token_file}")
        )
        assert port.principals == []


@pytest.mark.parametrize("kind", [ServerConfig, StorageConfig])
def test_an_invalid_principal_pattern_is_a_configuration_error(files, kind):
    directory = {"directory": "d"} if kind is StorageConfig else {}
    settings = {"access": "report", "principal_pattern": "CN=.+", **files.settings, **directory}
    with pytest.raises(BadConfig, match="principal_pattern"):
        tls.listen_context(kind(connect="zk:1/w", **settings))


# ---------------------------------------------------------------------------------------------
# tokens


@PROTOCOLS
@run_on_loop
async def test_the_token_determines_the_principal(files, token_file, protocol):
    async with open_port(files, protocol) as port:
        connect = trusting_connect_string(files, f"&token_file={token_file}")
        link = await dial_port(port.address, connect, protocol)
        assert port.principals == ["spark-etl"]
        assert port.peer.messages == []
        assert link.version == protocol.versions[-1]


@run_on_loop
async def test_a_token_may_be_in_an_environment_variable(files, monkeypatch):
    monkeypatch.setenv("OUR_TOKEN", SECRET.hex())
    async with open_port(files) as port:
        await dial_port(port.address, trusting_connect_string(files, "&token_env=OUR_TOKEN"))
        assert port.principals == ["spark-etl"]


@run_on_loop
async def test_a_token_takes_precedence_over_a_certificate(files, authority, tmp_path, token_file):
    made, settings = authority
    shown = certificate_settings(made, tmp_path, "ann", common_name="ann")
    async with open_port(files, **settings) as port:
        await dial_port(
            port.address, trusting_connect_string(files, f"&token_file={token_file}"), **shown
        )
        assert port.principals == ["spark-etl"]
        token_file.write_text(EXPIRED.hex())
        with pytest.raises(AuthenticationFailed):
            await dial_port(
                port.address, trusting_connect_string(files, f"&token_file={token_file}"), **shown
            )


@PROTOCOLS
@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        (EXPIRED, "token t2 of spark-etl has expired"),
        (REVOKED, "token t3 of ann is revoked"),
        (bytes(32), "the token is unknown, or was revoked"),
    ],
    ids=["expired", "revoked", "unknown"],
)
@run_on_loop
async def test_a_token_that_is_not_valid_closes_the_connection(
    files, token_file, logged, protocol, secret, reason
):
    token_file.write_text(secret.hex())
    async with open_port(files, protocol) as port:
        connect = trusting_connect_string(files, f"&token_file={token_file}")
        for _ in range(2):
            with pytest.raises(AuthenticationFailed, match=f"{port.address}: {reason}"):
                await dial_port(port.address, connect, protocol)
        await poll_until(lambda: len(port.peer.closed) == 2)
        assert port.principals == ["anonymous", "anonymous"]
        assert logged().count(f"access.token_rejected peer=127.0.0.1 error={reason}") == 1
        assert logged().count(f"access.rejected_by_peer peer={port.address} error={reason}") == 1
        assert secret.hex() not in logged()
        assert repr(secret) not in logged()


@run_on_loop
async def test_messages_after_a_rejected_token_are_ignored(files):
    async with open_port(files) as port:
        link = await net.dial(
            WireProtocol.STORAGE,
            port.address,
            ssl=tls.dial_context(ClientConfig(), trusting_connect_string(files)),
        )
        credential = authentication.credential_message(WireProtocol.STORAGE, 4, EXPIRED)
        link.send_all([credential, *(Heartbeat(1, n, 3) for n in range(100))])
        (answer,) = await link.receive()
        assert answer.error_code == AuthenticationFailed.code
        await link.wait_closed()
        assert port.peer.messages == []


@run_on_loop
async def test_a_token_after_another_message_has_no_effect(files):
    async with open_port(files) as port:
        link = await net.dial(
            WireProtocol.STORAGE,
            port.address,
            ssl=tls.dial_context(ClientConfig(), trusting_connect_string(files)),
        )
        credential = authentication.credential_message(WireProtocol.STORAGE, 4, SECRET)
        link.send(Heartbeat(1, 0, 3))
        link.send(credential)
        await poll_until(lambda: len(port.peer.messages) == 2)
        assert port.principals == ["anonymous"]
        link.abort("done")


@run_on_loop
async def test_no_token_is_accepted_before_the_permissions_have_been_read(files, token_file):
    connect = trusting_connect_string(files, f"&token_file={token_file}")
    async with open_port(files) as port:
        port.context.access.permissions = None
        with pytest.raises(AuthenticationFailed, match="process has no permissions yet"):
            await dial_port(port.address, connect)
        port.apply(PERMISSIONS)
        await dial_port(port.address, connect)


def test_a_missing_permissions_znode_or_an_older_revision_has_no_effect(logged):
    access = PortAccess("CN=(.+)", is_enforced=True, clock_ms=lambda: NOW_MS)
    access.apply(None)
    access.apply(PERMISSIONS)
    access.apply(None)
    access.apply(Permissions(4, "ops", 0, bytes(32)))
    assert access.valid_token(hash_of(SECRET)).principal == "spark-etl"
    assert logged().splitlines() == [
        "access.permissions_missing revision=0",
        "access.revision_applied revision=5",
        "access.permissions_missing revision=5",
        "access.older_revision_ignored revision=4 known=5",
    ]
    access.apply(Permissions(6, "ops", 0, bytes(32)))
    with pytest.raises(AuthenticationFailed):
        access.valid_token(hash_of(SECRET))


@run_on_loop
async def test_a_client_with_a_token_reaches_a_port_without_access_control(files, token_file):
    async with open_port(files, access="off") as port:
        await dial_port(port.address, trusting_connect_string(files, f"&token_file={token_file}"))
        assert port.principals == ["anonymous"]


@run_on_loop
async def test_a_token_is_not_accepted_without_tls(logged):
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected)
    link = await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")
    link.send(authentication.credential_message(WireProtocol.STORAGE, 4, SECRET))
    (answer,) = await link.receive()
    assert answer.error_code == AuthenticationFailed.code
    assert "expected TLS" in answer.message
    await link.wait_closed()
    await listener.close()
    assert peer.messages == []
    assert SECRET.hex() not in logged()


@PROTOCOLS
def test_a_message_does_not_show_its_token(protocol):
    credential = authentication.credential_message(protocol, protocol.versions[-1], SECRET)
    assert credential.token == SECRET
    assert "token" not in repr(credential)


# ---------------------------------------------------------------------------------------------
# versions


def without_tokens(protocol, versions):
    """Return the versions of a protocol in which a connection cannot be authenticated."""
    return tuple(
        version
        for version in versions
        if authentication.credential_message(protocol, version, SECRET) is None
    )


@PROTOCOLS
@run_on_loop
async def test_no_token_is_sent_to_a_peer_of_an_older_version(
    files, token_file, protocol, monkeypatch
):
    older = without_tokens(protocol, protocol.versions_accepted)
    monkeypatch.setattr(protocol, "versions_accepted", older)
    async with open_port(files, protocol) as port:
        link = await dial_port(
            port.address, trusting_connect_string(files, f"&token_file={token_file}"), protocol
        )
        assert link.version == older[-1]
        assert port.principals == ["anonymous"]
        assert port.peer.messages == []


@PROTOCOLS
@run_on_loop
async def test_a_peer_of_an_older_version_is_anonymous(files, protocol, monkeypatch):
    older = without_tokens(protocol, protocol.versions_offered)
    monkeypatch.setattr(protocol, "versions_offered", older)
    async with open_port(files, protocol) as port:
        link = await dial_port(port.address, trusting_connect_string(files), protocol)
        assert link.version == older[-1]
        assert port.principals == ["anonymous"]


@PROTOCOLS
def test_a_token_of_another_length_is_a_protocol_error(protocol):
    version = protocol.versions[-1]
    frame = b"".join(
        codec.encode(authentication.credential_message(protocol, version, SECRET), version)
    )
    for payload in (frame[7:-1], frame[7:] + b"x"):
        with pytest.raises(Exception, match="Authenticate") as caught:
            codec.decode(protocol, version, memoryview(payload))
        assert caught.type.__name__ == "RemoteProtocolError"


# ---------------------------------------------------------------------------------------------
# the position of a token


@pytest.mark.parametrize("tls_part", ["", "tls=unverified&", "tls=OFF&"])
def test_a_token_without_tls_or_with_an_unverified_peer_is_an_error(files, token_file, tls_part):
    settings = {"tls": "off"} if "OFF" in tls_part else {}
    connect = f"zk:1/w?{tls_part.replace('OFF', files.authorities)}token_file={token_file}"
    with pytest.raises(
        BadConfig, match=r"token_file '.*': a token requires TLS that verifies the peer"
    ):
        tls.dial_context(ClientConfig(**settings), connect)


@pytest.mark.parametrize("text", ["", SECRET.hex()[:-1], "\xff"])
def test_the_error_names_a_token_file_that_is_not_valid(files, token_file, text):
    token_file.write_text(text, encoding="latin-1")
    with pytest.raises(BadConfig, match=r"token_file .*: expected a token") as caught:
        tls.dial_context(
            ClientConfig(), trusting_connect_string(files, f"&token_file={token_file}")
        )
    assert not text or text not in str(caught.value)


def test_the_error_names_a_missing_token_file_or_variable(files, tmp_path, monkeypatch):
    with pytest.raises(BadConfig, match="absent' cannot be read: No such file"):
        tls.dial_context(
            ClientConfig(), trusting_connect_string(files, f"&token_file={tmp_path}/absent")
        )
    monkeypatch.delenv("OUR_TOKEN", raising=False)
    with pytest.raises(BadConfig, match="token_env OUR_TOKEN: expected a token"):
        tls.dial_context(ClientConfig(), trusting_connect_string(files, "&token_env=OUR_TOKEN"))


@run_on_loop
async def test_each_connection_reads_the_file_again(files, token_file):
    context = tls.dial_context(
        ClientConfig(), trusting_connect_string(files, f"&token_file={token_file}")
    )
    async with open_port(files) as port:
        for content, error in ((EXPIRED.hex(), "expired"), ("", "token_file"), (None, "No such")):
            token_file.unlink() if content is None else token_file.write_text(content)
            with pytest.raises(AuthenticationFailed, match=error):
                await net.dial(WireProtocol.STORAGE, port.address, ssl=context)
        token_file.write_text(SECRET.hex())
        link = await net.dial(WireProtocol.STORAGE, port.address, ssl=context)
        assert port.principals[-1] == "spark-etl"
        link.abort("done")
        await link.wait_closed()


# ---------------------------------------------------------------------------------------------
# permissions

GRANTED = dataclasses.replace(
    PERMISSIONS,
    revision=6,
    groups={"etl": ("spark-etl",)},
    grants=(
        Grant("etl", True, APPEND, ((0, 3),)),
        Grant("anonymous", False, READ, None),
    ),
)
# A token of another principal, and a proof with another key.
OTHER_GRANTS = dataclasses.replace(
    GRANTED,
    grants=(Grant("ann", False, APPEND, None),),
    tokens={hash_of(SECRET): StoredToken("t1", "ann", NOW_MS + 1)},
)
MOUNT_PERMISSIONS = dataclasses.replace(
    GRANTED, grants=(*GRANTED.grants, Grant("spark-etl", False, READ, None))
)
REQ_ID = ReqId(1, 2, 3, 4)
OTHER = ReqId(1, 2, 9, 4)
APPEND_3 = AppendRequest(REQ_ID, 0, (), (), (), 0, b"", 0)


class AccessOfConnection:
    """The access of one connection, and the reason for its end."""

    def __init__(self, *, is_enforced=True, permissions=GRANTED, token=SECRET):
        self.now_ms, self.ended = NOW_MS, []
        clock = lambda: self.now_ms  # noqa: E731 - it is passed on
        self.port = PortAccess("CN=(.+)", is_enforced=is_enforced, clock_ms=clock)
        self.access = self.port.add_connection(None, "a:1", self.ended.append)
        if permissions is not None:
            self.port.apply(permissions)
        if token is not None:
            self.access.take_token(token)

    def denial(self, message, version=8):
        return self.access.denial(message, version)


@run_on_loop
async def test_a_request_is_permitted_if_its_principal_has_the_verb_for_its_partition():
    access = AccessOfConnection()
    assert access.denial(APPEND_3) is None
    denied = access.denial(dataclasses.replace(APPEND_3, req_id=OTHER))
    assert type(denied) is PermissionDenied
    assert str(denied) == (
        "AppendRequest requires the verb append for partition 9, but spark-etl has no "
        "grant of append there. Hint: `waltz-core access grant` grants the verb; a client with "
        "permissions for only some partitions must name them in its requests (docs/access.md)."
    )
    assert isinstance(access.denial(TransactionDataRequest(REQ_ID, 0)), PermissionDenied)
    assert access.denial(ServerPartitionsRequest(REQ_ID)) is None  # any verb, for any partition
    assert isinstance(access.denial(AppendTimesRequest(REQ_ID)), PermissionDenied)
    assert access.ended == []
    anonymous = AccessOfConnection(token=None)
    assert str(anonymous.denial(APPEND_3)).endswith(" `waltz-core access grant` grants the verb.")
    assert anonymous.denial(TransactionDataRequest(OTHER, 0)) is None


@run_on_loop
async def test_a_request_for_recent_rejections_requires_read_or_administer_on_the_partition():
    for verb, is_permitted in ((READ, True), (ADMINISTER, True), (APPEND, False)):
        grants = (Grant("spark-etl", False, verb, ((3, 3),)),)
        access = AccessOfConnection(permissions=dataclasses.replace(GRANTED, grants=grants))
        denied = access.denial(RejectionsRequest(REQ_ID), version=9)
        assert (denied is None) == is_permitted
        assert isinstance(access.denial(RejectionsRequest(OTHER), version=9), PermissionDenied)


@run_on_loop
async def test_the_verb_is_required_for_each_listed_partition():
    grants = (Grant("spark-etl", False, ADMINISTER, ((1, 2),)),)
    access = AccessOfConnection(permissions=dataclasses.replace(GRANTED, grants=grants))
    for message in (SetAvailable(1, (1, 2), True), AddPreferredRequest(REQ_ID, (2,))):
        assert access.denial(message) is None
        for partitions in ((1, 3), (-1,)):
            other = dataclasses.replace(message, partitions=partitions)
            assert isinstance(access.denial(other), PermissionDenied)
        assert access.denial(dataclasses.replace(message, partitions=())) is None
    assert isinstance(AccessOfConnection().denial(SetAvailable(1, (), True)), PermissionDenied)


@run_on_loop
async def test_a_partition_that_a_request_names_many_times_is_checked_once(monkeypatch):
    """A request of 16 MiB names four million partitions; checking each would block a server."""
    access, checked, missing = AccessOfConnection(), [], PrincipalGrants.missing_verb

    def counted(granted, requirement, partition):
        checked.append(partition)
        return missing(granted, requirement, partition)

    monkeypatch.setattr(PrincipalGrants, "missing_verb", counted)
    assert isinstance(access.denial(SetAvailable(1, (3, 3, 3), True)), PermissionDenied)
    grants = (Grant("spark-etl", False, ADMINISTER, ((1, 3),)),)
    access = AccessOfConnection(permissions=dataclasses.replace(GRANTED, grants=grants))
    checked.clear()
    assert access.denial(SetAvailable(1, (3, 2) * 100, True)) is None
    assert checked == [3, 2]


@run_on_loop
async def test_the_permission_for_a_mount_depends_on_its_fields():
    access = AccessOfConnection()
    mount = mount_with_proof(access, FIRST_ISSUED_ID)
    assert access.denial(mount) is None
    assert isinstance(access.denial(dataclasses.replace(mount, wants_feed=True)), PermissionDenied)


@run_on_loop
async def test_an_unknown_enum_value_is_an_invalid_request():
    request = RangeRequest(REQ_ID, 0, 0, 1, 2, ())
    error = AccessOfConnection().denial(request)
    assert type(error) is BadRequest
    assert str(error) == "RangeRequest: expected one of 0, 1, 3 in field form, found 2"
    assert AccessOfConnection().denial(dataclasses.replace(request, form=OWN_HEADERS)) is None
    assert isinstance(
        AccessOfConnection().denial(dataclasses.replace(request, form=1)), PermissionDenied
    )


def mount_of(client_id, proof=NO_PROOF):
    req_id = ReqId(client_id, 2, 3, 4)
    return MountWriter(req_id, 0, 0, wants_feed=False, proof=proof)


def mount_with_proof(access, client_id):
    return mount_of(client_id, access.access.proof_of(client_id))


@run_on_loop
async def test_a_mount_needs_the_proof_of_its_client_id():
    access, others = AccessOfConnection(), AccessOfConnection(permissions=OTHER_GRANTS)
    for client_id in (5, FIRST_ISSUED_ID, FIRST_ISSUED_ID + 1):
        assert access.denial(mount_with_proof(access, client_id)) is None
    for denied in (
        mount_of(FIRST_ISSUED_ID),
        mount_of(5),
        mount_of(FIRST_ISSUED_ID + 1, access.access.proof_of(FIRST_ISSUED_ID)),
        mount_with_proof(others, FIRST_ISSUED_ID),
    ):
        error = access.denial(denied)
        assert type(error) is ClientIdDenied
        assert str(error).startswith("partition 3: expected a client ID with a proof that it ")
        assert type(access.denial(denied, version=7)) is BadRequest
    assert others.denial(mount_with_proof(others, FIRST_ISSUED_ID)) is None


@run_on_loop
async def test_client_ids_issued_by_zookeeper_need_no_proof_while_0_13_is_accepted():
    accepting = dataclasses.replace(
        GRANTED, accepts_0_13=True, grants=(*GRANTED.grants, Grant("spark-etl", False, READ, None))
    )
    for permissions, expected in ((accepting, type(None)), (MOUNT_PERMISSIONS, ClientIdDenied)):
        access = AccessOfConnection(permissions=permissions)
        old = MountRequest(ReqId(5, 2, 3, 4), 0, 0)
        for mount in (old, mount_of(5)):
            assert type(access.denial(mount, version=4)) is expected
            assert access.access.bound_principal(mount) == "spark-etl"
    access = AccessOfConnection(permissions=accepting)
    assert isinstance(access.denial(mount_of(FIRST_ISSUED_ID)), ClientIdDenied)
    assert isinstance(access.denial(mount_of(5, b"x" * 16)), ClientIdDenied)
    assert access.access.bound_principal(mount_of(FIRST_ISSUED_ID)) == ""


@run_on_loop
async def test_disallowing_0_13_ends_connections_whose_client_id_has_no_proof():
    accepting = dataclasses.replace(MOUNT_PERMISSIONS, accepts_0_13=True)
    for mount, reason in (
        (mount_of(5), ["client IDs without a proof of their principal are no longer accepted"]),
        (mount_of(5, b"x" * 16), []),  # a task of an earlier version, with a proof now
        (mount_of(FIRST_ISSUED_ID), []),
    ):
        access = AccessOfConnection(permissions=accepting)
        access.access.bound_principal(mount)
        access.port.apply(dataclasses.replace(accepting, revision=7))
        assert access.ended == []
        access.port.apply(dataclasses.replace(MOUNT_PERMISSIONS, revision=8))
        assert access.ended == reason


@run_on_loop
async def test_report_mode_permits_mounts_without_a_proof(logged):
    access = AccessOfConnection(is_enforced=False)
    assert access.denial(mount_of(FIRST_ISSUED_ID)) is None
    assert access.access.bound_principal(mount_of(5)) == ""
    assert "access.violation_reported peer=a:1 error=partition 3: expected a client ID " in logged()
    unknown = AccessOfConnection(is_enforced=False, permissions=None, token=None)
    assert unknown.access.proof_of(FIRST_ISSUED_ID) == NO_PROOF
    assert unknown.denial(mount_of(FIRST_ISSUED_ID)) is None


@run_on_loop
async def test_client_ids_of_a_principal_are_limited_except_in_report_mode(monkeypatch, logged):
    monkeypatch.setattr(IssuedIdLimit, "take", _reject)
    with pytest.raises(Overloaded):
        AccessOfConnection().access.charge_client_id()
    assert "access.limit_exceeded peer=a:1 error=no ID" in logged()
    AccessOfConnection(is_enforced=False).access.charge_client_id()


def _reject(_limit, _principal, _now_ns):
    raise Overloaded("no ID")


@pytest.mark.parametrize(
    ("message", "version", "expected"),
    [
        (dataclasses.replace(APPEND_3, req_id=OTHER), 4, PermissionDenied),  # the adapter's
        (dataclasses.replace(APPEND_3, req_id=OTHER), 5, BadRequest),
        (dataclasses.replace(APPEND_3, req_id=OTHER), 7, BadRequest),
        (dataclasses.replace(APPEND_3, req_id=OTHER), 8, PermissionDenied),
        (Heartbeat(1, 0, 3), 3, BadRequest),
        (Heartbeat(1, 0, 3), 4, PermissionDenied),
        (SetAvailable(1, (1,), True), 1, BadRequest),
        (SetAvailable(1, (1,), True), 2, PermissionDenied),
    ],
)
@run_on_loop
async def test_an_older_peer_gets_an_error_that_its_version_supports(message, version, expected):
    assert type(AccessOfConnection().denial(message, version)) is expected


@run_on_loop
async def test_a_peer_that_sends_an_answer_or_a_late_token_is_disconnected():
    for message in (Appended(1, 0, 3, 0), Authenticate(REQ_ID, SECRET)):
        access = AccessOfConnection()
        assert isinstance(access.denial(message), RemoteProtocolError)
        assert access.ended == [f"expected a request, found {type(message).__name__}"]
        assert AccessOfConnection(is_enforced=False).denial(message) is None


@run_on_loop
async def test_before_permissions_are_known_denials_are_retryable(logged):
    access = AccessOfConnection(permissions=None, token=None)
    error = access.denial(TransactionDataRequest(REQ_ID, 0))
    assert type(error) is PermissionsNotLoaded
    assert error.retriable
    assert (
        AccessOfConnection(is_enforced=False, permissions=None, token=None).denial(APPEND_3) is None
    )
    access.port.apply(GRANTED)
    assert access.denial(TransactionDataRequest(REQ_ID, 0)) is None
    assert "denied" not in logged()


@run_on_loop
async def test_the_first_revision_ends_connections_without_any_permission():
    enforced, report = (
        AccessOfConnection(is_enforced=each, permissions=None, token=None) for each in (True, False)
    )
    anonymous = Grant("anonymous", False, READ, None)
    for made in (enforced, report):
        known = made.port.add_connection(None, "a:2", made.ended.append)
        known.principal = "ann"
        assert made.access.has_permission
        made.port.apply(OTHER_GRANTS)
    assert enforced.ended == ["anonymous has no permission"]
    assert report.ended == []
    permitted = AccessOfConnection(
        permissions=dataclasses.replace(OTHER_GRANTS, grants=(anonymous,)), token=None
    )
    assert permitted.ended == []


@run_on_loop
async def test_report_mode_permits_everything_and_logs_once_a_minute(logged):
    access = AccessOfConnection(is_enforced=False)
    for number in (9, 10, 9):
        message = dataclasses.replace(APPEND_3, req_id=ReqId(1, 2, number, 4))
        assert access.denial(message) is None
    (line,) = [each for each in logged().splitlines() if "violation" in each]
    assert line.startswith(
        "access.violation_reported peer=a:1 error=AppendRequest requires the verb append for "
    )
    enforced = AccessOfConnection()
    enforced.denial(dataclasses.replace(APPEND_3, req_id=OTHER))
    assert "access.denied peer=a:1 error=AppendRequest requires the verb append for " in logged()


def revision(**changes):
    return dataclasses.replace(GRANTED, revision=7, **changes)


@pytest.mark.parametrize(
    ("permissions", "reason"),
    [
        (revision(), None),
        (revision(groups={}, grants=(Grant("spark-etl", False, APPEND, None),)), None),
        (revision(grants=(Grant("etl", True, APPEND, ((0, 2),)),)), "permissions of spark-etl"),
        (revision(groups={"etl": ("ann",)}), "permissions of spark-etl"),
        (revision(tokens={}), "token t1 of spark-etl is revoked"),
        (
            revision(tokens={hash_of(SECRET): StoredToken("t1", "ann", NOW_MS + 1)}),
            "permissions of ann",
        ),
        (  # with client IDs other than the mounted ones
            revision(
                tokens={hash_of(SECRET): StoredToken("t1", "bob", NOW_MS + 1)},
                groups={"etl": ("spark-etl", "bob")},
            ),
            "permissions of bob",
        ),
    ],
)
@run_on_loop
async def test_a_revision_ends_connections_that_lose_a_permission(permissions, reason):
    access = AccessOfConnection()
    anonymous = AccessOfConnection(token=None)
    access.port.apply(permissions)
    anonymous.port.apply(dataclasses.replace(permissions, grants=GRANTED.grants[1:]))
    assert (len(access.ended), anonymous.ended) == (int(reason is not None), [])
    assert reason is None or reason in access.ended[0]
    access.port.remove_connection(access.access)
    access.port.apply(revision(tokens={}))
    assert len(access.ended) == (reason is not None)


@run_on_loop
async def test_report_mode_ends_connections_only_for_invalid_tokens():
    access = AccessOfConnection(is_enforced=False)
    access.port.apply(revision(grants=()))
    assert access.ended == []
    access.port.apply(revision(tokens={}))
    assert access.ended == ["token t1 of spark-etl is revoked"]


@run_on_loop
async def test_an_expired_certificate_ends_its_connection_soon():
    ended = []
    until_s = 1_000
    port = PortAccess("CN=(.+)", is_enforced=True, clock_ms=lambda: now_ms)
    now_ms = until_s * 1_000 - 1
    certificate = {"notAfter": "Jan  1 00:16:40 1970 GMT", "subject": ((("commonName", "ann"),),)}
    assert port.add_connection(certificate, "a:1", ended.append).principal == "ann"
    reports = PortAccess("CN=(.+)", is_enforced=False, clock_ms=lambda: now_ms)
    assert reports.add_connection(certificate, "a:1", ended.append).expires_ms is None
    now_ms += 1
    await poll_until(lambda: ended)
    assert ended == ["the certificate of the peer has expired"]


@run_on_loop
async def test_an_expired_token_ends_its_connection_soon():
    access = AccessOfConnection()
    assert access.denial(APPEND_3) is None
    access.now_ms += 1
    await poll_until(lambda: access.ended)
    assert access.ended == ["token t1 of spark-etl has expired"]


@run_on_loop
async def test_a_revoked_connection_loses_its_unsent_bytes(files, token_file):
    """A peer that does not read gets no further bytes after the revocation."""
    connect = trusting_connect_string(files, f"&token_file={token_file}")
    async with open_port(files, access="on") as port:
        port.apply(GRANTED)
        link = await net.dial(
            WireProtocol.STORAGE, port.address, ssl=tls.dial_context(ClientConfig(), connect)
        )
        (server_side,) = port.peer.links
        assert server_side.denial(OpenRequest(-1, -1, -1, bytes(16), 4)) is not None
        port.apply(revision(grants=(Grant("spark-etl", False, REPLICATE, None),)))
        assert server_side.denial(Heartbeat(1, 0, 3)) is None
        assert server_side.filter_permitted([Heartbeat(1, 0, 3)]) == [Heartbeat(1, 0, 3)]
        port.apply(dataclasses.replace(GRANTED, revision=8))
        await link.wait_closed()
        assert server_side.closed_reason == "the permissions of spark-etl were changed"


@run_on_loop
async def test_access_control_needs_tls():
    with pytest.raises(BadConfig, match='tls: access = "on" requires tls = "on"'):
        tls.listen_context(StorageConfig(connect="zk:1/w", directory="d", access="on"))
