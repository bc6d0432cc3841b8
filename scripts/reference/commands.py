"""The commands, from the click commands in `waltz_core/cli/`."""

import re
import textwrap
from collections.abc import Iterator, Sequence

import click

from scripts.reference.markdown import cell, code, table
from waltz_core.cli.main import NAME, NOUNS, program
from waltz_core.cli.verbs import LazyVerb, Noun, Verb

WIDTH = 100
# Their options are the settings of a kind.
DAEMONS = {"storage run": "storage", "server run": "server"}
DEFAULT = re.compile(r" *\[default: ([^]]*)\]| *\[(required)\]")


def sections() -> dict[str, str]:
    """Return the sections of all commands."""
    return {"commands": "\n\n".join(part for noun in NOUNS for part in _noun(noun))}


def _noun(name: str) -> Iterator[str]:
    found = program.commands[name]
    yield f"## {name}"
    if isinstance(found, LazyVerb):
        yield from _verb(name, found.load())
        return
    assert isinstance(found, Noun)
    yield _prose(found.help)
    if NOUNS[name].examples:
        yield _lines(NOUNS[name].examples)
    for verb, command in _verbs(found):
        if not command.hidden:
            assert isinstance(command, LazyVerb)
            yield f"### {name} {verb}"
            yield from _verb(f"{name} {verb}", command.load())


def _verbs(noun: Noun) -> Iterator[tuple[str, click.Command]]:
    for name, command in noun.commands.items():
        if isinstance(command, Noun):  # a verb of two words
            yield from ((f"{name} {verb}", each) for verb, each in command.commands.items())
        else:
            yield name, command


def _verb(name: str, verb: Verb) -> Iterator[str]:
    yield _prose(verb.help)
    context = click.Context(verb, info_name=f"{NAME} {name}")
    yield _lines([" ".join([name, *verb.collect_usage_pieces(context)])])
    if verb.examples:
        yield _lines(verb.examples)
    if name in DAEMONS:
        kind = DAEMONS[name]
        yield _prose(
            f"`--config FILE` names a TOML file with settings. Each setting of a {kind}, of "
            "ZooKeeper and of TLS is also an option that overrides the file: `--port` for `port`. "
            f"docs/reference/settings.md#{kind} lists them."
        )
        return
    arguments_first = sorted(verb.params, key=lambda each: isinstance(each, click.Option))
    records = (each.get_help_record(context) for each in arguments_first)
    rows = [_row(*each) for each in records if each is not None]
    if rows:
        yield table(("argument or option", "default", "meaning"), rows)


def _row(names: str, text: str) -> tuple[str, str, str]:
    """Return a row; the default is at the end of the text."""
    found = ["".join(each) for each in DEFAULT.findall(text)]
    default = found[0] if found else ""
    if names.startswith("-"):
        return code(names), cell(default), cell(DEFAULT.sub("", text))
    optional = default or ("" if names.startswith("[") else "required")
    return code(names), cell(optional), cell(DEFAULT.sub("", text))


def _lines(commands: Sequence[str]) -> str:
    return "\n".join(["```", *(f"{NAME} {each}" for each in commands), "```"])


def _prose(text: str | None) -> str:
    return textwrap.fill(cell(text or ""), WIDTH, break_long_words=False, break_on_hyphens=False)
