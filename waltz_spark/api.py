"""Python functions in addition to `format("waltz")`: appends with outcomes, snapshots, sessions.

These functions run in the user's Python process. The rest of the package runs in processes that
Spark starts.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F

from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.option_table import OPTION_BY_NAME
from waltz_spark.session_errors import is_connect_session, raise_waltz_errors
from waltz_spark.shared_clients import with_client
from waltz_spark.worker_errors import error_of
from waltz_spark.writer.columns import RESULT_COLUMNS
from waltz_spark.writer.results import (
    COMMITTED,
    REJECTED,
    RETRY,
    SUMMARY_FILE,
    ResultDirectory,
    is_result_file_of,
    open_results_directory,
)
from waltz_spark.writer.rows_hash import RowsHash


@dataclass(frozen=True)
class WriteResult:
    """The outcome of every row of a write.

    Attributes:
        counts: the number of rows by outcome (`committed`, `rejected`, `retry` and
            `rejected_by_own_rows`), and the duration in `seconds`. `committed` includes the rows in
            `recomputed` and `found`; earlier attempts had appended the rows in `found`. If an
            earlier run has completed the write, these are the counts of that run.
        high_water_marks: for each partition, the last high-water mark that the write received.
        results_path: the directory with the results, as Parquet files.
        already_committed: an earlier run with the same `writeId` has written the rows; this run has
            appended nothing.
    """

    counts: Mapping[str, float]
    high_water_marks: Mapping[int, int]
    results_path: str
    already_committed: bool
    _results: DataFrame | None = field(repr=False)

    @property
    def results(self) -> DataFrame:
        """The outcomes as a DataFrame: one row for each written row, with its input columns.

        The columns after the input columns are `status`, `partition`, `transaction_id`, `attempts`,
        `lock_failure_transaction_id` and `retry_high_water_mark`.

        Raises:
            BadConfig: the run that completed the write kept no results, or they were removed.
        """
        if self._results is None:
            raise BadConfig(
                f"there are no results in {self.results_path}: an earlier run has completed "
                "this write without option resultsPath, or its results were removed, so only "
                "the counts are known. Hint: if you need results later, use resultsPath with "
                "a permanent directory in the first run of a write."
            )
        return self._results

    @property
    def committed(self) -> DataFrame:
        """The rows that are in the log."""
        return self.results.where(F.col("status") == COMMITTED)

    @property
    def rejected(self) -> DataFrame:
        """The rows that a lock rejected, with the conflicting transaction."""
        return self.results.where(F.col("status") == REJECTED)

    @property
    def retry(self) -> DataFrame:
        """The rejected rows of a write with `onLockFailure=retry`.

        Compute them again from the transactions up to `retry_high_water_mark`.
        """
        return self.results.where(F.col("status") == RETRY)


def append(
    df: DataFrame,
    connect: str,
    *,
    high_water_marks: Mapping[int, int] | None = None,
    **options: object,
) -> WriteResult:
    """Append a DataFrame and return the outcome of every row.

    The function writes like `df.write.format("waltz")`, but `onLockFailure` is `reject` by default.
    Without `resultsPath`, the results go to a temporary directory, which exists until this Python
    process exits. This works only if all of Spark is on this machine. With `writeId`, rows that an
    earlier run has written are not written again (`already_committed`).

    Args:
        df: the rows to write; each row is one transaction.
        connect: the connect string of the cluster.
        high_water_marks: for each partition, the high-water mark of the data from which the rows
            were computed (`Snapshot.high_water_marks`).
        options: other options of the format, by name.

    Raises:
        BadConfig: an option or `high_water_marks` is not valid, or Spark may run on other machines
            and `resultsPath` is missing.
        BadRequest: `df` is not a DataFrame, or a column cannot be written (the error names it), or
            an earlier run has completed `writeId` with other rows (the error has both counts).
        LockFailed: `onLockFailure` is `fail`, and a row was rejected.
        Unavailable: the cluster cannot be reached, or accepted no rows for a minute.
    """
    spark = getattr(df, "sparkSession", None)
    if spark is None:
        raise BadRequest(
            f"argument df of append: expected a Spark DataFrame, found {type(df).__name__}"
        )
    # Option names are case-insensitive in Spark: a default must not conflict with another spelling.
    texts = option_texts(options)
    texts.setdefault("onLockFailure", "reject")
    if high_water_marks is not None:
        _check_not_set("clientHighWaterMarks", texts, "the argument high_water_marks sets it")
        texts["clientHighWaterMarks"] = _marks_as_option(high_water_marks)
    _check_distinct_columns(df, texts)
    path = texts.setdefault("resultsPath", "") or _new_temporary_path(spark)
    texts["resultsPath"] = path
    # In a thread that the caller has started, no Spark session is active, so Spark's writer does
    # not find Python formats. A call of createDataFrame makes the session active.
    spark.createDataFrame([], "nothing int")
    try:
        df.write.format("waltz").mode("append").options(**texts).save(connect)
    except PySparkException as failure:
        waltz_error = error_of(failure)
        if waltz_error is None:
            raise
        raise waltz_error from failure
    summary = _read_summary(path)
    marks = {int(partition): mark for partition, mark in summary.pop("high_water_marks").items()}
    # If an earlier run has completed the write, the results are in the directory of that run.
    path, name = summary.pop("results_path", path), summary.pop("results_name", "")
    is_repeated = summary.pop("already_committed", False)
    for each in RowsHash().as_fields():
        summary.pop(each, None)
    results = _read_results(spark, path, name)
    if results is None and not sum(summary[each] for each in ("committed", "rejected", "retry")):
        results = _empty_results(spark, df)
    return WriteResult(summary, marks, path, is_repeated, results)


def _check_not_set(name: str, options: Mapping[str, object], reason: str) -> None:
    if name.lower() in {option.lower() for option in options}:
        raise BadConfig(f"option {name!r} is not allowed, because {reason}. Hint: omit the option.")


def _check_distinct_columns(df: DataFrame, options: Mapping[str, str]) -> None:
    """Reject result columns that differ only in case, before any row is written."""
    if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        return
    columns_option = options.get("resultColumns")
    input_columns = [name for name in df.columns if name != "data"]
    if columns_option:
        input_columns = [part.strip() for part in columns_option.split(",")]
    result_columns = {*RESULT_COLUMNS, "partition"}
    names_by_lower = {name: name for name in result_columns}
    for name in input_columns:
        other_name = names_by_lower.setdefault(name.lower(), name)
        if other_name != name:
            raise BadRequest(
                f"the results would have columns {other_name!r} and {name!r}, whose names are "
                "equal for Spark. Hint: rename one of them, or omit it from option "
                "resultColumns."
            )


def _read_summary(path: str) -> dict[str, Any]:
    directory = open_results_directory(path, is_for_reading=True)
    try:
        with directory.file_system.open_input_stream(f"{directory.path}/{SUMMARY_FILE}") as stream:
            return dict(json.loads(stream.read()))
    except FileNotFoundError:
        raise BadConfig(
            f"the write is complete, but its results are not in {path}. Hint: use a "
            "directory as resultsPath that this process and every executor can access."
        ) from None


def _read_results(spark: SparkSession, path: str, name: str) -> DataFrame | None:
    """Return the results of a write from a directory; None if there is no file with results."""
    directory = open_results_directory(path, is_for_reading=True)
    names = [
        entry.base_name for entry in directory.file_system.get_file_info(_files_in(directory.path))
    ]
    spark_path = _path_for_spark(path, directory)
    result_paths = [f"{spark_path}/{each}" for each in names if is_result_file_of(each, name)]
    return spark.read.parquet(*result_paths) if result_paths else None


def _path_for_spark(path: str, directory: ResultDirectory) -> str:
    """Return the path of a directory for Spark, with `file://` if the directory is local."""
    from pyarrow import fs  # noqa: PLC0415 - only functions that read results need it

    if isinstance(directory.file_system, fs.LocalFileSystem):
        path = f"file://{Path(directory.path).absolute()}"
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", path.rstrip("/"))  # otherwise it is a pattern


def _empty_results(spark: SparkSession, df: DataFrame) -> DataFrame:
    """Return an empty DataFrame with the columns of results, for a write without rows."""
    columns = (
        "status string, partition int, transaction_id bigint, attempts int, "
        "lock_failure_transaction_id bigint, retry_high_water_mark bigint"
    )
    empty = spark.createDataFrame([], columns)
    result_names = {*empty.columns, "data"}
    # A name may contain dots and backticks.
    names = [name.replace("`", "``") for name in df.columns if name not in result_names]
    input_columns = df.select(*[F.col(f"`{name}`") for name in names]).limit(0)
    return input_columns.crossJoin(empty)


def _files_in(path: str) -> object:
    from pyarrow import fs  # noqa: PLC0415 - only functions that read results need it

    return fs.FileSelector(path, allow_not_found=True)


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as strings, with their names spelled as in `option_table.py`."""
    return {_name_in_table(name): _option_text(value) for name, value in options.items()}


