"""`waltz-core storage run`: a storage daemon in the foreground."""

import argparse

from waltz_core.cli.daemon import add_run, run_daemon
from waltz_core.config import StorageConfig


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    run = verbs.add_parser("run", help="run a storage (conf/storage.toml is a sample)")
    add_run(run, StorageConfig)
    run.set_defaults(verb=_run)


def _run(arguments: argparse.Namespace) -> int:
    from waltz_core.storage.daemon import run  # noqa: PLC0415 - only a storage needs it

    return run_daemon(arguments, StorageConfig, run)
