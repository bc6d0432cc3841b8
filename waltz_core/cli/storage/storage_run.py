"""`waltz-core storage run`: a storage daemon.

The module imports nothing that only other verbs need, which would be a quarter of the start time.
"""

from collections.abc import Callable

from waltz_core.cli.daemon_command import daemon
from waltz_core.cli.verbs import verb
from waltz_core.config.declarations import StorageConfig


@verb
@daemon(StorageConfig)
def run_command() -> Callable[[StorageConfig], None]:
    from waltz_core.storage.process.storage_daemon import run  # noqa: PLC0415 - only a storage needs it

    return run
