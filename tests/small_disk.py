"""A small disk, which a test can fill."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

CANNOT_MOUNT_REASON = "only root on Linux can mount a small disk"


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    return os.geteuid() == 0 and sys.platform.startswith("linux")


class SmallDisk:
    """A file system in memory, mounted on a new directory; raises CalledProcessError."""

    def __init__(self, directory: Path, size: str) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
            check=True,
            capture_output=True,
        )

    @property
    def filler_path(self) -> Path:
        return self.directory / "filler"

    def fill(self) -> None:
        """Write a file until no byte is free."""
        with self.filler_path.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (self.directory / "more").write_bytes(bytes(4096))
        (self.directory / "more").unlink(missing_ok=True)

    def free(self) -> None:
        """Remove the file that `fill` has written."""
        self.filler_path.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.directory)], check=True, capture_output=True)
