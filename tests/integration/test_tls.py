"""A whole cluster under TLS: real processes, certificates in files, every port, commands."""

import json
import shlex
import signal
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Certificates, create_certificates
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.tls_cluster import tls_cluster
from waltz_core import errors
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig, render_toml
from waltz_core.local import LocalCluster

PARTITION = 1


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[LocalCluster]:
    with tls_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster


def place_of(cluster: LocalCluster) -> str:
    return cluster.connect.partition("?")[0]


def test_a_client_appends_and_reads_from_servers_and_from_storages(cluster: LocalCluster):
    with WaltzClient(cluster.connect) as client:
        rows = [bytes([number]) * 50_000 for number in range(40)]
        futures = [client.append(row, partition=PARTITION) for row in rows]
        last = max(future.result() for future in futures)
        for replicas in (None, client.replicas(PARTITION)):
            chunks = client.read_range(PARTITION, last - 39, last, replicas=replicas)
            assert sorted(row.data for chunk in chunks for row in chunk.rows()) == rows


def test_a_client_needs_no_certificate_for_servers(
    cluster: LocalCluster, certificates: Certificates
):
    connect = f"{place_of(cluster)}?tls={certificates.authorities}"
    with WaltzClient(connect) as client:
        first = client.append(b"without a certificate", partition=PARTITION).result()
        # Storages require a certificate of their readers, so the client reads from the server.
        chunks = client.read_range(PARTITION, first, first, replicas=client.replicas(PARTITION))
        assert [row.data for chunk in chunks for row in chunk.rows()] == [b"without a certificate"]
    settings = ClientConfig(tls="on", tls_authorities=certificates.authorities)
    with WaltzClient(place_of(cluster), settings) as client:
        assert client.high_water_mark(PARTITION) >= first


def test_a_plain_client_gets_an_error_within_seconds(cluster: LocalCluster):
    config = ClientConfig(request_timeout_ms=5_000)
    with (
        WaltzClient(place_of(cluster), config) as client,
        pytest.raises(errors.WaltzError, match=r"expected plain TCP, found TLS.*add \?tls=FILE"),
    ):
        client.high_water_mark(PARTITION)
    assert "expected TLS, found plain TCP" in cluster.log_path("server-1").read_text()


def test_a_client_that_trusts_another_authority_gets_an_error(
    cluster: LocalCluster, tmp_path: Path
):
    connect = f"{place_of(cluster)}?tls={create_certificates(tmp_path).authorities}"
    with (
        WaltzClient(connect, ClientConfig(request_timeout_ms=5_000)) as client,
        pytest.raises(errors.WaltzError, match="the certificate of the peer is not valid"),
    ):
        client.high_water_mark(PARTITION)


def test_commands_reach_every_port(cluster: LocalCluster):
    connect = ("--connect", cluster.connect)
    storage = cluster.member("storage-1")
    file = cluster.connect.partition("?tls=")[2]
    for words in (
        ("cluster", "verify", *connect),
        ("cluster", "check-connectivity", *connect),
        ("server", "list", *connect),
        ("storage", "list", *connect),
        ("storage", "validate", *connect),
        ("storage", "list", "--admin", f"127.0.0.1:{storage.admin_port}", "--tls", file),
        ("client", "append", "--partition", str(PARTITION), "hello", *connect),
    ):
        result = run_command(*words)
        assert result.returncode == 0, (words, result.stdout, result.stderr)
    # On a busy machine a daemon may not answer the doctor in time.
    wait_until("the doctor reports nothing", lambda: not run_command("doctor", *connect).returncode)


def test_a_plain_command_to_a_tls_port_gets_an_error(cluster: LocalCluster):
    port = cluster.member("storage-1").admin_port
    result = run_command("storage", "list", "--admin", f"127.0.0.1:{port}")
    assert result.returncode == 1
    assert "expected plain TCP, found TLS" in result.stderr


def test_the_doctor_does_not_suggest_to_stop_a_process_if_tls_fails(cluster: LocalCluster):
    result = run_command("doctor", "--json", "--connect", place_of(cluster))
    findings = json.loads(result.stdout)["findings"]
    assert [finding["name"] for finding in findings] == ["server-tls-failed", "storage-tls-failed"]
    _, *words = shlex.split(findings[0]["command"])
    file = cluster.connect.partition("?tls=")[2]
    result = run_command(*(word.replace("FILE", file) for word in words))
    assert result.returncode == 0, result.stdout


def test_a_0_13_program_with_a_certificate_reaches_servers_and_storages_over_tls_1_2(
    cluster: LocalCluster, certificates: Certificates
):
    """A 0.13 program uses TLS 1.2, verifies no certificate, and then sends a hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificates.certificate, certificates.key)
    server, storage = cluster.member("server-1"), cluster.member("storage-1")
    assert storage.admin_port is not None
    for port, versions, text in (
        (server.port, (0, 1, 2, 3, 4), "Waltz Client"),
        (storage.port, (0,), "Waltz Storage Client"),
        (storage.admin_port, (0,), "Waltz Storage Admin Client"),
    ):
        words = struct.pack(f">i{len(versions)}h", len(versions), *versions)
        payload = words + struct.pack(">i", len(text)) + text.encode()
        with (
            socket.create_connection(("127.0.0.1", port), 10) as raw,
            context.wrap_socket(raw) as wrapped,
        ):
            wrapped.sendall(b"H" + struct.pack(">hi", 0, len(payload)) + payload)
            assert wrapped.version() == "TLSv1.2"
            assert wrapped.recv(3) == b"H\0\0"


def test_daemons_read_their_files_again_after_a_signal(cluster: LocalCluster):
    for name in ("storage-1", "server-1"):
        cluster.kill(name, signal.SIGHUP)
        wait_until(
            "the daemon has read the files",
            lambda name=name: "tls.reloaded certificate=" in cluster.log_path(name).read_text(),
        )
    with WaltzClient(cluster.connect) as client:
        assert client.append(b"still there", partition=PARTITION).result() >= 0


def test_metrics_are_readable_without_tls(cluster: LocalCluster):
    port = cluster.member("server-1").http_port
    result = run_command("server", "metrics", f"127.0.0.1:{port}", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["server", "storage"])
def test_a_daemon_without_protection_does_not_start_on_a_network(kind: str, tmp_path: Path):
    values = {"connect": "127.0.0.1:1/w", "listen_host": "10.1.2.3"}
    values |= {"directory": str(tmp_path / "data")} if kind == "storage" else {}
    file = tmp_path / "daemon.toml"
    file.write_text(render_toml(kind, values))
    result = run_command(kind, "run", "--config", str(file))
    assert result.returncode == 1
    assert (
        "'10.1.2.3' is not a loopback address, so the daemon requires tls = \"on\" and"
        in result.stderr
    )
    assert not (tmp_path / "data").exists()