def _name_in_table(option: str) -> str:
    """Return the name of an option, spelled as in `option_table.py`."""
    table_option = OPTION_BY_NAME.get(option.lower())
    return option if table_option is None else table_option.name


def _option_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return json.dumps({str(key): part for key, part in value.items()})
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value)
    return str(value)


def _marks_as_option(marks: object) -> str:
    """Return high-water marks, also of NumPy types, as a value of `clientHighWaterMarks`."""
    expected = (
        "argument high_water_marks: expected a mapping from partition to high-water mark, such "
        "as {0: 41}"
    )
    if not isinstance(marks, Mapping):
        raise BadConfig(f"{expected}, found {marks!r} ({type(marks).__name__})")
    marks_by_text: dict[str, int] = {}
    for partition, mark in marks.items():
        if not (_is_integer(partition, minimum=0) and _is_integer(mark, minimum=-1)):
            raise BadConfig(f"{expected}, found {partition!r}: {mark!r}")
        marks_by_text[str(int(partition))] = int(mark)
    return json.dumps(marks_by_text)


def _is_integer(value: object, *, minimum: int) -> bool:
    if type(value) is bool:  # a number for Python
        return False
    return isinstance(value, Integral) and int(value) >= minimum


def _new_temporary_path(spark: SparkSession) -> str:
    # A Spark Connect server may run on another machine, unless this process has started it.
    is_local_driver = not is_connect_session(spark) or "SPARK_LOCAL_REMOTE" in os.environ
    if not (is_local_driver and (spark.conf.get("spark.master", "") or "").startswith("local")):
        raise BadConfig(
            "Spark may run on other machines, too. Hint: use option resultsPath with a directory "
            "that this process and every executor can access."
        )
    directory = tempfile.mkdtemp(prefix="waltz-results-")
    # A `WriteResult` can be used until this process exits.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return str(Path(directory) / uuid.uuid4().hex)  # noqa: TID251


