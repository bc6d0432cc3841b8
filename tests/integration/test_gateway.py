"""A gateway process and a cluster of real processes: HTTPS, signals, and the port for metrics."""

import http.client
import json
import shutil
import signal
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import create_certificates
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.gateway_process import GatewayClient, run_gateway
from tests.ports import free_port
from waltz_core.local import LocalCluster, running_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Yield a cluster with one storage and one server."""
    with running_cluster(
        tmp_path_factory.mktemp("cluster"), storage_count=1, server_count=1
    ) as cluster:
        yield cluster


def append_to(url: str, authorities: str) -> int:
    """Append over a new connection; return the status."""
    client = GatewayClient(url, authorities=authorities)
    try:
        return client.append({"data": "a"}).status
    finally:
        client.close()


def test_a_gateway_serves_https_and_reads_its_certificate_again(
    cluster: LocalCluster, tmp_path: Path
):
    old, new = create_certificates(tmp_path, name="old"), create_certificates(tmp_path, name="new")
    certificate, key, log = (tmp_path / name for name in ("cert.pem", "key.pem", "log"))

    def use(files: tuple[str, str]) -> None:
        shutil.copy(files[0], certificate)
        shutil.copy(files[1], key)

    def count(event: str) -> int:
        return log.read_text().count(event)

    use((old.certificate, old.key))
    files = {"https_certificate": certificate, "https_key": key}
    with run_gateway(cluster.connect, log, **files) as served:
        assert served.url.startswith("https://")
        existing = GatewayClient(served.url, authorities=old.authorities)
        assert existing.append({"data": "a"}).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            append_to(served.url, new.authorities)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            append_to(served.url.replace("https", "http"), "")

        use((new.certificate, new.key))
        served.send_signal(signal.SIGHUP)
        wait_until(
            "the gateway uses the new certificate", lambda: count("tls.reloaded certificate=")
        )
        assert append_to(served.url, new.authorities) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            append_to(served.url, old.authorities)
        assert existing.append({"data": "a"}).status == 200  # an existing connection still works

        use((old.certificate, new.key))  # not the key of this certificate
        served.send_signal(signal.SIGHUP)
        wait_until(
            "the gateway has rejected the certificate", lambda: count("tls.reload_failed error=")
        )
        assert append_to(served.url, new.authorities) == 200
        existing.close()
        assert served.terminate() == 0
        assert count("ERROR") == count("tls.reload_failed")


def test_sighup_does_not_end_a_gateway_without_a_certificate(cluster: LocalCluster):
    with run_gateway(cluster.connect) as served:
        client = GatewayClient(served.url)
        assert client.append({"data": "a"}).status == 200
        served.send_signal(signal.SIGHUP)
        assert client.append({"data": "a"}).status == 200
        client.close()
        assert served.terminate() == 0


def test_a_gateway_serves_its_health_and_metrics_pages(cluster: LocalCluster):
    port = free_port()
    with run_gateway(cluster.connect, http_port=port) as served:
        assert append_to(served.url, "") == 200
        page = f"http://127.0.0.1:{port}"
        for path in ("/livez", "/readyz", "/health"):
            with urllib.request.urlopen(page + path) as answer:
                assert answer.status == 200
        with urllib.request.urlopen(page + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("waltz_gateway_requests_total{")]
        assert any('operation="append"' in each for each in counted), counted


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            ("--listen-host", "10.1.2.3"),
            "'10.1.2.3' is not a loopback address, so the gateway requires",
        ),
        (("--https-key", "x.pem"), "setting https_key requires https_certificate"),
        (
            ("--https-certificate", "none.pem"),
            "setting https_certificate: 'none.pem' cannot be read",
        ),
    ],
)
def test_a_gateway_with_a_wrong_port_does_not_start(more: tuple[str, ...], error: str):
    result = run_command("gateway", "run", "--connect", "127.0.0.1:1/w", *more)
    assert result.returncode == 1
    assert error in result.stderr, json.dumps(result.stderr)
