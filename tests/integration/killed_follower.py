"""`waltz-core follow` in a process that kills itself: python -m tests.integration.killed_follower.

Arguments: a step (`STEPS`), the number of times that it is passed, and the words of the command.
"""

import os
import signal
import sys
import threading
from functools import wraps
from pathlib import Path
from typing import Any

from waltz_core.cli.main import main
from waltz_core.tables.delta_table import FollowedDeltaTable
from waltz_core.tables.followed_log import ClientFollowedLog

STEPS = (
    "before finish",
    "after finish",
    "after marks",
    "after changes",
    "before apply",
    "in apply",
    "after apply",
)
_OWNERS = {"changes": ClientFollowedLog}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_files_are_written(table: Path) -> None:
    """Kill the process when the merge has written a file, most often before the version."""
    known = set(table.glob("*.parquet"))
    while set(table.glob("*.parquet")) <= known:
        pass
    _kill()


def arm(step: str, passes: int, table: Path) -> None:
    """Kill this process at a step, after it was passed some times."""
    when, name = step.split()
    owner = _OWNERS.get(name, FollowedDeltaTable)
    method = getattr(owner, name)
    left = passes

    @wraps(method)
    def killed(*args: Any, **words: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and when == "before":
            _kill()
        if left < 0 and when == "in":
            threading.Thread(target=_kill_when_files_are_written, args=[table], daemon=True).start()
        result = method(*args, **words)
        if left < 0 and when == "after":
            _kill()
        return result

    setattr(owner, name, killed)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]), Path(sys.argv[4]))
    sys.exit(main(sys.argv[3:]))
