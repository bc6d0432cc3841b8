"""A SPARK_HOME in which Spark's Python workers find the PySpark of this environment.

Spark adds its `pyspark.zip` to the path of each Python process that it starts. Python stores no
bytecode of modules from a zip file, so each process would compile PySpark again. A compilation
takes a second of CPU time. This directory has all files of Spark except the zip file.
"""

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_LINKED_FOLDERS: Final = ("bin", "jars", "sbin")


def use_spark_home() -> None:
    """Make the Sparks that this process starts use the directory; create it if it is missing."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    spark_home = Path(sys.prefix) / f"spark-home-{version('pyspark')}"
    if not spark_home.exists():
        new_home = Path(tempfile.mkdtemp(prefix=spark_home.name, dir=sys.prefix))
        for part in _LINKED_FOLDERS:
            (new_home / part).symlink_to(Path(spec.origin).parent / part)
        new_home.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            new_home.rename(spark_home)
    os.environ.setdefault("SPARK_HOME", str(spark_home))
