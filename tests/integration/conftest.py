"""One real ZooKeeper process for the whole test run, on a free port."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Certificates, create_certificates
from tests.ports import free_port
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.local.zookeeper_process import zookeeper_command, zookeeper_config


class ZooKeeperProcess:
    """A ZooKeeper process that tests may kill, and start again on the same data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.config = directory / "zoo.cfg"
        self.config.write_text(zookeeper_config(directory / "data", self.port))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self.directory / "zookeeper.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                zookeeper_command(self.config), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, (self.directory / "zookeeper.log").read_text()
            assert time.monotonic() < deadline, f"no ZooKeeper at {self.host} in {TEST_TIMEOUT_S} s"
            time.sleep(0.05)  # no event reports that it listens

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1) as s,
        ):
            s.sendall(b"ruok")
            return s.recv(4) == b"imok"
        return False


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return "host:port" of a ZooKeeper for the whole test run; each test must use its own root."""
    process = ZooKeeperProcess(tmp_path_factory.mktemp("zookeeper"))
    process.start()
    yield process.host
    process.kill()


@pytest.fixture
def own_zookeeper(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    """Return a ZooKeeper that the test may kill and start again."""
    process = ZooKeeperProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of an authority of the test module."""
    return create_certificates(tmp_path_factory.mktemp("certificates"))
