"""Delta's library for the Spark of this environment, for tests of Delta tables.

`python -m tests.delta_jars` downloads it once, with Spark's own client of Maven's registry, into
this environment. Without it, these tests are skipped.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pyspark

VERSION: Final = "4.4.0"
_SPARKS: Final = ("4.0", "4.1", "4.2")
_SPARK: Final = ".".join(version("pyspark").split(".")[:2])
_DIRECTORY: Final = Path(sys.prefix) / f"delta-{VERSION}-spark-{_SPARK}"
# Spark has everything else that the library depends on.
_EXCLUDED: Final = (
    "com.fasterxml.jackson.core",
    "com.fasterxml.jackson.datatype",
    "io.unitycatalog",
    "javax.annotation",
    "org.apache.hadoop",
    "org.apache.logging.log4j",
    "org.apache.parquet",
    "org.locationtech.jts",
    "org.roaringbitmap",
    "org.scala-lang",
    "org.slf4j",
    "org.xerial.snappy",
)


def jars() -> list[Path]:
    """Return the files of the library; none if they were not downloaded."""
    return (
        sorted(_DIRECTORY.glob("jars/io.delta_*.jar")) if (_DIRECTORY / "complete").exists() else []
    )


def reason_without() -> str:
    """Return why there is no library."""
    if _SPARK not in _SPARKS:
        return f"Delta {VERSION} has no library for Spark {_SPARK}"
    return "Delta's library was not downloaded: python -m tests.delta_jars"


def settings() -> dict[str, str]:
    """Return the settings of a Spark session with Delta; none without the library."""
    found = jars()
    if not found:
        return {}
    return {
        "spark.jars": ",".join(map(str, found)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",  # of small tables
    }


def main() -> None:
    """Download the library, if this Spark has one and it is absent."""
    if jars() or _SPARK not in _SPARKS:
        return
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    excluded = ",".join(f"{group}:*" for group in _EXCLUDED)
    line = [str(submit), "--master", "local[1]"]
    line += ["--packages", f"io.delta:delta-spark_{_SPARK}_2.13:{VERSION}"]
    line += ["--exclude-packages", excluded, "--conf", f"spark.jars.ivy={_DIRECTORY}"]
    # A program of Spark's that ends at once.
    line += ["--class", "org.apache.spark.examples.DeltaHasNone", "spark-internal"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if list(_DIRECTORY.glob("jars/io.delta_delta-spark_*.jar")):
        (_DIRECTORY / "complete").touch()
    else:
        sys.stderr.write(f"no tests of Delta tables; Spark reported\n{done.stderr[-2000:]}\n")


if __name__ == "__main__":
    main()
