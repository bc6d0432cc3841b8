"""A daemon starts while ZooKeeper does not answer for a while."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.child import ChildProcess
from tests.fault.load import wait_until, waltz_command
from tests.fault.port_proxy import PortProxy
from tests.ports import free_port
from waltz_core.config import render_toml
from waltz_core.local import LocalCluster


class Daemon(ChildProcess):
    """An additional server or storage, which reaches ZooKeeper through a proxy."""

    def __init__(self, cluster: LocalCluster, folder: Path, kind: str, gate: PortProxy) -> None:
        (zookeeper,) = cluster.zookeepers
        values: dict[str, object] = {
            "connect": cluster.connect.replace(f":{zookeeper.port}", f":{gate.port}"),
            "port": free_port(),
            # The time limit of one request is short, the time limit of the start is long.
            "zookeeper_request_timeout_ms": 500,
            "zookeeper_connect_timeout_ms": 60_000,
        }
        if kind == "storage":
            values |= {"directory": str(folder / "data"), "admin_port": free_port()}
        config, self._log = folder / "daemon.toml", folder / "log"
        config.write_text(render_toml(kind, values))
        with self._log.open("w") as log:
            self.run(waltz_command(kind, "run", "--config", str(config)), log)

    def output(self) -> str:
        """Return the daemon's log; fail if the daemon has exited."""
        text = self._log.read_text(encoding="utf-8")
        assert self.process.poll() is None, text
        return text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Yield a cluster of which only ZooKeeper runs."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"), exit_with_parent=True)
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.down()


# ZooKeeper's first answer is for the request for a session. The daemon reads and registers later.
@pytest.mark.parametrize(
    ("kind", "answers"), [("server", 1), ("server", 4), ("storage", 2), ("storage", 6)]
)
def test_a_starting_daemon_waits_for_a_zookeeper_that_does_not_answer(
    cluster: LocalCluster, tmp_path: Path, kind: str, answers: int
):
    (zookeeper,) = cluster.zookeepers
    with PortProxy(lambda: zookeeper.port) as gate:
        gate.stall(after_answers=answers)
        daemon = Daemon(cluster, tmp_path, kind, gate)
        try:
            wait_until(
                "the log states what the start waits for",
                lambda: "zookeeper.waiting" in daemon.output(),
            )
            assert f"{kind} ready" not in daemon.output()
            gate.resume()
            wait_until("the daemon is ready", lambda: f"{kind} ready" in daemon.output())
        finally:
            daemon.kill()
