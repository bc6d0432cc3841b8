"""Passes the counts of a stream's written rows to the driver, from the committing process.

Spark commits each micro-batch in a Python process on the driver's machine, and passes no counts on
(docs/decisions/067). So `waltz_spark.export_metrics` makes a file for each query, and the commit
adds its counts to this file.

Rules:
    1. Without a file, a commit writes nothing.
    2. All users share the parent of the directory. So the directory belongs to the user of the
       process, and no other user may write to it.
    3. A file is replaced as a whole. A query has one commit at a time.
    4. A commit never fails because of its counts, because its rows are already in the log.
"""

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from waltz_core.errors import BadConfig


class WriteCounts(NamedTuple):
    """Rows that are in the log, rows that a lock has rejected, and appends that were repeated."""

    committed: int = 0
    rejected: int = 0
    retried: int = 0

    def plus(self, other: "WriteCounts") -> "WriteCounts":
        """Return the sums."""
        return WriteCounts(
            *(own_count + other_count for own_count, other_count in zip(self, other, strict=True))
        )


NO_ROWS = WriteCounts()


def make_directory() -> None:
    """Make the directory of the files. Called in the driver's Python process.

    Raises:
        BadConfig: it is not possible, or rule 2 forbids its use.
    """
    directory = _directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        is_own = _is_own(directory)
    except OSError as error:
        raise BadConfig(f"cannot count written rows in {directory}: {error}") from error
    if not is_own:
        raise BadConfig(
            f"cannot count written rows in {directory}: the directory belongs to another user, or "
            "other users may write to it. Hint: remove it, or set TMPDIR to another directory "
            "before Spark starts."
        )


def open_counts(query: str) -> None:
    """Make the file for the counts of a query, unless it exists.

    Called in the driver's Python process.
    """
    path = _directory() / query
    with contextlib.suppress(OSError):
        if _is_own(path.parent) and not path.exists():
            _write(path, NO_ROWS)


def add_counts(query: str, counts: WriteCounts) -> None:
    """In the commit, add to the counts of a query, if the query has a file (rules 1 and 4)."""
    with contextlib.suppress(OSError):
        if _is_own(_directory()) and (_directory() / query).exists():
            _write(_directory() / query, read_counts(query).plus(counts))


def read_counts(query: str) -> WriteCounts:
    """Return the counts of a query; zeros without a file, or with a damaged one."""
    try:
        return WriteCounts(*map(int, json.loads((_directory() / query).read_bytes())))
    except (OSError, ValueError, TypeError):
        return NO_ROWS


def remove_counts(query: str) -> None:
    """Remove the file of a query."""
    with contextlib.suppress(OSError):
        (_directory() / query).unlink()


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / f"waltz-spark-metrics-{os.getuid()}"


def _is_own(directory: Path) -> bool:
    status = directory.lstat()
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & writable_by_others
    )


def _write(path: Path, counts: WriteCounts) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    new.replace(path)
