"""`waltz-core gateway run`: a gateway; see `storage_run.py`."""

from collections.abc import Callable

from waltz_core.cli.daemon_command import daemon
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import GatewayConfig


@subcommand
@daemon(GatewayConfig)
def run_command() -> Callable[[GatewayConfig], None]:
    from waltz_core.gateway.gateway_daemon import run  # noqa: PLC0415 - only a gateway needs it

    return run