@dataclass(frozen=True)
class Snapshot:
    """The log up to fixed high-water marks: repeated reads return the same rows.

    Compute rows from `read()`, and write them with `high_water_marks`. Then a row is rejected if,
    and only if, another transaction has written one of the row's locks since the snapshot.
    """

    spark: SparkSession
    connect: str
    high_water_marks: Mapping[int, int]

    def reader(self) -> DataFrameReader:
        """Return a DataFrameReader for the snapshot; the caller can add options and a schema."""
        marks = json.dumps({str(p): mark for p, mark in self.high_water_marks.items()})
        partitions = ",".join(map(str, self.high_water_marks))
        reader = self.spark.read.format("waltz").option("endingHighWaterMarks", marks)
        return reader.option("partitions", partitions)

    def read(self, schema: str | None = None, **options: object) -> DataFrame:
        """Return the log up to the high-water marks of the snapshot.

        Args:
            schema: the columns to unpack from payloads, as DDL; needs option `dataFormat`.
            options: further options of the format.

        Raises:
            BadConfig: `options` contains `endingHighWaterMarks`.
        """
        _check_not_set(
            "endingHighWaterMarks", options, "a snapshot ends at its own high-water marks"
        )
        reader = self.reader().options(
            **{name: _option_text(value) for name, value in options.items()}
        )
        if schema is not None:
            reader = reader.schema(schema)
        return reader.load(self.connect)


def snapshot(
    spark: SparkSession, connect: str, partitions: Sequence[int] | None = None
) -> Snapshot:
    """Take a snapshot at the log's current high-water marks, of the given partitions or of all.

    Raises:
        Unavailable: the cluster does not answer.
    """
    marks = with_client(connect, lambda client: client.high_water_marks(partitions))
    return Snapshot(spark, connect, {int(p): int(mark) for p, mark in marks.items()})


