"""The libraries of Delta and Iceberg for the Spark of this environment, for tests of tables.

`python -m tests.table_libraries` downloads them once into this environment, with the Maven client
of Spark. The tests that need a missing library are skipped.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import pyspark

_SPARK_VERSION: Final = ".".join(version("pyspark").split(".")[:2])


class TableLibrary(NamedTuple):
    """A library of a table format: its names in Maven's registry, by version of Spark."""

    name: str
    modules: Mapping[str, str]
    file_prefix: str  # of its files
    excluded_groups: Sequence[str]  # dependencies that Spark already has
    extension: str
    settings: Mapping[str, str]

    @property
    def _directory(self) -> Path:
        module = self.modules[_SPARK_VERSION].rpartition(":")[2]
        return Path(sys.prefix) / f"{self.name.lower()}-{module}-spark-{_SPARK_VERSION}"

    def jars(self) -> list[Path]:
        """Return the files of the library; empty if they were not downloaded."""
        if _SPARK_VERSION not in self.modules or not (self._directory / "complete").exists():
            return []
        return sorted(self._directory.glob(f"jars/{self.file_prefix}*.jar"))

    def missing_reason(self) -> str:
        """Return the reason why the library is missing."""
        if _SPARK_VERSION not in self.modules:
            return f"{self.name} has no library for Spark {_SPARK_VERSION}"
        return f"the library of {self.name} was not downloaded: run python -m tests.table_libraries"

    def download(self) -> None:
        """Download the library, if this Spark has one and it is absent."""
        if self.jars() or _SPARK_VERSION not in self.modules:
            return
        submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
        line = [str(submit), "--master", "local[1]", "--packages", self.modules[_SPARK_VERSION]]
        line += ["--conf", f"spark.jars.ivy={self._directory}"]
        if self.excluded_groups:
            line += ["--exclude-packages", ",".join(f"{group}:*" for group in self.excluded_groups)]
        # A program of Spark that ends at once.
        line += ["--class", "org.apache.spark.examples.DeltaHasNone", "spark-internal"]
        result = subprocess.run(line, capture_output=True, text=True, check=False)
        if list(self._directory.glob(f"jars/{self.file_prefix}*.jar")):
            (self._directory / "complete").touch()
        else:
            sys.stderr.write(f"no tests of {self.name}; Spark reported\n{result.stderr[-2000:]}\n")


DELTA: Final = TableLibrary(
    "Delta",
    {each: f"io.delta:delta-spark_{each}_2.13:4.4.0" for each in ("4.0", "4.1", "4.2")},
    "io.delta_",
    (
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
    ),
    "io.delta.sql.DeltaSparkSessionExtension",
    {
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",  # of small tables
    },
)
ICEBERG: Final = TableLibrary(
    "Iceberg",
    {
        each: f"org.apache.iceberg:iceberg-spark-runtime-{each}_2.13:{number}"
        for each, number in (("4.0", "1.11.0"), ("4.1", "1.12.0"))
    },
    "org.apache.iceberg_",
    (),
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    {},
)
LIBRARIES: Final = (DELTA, ICEBERG)


def spark_settings() -> dict[str, str]:
    """Return the settings of a Spark session with the available libraries."""
    libraries = [library for library in LIBRARIES if library.jars()]
    if not libraries:
        return {}
    merged = {
        "spark.jars": ",".join(str(jar) for library in libraries for jar in library.jars()),
        "spark.sql.extensions": ",".join(library.extension for library in libraries),
    }
    for library in libraries:
        merged |= library.settings
    return merged


if __name__ == "__main__":
    for each in LIBRARIES:
        each.download()
