"""A process that a test starts; it runs until its input ends or until it is killed."""

import subprocess
from pathlib import Path
from typing import IO

from tests.time_limits import TEST_TIMEOUT_S


class ChildProcess:
    """A process; a subclass returns its command line."""

    process: subprocess.Popen[str]

    def run(
        self, command: list[str], output: IO[str] | None = None, cwd: Path | None = None
    ) -> None:
        """Start the process; `output` gets its errors, too."""
        errors = None if output is None else subprocess.STDOUT
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True, cwd=cwd
        )

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """End its input; the process must exit with 0."""
        self.process.communicate(timeout=TEST_TIMEOUT_S)
        assert self.process.returncode == 0
