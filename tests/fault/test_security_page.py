"""An open cluster becomes a protected one under load, by the commands of docs/security.md."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.fault.load import are_all_replicas_engaged, owner_addresses, wait_until
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import Callbacks, Transaction, WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import OutcomeUnknown, PermissionDenied, TlsFailed, Unavailable, WaltzError
from waltz_core.local import LocalCluster

if TYPE_CHECKING:
    from concurrent.futures import Future

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONNECT_OF_PAGE = "zk1:2181,zk2:2181/waltz/payments"
HOST = "127.0.0.1"
PARTITIONS = 4
# The number of rows that are sent to a partition before their outcomes are awaited, and the pause
# after these rows.
BURST, PAUSE_S = 5, 0.1
SESSION = {"zookeeper_session_timeout_ms": 3_000}


class Page:
    """The blocks of the page in their order, with the paths and addresses of this test."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
        for name, value in {
            CONNECT_OF_PAGE: cluster.connect.partition("?")[0],
            "/etc/waltz": str(directory),
            "s1.example s2.example": HOST,
        }.items():
            assert name in text
            text = text.replace(name, value)
        self._blocks = iter(BLOCK.findall(text))
        self.commands: list[str] = []

    def next(self, language: str) -> str:
        """Return the next block, which has this language."""
        found, text = next(self._blocks)
        assert found == language, text
        return str(text)

    def settings(self) -> dict[str, object]:
        """Return the settings of the next round."""
        return tomllib.loads(self.next("toml"))

    def run(self) -> None:
        """Run the lines of the next block: the project's commands here, others in a shell."""
        script = self.next("bash")
        if "waltz-core" not in script:
            subprocess.run(["/bin/sh", "-ec", script], check=True)
            return
        for words in map(shlex.split, script.splitlines()):
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                os.environ[name] = value
                continue
            result = run_command(*words[1:])
            assert result.returncode == 0, (words, result.stdout, result.stderr)
            self.commands.append(" ".join(words[1:3]))

    def check_is_finished(self) -> None:
        assert list(self._blocks) == []


class Journal:
    """What an application has received, over several clients: outcomes of appends, and a feed."""

    def __init__(self) -> None:
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.repeated: list[WaltzError] = []
        self.failures: list[BaseException] = []
        self.applied: dict[int, list[tuple[int, bytes]]] = {
            number: [] for number in range(PARTITIONS)
        }
        self._numbers = itertools.count()

    def new_row(self, partition: int) -> bytes:
        return b"%d/%d" % (partition, next(self._numbers))

    def await_progress(self) -> None:
        """Wait until each partition has committed more rows, and its feed has delivered them."""
        wanted = {each: len(self.applied[each]) + BURST for each in self.applied}
        wait_until(
            "the feed continues",
            lambda: (
                bool(self.failures)
                or all(len(self.applied[each]) >= count for each, count in wanted.items())
            ),
        )
        assert self.failures == []

    def check_outcomes_against_log(self, connect: str) -> None:
        """Check that no acknowledged append is lost or duplicated, and that the feed has no gap."""
        assert self.failures == []
        with WaltzClient(connect, PATIENT_CLIENT) as client:
            log = {partition: read_all(client, partition) for partition in range(PARTITIONS)}
        rows = [row for each in log.values() for _, row in each]
        assert len(rows) == len(set(rows))
        for partition, found in log.items():
            assert [number for number, _ in found] == list(range(len(found)))
            assert self.applied[partition] == found
        at = {(each, number): row for each, found in log.items() for number, row in found}
        assert self.acknowledged == at


def read_all(client: WaltzClient, partition: int) -> list[tuple[int, bytes]]:
    last = client.high_water_mark(partition, linearizable=True)
    chunks = client.read_range(partition, 0, last)
    return [(int(row.transaction_id), row.data) for chunk in chunks for row in chunk.rows()]


class Feed(Callbacks):
    """Continues after the last transaction of an earlier client."""

    def __init__(self, journal: Journal) -> None:
        self._applied = journal.applied

    def client_high_water_mark(self, partition: int) -> int:
        return self._applied[partition][-1][0] if self._applied[partition] else -1

    def apply_transaction(self, transaction: Transaction) -> None:
        data = transaction.data()
        assert isinstance(data, bytes)
        self._applied[transaction.partition_id].append((int(transaction.transaction_id), data))


