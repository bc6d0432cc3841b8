"""A cluster with `access = "on"`, its permissions in ZooKeeper, and a token of each principal."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.certificates import Certificates
from tests.fault.load import wait_until
from tests.integration.tls_cluster import daemons_with_access, tls_cluster
from waltz_core.access.permissions import Grant, Permissions, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.access.tokens import hash_of
from waltz_core.cluster.znodes import access_node
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.local import LocalCluster

DAEMONS = ("storage-1", "server-1")
PERMITTED_PARTITION, DENIED_PARTITION = 1, 3
FAR_FUTURE_MS = 1 << 50
# Each principal has a token; the first byte of the token's secret is the index in this list.
PRINCIPALS = ("nothing", "writer", *(each.value for each in AccessVerb))
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    grants=(
        Grant("localhost", False, AccessVerb.REPLICATE, None),
        Grant("writer", False, AccessVerb.READ, ((PERMITTED_PARTITION, PERMITTED_PARTITION),)),
        Grant("writer", False, AccessVerb.APPEND, ((PERMITTED_PARTITION, PERMITTED_PARTITION),)),
        *(
            Grant(each.value, False, each, ((PERMITTED_PARTITION, PERMITTED_PARTITION),))
            for each in AccessVerb
        ),
    ),
    tokens={
        hash_of(bytes([number]) * 32): StoredToken(f"t{number}", name, FAR_FUTURE_MS)
        for number, name in enumerate(PRINCIPALS)
    },
)


class ClusterAccess:
    """The permissions of the cluster in ZooKeeper, and connect strings of principals."""

    def __init__(self, cluster: LocalCluster, authorities: str, directory: Path) -> None:
        self.cluster = cluster
        self._connect = parse_connect_string(cluster.connect)
        self._authorities = authorities
        self._directory = directory
        self._zookeeper = KazooClient(",".join(self._connect.hosts))
        self._zookeeper.start()
        self.revision = 0

    def write(self, permissions: Permissions) -> None:
        """Write the next revision, and wait until every daemon has read it."""
        self.revision += 1
        data = access_node.encode_permissions(
            dataclasses.replace(permissions, revision=self.revision)
        )
        path = f"{self._connect.root}/x/access"
        if self._zookeeper.exists(path):
            self._zookeeper.set(path, data)
        else:
            self._zookeeper.create(path, data)
        self.await_applied()

    def await_applied(self) -> None:
        """Wait until every daemon has read the latest revision."""
        line = f"access.revision_applied revision={self.revision}\n"
        for name in DAEMONS:
            log = self.cluster.log_path(name)
            wait_until(f"{name} uses the permissions", lambda log=log: line in log.read_text())

    def connect(self, principal: str) -> str:
        """Return the connect string of a principal."""
        file = self._directory / principal
        file.write_text((bytes([PRINCIPALS.index(principal)]) * 32).hex())
        without_options = self.cluster.connect.partition("?")[0]
        return f"{without_options}?tls={self._authorities}&token_file={file}"

    def close(self) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()


@contextmanager
def permitted_cluster(
    directories: pytest.TempPathFactory,
    certificates: Certificates,
    permissions: Permissions = PERMISSIONS,
) -> Iterator[ClusterAccess]:
    """Run a cluster; introduce access control like an operator: "report", permissions, "on"."""
    settings = {"principal_pattern": "DNS=(localhost)"}
    with (
        daemons_with_access("report", **settings),
        tls_cluster(directories, certificates) as cluster,
    ):
        access = ClusterAccess(cluster, certificates.authorities, directories.mktemp("tokens"))
        access.write(permissions)
        with daemons_with_access("on", **settings):
            for name in DAEMONS:
                cluster.kill(name)
                cluster.log_path(name).write_text("")
                cluster.start(name)
            access.await_applied()
            yield access
        access.close()
