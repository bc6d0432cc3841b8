"""A SPARK_HOME in which Spark's Python workers find the PySpark of this environment.

Spark puts its own `pyspark.zip` on the path of each Python process that it starts, and Python keeps
no bytecode of what it imports from a zip: each process compiled PySpark again, for a second of CPU.
This directory has all of Spark but the zip.
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
    home = Path(sys.prefix) / f"spark-home-{version('pyspark')}"
    if not home.exists():
        made = Path(tempfile.mkdtemp(prefix=home.name, dir=sys.prefix))
        for part in _LINKED_FOLDERS:
            (made / part).symlink_to(Path(spec.origin).parent / part)
        made.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(home)
    os.environ.setdefault("SPARK_HOME", str(home))
