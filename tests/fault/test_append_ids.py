"""An append has the same request ID in the logs of its client, its server and its storage."""

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.load import wait_until
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster

pytestmark = [pytest.mark.fault, pytest.mark.slow]
LOGGING = """
version = 1
disable_existing_loggers = false
formatters.json."()" = "waltz_core.log_lines.JsonFormatter"
handlers.stderr = {class = "logging.StreamHandler", formatter = "json"}
root = {level = "INFO", handlers = ["stderr"]}
loggers."waltz_core.server.process.clients".level = "DEBUG"
loggers."waltz_core.storage.process.append_lines".level = "DEBUG"
"""
ROWS = 20


@contextlib.contextmanager
def run_with_logging(cluster: LocalCluster, name: str, log: Path) -> Iterator[None]:
    """Run a member with the option `--logging` instead of its own process."""
    kind = cluster.member(name).kind
    cluster.kill(name)
    settings = cluster.directory / "logging.toml"
    settings.write_text(LOGGING, encoding="utf-8")
    words = ("--logging", str(settings), kind, "run", "--config", str(config_of(cluster, name)))
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "waltz_core", *words], stderr=output)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def config_of(cluster: LocalCluster, name: str) -> Path:
    """Return the settings file of a member."""
    (path,) = (cluster.directory / "conf").glob(f"{name}.*")
    return path


def events_of(log: Path) -> list[dict[str, object]]:
    """Return the complete lines of a log, each of which must be a JSON object."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def with_request(events: list[dict[str, object]], name: str, request: str) -> list[object]:
    """Return the events that have this name, and this ID or a range that begins with this ID."""
    return [
        event
        for event in events
        if event.get("event") == name
        and request in (event.get("request"), str(event.get("requests")).partition("..")[0])
    ]


def test_an_append_is_found_by_its_request_id_in_all_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    cluster = LocalCluster(tmp_path / "waltz", storage_count=1, server_count=1, partition_count=1)
    server, storage = tmp_path / "server.log", tmp_path / "storage.log"
    caplog.set_level(logging.DEBUG, "waltz_core.client.stream.client_partition")
    try:
        cluster.up()
        with (
            run_with_logging(cluster, "storage-1", storage),
            run_with_logging(cluster, "server-1", server),
            WaltzClient(cluster.connect, PATIENT_CLIENT) as client,
        ):
            futures = [client.append(b"row %d" % row, partition=0) for row in range(ROWS)]
            ids = [future.result(TEST_TIMEOUT_S) for future in futures]
            assert ids == list(range(ROWS))
            sent = [
                message for message in caplog.messages if message.startswith("client.append_sent ")
            ]
            request = sent[0].partition("request=")[2]
            assert request == f"{client.client_id}.{request.split('.', 1)[1]}"
            wait_until(
                "the server has logged the answer",
                lambda: with_request(events_of(server), "server.append_answered", request),
            )
            wait_until(
                "the storage has logged the sync",
                lambda: with_request(events_of(storage), "storage.append_synced", request),
            )
            assert with_request(events_of(server), "server.append_received", request)
            assert any(
                message.startswith(f"client.append_answered request={request} rows=")
                and "committed=0" in message
                for message in caplog.messages
            )
    finally:
        cluster.down()


def test_daemons_log_json_if_log_format_is_json(tmp_path: Path):
    json_lines: dict[str, dict[str, object]] = {
        "storage": {"log_format": "json"}, "server": {"log_format": "json"}
    }  # fmt: skip
    cluster = LocalCluster(
        tmp_path / "waltz", storage_count=1, server_count=1, partition_count=1, settings=json_lines
    )
    try:
        cluster.up()
        for name, event in (("storage-1", "storage.ready"), ("server-1", "server.ready")):
            lines = cluster.log_path(name).read_text(encoding="utf-8").splitlines()
            found = [json.loads(line) for line in lines if " ready 127.0.0.1:" not in line]
            assert event in {each.get("event") for each in found}
            assert all({"time", "level", "logger"} <= {*each} for each in found)
    finally:
        cluster.down()
