"""Converts errors of Spark, Delta and Iceberg to errors of the project.

Rules:
    1. If a task raises an error of the project, the driver raises the same error.
    2. An error of the network, or the loss of an executor, is `Unavailable`, and a follower tries
       again. Other errors of Spark are not changed, and end the follower.
    3. The message of a violated table constraint contains values of rows. Such a value may be the
       text of another error. So the violated constraint is recognized first.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pyspark.sql import SparkSession

from waltz_core.errors import BadConfig, BadRequest, Superseded, Unavailable, WaltzError
from waltz_spark.session_errors import SPARK_ERRORS
from waltz_spark.worker_errors import error_of

# The beginnings of messages that the SQL statements of the followers raise.
TWO_PARTITIONS_PREFIX = "a key in two partitions: "
NULL_TEXT_PREFIX = "a text that Delta reads as null: partition "


class TableLibrary(NamedTuple):
    """A library for a table format, and the hint for a session that lacks it."""

    name: str
    hint: str


DELTA = TableLibrary(
    "Delta",
    "Delta 4.4.0 has a library for Spark 4.0, 4.1 and 4.2 (io.delta:delta-spark_4.2_2.13:4.4.0), "
    "and none for 4.3; docs/spark-tables.md has the settings of the session.",
)
ICEBERG = TableLibrary(
    "Iceberg",
    "there are libraries for Spark 4.0 and 4.1, and none for 4.2 and 4.3; docs/spark-tables.md has "
    "them, with the settings of the session.",
)
# The errors with which Spark and Delta report a row that violates a constraint (rule 3).
_CONSTRAINT_ERRORS = re.compile(
    r"\[(?:DELTA_VIOLATE_CONSTRAINT|DELTA_NOT_NULL|NOT_NULL_CONSTRAINT|NOT_NULL_ASSERT)\w*"
)
# The errors with which Spark, Delta and Iceberg report that another commit came first.
_TABLE_EXISTS_ERRORS = re.compile(
    r"DELTA_PATH_EXISTS|TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_TABLE_ALREADY_EXISTS"
)
_CONFLICT_ERRORS = re.compile(
    r"\[(DELTA_CONCURRENT_\w+|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED)\S*\]|"
    r"Cannot fast-forward|CommitFailedException|Cannot use branch \(does not exist\)|"
    r"Ref does not exist|Found conflicting"
)
# The errors of a Spark that lacks a library, or has a library for another version.
_NO_LIBRARY_ERRORS = re.compile(
    r"NoSuchMethodError|NoSuchFieldError|NoClassDefFoundError|IncompatibleClassChangeError|"
    r"AbstractMethodError|DATA_SOURCE_NOT_FOUND|DELTA_CONFIGURE_SPARK_SESSION\w*|"
    r"PARSE_SYNTAX_ERROR|UNSUPPORTED_FEATURE.TABLE_OPERATION|"
    r"ClassNotFoundException: \S*(?:delta|iceberg)\S*|CATALOG_NOT_FOUND|"
    r"REQUIRES_SINGLE_PART_NAMESPACE|\w*PLUGIN_CLASS_NOT_FOUND\w*"
)
_TWO_PARTITIONS_ERROR = re.compile(
    rf"{TWO_PARTITIONS_PREFIX}(\(.*?\) has changes .*?)\.(?: SQLSTATE|\s|$)", re.DOTALL
)
_NULL_TEXT_ERROR = re.compile(
    rf"{NULL_TEXT_PREFIX}(\d+, transaction \d+), column ('.*?'|\".*?\"), found ('\w*')\."
)
_TEMPORARY_ERRORS = re.compile(
    r"java\.net\.(?:Connect|NoRouteToHost|Socket|SocketTimeout)Exception|ConnectTimeoutException|"
    r"ExecutorLostFailure|FetchFailed|ServiceUnavailable|SlowDown"
)


@contextmanager
def translate_errors(
    subject: str, session: SparkSession, library: TableLibrary | None = DELTA
) -> Iterator[None]:
    """Raise errors of Spark as errors of the project.

    Args:
        subject: the subject of the messages, such as "table t".
        session: the session in which the errors are raised.
        library: the library that the session needs; None if it needs none.
    """
    try:
        yield
    except SPARK_ERRORS as failure:
        waltz_error = error_of(failure) or _convert_message(str(failure), subject, session, library)
        if waltz_error is None:
            raise
        raise waltz_error from failure


def _convert_message(
    text: str, subject: str, session: SparkSession, library: TableLibrary | None
) -> WaltzError | None:
    if _CONSTRAINT_ERRORS.search(text):
        return None  # rule 3
    if row_error := _error_of_row(text, subject):
        return row_error
    if conflict := _CONFLICT_ERRORS.search(text) or _TABLE_EXISTS_ERRORS.search(text):
        return Superseded(f"{subject}: another commit came first ({conflict[0]})")
    if library is not None and (missing := _NO_LIBRARY_ERRORS.search(text)):
        return BadConfig(
            f"{subject}: the session has no library of {library.name} that works with Spark "
            f"{session.version} ({missing[0]}). Hint: {library.hint}"
        )
    if cause := _TEMPORARY_ERRORS.search(text):
        line = next(line for line in text.splitlines() if cause[0] in line)
        return Unavailable(f"{subject}: {line.strip():.300}")
    return None


def _error_of_row(text: str, subject: str) -> BadRequest | None:
    """Return the error for a row that a follower's SQL statement rejects; None for other errors."""
    if twice := _TWO_PARTITIONS_ERROR.search(text):
        return BadRequest(
            f"{subject}: the key {twice[1]}, and partitions have no common order. Hint: use a key "
            "that includes the column that chooses the partition."
        )
    if null := _NULL_TEXT_ERROR.search(text):
        return BadRequest(
            f"{subject}, partition {null[1]}: expected null or another text in partition column "
            f"{null[2]} of the table, found {null[3]}, which Delta reads as null. Hint: use a "
            "table with another partition column."
        )
    return None
