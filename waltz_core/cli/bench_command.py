"""`waltz-core bench`, whose workloads are the package `waltz_bench`."""

import argparse
from importlib import import_module
from importlib.util import find_spec

from waltz_core.errors import BadConfig


def add(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of the benchmarks, where they are installed."""
    if find_spec("waltz_bench") is not None:
        import_module("waltz_bench.command").add(command)
        return
    command.add_argument(
        "workload", nargs=argparse.REMAINDER, help="needs pip install 'waltz-spark[bench]'"
    )
    command.set_defaults(verb=_refuse)


def _refuse(arguments: argparse.Namespace) -> int:
    raise BadConfig("the benchmarks are not installed. Hint: run pip install 'waltz-spark[bench]'.")
