"""Spark with access control: a principal that has permissions for some partitions.

The principal has no ZooKeeper user.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kazoo.security import make_digest_acl_credential
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.certificates import create_certificates
from tests.commands import run_command
from tests.integration.tls_cluster import daemons_with_access
from waltz_core.client import WaltzClient, lock, partition_of
from waltz_core.config import render_toml
from waltz_core.errors import BadRequest, PermissionDenied
from waltz_core.local import LocalCluster, running_cluster

pytestmark = pytest.mark.spark

PATTERN = "DNS=(localhost)"
ONE_USER = "digest:waltz:of members\n"
MEMBERS = f"{ONE_USER}administrators:digest:{make_digest_acl_credential('admin', 'of admin')}\n"
ADMINISTRATORS = "digest:admin:of admin\nmembers:digest:waltz:of members\n"
OWN_PARTITIONS = {"partitions": "1,3"}


def set_up(cluster: LocalCluster, administrator: str, token: Path) -> None:
    """Permit two partitions to the principal `tenant`; restart daemons with `access = "on"`."""
    for words in (
        ("access", "init"),
        ("access", "grant", "localhost", "replicate"),
        ("access", "grant", "tenant", "read,append", "--partitions", OWN_PARTITIONS["partitions"]),
        ("access", "token", "create", "tenant", "--file", str(token)),
        ("cluster", "protect"),
    ):
        connect_arguments = (
            (administrator,) if words[0] == "cluster" else ("--connect", administrator)
        )
        result = run_command(*words, *connect_arguments)
        assert result.returncode == 0, result.stderr
    with daemons_with_access("on", principal_pattern=PATTERN):
        for member in cluster.members:
            if member.kind != "zookeeper":
                cluster.kill(member.name, signal.SIGTERM)
                cluster.start(member.name)


class ConnectStrings(NamedTuple):
    """Connect strings of one cluster."""

    tenant: str
    administrator: str


@pytest.fixture(scope="module")
def connect_strings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectStrings]:
    """Run a cluster with access control."""
    directory = tmp_path_factory.mktemp("tenant")
    certificates = create_certificates(directory)
    tls, members, administrators, token = (
        directory / name for name in ("tls.toml", "members.auth", "administrators.auth", "token")
    )
    tls.write_text(render_toml("tls", certificates.settings))
    members.write_text(ONE_USER)
    administrators.write_text(ADMINISTRATORS)
    with (
        daemons_with_access("report", principal_pattern=PATTERN),
        running_cluster(
            directory / "local", tls=tls, auth_file=members, storage_count=1
        ) as cluster,
    ):
        without_options = cluster.connect.partition("?")[0]
        members.write_text(MEMBERS)
        strings = ConnectStrings(
            f"{without_options}?tls={certificates.authorities}&token_file={token}",
            f"{without_options}?auth={administrators}&tls={tls}",
        )
        set_up(cluster, strings.administrator, token)
        yield strings


@pytest.fixture
def tenant(connect_strings: ConnectStrings) -> str:
    """Return the connect string of the tenant."""
    return connect_strings.tenant


def test_a_tenant_writes_and_reads_its_own_partitions(spark: SparkSession, tenant: str) -> None:
    rows = spark.range(2_000).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS data")
    before = waltz_spark.snapshot(spark, tenant, partitions=[1, 3])
    written = waltz_spark.append(rows, tenant, **OWN_PARTITIONS)
    assert written.counts["committed"] == 2_000
    assert written.high_water_marks.keys() == {1, 3}
    after = waltz_spark.snapshot(spark, tenant, partitions=[1, 3])
    grown = {each: after.high_water_marks[each] - before.high_water_marks[each] for each in (1, 3)}
    assert grown == {1: 1_000, 3: 1_000}
    assert sorted(int(row.data) for row in after.read().collect()) == list(range(2_000))
    with pytest.raises(PermissionDenied, match="tenant has no grant"):
        waltz_spark.append(rows, tenant)


@pytest.mark.slow
def test_a_row_needs_a_partition_column_if_its_lock_selects_a_forbidden_partition(
    spark: SparkSession, tenant: str
) -> None:
    key = next(n for n in range(100) if partition_of(lock("account", n), 4) == 2)
    rows = spark.createDataFrame(
        [(b"row", [lock("account", key)])], "data binary, write_locks array<int>"
    )
    with pytest.raises(BadRequest, match="found partition 2 in row 0"):
        waltz_spark.append(rows, tenant, **OWN_PARTITIONS)
    named = waltz_spark.append(rows.withColumn("partition", F.lit(3)), tenant, **OWN_PARTITIONS)
    assert named.counts["committed"] == 1


def test_a_client_that_is_opened_for_some_partitions_needs_no_other_permissions(
    tenant: str,
) -> None:
    with WaltzClient(tenant, partitions=[1, 3]) as client:
        ids = [client.append(b"in turn") for _ in range(4)]
        assert all(future.result() >= 0 for future in ids)
        assert client.mount().keys() == client.high_water_marks().keys() == {1, 3}


@pytest.mark.slow
def test_a_revoked_permission_ends_a_stream(
    spark: SparkSession, connect_strings: ConnectStrings
) -> None:
    grant = ("tenant", "read", "--partitions", "1", "--connect", connect_strings.administrator)
    source = spark.readStream.format("waltz").options(**OWN_PARTITIONS, pollInterval=0)
    stream = source.load(connect_strings.tenant)
    query = stream.writeStream.format("memory").queryName("revoked").start()
    try:
        query.processAllAvailable()  # The query has determined its start.
        with WaltzClient(connect_strings.tenant, partitions=[1]) as client:
            client.append(b"before").result()
            query.processAllAvailable()
            assert run_command("access", "revoke", *grant).returncode == 0
            client.append(b"after").result()
        with pytest.raises(StreamingQueryException, match="tenant has no grant of read"):
            query.processAllAvailable()
    finally:
        query.stop()
        run_command("access", "grant", *grant)
    assert [bytes(row.data) for row in spark.table("revoked").collect()] == [b"before"]
