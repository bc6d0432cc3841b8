"""The session that writes a table. Its settings contain the identifier of a `MERGE` for Delta.

In the session of the user, another query would inherit the identifier, and Delta would skip the
commits of that query as repetitions.
"""

import contextlib
from collections.abc import Iterator

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from waltz_spark.session_errors import is_connect_session
from waltz_spark.spark_version import new_session


@contextlib.contextmanager
def table_session(spark: SparkSession) -> Iterator[SparkSession]:
    """Open a new session with the settings and the current database of `spark`."""
    session = new_session(spark)
    try:
        _copy_settings(spark, session)
        session.catalog.setCurrentCatalog(spark.catalog.currentCatalog())
        session.catalog.setCurrentDatabase(spark.catalog.currentDatabase())
        yield session
    finally:
        if is_connect_session(session):
            # Not stop(), because it would stop a server that this process has started.
            with contextlib.suppress(Exception):  # otherwise the session expires after an hour
                session.client.release_session()


def _copy_settings(spark: SparkSession, session: SparkSession) -> None:
    current = session.conf.getAll
    for name, value in spark.conf.getAll.items():
        if current.get(name) != value:
            with contextlib.suppress(PySparkException):  # a static setting: it has the same value
                session.conf.set(name, value)
