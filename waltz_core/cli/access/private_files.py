"""Reads and writes files with secrets, which only their owner can read."""

import contextlib
import os
from pathlib import Path
from typing import Final

from waltz_core.errors import BadConfig

_FILE_MODE: Final = 0o600


def write_private_file(path: Path, data: bytes) -> None:
    """Write a new file with mode 600; return after it is synced to disk.

    Raises BadConfig if the file exists or cannot be written. In both cases, no incomplete file
    remains.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    except FileExistsError:
        raise BadConfig(
            f"{path} exists already, and the command does not overwrite it. Hint: use another "
            "name; delete the file only if an interrupted command has left it."
        ) from None
    except OSError as error:
        raise BadConfig(f"the file {path} cannot be created: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, _FILE_MODE)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        _sync_folder(path)
    except BaseException as error:
        remove_private_file(path)
        if isinstance(error, OSError):
            raise BadConfig(f"the file {path} cannot be written: {error.strerror}") from error
        raise


def remove_private_file(path: Path) -> None:
    """Delete a file that `write_private_file` has written; ignore errors of the file system."""
    with contextlib.suppress(OSError):
        path.unlink()


def read_private_file(path: Path, bytes_max: int) -> bytes:
    """Read a file; raises BadConfig if it cannot be read or has more than `bytes_max` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise BadConfig(f"the file {path} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise BadConfig(
            f"the file {path} is too large: expected at most {bytes_max} bytes, found more"
        )
    return data


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
