"""The parser of all commands: what was not understood is one sentence, with what was meant.

Argparse answers with the usage of all options, forty lines for a daemon, and knows neither the
nearest word nor where a connect string comes from.
"""

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias

from waltz_core.config.settings import nearest

# What `add_subparsers` returns, to which a command adds its verbs.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

NOT_UNDERSTOOD = 2
WHICH_CLUSTER = (
    "which cluster? Give --connect zk1:2181,zk2:2181/waltz/payments or set $WALTZ_CONNECT "
    "(`waltz-core local up` starts one on this machine and prints what to give)"
)
REQUIRED = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """Parses one command, or one noun, or one verb."""

    def error(self, message: str) -> NoReturn:
        """Say what was not understood, and end."""
        missing = message.removeprefix(REQUIRED).split(", ") if message.startswith(REQUIRED) else []
        if "--connect" in missing:
            others = [each for each in missing if each != "--connect"]
            message = WHICH_CLUSTER
            if others:
                message = f"{REQUIRED}{', '.join(others)}; and {WHICH_CLUSTER}"
        self.exit(NOT_UNDERSTOOD, f"{self.prog}: {message}\n`{self.prog} --help` has the rest\n")

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """End with the first word that nobody takes, and the option it may have been."""
        for word in words:
            name = word.partition("=")[0] if word.startswith("-") else word
            close = ""
            if re.match(r"--?[^\d-]", name):
                options = {each.lstrip("-"): each for each in self._option_string_actions}
                found = difflib.get_close_matches(name.lstrip("-"), options, n=1)
                close = f"; did you mean {options[found[0]]!r}?" if found else ""
            self.error(f"there is no {name!r} here{close}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            raise argparse.ArgumentError(action, f"there is no {value!r}{nearest(value, known)}")
