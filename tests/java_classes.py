"""Class data archives for Spark and ZooKeeper, which halve the CPU of a start.

The tests start dozens of Java processes. `python -m tests.java_classes` creates the archives, once
for each combination of Java and PySpark. Without a matching archive Java loads its classes as
usual.
"""

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests import spark_home
from tests.ports import free_port
from waltz_core import local
from waltz_core.local.zookeeper_process import JAVA_OPTIONS_VARIABLE, find_java

SPARK_OPTIONS_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
# In tests, Spark spends most of its time on its start. During the start, Java's second compiler
# costs more than it saves.
_SPARK_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Java must not print a line to standard output if the archive does not match.
_QUIET_OPTIONS: Final = "-Xlog:disable -Xlog:all=error:stderr"
_ARCHIVE_DIRECTORY: Final = Path(sys.prefix) / "java-classes"
_SQL_QUERY: Final = "SELECT count(*), sum(id) FROM range(100) WHERE id % 2 = 0"


def _archive_path(name: str) -> Path:
    java = Path(find_java()).resolve()
    spark_home = os.environ.get("SPARK_HOME", "")  # no archive matches another class path
    identity = f"{java} {java.stat().st_mtime_ns} {version('pyspark')} {sys.prefix} {spark_home}"
    return _ARCHIVE_DIRECTORY / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.jsa"


def _archive_option(archive: Path) -> str:
    return f"-XX:SharedArchiveFile={archive} {_QUIET_OPTIONS}" if archive.exists() else ""


def use_class_archives() -> None:
    """Use the existing archives in the processes that this one starts."""
    spark_home.use_spark_home()
    spark = f"{_SPARK_OPTIONS} {_archive_option(_archive_path('spark'))}".strip()
    os.environ.setdefault(SPARK_OPTIONS_VARIABLE, spark)
    os.environ.setdefault(JAVA_OPTIONS_VARIABLE, _archive_option(_archive_path("zookeeper")))


def _start_zookeeper() -> None:
    with local.running_cluster(storage_count=1, server_count=1):
        pass


def _start_spark() -> None:
    """Run the most frequent operations of tests: a batch, a stream, SQL, and Spark Connect."""
    import waltz_spark  # noqa: PLC0415 - ZooKeeper's archive needs no Spark

    port = str(free_port())
    settings = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": port,
    }
    with local.running_cluster(storage_count=1, server_count=1) as cluster:
        spark = waltz_spark.session("classes", master="local[2]", **settings)
        java = spark.sparkContext._gateway.proc
        rows = spark.range(100).selectExpr("cast(id as string) AS data")
        rows.write.format("waltz").option("connect", cluster.connect).mode("append").save()
        source = spark.read.format("waltz").option("connect", cluster.connect).load()
        source.groupBy("partition").count().orderBy("partition").toPandas()
        feed = spark.readStream.format("waltz").option("connect", cluster.connect).load()
        stream = feed.writeStream.format("noop").trigger(availableNow=True)
        stream.start().awaitTermination()
        client = f"SparkSession.builder.remote('sc://127.0.0.1:{port}').getOrCreate()"
        code = f"from pyspark.sql import SparkSession; {client}.sql({_SQL_QUERY!r}).collect()"
        subprocess.run([sys.executable, "-c", code], check=True)
        spark.stop()
        java.stdin.close()  # then Java ends, and writes the archive
        java.wait()


def _create_archive(name: str, variable: str, options: str) -> None:
    archive = _archive_path(name)
    if archive.exists():
        return
    unfinished, log = archive.with_suffix(f".{os.getpid()}"), archive.with_suffix(".log")
    options_with_archive = (
        f"{options} -XX:ArchiveClassesAtExit={unfinished} {_QUIET_OPTIONS}".strip()
    )
    line = [sys.executable, "-m", "tests.java_classes", name]
    with log.open("wb") as out:
        environment = {**os.environ, variable: options_with_archive}
        ended = subprocess.run(line, env=environment, stdout=out, stderr=out, check=False)
    if ended.returncode == 0 and unfinished.exists():
        unfinished.rename(archive)
    else:
        sys.stderr.write(f"no archive of {name}'s classes, so it starts as ever; see {log}\n")


def main(names: list[str]) -> None:
    """Create missing archives; with a name, run the process whose classes are archived."""
    spark_home.use_spark_home()
    if names == ["zookeeper"]:
        _start_zookeeper()
    elif names == ["spark"]:
        _start_spark()
    else:
        _ARCHIVE_DIRECTORY.mkdir(exist_ok=True)
        _create_archive("zookeeper", JAVA_OPTIONS_VARIABLE, "")
        _create_archive("spark", SPARK_OPTIONS_VARIABLE, _SPARK_OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1:])
