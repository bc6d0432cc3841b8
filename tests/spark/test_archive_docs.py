"""The snippets of docs/archive-objects.md, in their order, on the archive of a local cluster."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.commands import run_command
from tests.fault.load import wait_until
from tests.spark.test_spark_docs import ROOT, snippets
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.objects import SCHEMA
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster

pytestmark = pytest.mark.spark

PAGE = "docs/archive-objects.md"
CONNECT = "zk1:2181/waltz/payments"
APPENDS, ROWS_OF_ONE, HEADERS = 3, 100, 3
ROW_OF_TABLE = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)


def append(connect: str, start: int) -> None:
    """Append rows with several headers from an ID on."""
    with WaltzClient(connect) as client:
        futures = [
            client.append(b"row %d" % number, partition=0, header=number % HEADERS)
            for number in range(start, start + ROWS_OF_ONE)
        ]
        for future in futures:
            future.result(TEST_TIMEOUT_S)


def listed(connect: str, folder: Path) -> int:
    """Run the page's command, and return the last archived ID.

    The snippets use only the last row of the first object, and the first row of the last object. So
    they are tested as after an expiry and a restore, when objects have rows that do not belong to
    the log.
    """
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    (line,) = re.findall(r"^waltz-core (.*) > objects.json$", text, re.MULTILINE)
    result = run_command(*line.replace(CONNECT, connect).split())
    status = json.loads(result.stdout)
    (partition,) = status["partitions"]
    objects = partition["files"]
    if len(objects) > 1:
        objects[0]["first"] = objects[0]["last"]
        objects[-1]["last"] = objects[-1]["first"]
    (folder / "objects.json").write_text(json.dumps(status))
    archived: int | None = partition["archived"]
    return -1 if archived is None else archived


@pytest.mark.slow
def test_every_snippet_works(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings: dict[str, dict[str, object]] = {
        "storage": {
            "archive_url": f"file://{tmp_path}/archive",
            "archive_object_bytes": 4_000,
            "archive_age_ms": 0,
        },
        "server": {"archive_interval_ms": 100},
    }
    names: dict[str, Any] = {"spark": spark}
    options = {"settings": settings, "server_count": 1, "partition_count": 1}
    with running_cluster(tmp_path / "cluster", **options) as cluster:
        for start in range(0, APPENDS * ROWS_OF_ONE, ROWS_OF_ONE):
            append(cluster.connect, start)
            last = start + ROWS_OF_ONE - 1
            wait_until(
                "all transactions are archived",
                lambda last=last: listed(cluster.connect, tmp_path) == last,
            )
    # The snippet needs no cluster.
    found = snippets(PAGE)
    assert len(found) == 5
    for text in found:
        exec(compile(text, ROOT / PAGE, "exec"), names)
    objects = names["objects"]
    assert len(objects) > 2
    ids = range(objects[0]["first"], objects[-1]["last"] + 1)
    assert ROWS_OF_ONE <= len(ids) < APPENDS * ROWS_OF_ONE
    assert names["table"].column("transaction_id").to_pylist() == list(ids)
    assert names["table"].column("data").to_pylist() == [
        b"row %d" % transaction_id for transaction_id in ids
    ]
    counts = [
        len([transaction_id for transaction_id in ids if transaction_id % HEADERS == header])
        for header in range(HEADERS)
    ]
    assert names["by_header"] == list(enumerate(counts))
    ones = [b"row %d" % transaction_id for transaction_id in ids if transaction_id % HEADERS == 1]
    assert names["payloads"]["data"].to_list() == ones
    rows = names["rows"].select("transaction_id", "data").orderBy("transaction_id").collect()
    assert [(row[0], bytes(row[1])) for row in rows] == [
        (transaction_id, b"row %d" % transaction_id) for transaction_id in ids
    ]


def test_the_documented_table_has_the_columns_of_an_archived_object():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    found = {name: kind.strip() for name, kind in ROW_OF_TABLE.findall(text)}
    assert found == {each.name: str(each.type) for each in SCHEMA}
