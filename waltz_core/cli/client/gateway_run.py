"""`waltz-core gateway run`: run a gateway; for its imports see `storage_run.py`."""

from collections.abc import Callable

from waltz_core.cli.daemon_command import with_daemon_options
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import GatewayConfig


@subcommand
@with_daemon_options(GatewayConfig)
def run_command() -> Callable[[GatewayConfig], None]:
    from waltz_core.gateway.gateway_daemon import run  # noqa: PLC0415 - only a gateway needs it

    return run
