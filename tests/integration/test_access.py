"""A cluster whose daemons identify their peers: real processes, tokens in files, every port."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.certificates import Certificates
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.tls_cluster import daemons_with_access, tls_cluster
from waltz_core.access.permissions import Permissions, StoredToken
from waltz_core.access.tokens import hash_of
from waltz_core.client import WaltzClient
from waltz_core.cluster.znodes import access_node
from waltz_core.config import ClientConfig
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.errors import AuthenticationFailed
from waltz_core.local import LocalCluster

PARTITION = 1
SECRET = bytes(range(32))
LATER_MS = 1 << 50
PERMISSIONS = Permissions(
    1, "ops", 0, bytes(32), tokens={hash_of(SECRET): StoredToken("t1", "ann", LATER_MS)}
)
REVOKED = "token t1 of ann is revoked"
DAEMONS = ("server-1", "storage-1")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[LocalCluster]:
    with daemons_with_access("report"), tls_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster


@pytest.fixture
def write(cluster: LocalCluster) -> Iterator[Callable[[Permissions], None]]:
    """Write permissions, and wait until every daemon has read them."""
    place = parse_connect_string(cluster.connect)
    zookeeper = KazooClient(",".join(place.hosts))
    zookeeper.start()

    def put(permissions: Permissions) -> None:
        path, data = f"{place.root}/x/access", access_node.encode_permissions(permissions)
        if zookeeper.exists(path):
            zookeeper.set(path, data)
        else:
            zookeeper.create(path, data)
        line = f"access.revision_applied revision={permissions.revision}\n"
        for name in DAEMONS:
            wait_until(
                f"{name} reads", lambda name=name: line in cluster.log_path(name).read_text()
            )

    yield put
    zookeeper.stop()
    zookeeper.close()


@pytest.fixture
def connect(cluster: LocalCluster, certificates: Certificates, tmp_path: Path) -> str:
    """The connect string of a client with a token, and without a certificate."""
    file = tmp_path / "token"
    file.write_text(SECRET.hex())
    place = cluster.connect.partition("?")[0]
    return f"{place}?tls={certificates.authorities}&token_file={file}"


def test_a_client_with_a_token_reaches_every_port_until_it_is_revoked(
    cluster: LocalCluster, connect: str, write: Callable[[Permissions], None]
):
    write(PERMISSIONS)
    with WaltzClient(connect) as client:
        first = client.append(b"with a token", partition=PARTITION).result()
        for replicas in (None, client.replicas(PARTITION)):
            chunks = client.read_range(PARTITION, first, first, replicas=replicas)
            assert [row.data for chunk in chunks for row in chunk.rows()] == [b"with a token"]
    for words in (("storage", "list"), ("cluster", "check-connectivity")):
        done = run_command(*words, "--connect", connect)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    # On a busy machine a daemon may not answer the doctor in time.
    wait_until(
        "the doctor finds nothing",
        lambda: not run_command("doctor", "--connect", connect).returncode,
    )

    write(dataclasses.replace(PERMISSIONS, revision=2, tokens={}))
    config = ClientConfig(request_timeout_ms=5_000)
    with (
        WaltzClient(connect, config) as client,
        pytest.raises(AuthenticationFailed, match=REVOKED),
    ):
        client.high_water_mark(PARTITION)
    done = run_command("storage", "list", "--connect", connect)
    assert done.returncode == 1
    assert REVOKED in done.stderr
    for name in DAEMONS:
        log = cluster.log_path(name).read_text()
        assert f"access.token_rejected peer=127.0.0.1 error={REVOKED}" in log
        assert SECRET.hex() not in log
        assert hash_of(SECRET) not in log


def test_a_client_without_a_token_is_anonymous_and_works(cluster: LocalCluster):
    with WaltzClient(cluster.connect) as client:
        assert client.append(b"without a token", partition=PARTITION).result() >= 0
