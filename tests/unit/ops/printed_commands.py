"""Checks that programs accept the commands that the doctor prints."""

import re
import shlex

import click

from tests.commands import parse_command

# Operators replace words in capitals.
FILLED_IN = {
    "COUNT": "3",
    "ADMIN_PORT": "15281",
    "CLUSTER_KEY": "191568e5-8d82-421b-82d3-20ab46b03e4e",
}
OTHER_PROGRAMS = {"kill", "timedatectl", "wait"}


def check_understood(line: str) -> None:
    """Fail unless the program accepts each command of a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&{}")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch(r"[;&{}]+", word):
            commands.append([])
        else:
            commands[-1].append(FILLED_IN.get(word, word))
    given = [command for command in commands if command]
    assert given, line
    for program, *words in given:
        if program != "waltz-core":
            assert program in OTHER_PROGRAMS, line
            continue
        try:
            parse_command(words)
        except click.UsageError as error:
            raise AssertionError(f"invalid command: {line}: {error.format_message()}") from None
