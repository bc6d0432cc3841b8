"""A server that no other server can connect to owns no partitions, and the doctor says why."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.certificates import make
from tests.commands import run_command
from tests.fault.child import Child
from tests.fault.gate import Gate
from tests.fault.load import Story, shown, wait_until
from tests.ports import free_port
from waltz_core.config import render_toml
from waltz_core.local import LocalCluster, running

STORAGE_COUNT = 1


class Server(Child):
    """A server in addition to those of the cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        settings: dict[str, object],
        program: Sequence[str] = ("-m", "waltz_core", "server", "run", "--config"),
    ) -> None:
        values = {"connect": cluster.connect, "zookeeper_session_timeout_ms": 1_500} | settings
        values = {"listen_host": "127.0.0.1", "advertised_host": "127.0.0.1"} | values
        config, self._log = folder / "server.toml", folder / "server.log"
        config.write_text(render_toml("server", values))
        with self._log.open("w") as log:
            self.run([sys.executable, *program, str(config)], log)

    def is_ready(self) -> bool:
        """Return whether it is registered."""
        assert self.process.poll() is None, self._log.read_text()
        return "server ready" in self._log.read_text()


def owners(cluster: LocalCluster) -> set[object]:
    """Return the addresses that own partitions."""
    partitions = shown(cluster)["partitions"]
    assert isinstance(partitions, dict)
    return {each["server"] for each in partitions.values()}


def doctor(cluster: LocalCluster) -> str:
    """Return what the doctor says."""
    words = ("doctor", "--connect", cluster.connect, "--directory", "nowhere")
    return run_command(*words).stdout


def test_a_server_with_an_untrusted_certificate_gets_no_partitions(tmp_path: Path):
    trusted, other = (make(tmp_path, name=name) for name in ("trusted", "other"))
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", trusted.settings))
    with running(tmp_path / "cluster", tls=file, storage_count=1, server_count=1) as cluster:
        story = Story(cluster)
        before = owners(cluster)
        port = free_port()
        shows = {"tls_certificate": other.certificate, "tls_key": other.key}
        server = Server(cluster, tmp_path, {"port": port, "tls": "on", **shows})
        try:
            with story.load() as load:
                wait_until("it is registered", server.is_ready)
                wait_until(
                    "the doctor says why",
                    lambda: "the peer's certificate is not accepted" in doctor(cluster),
                )
                assert f"server 127.0.0.1:{port} is assigned no partitions" in doctor(cluster)
                assert owners(cluster) == before
                load.await_commits()
        finally:
            server.kill()
        assert {each.outcome for each in story.ledger} <= {"committed", "refused"}
        story.check_agrees()


def test_a_running_server_that_becomes_unreachable_loses_its_partitions(
    story: Story, tmp_path: Path
):
    port = free_port()
    with Gate(lambda: port) as gate:
        address, others = f"127.0.0.1:{gate.port}", owners(story.cluster)
        settings = {"port": port, "advertised_port": gate.port}
        server = Server(story.cluster, tmp_path, settings)
        try:
            with story.load() as load:
                wait_until("it owns some", lambda: address in owners(story.cluster))
                load.await_commits()
                gate.shut()
                wait_until("it owns nothing", lambda: owners(story.cluster) == others)
                load.await_commits()
                wait_until("the doctor says so", lambda: "no partitions" in doctor(story.cluster))
                assert server.is_ready()
                gate.open()
                wait_until("it owns some again", lambda: address in owners(story.cluster))
                load.await_commits()
        finally:
            server.kill()
    story.check_agrees()


def test_a_server_that_is_cut_off_from_the_others_gets_nothing_when_all_storages_restart(
    story: Story, tmp_path: Path
):
    cluster = story.cluster
    wait_until("both own some", lambda: len(owners(cluster)) == 2)
    others = owners(cluster)
    settings = {"port": free_port(), "advertised_port": free_port()}
    server = Server(cluster, tmp_path, settings, ("-m", "tests.fault.walled_server"))
    try:
        wait_until("it is registered", server.is_ready)
        with story.load() as load:
            load.await_commits()
            for _ in range(2):
                cluster.kill("storage-1")
                cluster.start("storage-1")
                load.await_commits()
                # While no server had an open partition, it may have been given some.
                wait_until("the others own all", lambda: owners(cluster) == others)
                load.await_commits()
    finally:
        server.kill()
    story.check_agrees()
