"""`waltz-core server run`: a server daemon in the foreground."""

import argparse

from waltz_core.cli.daemon import add_run, run_daemon
from waltz_core.config import ServerConfig


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    run = verbs.add_parser("run", help="run a server (conf/server.toml is a sample)")
    add_run(run, ServerConfig)
    run.set_defaults(verb=_run)


def _run(arguments: argparse.Namespace) -> int:
    from waltz_core.server.daemon import run  # noqa: PLC0415 - only a server needs it

    return run_daemon(arguments, ServerConfig, run)