class Application:
    """Appends to all partitions, and repeats appends as docs/client.md describes."""

    def __init__(self, connect: str, journal: Journal) -> None:
        self._journal = journal
        self._client = WaltzClient(connect, PATIENT_CLIENT)
        self._client.subscribe(Feed(journal))
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(partition,)) for partition in range(PARTITIONS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for all outcomes, and until the feed has delivered them."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()
        applied = self._journal.applied
        wait_until(
            "the feed has all acknowledged transactions",
            lambda: (
                bool(self._journal.failures)
                or sum(map(len, applied.values())) >= len(self._journal.acknowledged)
            ),
        )
        self._client.close()

    def _run(self, partition: int) -> None:
        try:
            while not self._is_stopping.wait(PAUSE_S):
                rows = [self._journal.new_row(partition) for _ in range(BURST)]
                sent = [(row, self._client.append(row, partition=partition)) for row in rows]
                for row, future in sent:
                    self._settle(partition, row, future)
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self._journal.failures.append(error)

    def _settle(self, partition: int, row: bytes, future: "Future[int]") -> None:
        """Record the ID of a row; append the row again until it has an ID."""
        while True:
            try:
                number = future.result(TEST_TIMEOUT_S)
            except OutcomeUnknown as error:
                self._journal.repeated.append(error)
                found = [each for each, data in read_all(self._client, partition) if data == row]
                if found:
                    number = found[0]
                    break
            except WaltzError as error:
                if not error.retriable:
                    raise
                self._journal.repeated.append(error)
            else:
                break
            future = self._client.append(row, partition=partition)
        self._journal.acknowledged[partition, int(number)] = row


@contextmanager
def application(connect: str, journal: Journal) -> Iterator[None]:
    application = Application(connect, journal)
    try:
        yield
    finally:
        application.stop()


def restart_daemons(cluster: LocalCluster, settings: dict[str, object], journal: Journal) -> None:
    """Restart storages and servers with these settings, one after the other."""
    configure(cluster, settings)
    for member in cluster.members:
        if member.kind == "zookeeper":
            continue
        cluster.kill(member.name, signal.SIGTERM)
        cluster.start(member.name)
        wait_until(
            "both servers own partitions", lambda: len(owner_addresses(cluster) - {None}) == 2
        )
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(cluster))
        journal.await_progress()


def configure(cluster: LocalCluster, settings: dict[str, object]) -> None:
    cluster._settings = dict.fromkeys(("server", "storage"), SESSION | settings)


def logs(cluster: LocalCluster) -> str:
    return "".join(cluster.log_path(member.name).read_text() for member in cluster.members)


def create_certificates(directory: Path) -> None:
    """Run the commands of docs/operations.md for a machine that is known by its address."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    script = page.partition("## TLS")[2].split("```")[1].replace("DNS:$HOST", "IP:$HOST")
    environment = os.environ | {"HOST": HOST}
    subprocess.run(["/bin/sh", "-ec", script], cwd=directory, env=environment, check=True)


def check_unauthorized(cluster: LocalCluster, authorities: Path) -> None:
    """Check that a process without TLS, and a process without a token, are rejected."""
    connect = cluster.connect.partition("?")[0]
    for timeout_ms in (2_000, 20_000, 200_000):
        with (
            WaltzClient(connect, ClientConfig(request_timeout_ms=timeout_ms)) as client,
            pytest.raises(Unavailable) as caught,
        ):
            client.high_water_mark(0)
        if isinstance(caught.value, TlsFailed):
            break
        # On a busy machine, the request may time out before the client has connected. The next
        # client has more time.
    assert isinstance(caught.value, TlsFailed)
    with (
        WaltzClient(f"{connect}?tls={authorities}", PATIENT_CLIENT) as client,
        pytest.raises(PermissionDenied, match="anonymous has no grant"),
    ):
        client.high_water_mark(0)


@pytest.mark.slow
def test_an_open_cluster_is_protected_by_ten_commands_without_a_failed_append(
    tmp_path: Path,
    cluster_of: Callable[[LocalCluster], LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("WALTZ_CONNECT", "")  # the page changes it
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.chdir(files)
    cluster = cluster_of(LocalCluster(tmp_path / "c", server_count=2, partition_count=PARTITIONS))
    cluster.prepare()
    page, journal = Page(cluster, files), Journal()
    create_certificates(files)
    page.run()
    configure(cluster, page.settings())
    cluster.up()
    with application(cluster.connect, journal):
        journal.await_progress()
        page.run()
        cluster._load_state().auth_file = str(files / "members.auth")
        restart_daemons(cluster, page.settings(), journal)
        assert "tls.plain_tcp_accepted" not in logs(cluster)
        page.run()
        restart_daemons(cluster, page.settings(), journal)
    assert "anonymous has no grant of append" in logs(cluster)
    assert "tls.plain_tcp_accepted" in logs(cluster)
    connect = page.next("").strip()
    with application(connect, journal):
        journal.await_progress()
        page.run()
        journal.await_progress()
        restart_daemons(cluster, page.settings(), journal)
        page.run()
        check_unauthorized(cluster, files / "ca.pem")
        journal.await_progress()
    assert len(page.commands) == 10
    page.check_is_finished()
    journal.check_outcomes_against_log(connect)
    assert "network.insecure" not in logs(cluster)
