"""The client and the commands of this version in a cluster of Waltz 0.13.

The znodes are those of 0.13, byte by byte. The server is the model in
`original_server_for_clients.py`. No process of this version has written to ZooKeeper.
"""

import json
import struct
from collections.abc import Iterator

import pytest

from tests.client_contract import (
    RecordingCallbacks,
    RecordingContext,
    append_and_wait,
    read_payloads,
)
from tests.original_server_for_clients import OriginalCluster
from tests.original_zookeeper import ROOT, Nodes
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cli.main import main
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import Unavailable, Unreachable

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def nodes(zookeeper: str) -> Iterator[Nodes]:
    with OriginalCluster(2, server_count=2) as cluster:
        nodes = Nodes(zookeeper, cluster)
        yield nodes
        nodes.close()


@pytest.fixture
def connect(zookeeper: str, nodes: Nodes) -> str:
    return f"{zookeeper}{ROOT}"


def test_a_client_needs_no_znode_of_this_version_and_leaves_none(connect: str, nodes: Nodes):
    before = nodes.paths()
    with WaltzClient(connect) as client:
        assert client.cluster().name == "original"
        ids = [append_and_wait(client, 0, b"%d" % i) for i in range(5)]
        assert ids == [0, 1, 2, 3, 4]
        assert read_payloads(client, 0, 0) == [b"%d" % i for i in range(5)]
        ledger = RecordingCallbacks(-1)
        client.subscribe(ledger, [0])
        ledger.wait_until(lambda: len(ledger.applied) == 5)
        last_client_id, _ = nodes.zookeeper.get(f"{ROOT}/ids/client")
        # One client writes, the other reads headers.
        assert struct.unpack(">i", last_client_id) == (2,)
        assert client.client_id == 1
    assert nodes.paths() == before


def test_clients_follow_a_partition_that_moves(connect: str, nodes: Nodes):
    with WaltzClient(connect) as client:
        cluster = nodes.cluster
        assert append_and_wait(client, 0, b"here") == 0
        cluster.call(cluster.partition(0).may_commit.clear)
        future = client.append(b"on its way", partition=0)
        while not cluster.partition(0).pending:
            assert not future.done()
        cluster.move(0, 1, kept=1)
        nodes.assign()
        assert future.result(TEST_TIMEOUT_S) == 1
        assert append_and_wait(client, 0, b"there") == 2
        context = RecordingContext(0)
        assert client.submit(context).result(TEST_TIMEOUT_S) == 3
        assert [
            struct.unpack_from(">i", record[0], 4)[0] for record in cluster.logs[0].records
        ] == [
            1,
            1,
            2,
            2,
        ]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    return code, capsys.readouterr().out


def test_client_commands_work_with_a_0_13_server(connect: str, capsys: pytest.CaptureFixture[str]):
    at = ("--connect", connect)
    assert run(capsys, "client", "append", "one", "two", "--partition", "1", *at) == (0, "0\n1\n")
    read = run(capsys, "client", "read", "--partition", "1", *at)
    assert read == (0, "0\t0\tone\n1\t0\ttwo\n")
    watched = ("--partition", "1", "--first", "0", "--transactions", "2")
    assert run(capsys, "client", "watch", *watched, *at) == read
    code, text = run(capsys, "client", "high-water-mark", "--linearizable", "--json", *at)
    assert (code, json.loads(text)) == (0, {"0": -1, "1": 1})
    few = ("--clients", "2", "--transactions", "20", "--interval-ms", "1")
    code, text = run(capsys, "client", "validate", *few, *at)
    assert code == 0, text


def test_commands_that_query_servers_work_with_0_13_servers(
    connect: str, capsys: pytest.CaptureFixture[str]
):
    code, text = run(capsys, "cluster", "verify", "--connect", connect, "--json")
    findings = json.loads(text)["findings"]
    assert code == 1  # findings: the cluster has no storages
    assert not [finding for finding in findings if "server" in finding]
    code, text = run(capsys, "cluster", "check-connectivity", "--connect", connect, "--json")
    assert json.loads(text)["is_healthy"]
    code, text = run(capsys, "doctor", "--connect", connect, "--json")
    assert "does not answer" not in text


def test_a_server_that_is_too_old_is_rejected_in_one_sentence(zookeeper: str):
    with OriginalCluster(1, versions=(0, 1, 2)) as cluster:
        nodes = Nodes(zookeeper, cluster)
        why = "cannot report that a client is ahead of the log"
        try:
            for timeout_ms in (500, 5_000, 50_000):
                config = ClientConfig(request_timeout_ms=timeout_ms)
                with (
                    WaltzClient(f"{zookeeper}{ROOT}", config) as client,
                    pytest.raises(Unavailable) as caught,
                ):
                    append_and_wait(client, 0)
                if why in str(caught.value):
                    break
                # On a busy machine, the time limit may end before the command has queried the
                # server. The next command has more time.
        finally:
            nodes.close()
        assert isinstance(caught.value, Unreachable)
        assert why in str(caught.value)
