"""A cluster under load is upgraded from the released version and back, one process at a time.

Each order of storages and servers is tried. During the whole test, a client of this version checks
every outcome against the log, and clients of both versions append and read.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.cluster_commands import partitions_not_engaged
from tests.fault.doctor import remote_options, run_doctor
from tests.fault.load import Load, Scenario, wait_until, waltz_command
from tests.fault.released_version import packages_of, restart, run_script, unpack
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.local import LocalCluster

pytestmark = [pytest.mark.fault, pytest.mark.slow]

STORAGES = ("storage-1", "storage-2", "storage-3")
SERVERS = ("server-1", "server-2")
ORDERS = {
    "storages first": (*STORAGES, *SERVERS),
    "servers first": (*SERVERS, *STORAGES),
    "in turn": ("server-1", "storage-1", "storage-2", "server-2", "storage-3"),
}
# Appends with a lock, a lock conflict, a range and the feed, as an application does.
APPLICATION = """
import json, sys, threading
import waltz_core
from waltz_core.client import Callbacks, WaltzClient, lock
from waltz_core.errors import LockFailed

connect, hang_s, row = sys.argv[1], float(sys.argv[2]), bytes.fromhex(sys.argv[3])
seat = lock("seat", sys.argv[3])
applied, done = [], threading.Event()


class View(Callbacks):
    def __init__(self, mark):
        self.mark = mark

    def client_high_water_mark(self, partition):
        return self.mark

    def apply_transaction(self, transaction):
        applied.append(transaction.transaction_id)
        done.set()


with WaltzClient(connect) as client:
    mark = client.high_water_mark(0, linearizable=True)
    first = client.append(
        row, partition=0, write_locks=[seat], client_high_water_mark=mark
    ).result(hang_s)
    try:
        client.append(
            b"late", partition=0, write_locks=[seat], client_high_water_mark=mark
        ).result(hang_s)
        winner = None
    except LockFailed as error:
        winner = error.conflicting
    (chunk,) = client.read_range(0, first, first)
    client.subscribe(View(first - 1), [0])
    assert done.wait(hang_s), "the feed does not arrive"
print(json.dumps({
    "package": waltz_core.__file__, "first": first, "winner": winner,
    "is_equal": bytes(chunk.records)[36:-4] == row, "applied": applied[0],
}))
"""


@pytest.fixture(scope="module")
def released_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def scenario(
    released_packages: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenario]:
    """A cluster of which all processes run the released version."""
    cluster = LocalCluster(tmp_path_factory.mktemp("upgrade") / "waltz")
    with packages_of(released_packages):
        cluster.up()
    yield Scenario(cluster)
    cluster.down()


def check_clients(scenario: Scenario, released_packages: Path) -> None:
    """Let an application with each version append, lose a conflict, read and follow."""
    for directory in (released_packages, None):
        words = (scenario.cluster.connect, str(TEST_TIMEOUT_S), scenario.row(0).hex())
        document = json.loads(run_script(APPLICATION, *words, directory=directory))
        assert document["package"].startswith(str(released_packages)) == (directory is not None)
        assert document["winner"] >= document["first"] == document["applied"]
        assert document["is_equal"]


def replace(scenario: Scenario, load: Load, name: str, directory: Path | None) -> None:
    """Replace one process as docs/upgrade.md describes, and wait until the cluster is healthy."""
    restart(scenario.cluster, name, directory)
    wait_until("all replicas are engaged", lambda: not partitions_not_engaged(scenario.cluster))
    wait_until("no problems", lambda: not run_doctor(*remote_options(scenario.cluster.connect)))
    load.await_commits()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_cluster_is_upgraded_and_downgraded_under_load(
    scenario: Scenario, released_packages: Path, order: tuple[str, ...]
):
    with scenario.load() as load:
        load.await_commits()
        for name in order:
            replace(scenario, load, name, None)
            check_clients(scenario, released_packages)
        for name in reversed(order):
            replace(scenario, load, name, released_packages)
            check_clients(scenario, released_packages)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_files_of_a_newer_version_are_rejected_in_one_sentence(scenario: Scenario):
    """The file is not changed, so the newer version continues with it."""
    cluster = scenario.cluster
    cluster.kill("storage-3", signal.SIGTERM)
    file = cluster.directory / "storage-3" / "waltz-storage.ctl"
    before = file.read_bytes()
    newer = (1).to_bytes(4, "big") + before[4:]
    file.write_bytes(newer)
    (config,) = (cluster.directory / "conf").glob("storage-3.*")
    result = subprocess.run(
        waltz_command("storage", "run", "--config", str(config)),
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    assert result.returncode == 1
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("waltz-core: ")]
    assert f"{file}: control file header: expected version 0, found 1. Hint: if a newer" in sentence
    assert "Traceback" not in result.stderr
    assert file.read_bytes() == newer
    file.write_bytes(before)
    cluster.start("storage-3")
    wait_until("all replicas are engaged", lambda: not partitions_not_engaged(cluster))
