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
def write_permissions_of(cluster: LocalCluster) -> Iterator[Callable[[Permissions], None]]:
    """Write permissions, and wait until every daemon has read them."""
    parsed = parse_connect_string(cluster.connect)
    zookeeper = KazooClient(",".join(parsed.hosts))
    zookeeper.start()

    def write_permissions(permissions: Permissions) -> None:
        path, data = f"{parsed.root}/x/access", access_node.encode_permissions(permissions)
        if zookeeper.exists(path):
            zookeeper.set(path, data)
        else:
            zookeeper.create(path, data)
        line = f"access.revision_applied revision={permissions.revision}\n"
        for name in DAEMONS:
            wait_until(
                f"{name} uses the permissions",
                lambda name=name: line in cluster.log_path(name).read_text(),
            )

    yield write_permissions
    zookeeper.stop()
    zookeeper.close()


@pytest.fixture
def connect(cluster: LocalCluster, certificates: Certificates, tmp_path: Path) -> str:
    """The connect string of a client with a token, and without a certificate."""
    file = tmp_path / "token"
    file.write_text(SECRET.hex())
    without_options = cluster.connect.partition("?")[0]
    return f"{without_options}?tls={certificates.authorities}&token_file={file}"


def test_a_client_with_a_token_reaches_every_port_until_it_is_revoked(
    cluster: LocalCluster, connect: str, write_permissions_of: Callable[[Permissions], None]
):
    write_permissions_of(PERMISSIONS)
    with WaltzClient(connect) as client:
        first = client.append(b"with a token", partition=PARTITION).result()
        for replicas in (None, client.replicas(PARTITION)):
            chunks = client.read_range(PARTITION, first, first, replicas=replicas)
            assert [row.data for chunk in chunks for row in chunk.rows()] == [b"with a token"]
    for words in (("storage", "list"), ("cluster", "check-connectivity")):
        result = run_command(*words, "--connect", connect)
        assert result.returncode == 0, (words, result.stdout, result.stderr)
    # On a busy machine a daemon may not answer the doctor in time.
    wait_until(
        "the doctor reports nothing",
        lambda: not run_command("doctor", "--connect", connect).returncode,
    )

    write_permissions_of(dataclasses.replace(PERMISSIONS, revision=2, tokens={}))
    config = ClientConfig(request_timeout_ms=5_000)
    with (
        WaltzClient(connect, config) as client,
        pytest.raises(AuthenticationFailed, match=REVOKED),
    ):
        client.high_water_mark(PARTITION)
    result = run_command("storage", "list", "--connect", connect)
    assert result.returncode == 1
    assert REVOKED in result.stderr
    for name in DAEMONS:
        log = cluster.log_path(name).read_text()
        assert f"access.token_rejected peer=127.0.0.1 error={REVOKED}" in log
        assert SECRET.hex() not in log
        assert hash_of(SECRET) not in log


def test_a_client_without_a_token_is_anonymous_and_works(cluster: LocalCluster):
    with WaltzClient(cluster.connect) as client:
        assert client.append(b"without a token", partition=PARTITION).result() >= 0
