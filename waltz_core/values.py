"""`value`: an immutable dataclass that is created as fast as a mutable one.

Messages, events and effects are such objects; a single append creates about fifty of them.
`dataclass(frozen=True)` calls `object.__setattr__` for each field, which makes creation three times
as slow.

Rules:
    1. mypy sees a frozen dataclass, and rejects code that changes one. At run time it is a mutable
       dataclass with the same fields, equality and hash.
    2. Objects that are rarely created use `dataclass(frozen=True)`, which also checks at run time.
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
