"""Arguments of `waltz_spark.append`, checked before Spark runs a task."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

import waltz_spark
from waltz_core.errors import BadConfig, BadRequest, Unreachable
from waltz_spark.api import (
    Snapshot,
    _check_distinct_columns,
    _marks_as_option,
    _path_for_spark,
    append,
)
from waltz_spark.writer.results import open_results_directory

INSENSITIVE = {"spark.sql.caseSensitive": "false"}


@pytest.mark.parametrize("name", waltz_spark.__all__)
def test_each_public_name_can_be_imported(name: str) -> None:
    assert getattr(waltz_spark, name).__name__ == name


def test_marks_may_have_integers_of_any_type_as_keys_and_values() -> None:
    marks = {0: 41, np.int32(1): np.int64(1 << 40), 2: -1}
    assert json.loads(_marks_as_option(marks)) == {"0": 41, "1": 1 << 40, "2": -1}


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ([41, 7], r"found \[41, 7\] \(list\)"),
        ('{"0": 41}', r"\(str\)"),
        (41, r"found 41 \(int\)"),
        ({0: "x"}, "found 0: 'x'"),
        ({"zero": 1}, "found 'zero': 1"),
        ({0: 1.5}, r"found 0: 1\.5"),
        ({0: -2}, "found 0: -2"),
        ({-1: 0}, "found -1: 0"),
        ({0: True}, "found 0: True"),
    ],
)
def test_invalid_marks_are_reported_with_the_expected_type(marks: object, found: str) -> None:
    with pytest.raises(BadConfig, match="a mapping from partition to high-water mark") as caught:
        _marks_as_option(marks)
    caught.match(found)


@pytest.mark.parametrize("argument", [None, [(1, "a")], "df"])
def test_an_argument_other_than_a_data_frame_is_reported(argument: object) -> None:
    with pytest.raises(
        BadRequest,
        match=f"argument df of append: expected a Spark DataFrame, found {type(argument).__name__}",
    ):
        append(argument, "localhost:2181/waltz")  # type: ignore[arg-type]


def frame(*columns: str, **settings: str) -> SimpleNamespace:
    return SimpleNamespace(columns=list(columns), sparkSession=SimpleNamespace(conf=settings))


def test_marks_cannot_be_given_as_option_and_argument() -> None:
    marks = {"high_water_marks": {0: 1}, "ClientHighWaterMarks": '{"0": 2}'}
    with pytest.raises(
        BadConfig,
        match="'clientHighWaterMarks' is not allowed, because the argument high_water_marks",
    ):
        append(frame("data"), "localhost:2181/waltz", **marks)  # type: ignore[arg-type]
    snapshot = Snapshot(None, "localhost:2181/waltz", {0: 1})  # type: ignore[arg-type]
    with pytest.raises(
        BadConfig,
        match=r"a snapshot ends at its own high-water marks\. "
        r"Hint: omit",
    ):
        snapshot.read(endingHighWaterMarks='{"0": 0}')


def test_columns_that_spark_cannot_distinguish_are_reported_before_anything_is_written() -> None:
    for names in (("id", "ID"), ("id", "Status"), ("Partition", "data")):
        with pytest.raises(BadRequest, match="the results would have columns"):
            _check_distinct_columns(frame(*names, **INSENSITIVE), {})
        _check_distinct_columns(frame(*names, **{"spark.sql.caseSensitive": "true"}), {})
    _check_distinct_columns(frame("id", "ID", **INSENSITIVE), {"resultColumns": "id"})
    _check_distinct_columns(frame("id", "status", "partition", "data", **INSENSITIVE), {})


def test_a_given_option_overrides_a_default_case_insensitively() -> None:
    df = MagicMock(columns=["data"])
    df.sparkSession.conf = INSENSITIVE
    options = df.write.format.return_value.mode.return_value.options
    options.return_value.save.side_effect = Unreachable("far enough")
    with pytest.raises(Unreachable):
        append(df, "localhost:2181/waltz", onlockfailure="fail", RESULTSPATH="/results")
    options.assert_called_once_with(onLockFailure="fail", resultsPath="/results")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{here}/results/", "file://{here}/results"),
        ("file:{here}/results", "file://{here}/results"),
        ("file://{here}/a%20b", "file://{here}/a b"),
        ("{here}/a%20b", "file://{here}/a%20b"),
        ("{here}/of [1]", r"file://{here}/of \[1\]"),
    ],
)
def test_spark_reads_the_results_from_the_result_directory(
    tmp_path: Path, path: str, expected: str
) -> None:
    given = path.format(here=tmp_path)
    results = open_results_directory(given, is_for_reading=True)
    assert _path_for_spark(given, results) == expected.format(here=tmp_path)


def test_the_error_for_a_session_without_java_names_its_type(tmp_path: Path) -> None:
    program = "import waltz_spark; waltz_spark.session(master='local[1]')"
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "waltz_core.errors.BadConfig: Spark's Java process ended before it was ready. "
        f"JAVA_HOME is {tmp_path}, `java` on the PATH is "
    )
    assert 'docs/spark.md, "Java"' in last
