"""Runs a server that can connect to no other server; its configuration is the argument."""

import sys

from waltz_core.cli.main import main
from waltz_core.errors import Unreachable
from waltz_core.server.process import failure_detector


class FirewalledServer:
    """A firewall that blocks only the connections between this server and other servers."""

    async def dial(self, _protocol: object, address: str, **_options: object) -> None:
        """Fail as a connection does that a firewall drops."""
        raise Unreachable(f"{address}: timed out") from TimeoutError()


if __name__ == "__main__":
    failure_detector.net = FirewalledServer()  # type: ignore[assignment]
    sys.exit(main(["server", "run", "--config", sys.argv[1]]))
