"""A small disk, which a test can fill."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

WHY_NOT = "only root on Linux can mount a small disk"


def can_mount() -> bool:
    """Whether it is possible to try."""
    return os.geteuid() == 0 and sys.platform.startswith("linux")


class Disk:
    """A file system in memory, mounted on a new directory; raises CalledProcessError."""

    def __init__(self, where: Path, size: str) -> None:
        self.where = where
        where.mkdir(parents=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)],
            check=True,
            capture_output=True,
        )

    @property
    def filler(self) -> Path:
        return self.where / "filler"

    def fill(self) -> None:
        """Leave no byte."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (self.where / "more").write_bytes(bytes(4096))
        (self.where / "more").unlink(missing_ok=True)

    def free(self) -> None:
        """Give it back."""
        self.filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.where)], check=True, capture_output=True)
