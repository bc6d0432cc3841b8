"""The principal of a connection over real sockets: by a certificate, by a token, or none."""

import contextlib
import datetime
import logging

import pytest
import trustme

from tests.certificates import HERE
from tests.loops import on_loop, until
from tests.unit.transport.peer import ANY, Peer
from waltz_core.access.permissions import KnownToken, Permissions
from waltz_core.access.tokens import hash_of
from waltz_core.config import ClientConfig, ServerConfig, StorageConfig
from waltz_core.errors import AuthenticationFailed, BadConfig, TlsFailed, Unreachable
from waltz_core.transport import net, tls
from waltz_core.transport.identification import Identification
from waltz_core.wire import authentication, codec
from waltz_core.wire.messages import Heartbeat, WireProtocol

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
        hash_of(SECRET): KnownToken("t1", "spark-etl", NOW_MS + 1),
        hash_of(EXPIRED): KnownToken("t2", "spark-etl", NOW_MS),
    },
)


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(tls, "_LAST_LOGGED", {})
    caplog.set_level(logging.DEBUG)
    return lambda: "\n".join(each.getMessage() for each in caplog.records)


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET.hex()}\n")
    return file


class Port:
    """A listening port, its peers, and the rule by which it identifies them."""

    def __init__(self, context):
        self.context, self.peer, self.address = context, Peer(), ""

    def learn(self, permissions):
        self.context.identification.learn(permissions)

    @property
    def principals(self):
        return [each.principal for each in self.peer.links]


@contextlib.asynccontextmanager
async def open_port(files, protocol=WireProtocol.STORAGE, **settings):
    asked = {"tls_require_certificate": False, "access": "report"} | files.settings | settings
    port = Port(tls.listening(StorageConfig(connect="zk:1/w", directory="d", **asked)))
    if port.context.identification is not None:
        port.context.identification._clock_ms = lambda: NOW_MS
        port.learn(PERMISSIONS)
    listener = await net.listen(protocol, ANY, 0, port.peer.connected, ssl=port.context)
    port.address = f"{ANY}:{listener.port}"
    try:
        yield port
    finally:
        await listener.close()


async def dialed(address, connect, protocol=WireProtocol.STORAGE, **settings):
    """Dial as a client with this connect string does; return the closed link."""
    context = tls.dialing(ClientConfig(**settings), connect)
    link = await net.dial(protocol, address, ssl=context)
    link.close("done")
    await link.wait_closed()
    return link


def trusting(files, extra=""):
    return f"zk:1/w?tls={files.authorities}{extra}"


# ---------------------------------------------------------------------------------------------
# certificates


def issued(files_of, tmp_path, name, **options):
    """Write a certificate of an authority; return the settings of a client that presents it."""
    made = files_of.issue_cert(*HERE, **options)
    file = tmp_path / f"{name}.pem"
    made.private_key_and_cert_chain_pem.write_to_path(str(file))
    return {"tls_certificate": str(file)}


@pytest.fixture
def authority(tmp_path):
    """An authority of clients, and the settings of a port that trusts it."""
    made = trustme.CA()
    file = tmp_path / "clients.pem"
    made.cert_pem.write_to_path(str(file))
    return made, {"tls_authorities": str(file)}


@on_loop
async def test_the_principal_is_that_of_the_certificate(files, authority, tmp_path):
    made, settings = authority
    async with open_port(files, **settings) as port:
        shown = issued(made, tmp_path, "ann", common_name="ann")
        await dialed(port.address, trusting(files), **shown)
        assert port.principals == ["ann"]
        # Without a certificate, and with one that has no principal.
        await dialed(port.address, trusting(files))
        shown = issued(made, tmp_path, "reserved", common_name="other")
        await dialed(port.address, trusting(files), **shown)
        assert port.principals == ["ann", "anonymous", "anonymous"]


@on_loop
async def test_a_pattern_can_name_a_host_of_the_certificate(files, authority, tmp_path):
    made, settings = authority
    pattern = {"principal_pattern": "DNS=(localhost)"}
    async with open_port(files, **settings, **pattern) as port:
        shown = issued(made, tmp_path, "ann", common_name="ann")
        await dialed(port.address, trusting(files), **shown)
        assert port.principals == ["localhost"]


async def rejected_at(address, connect, **settings):
    """Dial with a certificate; TLS 1.3 reports its rejection after the dialer's handshake."""
    with pytest.raises((TlsFailed, Unreachable)) as caught:
        await dialed(address, connect, **settings)
    return str(caught.value)


@on_loop
async def test_a_foreign_or_expired_certificate_is_rejected(files, authority, tmp_path, logged):
    made, settings = authority
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    async with open_port(files, **settings) as port:
        shown = issued(trustme.CA(), tmp_path, "foreign", common_name="ann")
        await rejected_at(port.address, trusting(files), **shown)
        await until(lambda: "unable to get local issuer certificate" in logged())
        shown = issued(made, tmp_path, "expired", common_name="ann", not_after=past)
        await rejected_at(port.address, trusting(files), **shown)
        await until(lambda: "certificate has expired" in logged())
        assert port.principals == []


