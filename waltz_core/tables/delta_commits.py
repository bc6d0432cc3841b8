"""The commits of a follower among those of a Delta table, written by deltalake or by Spark.

Rules:
    1. A commit of maintenance is of no follower: those of Spark's auto compaction have the metadata
       of the session, and so the marks of the follower.
    2. Spark's `MERGE` succeeds after a `RESTORE`, or a commit of a follower with another name, that
       came after its marks were read. So these are found also between the newest two commits of
       the follower: its process may have been killed before it read the table again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from waltz_core.tables.follower import OtherCommit
from waltz_core.tables.table_marks import TableMarks, decode


class DeltaCommit(NamedTuple):
    """A commit in the history of a table; `metadata` is its `userMetadata`."""

    version: int
    operation: str
    metadata: str | None

    def of_follower(self) -> OtherCommit:
        """Return the commit with the name of its follower, if it has one (rule 1)."""
        commit = OtherCommit(self.version, self.operation)
        found = None if commit.is_maintenance else decode(self.metadata)
        return commit if found is None else commit._replace(follower=found.follower)


def operation_of(operation: str, mode: str) -> str:
    """Return the operation of a commit of Delta, with the mode if it is an overwrite."""
    is_overwrite = operation == "WRITE" and mode.upper() == "OVERWRITE"
    return f"{operation} (OVERWRITE)" if is_overwrite else operation


def newest_of(
    follower: TableMarks, commits: Sequence[DeltaCommit], *, is_complete: bool
) -> tuple[str, list[OtherCommit]] | None:
    """Return the metadata of the newest commit of a follower, and the commits to check.

    These are all later ones, and those of rule 2.

    Args:
        follower: its name.
        commits: the newest commits, the newest one first.
        is_complete: whether there are no older ones.

    Returns:
        None if there is no such commit, or older ones must be read, too.
    """
    found = [each.of_follower() for each in commits]
    own = [at for at, each in enumerate(found) if each.follower == follower.follower]
    if not own or (len(own) == 1 and not is_complete):
        return None
    others = found[: own[0]]
    if len(own) > 1:
        between = found[own[0] + 1 : own[1]]
        others += [each for each in between if each.follower or each.is_replacement]
    metadata = commits[own[0]].metadata
    assert metadata is not None, "it has the name of the follower"
    return metadata, others
