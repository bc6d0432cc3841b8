"""Loads a user-supplied function that an option names as `module:function`."""

import importlib
import re
from typing import Any

from waltz_core.errors import BadConfig

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_function_name(text: str) -> bool:
    """Return whether a text has the form `module:function`."""
    return _NAME.fullmatch(text) is not None


def load_function(name: str, option: str, hint: str) -> Any:  # noqa: ANN401 - the user's
    """Import and return the function with the name `module:function`.

    Args:
        name: the name of the function.
        option: the option that has the name, for errors.
        hint: the hint in the error for a function that cannot be imported.

    Raises:
        BadConfig: the function does not exist, or the object is not a function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"{option}: {name!r} cannot be imported ({error}). {hint}") from None
    if not callable(function):
        raise BadConfig(f"{option}: expected {name!r} to be a function, found {function!r}")
    return function