@on_loop
async def test_without_access_control_no_certificate_is_requested(files, tmp_path):
    foreign = issued(trustme.CA(), tmp_path, "foreign", common_name="ann")
    async with open_port(files, access="off") as port:
        await dialed(port.address, trusting(files), **foreign)
        assert port.principals == ["anonymous"]


@on_loop
async def test_without_explicit_authorities_no_certificate_is_requested(files, tmp_path):
    foreign = issued(trustme.CA(), tmp_path, "foreign", common_name="ann")
    async with open_port(files, tls_authorities="") as port:
        await dialed(port.address, trusting(files), **foreign)
        assert port.principals == ["anonymous"]


@on_loop
async def test_a_required_certificate_stays_required(files, token_file):
    async with open_port(files, tls_require_certificate=True) as port:
        await rejected_at(port.address, trusting(files, f"&token_file={token_file}"))
        assert port.principals == []


@pytest.mark.parametrize("kind", [ServerConfig, StorageConfig])
def test_an_invalid_pattern_is_an_error_of_the_settings(files, kind):
    directory = {"directory": "d"} if kind is StorageConfig else {}
    settings = {"access": "report", "principal_pattern": "CN=.+", **files.settings, **directory}
    with pytest.raises(BadConfig, match="principal_pattern"):
        tls.listening(kind(connect="zk:1/w", **settings))


# ---------------------------------------------------------------------------------------------
# tokens


@PROTOCOLS
@on_loop
async def test_the_principal_is_that_of_the_token(files, token_file, protocol):
    async with open_port(files, protocol) as port:
        connect = trusting(files, f"&token_file={token_file}")
        link = await dialed(port.address, connect, protocol)
        assert port.principals == ["spark-etl"]
        assert port.peer.messages == []
        assert link.version == protocol.versions[-1]


@on_loop
async def test_a_token_may_be_in_a_variable(files, monkeypatch):
    monkeypatch.setenv("OUR_TOKEN", SECRET.hex())
    async with open_port(files) as port:
        await dialed(port.address, trusting(files, "&token_env=OUR_TOKEN"))
        assert port.principals == ["spark-etl"]


@on_loop
async def test_a_token_decides_also_if_there_is_a_certificate(
    files, authority, tmp_path, token_file
):
    made, settings = authority
    shown = issued(made, tmp_path, "ann", common_name="ann")
    async with open_port(files, **settings) as port:
        await dialed(port.address, trusting(files, f"&token_file={token_file}"), **shown)
        assert port.principals == ["spark-etl"]
        token_file.write_text(EXPIRED.hex())
        with pytest.raises(AuthenticationFailed):
            await dialed(port.address, trusting(files, f"&token_file={token_file}"), **shown)


@PROTOCOLS
@pytest.mark.parametrize("secret", [EXPIRED, bytes(32)], ids=["expired", "unknown"])
@on_loop
async def test_a_token_that_is_not_valid_closes_the_connection(
    files, token_file, logged, protocol, secret
):
    token_file.write_text(secret.hex())
    async with open_port(files, protocol) as port:
        connect = trusting(files, f"&token_file={token_file}")
        for _ in range(2):
            with pytest.raises(AuthenticationFailed, match="token is unknown, revoked or expired"):
                await dialed(port.address, connect, protocol)
        await until(lambda: len(port.peer.closed) == 2)
        assert port.principals == ["anonymous", "anonymous"]
        assert logged().count("access.token_rejected peer=127.0.0.1 error=the token is unk") == 1
        assert secret.hex() not in logged()
        assert repr(secret) not in logged()


@on_loop
async def test_nothing_after_a_rejected_token_is_processed(files):
    async with open_port(files) as port:
        link = await net.dial(
            WireProtocol.STORAGE, port.address, ssl=tls.dialing(ClientConfig(), trusting(files))
        )
        credential = authentication.credential(WireProtocol.STORAGE, 4, EXPIRED)
        link.send_all([credential, *(Heartbeat(1, n, 3) for n in range(100))])
        (answer,) = await link.receive()
        assert answer.error_code == AuthenticationFailed.code
        await link.wait_closed()
        assert port.peer.messages == []


@on_loop
async def test_a_token_after_another_message_changes_nothing(files):
    async with open_port(files) as port:
        link = await net.dial(
            WireProtocol.STORAGE, port.address, ssl=tls.dialing(ClientConfig(), trusting(files))
        )
        credential = authentication.credential(WireProtocol.STORAGE, 4, SECRET)
        link.send(Heartbeat(1, 0, 3))
        link.send(credential)
        await until(lambda: len(port.peer.messages) == 2)
        assert port.principals == ["anonymous"]
        link.abort("done")


@on_loop
async def test_tokens_are_unknown_until_the_permissions_were_read(files, token_file):
    connect = trusting(files, f"&token_file={token_file}")
    async with open_port(files) as port:
        port.context.identification._permissions = None
        with pytest.raises(AuthenticationFailed, match="there are no permissions yet"):
            await dialed(port.address, connect)
        port.learn(PERMISSIONS)
        await dialed(port.address, connect)


