"""A server daemon whose event loop hangs after SIGUSR1 while a file exists.

    python -m tests.fault.hanging_server FILE CONFIG

Only the main thread hangs. The other threads run, also those of kazoo, the ZooKeeper client.
"""

import signal
import sys
import time
from pathlib import Path

from waltz_core.cli.main import main


def block_event_loop(*_: object) -> None:
    """Block the thread that runs the event loop."""
    while Path(sys.argv[1]).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, block_event_loop)
    sys.exit(main(["server", "run", "--config", sys.argv[2]]))
