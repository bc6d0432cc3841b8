"""Spark Declarative Pipelines: two runs of the project in examples/pipelines."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pyarrow.parquet as pq
import pyspark
import pytest

from tests.spark.connect_server import run_connect_server
from tests.spark.versions import needs_pyspark
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster

pytestmark = [pytest.mark.spark, needs_pyspark(4, 1, "there are no pipelines")]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipelines"
PAYMENT, ALERT = 1, 2


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example with separate checkpoints."""
    shutil.copytree(EXAMPLE, tmp_path / "project")
    spec = tmp_path / "project" / "spark-pipeline.yml"
    text = spec.read_text().replace("file:///tmp/payments-pipeline", f"file://{tmp_path / 'state'}")
    assert str(tmp_path) in text
    spec.write_text(text)
    return tmp_path / "project"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WaltzClient]:
    options = {"storage_count": 1, "server_count": 1, "partition_count": 2}
    with running_cluster(tmp_path / "cluster", **options) as cluster:
        monkeypatch.setenv("WALTZ_CONNECT", cluster.connect)
        with WaltzClient(cluster.connect, PATIENT_CLIENT) as found:
            yield found


@pytest.fixture
def remote(client: WaltzClient, tmp_path: Path) -> Iterator[str]:
    """The address of a Spark Connect server, whose catalog keeps the tables from run to run.

    Without `--remote` each run starts its own server, on a fixed port.
    """
    with run_connect_server(tmp_path / "server.log") as address:
        yield address


def pay(client: WaltzClient, *payments: tuple[str, int]) -> None:
    for account, amount in payments:
        payload = msgpack.packb({"account": account, "amount": amount})
        client.append(payload, header=PAYMENT).result()


def run(project: Path, remote: str) -> None:
    program = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    line = [program, "run", "--remote", remote]
    result = subprocess.run(
        line, cwd=project, capture_output=True, check=False, timeout=TEST_TIMEOUT_S
    )
    assert result.returncode == 0, (result.stdout + result.stderr).decode()


def rows(project: Path, table: str) -> list[tuple[object, ...]]:
    rows = pq.read_table(project.parent / "warehouse" / table).to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def alerts(client: WaltzClient) -> list[dict[str, object]]:
    rows = client.scan().read_all().to_pylist()
    return [msgpack.unpackb(row["data"]) for row in rows if row["header"] == ALERT]


@pytest.mark.slow
def test_each_run_adds_the_new_transactions_once(client: WaltzClient, project: Path, remote: str):
    pay(client, ("a", 10), ("b", 2000))
    run(project, remote)
    assert [row[:2] for row in rows(project, "payments")] == [("a", 10), ("b", 2000)]
    assert rows(project, "totals") == [("a", 1, 10), ("b", 1, 2000)]
    assert alerts(client) == [{"account": "b", "amount": 2000}]
    pay(client, ("a", 5), ("a", 3000))
    run(project, remote)
    assert [row[:2] for row in rows(project, "payments")] == [
        *(("a", 5), ("a", 10), ("a", 3000), ("b", 2000))
    ]
    assert rows(project, "totals") == [("a", 3, 3015), ("b", 1, 2000)]
    assert sorted(alert["amount"] for alert in alerts(client)) == [2000, 3000]
