"""The findings of a verification: one sentence for each, with its file and its offset.

A check adds findings; `VerificationFindings` counts and limits them.

Rules:
    1. An error (`is_error`) is a state that no storage leaves on its disk, not even after a crash.
       All other findings are notes. Most notes describe a state that the storage handles by itself,
       such as the traces of a crash, or a change that was begun.
    2. The first `limit` findings are kept; the others are only counted.
"""

from typing import NamedTuple


def records_text(first: int, last: int) -> str:
    """Return "record 7" or "records 7..9"."""
    return f"record {first}" if first == last else f"records {first}..{last}"


class FileFinding(NamedTuple):
    """One finding; `path` is relative to the verified directory."""

    is_error: bool
    path: str
    offset: int | None
    what: str


class VerificationFindings:
    """All findings of a verification."""

    def __init__(self, limit: int) -> None:
        self.kept_findings: list[FileFinding] = []
        self.error_count = 0
        self.note_count = 0
        self._limit = limit

    @property
    def omitted_count(self) -> int:
        """The number of findings that were counted but not kept (rule 2)."""
        return self.error_count + self.note_count - len(self.kept_findings)

    def add(self, path: str, offset: int | None, what: str, *, is_error: bool) -> None:
        """Count a finding, and keep it if the limit permits."""
        if is_error:
            self.error_count += 1
        else:
            self.note_count += 1
        if len(self.kept_findings) < self._limit:
            self.kept_findings.append(FileFinding(is_error, path, offset, what))

    def in_file(self, path: str) -> "FileFindings":
        """Return a collector for the findings of one file."""
        return FileFindings(self, path)


class FileFindings:
    """Collects the findings of one file."""

    def __init__(self, findings: VerificationFindings, path: str) -> None:
        self._findings = findings
        self._path = path

    def add_error(self, offset: int | None, what: str) -> None:
        """Add an error at an offset; None if it concerns the complete file."""
        self._findings.add(self._path, offset, what, is_error=True)

    def add_note(self, offset: int | None, what: str) -> None:
        """Add a note at an offset; None if it concerns the complete file."""
        self._findings.add(self._path, offset, what, is_error=False)

    def add_finding(self, offset: int | None, what: str, *, is_error: bool) -> None:
        """Add an error or a note."""
        self._findings.add(self._path, offset, what, is_error=is_error)
