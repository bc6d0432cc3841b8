"""Makes a Spark session raise a `WaltzError` in place of the Spark error that contains it.

Neither py4j nor PySpark has a public interface for this, so the module changes their internals.

Rules:
    1. A Spark error is replaced only if its text ends with a `WaltzError`, and only after a call of
       `raise_waltz_errors`. In a classic session, the call applies to all errors of its
       SparkContext; in a Connect session, to all errors of its client. The `WaltzError` has Spark's
       error as its cause, and Spark's class as one of its base classes.
    2. `raise_waltz_errors` may be called several times.
    3. If the internals of PySpark or py4j have changed, the user gets Spark's error, which also
       contains the message.
"""

import logging
from typing import Any
from weakref import WeakSet

from py4j import protocol
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import convert_exception, install_exception_handler
from pyspark.sql import SparkSession

from waltz_core.errors import WaltzError
from waltz_spark.worker_errors import trailing_error

# The errors that a Spark action may raise: PySpark converts only some of the Java errors.
SPARK_ERRORS = (PySparkException, protocol.Py4JError)

_log = logging.getLogger("waltz")

_patched_contexts: WeakSet[SparkContext] = WeakSet()


def raise_waltz_errors(session: SparkSession) -> None:
    """Make a session raise the errors `LockFailed`, `BadConfig`, ... (rule 1)."""
    try:
        if is_connect_session(session):
            _patch_connect_client(session.client)
        else:
            _patch_py4j()
            _patched_contexts.add(session.sparkContext)
    except (AttributeError, TypeError) as error:
        _log.debug("spark.error_conversion_disabled", exc_info=error)  # rule 3


def is_connect_session(session: SparkSession) -> bool:
    """Whether a session uses Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect.")


def _patch_py4j() -> None:
    """Wrap the py4j function that raises all Java errors.

    PySpark also wraps this function, once for each session; its wrapper passes a `WaltzError` on.
    """
    original = protocol.get_return_value
    if original.__module__ == __name__:
        return  # rule 2

    def get_return_value(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - py4j's own signature
        try:
            return original(*args, **kwargs)
        except protocol.Py4JJavaError as failure:
            waltz_error = _trailing_error_of_java(failure)
            if waltz_error is None:
                raise
            cause = _error_from_spark(failure)
        raise _combine_errors(waltz_error, cause) from cause

    protocol.get_return_value = get_return_value
    install_exception_handler()


def _trailing_error_of_java(failure: protocol.Py4JJavaError) -> WaltzError | None:
    if SparkContext._active_spark_context not in _patched_contexts:
        return None
    try:
        return trailing_error(str(failure))  # str() requests the text from Java
    except Exception as error:  # noqa: BLE001 - rule 3
        _log.debug("spark.error_text_unreadable", exc_info=error)
        return None


def _error_from_spark(failure: protocol.Py4JJavaError) -> Exception:
    """Return the error that PySpark would have raised without `raise_waltz_errors`."""
    try:
        return convert_exception(failure.java_exception)
    except Exception as error:  # noqa: BLE001 - rule 3
        _log.debug("spark.error_not_converted", exc_info=error)
        unconverted: Exception = failure
        return unconverted


def _patch_connect_client(client: Any) -> None:  # noqa: ANN401 - its class cannot be named without grpc
    """Wrap the method of a Spark Connect client that raises errors."""
    original = client._handle_error
    if original.__module__ == __name__:
        return  # rule 2

    def handle_error(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        try:
            return original(*args, **kwargs)
        except PySparkException as failure:
            waltz_error, cause = trailing_error(str(failure)), failure
            if waltz_error is None:
                raise
        raise _combine_errors(waltz_error, cause) from cause

    client._handle_error = handle_error


def _combine_errors(waltz_error: WaltzError, reported: Exception) -> Exception:
    """Return a `WaltzError` that `except` clauses for Spark's class catch, too."""
    if not isinstance(reported, PySparkException):
        return waltz_error
    kind = _combined_class(type(waltz_error), type(reported))
    error: Exception = kind.__new__(kind, *waltz_error.args)
    error.__dict__.update(reported.__dict__, plain=waltz_error)
    return error


def _combined_class(
    waltz_error: type[WaltzError], reported: type[PySparkException]
) -> type[Exception]:
    """Return a subclass of both classes, with Spark's methods and the name of the `WaltzError`."""
    members = {
        "__module__": waltz_error.__module__,
        "__doc__": waltz_error.__doc__,
        "__str__": Exception.__str__,
        "__reduce__": lambda self: (waltz_error, self.args),
    }
    return type(waltz_error.__name__, (waltz_error, reported), members)
