"""`waltz-core follow` in a process that kills itself: python -m tests.integration.killed_follower.

Arguments: a step of `KILL_STEPS`, the number of times that the process passes this step, and the
command.
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

KILL_STEPS = (
    "before finish",
    "after finish",
    "after marks",
    "after changes",
    "before apply",
    "in apply",
    "after apply",
)
_STEP_CLASSES = {"changes": ClientFollowedLog}


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_files_are_written(table: Path) -> None:
    """Kill the process when the merge has written a file, usually before it writes the version."""
    known = set(table.glob("*.parquet"))
    while set(table.glob("*.parquet")) <= known:
        pass
    _kill_this_process()


def kill_at_step(step: str, passes: int, table: Path) -> None:
    """Kill this process at the given occurrence of a step."""
    when, name = step.split()
    owner = _STEP_CLASSES.get(name, FollowedDeltaTable)
    method = getattr(owner, name)
    remaining_passes = passes

    @wraps(method)
    def call_or_kill(*args: Any, **words: Any) -> Any:
        nonlocal remaining_passes
        remaining_passes -= 1
        if remaining_passes < 0 and when == "before":
            _kill_this_process()
        if remaining_passes < 0 and when == "in":
            threading.Thread(target=_kill_when_files_are_written, args=[table], daemon=True).start()
        result = method(*args, **words)
        if remaining_passes < 0 and when == "after":
            _kill_this_process()
        return result

    setattr(owner, name, call_or_kill)


if __name__ == "__main__":
    kill_at_step(sys.argv[1], int(sys.argv[2]), Path(sys.argv[4]))
    sys.exit(main(sys.argv[3:]))
