"""`value`: an immutable dataclass that is created as fast as a mutable one.

Messages, events and effects use this decorator, because a single append creates about fifty such
objects. `dataclass(frozen=True)` calls `object.__setattr__` for each field, so its objects are
created three times as slowly.

Rules:
    1. For mypy, the class is a frozen dataclass, so mypy rejects code that changes an object. At
       run time, the class is a mutable dataclass with the same fields, equality and hash.
    2. Classes with few objects use `dataclass(frozen=True)`, which also prevents changes at run
       time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool, eq: bool = True) -> Callable[[type[_T]], type[_T]]:
        """Return a class decorator; its arguments are those of `dataclass`."""
        assert frozen
        assert slots
        return dataclass(slots=True, eq=eq, unsafe_hash=eq)


__all__ = ["value"]