def test_a_missing_node_or_an_older_revision_changes_nothing(logged):
    identification = Identification("CN=(.+)", lambda: NOW_MS)
    identification.learn(None)
    identification.learn(PERMISSIONS)
    identification.learn(None)
    identification.learn(Permissions(4, "ops", 0, bytes(32)))
    assert identification.by_token(SECRET) == "spark-etl"
    assert logged().splitlines() == [
        "access.missing revision=0",
        "access.revision revision=5",
        "access.missing revision=5",
        "access.revision_ignored revision=4 known=5",
    ]
    identification.learn(Permissions(6, "ops", 0, bytes(32)))
    with pytest.raises(AuthenticationFailed):
        identification.by_token(SECRET)


@on_loop
async def test_a_client_with_a_token_reaches_a_port_without_access_control(files, token_file):
    async with open_port(files, access="off") as port:
        await dialed(port.address, trusting(files, f"&token_file={token_file}"))
        assert port.principals == ["anonymous"]


@on_loop
async def test_a_token_is_not_accepted_without_tls(logged):
    peer = Peer()
    listener = await net.listen(WireProtocol.STORAGE, ANY, 0, peer.connected)
    link = await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")
    link.send(authentication.credential(WireProtocol.STORAGE, 4, SECRET))
    (answer,) = await link.receive()
    assert answer.error_code == AuthenticationFailed.code
    assert "expected TLS" in answer.message
    await link.wait_closed()
    await listener.close()
    assert peer.messages == []
    assert SECRET.hex() not in logged()


@PROTOCOLS
def test_a_message_does_not_show_its_token(protocol):
    credential = authentication.credential(protocol, protocol.versions[-1], SECRET)
    assert credential.token == SECRET
    assert "token" not in repr(credential)


# ---------------------------------------------------------------------------------------------
# versions


@PROTOCOLS
@on_loop
async def test_no_token_is_sent_to_a_peer_of_an_older_version(
    files, token_file, protocol, monkeypatch
):
    older = protocol.versions_taken[:-1]
    monkeypatch.setattr(protocol, "versions_taken", older)
    async with open_port(files, protocol) as port:
        link = await dialed(port.address, trusting(files, f"&token_file={token_file}"), protocol)
        assert link.version == older[-1]
        assert port.principals == ["anonymous"]
        assert port.peer.messages == []


@PROTOCOLS
@on_loop
async def test_a_peer_of_an_older_version_is_anonymous(files, protocol, monkeypatch):
    older = protocol.versions_offered[:-1]
    monkeypatch.setattr(protocol, "versions_offered", older)
    async with open_port(files, protocol) as port:
        link = await dialed(port.address, trusting(files), protocol)
        assert link.version == older[-1]
        assert port.principals == ["anonymous"]


@PROTOCOLS
def test_a_token_of_another_length_is_a_protocol_error(protocol):
    version = protocol.versions[-1]
    frame = b"".join(codec.encode(authentication.credential(protocol, version, SECRET), version))
    for payload in (frame[7:-1], frame[7:] + b"x"):
        with pytest.raises(Exception, match="Authenticate") as caught:
            codec.decode(protocol, version, memoryview(payload))
        assert caught.type.__name__ == "RemoteProtocolError"


# ---------------------------------------------------------------------------------------------
# the place of a token


@pytest.mark.parametrize("tls_part", ["", "tls=unverified&", "tls=OFF&"])
def test_a_token_without_tls_or_with_an_unverified_peer_is_an_error(files, token_file, tls_part):
    settings = {"tls": "off"} if "OFF" in tls_part else {}
    connect = f"zk:1/w?{tls_part.replace('OFF', files.authorities)}token_file={token_file}"
    with pytest.raises(BadConfig, match=r"token_file '.*': expected TLS that verifies the peer"):
        tls.dialing(ClientConfig(**settings), connect)


@pytest.mark.parametrize("text", ["", SECRET.hex()[:-1], "\xff"])
def test_a_token_file_that_is_not_valid_is_an_error_with_its_name(files, token_file, text):
    token_file.write_text(text, encoding="latin-1")
    with pytest.raises(BadConfig, match=r"token_file .*: expected a token") as caught:
        tls.dialing(ClientConfig(), trusting(files, f"&token_file={token_file}"))
    assert not text or text not in str(caught.value)


def test_a_missing_file_or_variable_is_an_error_with_its_name(files, tmp_path, monkeypatch):
    with pytest.raises(BadConfig, match="absent' cannot be read: No such file"):
        tls.dialing(ClientConfig(), trusting(files, f"&token_file={tmp_path}/absent"))
    monkeypatch.delenv("OUR_TOKEN", raising=False)
    with pytest.raises(BadConfig, match="token_env OUR_TOKEN: expected a token"):
        tls.dialing(ClientConfig(), trusting(files, "&token_env=OUR_TOKEN"))


@on_loop
async def test_each_connection_reads_the_file_again(files, token_file):
    context = tls.dialing(ClientConfig(), trusting(files, f"&token_file={token_file}"))
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
