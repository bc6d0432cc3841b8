"""Waltz for Spark: `format("waltz")`, `append`, `snapshot`, `follow`, `upsert`, lock columns.

    spark.read.format("waltz").load("zk1:2181,zk2:2181/waltz/payments")
    df.write.format("waltz").mode("append").save("zk1:2181,zk2:2181/waltz/payments")

Each name is imported at its first use. Spark starts several Python processes for a job, and most of
them need only one module of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waltz_spark.api import Snapshot, WriteResult, append, register, session, snapshot
    from waltz_spark.monitoring.lag import LagListener, lag_of
    from waltz_spark.monitoring.query_metrics import export_metrics
    from waltz_spark.tables.following import Table, follow, upsert
    from waltz_spark.worker_errors import error_of

_MODULE_BY_NAME = {
    "LagListener": "monitoring.lag",
    "Snapshot": "api",
    "Table": "tables.following",
    "WriteResult": "api",
    "append": "api",
    "error_of": "worker_errors",
    "export_metrics": "monitoring.query_metrics",
    "follow": "tables.following",
    "lag_of": "monitoring.lag",
    "register": "api",
    "session": "api",
    "snapshot": "api",
    "upsert": "tables.following",
}
__all__ = [
    "LagListener",
    "Snapshot",
    "Table",
    "WriteResult",
    "append",
    "error_of",
    "export_metrics",
    "follow",
    "lag_of",
    "register",
    "session",
    "snapshot",
    "upsert",
]


def __getattr__(name: str) -> object:
    if name in _MODULE_BY_NAME:
        return getattr(import_module(f"waltz_spark.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
