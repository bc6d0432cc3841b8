"""Transports errors from Spark workers to the driver, as a message and the class of the error.

Spark sends an exception to the driver as text that begins with the worker's stack. This module
shortens the text in the worker, and recognizes the error in the driver.

Rules:
    1. The text of a `WaltzError` of a class in `_SHOWN_WITHOUT_STACK` begins with the message,
       because the user does not need the stack. Any other error, including a `ProtocolError`, may
       be a bug and keeps its stack.
    2. Only the last output of a worker is changed: Spark ends the worker after an exception.
    3. A `WaltzError` is recognized only at the positions where Spark or Python put an error. It is
       not recognized in a value, in a message of the user, or on another line of that message.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from waltz_core import errors

_log = logging.getLogger("waltz")

# Variables that Spark sets for its Python workers, and that the workers read to report errors.
_WORKER_VARIABLE = ("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
_HIDE_TRACEBACK_VARIABLE = "SPARK_HIDE_TRACEBACK"
_SHOWN_WITHOUT_STACK = (errors.UsageError, errors.Unavailable, errors.Superseded, errors.Damaged)
# The positions of an error in a text (rule 3): after Spark's prefix for a Python error, or below
# the last frame of a stack.
_MESSAGE_PREFIX = (
    r"(?:^|: |\) )(?:\[\w*PYTHON\w*\] |An exception was thrown from the Python worker)"
    r"[^:'\"\n]*:[ \n]"
)
_LAST_FRAME = r'^  File ".*\n(?:    .*\n)*(?:  \[Previous line .*\n)?'
_ERROR_TEXT = re.compile(
    rf"(?:{_MESSAGE_PREFIX}|{_LAST_FRAME})waltz_core\.errors\.(\w+): (.*)", re.MULTILINE
)
# The text that Python writes between an error and the error that was raised while handling it.
_CHAINED_ERROR = re.compile(r"^(During handling of|The above exception was the)", re.MULTILINE)

P = ParamSpec("P")
T = TypeVar("T")


def without_stack(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that the user sees its errors without a stack (rule 1)."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except _SHOWN_WITHOUT_STACK as error:
            _hide_stack(error)
            raise

    return wrapper


def without_stack_each(call: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorate an iterator so that the user sees its errors without a stack (rule 1)."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from call(*args, **kwargs)
        except _SHOWN_WITHOUT_STACK as error:
            _hide_stack(error)
            raise

    return wrapper


def _hide_stack(error: errors.WaltzError) -> None:
    _log.debug("spark.error_stack_trace", exc_info=error)
    name, worker = _WORKER_VARIABLE
    if os.environ.get(name) == worker:
        os.environ[_HIDE_TRACEBACK_VARIABLE] = "1"


def error_of(failure: BaseException) -> errors.WaltzError | None:
    """Return the `WaltzError` inside an error that Spark has raised on the driver; otherwise None.

        except Exception as failure:
            if isinstance(waltz_spark.error_of(failure), LockFailed): ...

    The returned error has the class and the message, but no other attributes.
    """
    if isinstance(failure, errors.WaltzError):
        original: errors.WaltzError = getattr(failure, "plain", failure)  # see session_errors.py
        return original
    matches = _ERROR_TEXT.findall(str(failure))
    return _create_error(*matches[-1]) if matches else None


def trailing_error(text: str) -> errors.WaltzError | None:
    """Return the `WaltzError` at the end of a text; None if another error was raised after it."""
    matches = list(_ERROR_TEXT.finditer(text))
    if not matches or _CHAINED_ERROR.search(text, matches[-1].end()):
        return None
    return _create_error(*matches[-1].groups())


def _create_error(name: str, message: str) -> errors.WaltzError | None:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.WaltzError)):
        return None
    return kind(message)
