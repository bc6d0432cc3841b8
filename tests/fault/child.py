"""A process that a test starts; it runs until its input ends or until it is killed."""

import subprocess
from pathlib import Path
from typing import IO

from tests.patience import HANG_S


class Child:
    """Its process, which the subclass starts."""

    process: subprocess.Popen[str]

    def run(
        self, command: list[str], output: IO[str] | None = None, cwd: Path | None = None
    ) -> None:
        """Start it; an output takes its errors, too."""
        errors = None if output is None else subprocess.STDOUT
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True, cwd=cwd
        )

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """Have it come to its end, which must be a good one."""
        self.process.communicate(timeout=HANG_S)
        assert self.process.returncode == 0
