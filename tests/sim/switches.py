"""The register of mutants: each switch breaks one rule of the production code.

A switch is a function that yields patches, and its docstring describes the broken behavior. The
switches are in `broken_*.py`, one file for each part of the production code.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from waltz_sim.cluster import simulated_servers

Patches = Iterable[mock._patch]
SWITCHES: dict[str, Callable[[], Patches]] = {}


def switch(make: Callable[[], Patches]) -> Callable[[], Patches]:
    """Register a switch."""
    assert make.__doc__
    assert make.__name__ not in SWITCHES
    SWITCHES[make.__name__] = make
    return make


def replaced(owner: object, name: str, new: object) -> mock._patch:
    """Replace a function of the production code, which must exist."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    return mock.patch.object(owner, name, new)


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break a rule for the duration of a `with` block.

    The machines' own invariant checks are disabled, because the checkers must detect the effect.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(simulated_servers, "check", do_nothing))
        for patch in SWITCHES[name]():
            stack.enter_context(patch)
        yield