def register(spark: SparkSession) -> None:
    """Register `format("waltz")` in a session whose PySpark did not find it automatically."""
    from waltz_spark.datasource.source import WaltzDataSource  # noqa: PLC0415 - costs an import

    spark.dataSource.register(WaltzDataSource)


def session(
    app_name: str = "waltz",
    master: str | None = None,
    *,
    remote: str | None = None,
    **conf: str,
) -> SparkSession:
    """Return a Spark session with settings for Waltz.

    The session runs workers with this Python interpreter, connects to them over Unix sockets
    (faster for short tasks), and keeps the console readable. In a notebook, the output of Spark's
    processes goes to Jupyter's terminal, not into a cell. Errors are raised as `LockFailed`,
    `BadConfig`, ... (`waltz_core.errors`). Settings in `conf` take precedence.

    Args:
        app_name: the name in Spark's UI.
        master: `local[*]`, `spark://...`; None: Spark's default.
        remote: the address of a Spark Connect server, `sc://host:15002`, in place of `master`; or
            `local[2]` for a server that this process starts. A remote server has its own settings.
        conf: Spark settings with `_` for `.`, or as a dict with `**{"spark.x.y": "z"}`.

    Raises:
        BadConfig: Spark's Java process exited before it was ready.
        BadRequest: both `master` and `remote` are given, or a session that runs already may have
            workers with another Python interpreter.
    """
    if master is not None and remote is not None:
        raise BadRequest(f"expected either master or remote, found both: {master} and {remote}")
    user_settings = {
        key if "." in key else key.replace("_", "."): value for key, value in conf.items()
    }
    if remote is not None and not remote.startswith("local"):
        builder, settings = SparkSession.builder.remote(remote), _SESSION_SETTINGS
    else:
        _set_worker_python()
        builder, settings = SparkSession.builder.appName(app_name), _PROCESS_SETTINGS
        if remote is not None:
            builder = builder.remote(remote)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**settings, **user_settings}.items():
        builder = builder.config(key, value)
    with _terminal_stderr(), warnings.catch_warnings():
        # Spark Connect starts its server with all settings, then tries to set them again.
        waltz_names = "|".join(re.escape(key) for key in settings if key not in user_settings)
        warnings.filterwarnings("ignore", f"Failed to set ({waltz_names}) ")
        spark = _start_session(builder)
    raise_waltz_errors(spark)
    return spark


_SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.connect.serverStacktrace.enabled": "false",  # like Spark without Connect
}
_PROCESS_SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.python.unix.domain.socket.enabled": "true",
    **_SESSION_SETTINGS,
}


def _start_session(builder: SparkSession.Builder) -> SparkSession:
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise BadConfig(
            "Spark's Java process ended before it was ready. JAVA_HOME is "
            f"{os.environ.get('JAVA_HOME', 'not set')}, `java` on the PATH is "
            f"{shutil.which('java') or 'not found'}. Hint: read the reason in Spark's "
            'standard error. docs/spark.md, "Java", describes which Java versions Spark needs, '
            "and how to install Java from PyPI."
        ) from error


def _set_worker_python() -> None:
    if "PYSPARK_PYTHON" in os.environ:
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if SparkSession.getActiveSession() is not None:
        raise BadRequest(
            "a Spark session runs already, and its workers may use another Python. Hint: "
            f"set PYSPARK_PYTHON={sys.executable} before the first session starts."
        )


@contextlib.contextmanager
def _terminal_stderr() -> Iterator[None]:
    """Let Java inherit the stderr that this process had before a notebook's kernel replaced it.

    A kernel copies the output of its child processes into the current cell as long as they run.
    """
    terminal = getattr(sys.stderr, "_original_stdstream_copy", None)  # ipykernel's; no public name
    if terminal is None:
        yield
        return
    cell_stderr = os.dup(2)
    os.dup2(terminal, 2)
    try:
        yield
    except PySparkException as failure:
        failure.add_note("The terminal in which Jupyter runs shows the output of Java.")
        raise
    finally:
        os.dup2(cell_stderr, 2)
        os.close(cell_stderr)
