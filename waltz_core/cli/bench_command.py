"""`waltz-core bench`: run a benchmark; the package `waltz_bench` contains the benchmarks."""

from importlib import import_module
from importlib.util import find_spec

import click

from waltz_core.cli.subcommands import Subcommand
from waltz_core.errors import BadConfig


@click.command(cls=Subcommand, help="", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain_installation(arguments: tuple[str, ...]) -> int:
    """Explain how to install the benchmarks."""
    raise BadConfig("the benchmarks are not installed. Hint: run pip install 'waltz-spark[bench]'.")


bench: Subcommand = (
    explain_installation
    if find_spec("waltz_bench") is None
    else import_module("waltz_bench.command").bench
)
