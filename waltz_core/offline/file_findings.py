"""What a verification has to say: one sentence for each thing, with its file and its offset.

Whoever finds something should not care how much was found before, in which order, or who prints it.

Rules:
    1. `wrong` is what no storage would leave behind. `note` is what a person may want to know and
       a storage copes with by itself: what a stop without a close has left, or work that waits.
    2. At most `limit` findings are kept, the first ones; the others are counted.
"""

from typing import NamedTuple


def records_text(first: int, last: int) -> str:
    """Return "record 7" or "records 7..9"."""
    return f"record {first}" if first == last else f"records {first}..{last}"


class FileFinding(NamedTuple):
    """One thing that was found; `path` is relative to what was looked at."""

    is_wrong: bool
    path: str
    offset: int | None
    what: str


class Findings:
    """All of them."""

    def __init__(self, limit: int) -> None:
        self.kept: list[FileFinding] = []
        self.wrong = 0
        self.notes = 0
        self._limit = limit

    @property
    def unkept(self) -> int:
        """How many were counted and not kept (rule 2)."""
        return self.wrong + self.notes - len(self.kept)

    def add(self, path: str, offset: int | None, what: str, *, is_wrong: bool) -> None:
        """Take one."""
        if is_wrong:
            self.wrong += 1
        else:
            self.notes += 1
        if len(self.kept) < self._limit:
            self.kept.append(FileFinding(is_wrong, path, offset, what))

    def in_file(self, path: str) -> "InFile":
        """Return what takes the findings of one file."""
        return InFile(self, path)


class InFile:
    """Takes the findings of one file."""

    def __init__(self, findings: Findings, path: str) -> None:
        self._findings = findings
        self._path = path

    def wrong(self, offset: int | None, what: str) -> None:
        """Take something that should not be."""
        self._findings.add(self._path, offset, what, is_wrong=True)

    def note(self, offset: int | None, what: str) -> None:
        """Take something to know."""
        self._findings.add(self._path, offset, what, is_wrong=False)

    def found(self, offset: int | None, what: str, *, is_wrong: bool) -> None:
        """Take either."""
        self._findings.add(self._path, offset, what, is_wrong=is_wrong)
