"""The Python snippets of README.md and docs/spark.md against a real cluster."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.ports import free_port
from tests.spark.versions import needs_pyspark
from waltz_core.errors import LockFailed
from waltz_spark.functions import lock

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
CONNECT = re.compile(r"zk1:2181(?:,zk2:2181)?/waltz/\w+")
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SINCE = "2026-11-21T10:00:00Z"
STOCK = '''\
"""The module of the page: the rows stay as they are."""


def newly_computed(refused, taken):
    assert taken.column("item").to_pylist() == [7]
    return refused


'''


def snippets(page: str) -> list[str]:
    """Return the snippets of a page, each at its line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [
        "\n" * (text.count("\n", 0, match_.start()) + 1) + match_[1]
        for match_ in SNIPPET.finditer(text)
    ]
    assert len(found) == text.count("```python")
    return found


class Reader:
    """Runs snippets one after the other, in one namespace."""

    def __init__(self, spark: SparkSession, connect: str, page: str) -> None:
        self.page, self.connect = page, connect
        self.names: dict[str, Any] = {
            "spark": spark,
            "waltz_spark": waltz_spark,
            "connect": connect,
            "LockFailed": LockFailed,
        }

    def run(self, snippet: str, **names: object) -> Mapping[str, Any]:
        """Run a snippet with further names that it assumes; return all names."""
        self.names |= names
        code = CONNECT.sub(self.connect, snippet).replace(SINCE, "2013-01-01T00:00:00Z")
        code = code.replace("port=9404", f"port={free_port()}")
        exec(compile(code, ROOT / self.page, "exec"), self.names)
        return self.names


@pytest.fixture
def separate_session(spark: SparkSession) -> Iterator[SparkSession]:
    """A separate session; its listeners and queries end with it."""
    separate_session = spark.newSession()
    yield separate_session
    for query in separate_session.streams.active:
        query.stop()
    # Without this call, the separate session stays the active session of the thread, and objects of
    # other sessions are not found.
    spark.createDataFrame([], "nothing int")


def rows(spark: SparkSession, item: int) -> DataFrame:
    """Return one order of an item, with its lock."""
    order = spark.sql(f"SELECT 1 AS order_id, {item} AS item, 2 AS count")
    return order.withColumn("write_locks", F.array(lock("item", F.col("item"))))


def test_the_snippet_of_the_readme_works(separate_session: SparkSession, connect: str) -> None:
    (snippet,) = snippets("README.md")
    names = Reader(separate_session, connect, "README.md").run(
        snippet,
        df=separate_session.sql("SELECT 'LX 1' AS data"),
        decide=lambda flights: flights.where("partition >= 0").select("data").limit(1),
    )
    assert names["result"].counts["committed"] == 1
    assert names["result"].rejected.count() == 0


@pytest.mark.slow
@needs_pyspark(4, 2, "there is no lag")
def test_the_snippets_of_the_spark_page_work(
    separate_session: SparkSession, connect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last snippet needs a server of Spark Connect; test_connect.py opens such sessions.
    first, recompute, error, stream, lag, write, export, traces, feed, _remote = snippets(
        "docs/spark.md"
    )
    reader = Reader(separate_session, connect, "docs/spark.md")
    assert reader.run(first)["spark"].version == separate_session.version
    marks = waltz_spark.snapshot(separate_session, connect).high_water_marks
    waltz_spark.append(
        rows(separate_session, 7), connect, high_water_marks=marks, dataFormat="msgpack"
    )

    reader.run(
        recompute,
        **stock(separate_session, recompute, tmp_path),
        orders=rows(separate_session, 7),
        marks=marks,
    )

    late = (
        rows(separate_session, 7)
        .select(F.lit("late").alias("data"), "write_locks")
        .withColumn("client_high_water_mark", F.lit(-1).cast("long"))
    )
    reader.run(error, df=late)
    assert "a row was rejected" in capsys.readouterr().out

    counts: list[int] = []
    names = reader.run(
        stream,
        spark=separate_session,
        settle=lambda batch, _number: counts.append(batch.count()),
        place=str(tmp_path / "settled"),
    )
    names["query"].processAllAvailable()
    assert sum(counts) == separate_session.read.format("waltz").load(connect).count()
    reader.run(lag)

    separate_session.sql("SELECT 'changed' AS data").write.parquet(str(tmp_path / "in"))
    changes = separate_session.readStream.schema("data string").parquet(str(tmp_path / "in"))
    reader.run(write, changes=changes, place=str(tmp_path / "written"), results=str(tmp_path / "r"))
    for query in separate_session.streams.active:
        query.processAllAvailable()
    assert separate_session.read.parquet(str(tmp_path / "r" / "batch=0")).count() == 1
    assert (
        separate_session.read.format("waltz").load(connect).where("data = 'changed'").count() == 1
    )

    reader.run(export)
    assert callable(reader.run(traces)["start"])  # test_task_spans.py calls such a function
    # tests/spark/test_change_feed.py reads feeds; the payloads of this log are not changes of rows.
    assert "_change_type" in reader.run(feed)["changes"].columns


def stock(spark: SparkSession, snippet: str, folder: Path) -> dict[str, object]:
    """Pass the function of a snippet to Spark, in a module with the name in the snippet."""
    function = snippet.strip().split("\n\n")[0]
    path = folder / "stock.py"
    path.write_text(STOCK + function + "\n", encoding="utf-8")
    spark.addArtifact(str(path), pyfile=True)
    sys.path.insert(0, str(folder))
    return {}
