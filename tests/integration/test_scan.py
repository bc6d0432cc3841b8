"""`WaltzClient.scan` and `client export` against a local cluster, read by tools for tables."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgpack
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import run_command
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.errors import UsageError
from waltz_core.local import LocalCluster, running_cluster

ROWS = 600
FILLER = "x" * 50_000
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("transaction_id", pa.int64()),
        ("header", pa.int32()),
        ("id", pa.int64()),
        ("filler", pa.string()),
    ]
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "local", storage_count=1) as cluster:
        with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
            futures = [
                client.append(
                    msgpack.packb({"id": number, "filler": FILLER}),
                    partition=number % 2,
                    header=number,
                )
                for number in range(ROWS)
            ]
            for future in futures:
                future.result()
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[WaltzClient]:
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as opened:
        yield opened


def test_a_scan_of_all_partitions_has_every_transaction(client: WaltzClient):
    reader = client.scan(schema=SCHEMA)
    allocated = pa.total_allocated_bytes()
    most, found = 0, []
    for batch in reader:
        most = max(most, pa.total_allocated_bytes() - allocated)
        found += batch.select(["partition", "transaction_id", "id"]).to_pylist()
    assert found == [
        {"partition": part, "transaction_id": index, "id": 2 * index + part}
        for part in range(2)
        for index in range(ROWS // 2)
    ]
    # 30 MB were read. A chunk has 4 MiB, and its batch has the same payloads, decoded.
    assert most < 16 * 1024 * 1024


def test_polars_duckdb_and_pandas_read_a_scan(client: WaltzClient):
    columns = pa.schema([SCHEMA.field("id"), SCHEMA.field("header")])
    expected = sum(range(0, ROWS, 2))
    frame = pl.from_arrow(client.scan(0, schema=columns))
    assert frame["id"].sum() == frame["header"].sum() == expected
    log = client.scan(0, schema=columns)  # noqa: F841 - DuckDB finds it by its name
    assert duckdb.sql("SELECT sum(id) FROM log WHERE header >= 0").fetchall() == [(expected,)]
    assert client.scan(0, schema=columns).read_pandas()["id"].sum() == expected


def test_duckdb_can_stop_a_scan_early_and_its_error_names_the_transaction(client: WaltzClient):
    log = client.scan(schema=SCHEMA)  # noqa: F841 - as above
    assert len(duckdb.sql("SELECT id FROM log LIMIT 3").fetchall()) == 3
    wrong = client.scan(0, schema=pa.schema([("id", pa.string())]))  # noqa: F841 - as above
    with pytest.raises(duckdb.Error, match=r"partition 0, transaction 0, column 'id'"):
        duckdb.sql("SELECT * FROM wrong").fetchall()


def test_closing_a_client_ends_the_reads_of_its_open_readers(cluster: LocalCluster):
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        reader = client.scan(0)
        assert reader.read_next_batch().num_rows > 0
    with pytest.raises(UsageError, match="closed"):
        reader.read_all()
    reader.close()


def test_an_export_in_each_format_contains_the_selected_transactions_and_columns(
    cluster: LocalCluster, tmp_path: Path
):
    common = ["client", "export", "--connect", cluster.connect, "--partition", "1", "--first", "7"]
    common += ["--last", "9", "--column", "transaction_id", "--column", "id:int64"]
    for each in ("parquet", "csv", "json"):
        result = run_command(*common, "--format", each, "--output", str(tmp_path / each))
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
        assert result.stderr == "exported 3 transactions\n"
    expected = [{"transaction_id": each, "id": 2 * each + 1} for each in (7, 8, 9)]
    assert pq.read_table(tmp_path / "parquet").to_pylist() == expected
    lines = (tmp_path / "json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert (tmp_path / "csv").read_text() == '"transaction_id","id"\n7,15\n8,17\n9,19\n'

    command = [sys.executable, "-m", "waltz_core", *common, "--format", "csv"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stdout == (tmp_path / "csv").read_text()


def test_a_failed_export_leaves_no_file(cluster: LocalCluster, tmp_path: Path):
    result = run_command(
        *["client", "export", "--connect", cluster.connect, "--format", "json"],
        *["--column", "id:string", "--output", str(tmp_path / "out")],
    )
    assert result.returncode == 1
    assert "partition 0, transaction 0, column 'id': expected string, found 0" in result.stderr
    assert not list(tmp_path.iterdir())
