"""`waltz-core server run`: run a server daemon; for its imports see `storage_run.py`."""

from collections.abc import Callable

from waltz_core.cli.daemon_command import with_daemon_options
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import ServerConfig


@subcommand
@with_daemon_options(ServerConfig)
def run_command() -> Callable[[ServerConfig], None]:
    from waltz_core.server.process.server_daemon import run  # noqa: PLC0415 - only a server needs it

    return run
