"""The errors, from the classes in `waltz_core/errors.py` and their docstrings."""

import re

from scripts.reference.markdown import cell, code, table
from waltz_core.errors import WaltzError

ACTION = "Action: "


def tables() -> dict[str, str]:
    """Return a table for each group, and one for the base class."""
    groups = {_group_anchor(group): _table(group) for group in WaltzError.__subclasses__()}
    return {"base": table(COLUMNS, [_row(WaltzError)]), **groups}


COLUMNS = ("error", "code", "retriable", "what has happened", "what to do")


def _table(group: type[WaltzError]) -> str:
    return table(COLUMNS, [_row(subclass) for subclass in _class_and_subclasses(group)])


def _row(error: type[WaltzError]) -> tuple[str, int, str, str, str]:
    paragraphs = [" ".join(each.split()) for each in (error.__doc__ or "").split("\n\n")]
    *facts, action = paragraphs
    assert action.startswith(ACTION), f"{error.__name__}: no action in its docstring"
    retriable = "yes" if error.retriable else "no"
    return (
        code(error.__name__),
        error.code,
        retriable,
        cell(" ".join(facts)),
        cell(action.removeprefix(ACTION)),
    )


def _class_and_subclasses(error: type[WaltzError]) -> list[type[WaltzError]]:
    """Return a class and its subclasses, by code."""
    children = sorted(error.__subclasses__(), key=lambda each: each.code)
    return [error, *(subclass for child in children for subclass in _class_and_subclasses(child))]


def _group_anchor(group: type[WaltzError]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", group.__name__).lower()
