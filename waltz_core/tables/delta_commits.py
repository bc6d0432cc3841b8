"""Finds a follower's commits in the history of a Delta table, written by deltalake or Spark.

Rules:
    1. A maintenance commit belongs to no follower, even if it contains a follower's marks. Reason:
       a commit of Spark's auto compaction inherits the metadata of the session.
    2. Spark's `MERGE` succeeds even if a `RESTORE`, or a commit of a follower with another name,
       came after the marks were read. The follower detects such a commit only when the follower
       reads the table again. It may be killed before this read. So the next process also searches
       the commits between the two newest commits of the follower.
"""

from collections.abc import Sequence
from typing import NamedTuple

from waltz_core.tables.follower import OtherCommit
from waltz_core.tables.table_marks import TableMarks, decode_marks


class DeltaCommit(NamedTuple):
    """A commit in the history of a table; `metadata` is its `userMetadata`."""

    version: int
    operation: str
    metadata: str | None

    def as_other_commit(self) -> OtherCommit:
        """Return the commit, with the name of its follower if it has one (rule 1)."""
        commit = OtherCommit(self.version, self.operation)
        marks = None if commit.is_maintenance else decode_marks(self.metadata)
        return commit if marks is None else commit._replace(follower=marks.follower)


def full_operation_name(operation: str, mode: str) -> str:
    """Return the operation of a Delta commit, with the mode if the commit is an overwrite."""
    is_overwrite = operation == "WRITE" and mode.upper() == "OVERWRITE"
    return f"{operation} (OVERWRITE)" if is_overwrite else operation


def find_newest_commit(
    follower: TableMarks, commits: Sequence[DeltaCommit], *, is_complete: bool
) -> tuple[str, list[OtherCommit]] | None:
    """Find the newest commit of a follower; return its metadata, and the commits to check.

    The commits to check are all later commits, and the commits that rule 2 describes.

    Args:
        follower: the name of the follower.
        commits: the newest commits of the table, the newest first.
        is_complete: whether the history of the table has no older commits.

    Returns:
        None if `commits` contains no commit of the follower, or if older commits must also be read.
    """
    other_commits = [commit.as_other_commit() for commit in commits]
    own_indexes = [
        index for index, commit in enumerate(other_commits) if commit.follower == follower.follower
    ]
    if not own_indexes or (len(own_indexes) == 1 and not is_complete):
        return None
    commits_to_check = other_commits[: own_indexes[0]]
    if len(own_indexes) > 1:
        between = other_commits[own_indexes[0] + 1 : own_indexes[1]]
        commits_to_check += [
            commit for commit in between if commit.follower or commit.is_replacement
        ]
    metadata = commits[own_indexes[0]].metadata
    assert metadata is not None, "the metadata contain the name of the follower"
    return metadata, commits_to_check
