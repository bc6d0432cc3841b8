"""`waltz-core storage run`: run a storage daemon.

The module does not import the modules of other subcommands, because these imports would take a
quarter of the start time.
"""

from collections.abc import Callable

from waltz_core.cli.daemon_command import with_daemon_options
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import StorageConfig


@subcommand
@with_daemon_options(StorageConfig)
def run_command() -> Callable[[StorageConfig], None]:
    from waltz_core.storage.process.storage_daemon import run  # noqa: PLC0415 - only a storage needs it

    return run
