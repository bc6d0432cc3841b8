"""`waltz-core server run`: a server daemon.

As `storage_run.py`.
"""

import argparse

from waltz_core.cli.daemon_command import (
    add_run,
    run_daemon,
    spare_threads,
)
from waltz_core.cli.parsing import Verbs
from waltz_core.config.declarations import ServerConfig


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    run = verbs.add_parser("run", help="run a server (conf/server.toml is a sample)")
    add_run(run, ServerConfig)
    run.set_defaults(verb=_run)


def _run(arguments: argparse.Namespace) -> int:
    spare_threads()
    from waltz_core.server.process.server_daemon import run  # noqa: PLC0415 - only a server needs it

    return run_daemon(arguments, ServerConfig, run)
