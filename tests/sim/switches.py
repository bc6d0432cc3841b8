"""The register of broken rules: each switch breaks one rule of the production code.

A switch is a function that yields patches; its docstring says what is wrong while they are on. They
stand in `broken_*.py`, by the part of the production code that they break.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from waltz_sim.cluster import servers

Patches = Iterable[mock._patch]
SWITCHES: dict[str, Callable[[], Patches]] = {}


def switch(make: Callable[[], Patches]) -> Callable[[], Patches]:
    """Enter a switch in the register."""
    assert make.__doc__
    assert make.__name__ not in SWITCHES
    SWITCHES[make.__name__] = make
    return make


def instead(owner: object, name: str, new: object) -> mock._patch:
    """Replace a function of the production code, which must exist."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    return mock.patch.object(owner, name, new)


def nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break a rule for a while.

    The machines' own checks of their whole state are left out: what is broken must show outside.
    """
    with ExitStack() as stack:
        stack.enter_context(instead(servers, "check", nothing))
        for patch in SWITCHES[name]():
            stack.enter_context(patch)
        yield
