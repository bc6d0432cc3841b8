"""An error's way from a Spark worker to the user: as one sentence, and back as its class.

Spark sends an exception to the driver as text, the stack of its worker first. Both ends of that way
are here: what a worker leaves out, and what the driver reads out of the rest.

Rules:
    1. An error that says what was expected, what was found and where needs no stack: the sentence
       comes first. Everything else, which may be our own bug, keeps its stack.
    2. Nothing but the last words of a worker is changed: Spark ends it after an exception.
    3. An error of ours is read only where Spark or Python put one. The same words in a value, in a
       user's own sentence, or on another line of it are the user's.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from waltz_core import errors

_log = logging.getLogger("waltz")

# What Spark says to its Python workers, and what they look at when they report an exception.
_WORKER = ("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
_HIDE = "SPARK_HIDE_TRACEBACK"
_SPOKEN = (errors.UsageError, errors.Unavailable, errors.Superseded, errors.Damaged)
# Where an error stands in a text (rule 3): after what Spark puts before whatever Python says, or
# below the last frame of a stack.
_PUT_BEFORE = (
    r"(?:^|: |\) )(?:\[\w*PYTHON\w*\] |An exception was thrown from the Python worker)"
    r"[^:'\"\n]*:[ \n]"
)
_LAST_FRAME = r'^  File ".*\n(?:    .*\n)*(?:  \[Previous line .*\n)?'
_SENTENCE = re.compile(
    rf"(?:{_PUT_BEFORE}|{_LAST_FRAME})waltz_core\.errors\.(\w+): (.*)", re.MULTILINE
)
# What Python says between an error and the one that was raised in answer to it.
_ANSWERED = re.compile(r"^(During handling of|The above exception was the)", re.MULTILINE)

P = ParamSpec("P")
T = TypeVar("T")


def plainly(call: Callable[P, T]) -> Callable[P, T]:
    """Have what a method raises reach the user as its sentence (rule 1)."""

    @functools.wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except _SPOKEN as error:
            _hide_stack(error)
            raise

    return plain


def plainly_each(call: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Do the same for what a method raises while its result is iterated over."""

    @functools.wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from call(*args, **kwargs)
        except _SPOKEN as error:
            _hide_stack(error)
            raise

    return plain


def _hide_stack(error: errors.WaltzError) -> None:
    _log.debug("the stack of what the user is told", exc_info=error)
    name, worker = _WORKER
    if os.environ.get(name) == worker:
        os.environ[_HIDE] = "1"


def error_of(failure: BaseException) -> errors.WaltzError | None:
    """Return our error inside one that Spark has raised on the driver; None when there is none.

        except Exception as failure:
            if isinstance(waltz_spark.error_of(failure), LockFailed): ...

    It has the class and the sentence; other attributes do not travel.
    """
    if isinstance(failure, errors.WaltzError):
        plain: errors.WaltzError = getattr(failure, "plain", failure)  # see unwrapping.py
        return plain
    found = _SENTENCE.findall(str(failure))
    return _made(*found[-1]) if found else None


def last_word(text: str) -> errors.WaltzError | None:
    """Return our error at the end of a text; None when somebody has raised another one over it."""
    found = list(_SENTENCE.finditer(text))
    if not found or _ANSWERED.search(text, found[-1].end()):
        return None
    return _made(*found[-1].groups())


def _made(name: str, sentence: str) -> errors.WaltzError | None:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.WaltzError)):
        return None
    return kind(sentence)
