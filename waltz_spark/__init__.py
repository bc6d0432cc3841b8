"""Waltz for Spark: `format("waltz")`, `append`, `snapshot`, lock columns.

    spark.read.format("waltz").load("zk1:2181,zk2:2181/waltz/payments")
    df.write.format("waltz").mode("append").save("zk1:2181,zk2:2181/waltz/payments")

What is named here is loaded when it is first used: Spark starts half a dozen Python processes for
one job, most of which need one module of this package, and each would pay for all of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waltz_spark.api import Snapshot, WriteResult, append, register, session, snapshot
    from waltz_spark.failures import error_of

__all__ = ["Snapshot", "WriteResult", "append", "error_of", "register", "session", "snapshot"]


def __getattr__(name: str) -> object:
    if name in __all__:
        module = "waltz_spark.failures" if name == "error_of" else "waltz_spark.api"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
