"""The path of an error from a Spark worker to the user."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_spark.worker_errors import error_of, trailing_error, without_stack, without_stack_each

HIDE = "SPARK_HIDE_TRACEBACK"


@without_stack
def raise_error(error: Exception) -> None:
    raise error


@without_stack_each
def yield_and_raise(error: Exception) -> Iterator[int]:
    yield 1
    raise error


def test_a_spark_worker_omits_the_stack_trace_of_a_waltz_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    for call in (raise_error, lambda error: list(yield_and_raise(error))):
        monkeypatch.setenv(HIDE, "")
        with pytest.raises(errors.LockFailed, match="refused"):
            call(errors.LockFailed("refused"))
        assert os.environ[HIDE] == "1"


@pytest.mark.parametrize(
    "error", [AssertionError("a bug"), errors.RemoteProtocolError("a peer's"), errors.WaltzError()]
)
def test_an_unexpected_error_keeps_its_stack_trace(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    monkeypatch.setenv(HIDE, "")
    with pytest.raises(type(error)):
        raise_error(error)
    with pytest.raises(type(error)):
        list(yield_and_raise(error))
    assert os.environ[HIDE] == ""


def test_stack_traces_outside_of_a_worker_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_PYTHON_RUNTIME", raising=False)
    monkeypatch.setenv(HIDE, "")
    with pytest.raises(errors.BadRequest):
        raise_error(errors.BadRequest("no"))
    assert os.environ[HIDE] == ""


@pytest.mark.parametrize(
    "text",
    [
        "[PYTHON_EXCEPTION] From the Python worker: waltz_core.errors.LockFailed: a: row\n SQL: 3",
        (
            "An exception was thrown from the Python worker: waltz_core.errors.Unreachable: b\n\n"
            'Traceback\n  File "a.py", line 1\n    b()\nwaltz_core.errors.LockFailed: a: row'
        ),
    ],
)
def test_the_driver_gets_the_class_and_the_message(text: str) -> None:
    error = error_of(RuntimeError(text))
    assert type(error) is errors.LockFailed
    assert str(error) == "a: row"


def test_errors_of_other_libraries_are_not_converted() -> None:
    assert error_of(RuntimeError("ValueError: no")) is None
    assert error_of(RuntimeError("waltz_core.errors.Any: no")) is None
    assert error_of(RuntimeError("waltz_core.errors.ClassVar: no")) is None
    waltz_error = errors.BadRequest("no")
    assert error_of(waltz_error) is waltz_error


WORKER = "An exception was thrown from the Python worker:\n"
WALTZ = "waltz_core.errors.LockFailed: partition 2: a row was rejected"
JAVA = "\n SQLSTATE: 38000\n\tat org.apache.spark.Some.method(Some.scala:1)"


TRACE = (
    'Traceback (most recent call last):\n  File "a.py", line 3, in a\n    raise b\n    ^^^^^^^\n'
)
SOURCE = "[PYTHON_DATA_SOURCE_ERROR] Failed to initialize Python data source writer: "


@pytest.mark.parametrize(
    "text",
    [
        WORKER + WALTZ,
        f"o42.save.\n: org.apache.spark.SparkException: {WORKER}{WALTZ}{JAVA}",
        # Texts of PySpark 4.3 for an error in a task, on the driver, in a stream, and over Connect.
        f"o42.save.\n: org.apache.spark.PythonException: [PYTHON_EXCEPTION] {WORKER[:-1]} {WALTZ}",
        f"Lost task 0.3 in stage 3.0 (TID 6) (host executor 1): [PYTHON_EXCEPTION] {WORKER}{WALTZ}",
        f"{SOURCE}{WALTZ}{JAVA}",
        f"o42.awaitTermination.\n: org.apache.spark.StreamingQueryException: {SOURCE}{WALTZ}{JAVA}",
        f"(org.apache.spark.sql.AnalysisException) {SOURCE}{WALTZ}{JAVA}",
        f"[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: {SOURCE}{WALTZ}",
        f"[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when perform planPartitions: {WALTZ}",
        # After a stack trace.
        WORKER + TRACE + WALTZ,
        f"{SOURCE}{TRACE}  [Previous line repeated 3 more times]\n{WALTZ}",
        # A Waltz error that was raised while another error was handled.
        f"KeyError: 1\n\nDuring handling of the above exception, another:\n\n{TRACE}{WALTZ}",
    ],
)
def test_the_waltz_error_at_the_end_of_a_text_is_used(text: str) -> None:
    for found in (trailing_error(text), error_of(RuntimeError(text))):
        assert type(found) is errors.LockFailed
        assert str(found) == "partition 2: a row was rejected"


@pytest.mark.parametrize(
    "between",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_trailing_error_ignores_a_waltz_error_that_another_error_follows(between: str) -> None:
    text = f"{WORKER}{WALTZ}\n\n{between}\n\nRuntimeError: the ledger is closed{JAVA}"
    assert trailing_error(text) is None
    assert type(error_of(RuntimeError(text))) is errors.LockFailed  # contains a Waltz error


@pytest.mark.parametrize(
    "text", ["", "ValueError: x", "waltz_core.errors.Unknown: x", "LockFailed"]
)
def test_texts_without_a_waltz_error_are_not_converted(text: str) -> None:
    assert trailing_error(text) is None
    assert error_of(RuntimeError(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        WALTZ,
        f"[CAST_INVALID_INPUT] The value '{WALTZ}' of the type \"STRING\" cannot be cast{JAVA}",
        f"[CAST_INVALID_INPUT] The value '[PYTHON_X] y: {WALTZ}' of the type \"STRING\"",
        f"[USER_RAISED_EXCEPTION] {WALTZ}{JAVA}",
        f"[USER_RAISED_EXCEPTION] x {WALTZ}{JAVA}",
        f"[USER_RAISED_EXCEPTION] x:\n{WALTZ}{JAVA}",
        f"[PYTHON_EXCEPTION] {WORKER}{TRACE}RuntimeError: my job: {WALTZ}{JAVA}",
        f"[PYTHON_EXCEPTION] {WORKER}{TRACE}RuntimeError: two lines\n{WALTZ}{JAVA}",
        f"[PYTHON_EXCEPTION] {WORKER}{TRACE}RuntimeError: two lines\n  and\n{WALTZ}{JAVA}",
        f"\tat org.apache.spark.Some.method(Some.scala:1)\n{WALTZ}",
    ],
)
def test_a_waltz_error_quoted_by_a_user_is_not_converted(text: str) -> None:
    assert trailing_error(text) is None
    assert error_of(ValueError(text)) is None


@given(before=st.text(st.sampled_from("ab: \n'[]()"), max_size=20))
def test_a_waltz_error_within_a_line_of_other_text_is_not_converted(before: str) -> None:
    assert error_of(RuntimeError(f"{before}{WALTZ}")) is None
    error = error_of(RuntimeError(f"{before}\n{SOURCE}{WALTZ}"))
    assert type(error) is errors.LockFailed
