"""`value`: a dataclass that nobody changes, and that is made as fast as one that may be changed.

Each message, event and effect is such an object, and a lone append makes some fifty of them on its
way. `dataclass(frozen=True)` goes through `object.__setattr__` for each field when an object is
made, which takes three times as long as making it without.

Rules:
    1. mypy sees a frozen dataclass, and refuses whatever would change one. At run time nothing
       does: there it is one with the same fields, the same equality and the same hash.
    2. For what is made once in a while there is `dataclass(frozen=True)`, which refuses for itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool, eq: bool = True) -> Callable[[type[_T]], type[_T]]:
        """Return a decorator; what it is given is as for a dataclass."""
        assert frozen
        assert slots
        return dataclass(slots=True, eq=eq, unsafe_hash=eq)


__all__ = ["value"]
