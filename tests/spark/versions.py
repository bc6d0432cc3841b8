"""The version of PySpark, for tests of functions that older versions do not have.

See docs/spark.md, "Versions of Spark".
"""

import pyspark
import pytest

PYSPARK_VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))


def first_shown_text(error: object) -> str:
    """Return the line of a stream's error that has the message of Waltz.

    Before 4.2, a message of Spark and a stack precede it.
    """
    return str(error).splitlines()[0] if PYSPARK_VERSION >= (4, 2) else str(error)


def needs_pyspark(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skip a test with an older PySpark."""
    reason = f"before PySpark {major}.{minor}, {why}"
    return pytest.mark.skipif((major, minor) > PYSPARK_VERSION, reason=reason)
