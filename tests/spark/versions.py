"""The version of PySpark, for tests of functions that older versions do not have.

See docs/spark.md, "Versions of Spark".
"""

import pyspark
import pytest

PYSPARK_VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))


def first_shown_text(error: object) -> str:
    """Return the part of an error of a stream that has our sentence: its first line.

    Before 4.2 Spark's own sentence and a stack come first.
    """
    return str(error).splitlines()[0] if PYSPARK_VERSION >= (4, 2) else str(error)


def needs_pyspark(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skip a test with an older PySpark."""
    reason = f"before PySpark {major}.{minor}, {why}"
    return pytest.mark.skipif((major, minor) > PYSPARK_VERSION, reason=reason)
