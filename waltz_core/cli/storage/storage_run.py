"""`waltz-core storage run`: a storage daemon.

A daemon is started for this verb and imports nothing that only the others need, which would be a
quarter of the time until it serves.
"""

import argparse

from waltz_core.cli.daemon_command import (
    add_run,
    run_daemon,
    spare_threads,
)
from waltz_core.cli.parsing import Verbs
from waltz_core.config.declarations import StorageConfig


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    run = verbs.add_parser("run", help="run a storage (conf/storage.toml is a sample)")
    add_run(run, StorageConfig)
    run.set_defaults(verb=_run)


def _run(arguments: argparse.Namespace) -> int:
    spare_threads()
    from waltz_core.storage.process.storage_daemon import run  # noqa: PLC0415 - only a storage needs it

    return run_daemon(arguments, StorageConfig, run)
