"""Print the section of CHANGELOG.md of a release.

    python scripts/release_notes.py v0.2.0

The script fails if the tag differs from the version of the code, or if the section has no date. A
release page shows each line break, so wrapped lines are joined.
"""

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str) -> str:
    """Return the section of a version; raises ValueError if there is none with a date."""
    title = re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n", changelog, re.MULTILINE)
    if title is None:
        raise ValueError(f"CHANGELOG.md: expected a section '## {version} (YYYY-MM-DD)'")
    section = re.split(r"^## ", changelog[title.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    return re.sub(r"(?<=\S)\n *(?![\n\-#])(?=\S)", " ", section).strip()


def main(arguments: list[str]) -> int:
    """Check the tag, and print the notes."""
    version = runpy.run_path(str(ROOT / "waltz_core" / "__init__.py"))["__version__"]
    if arguments != [f"v{version}"]:
        print(
            f"expected the tag v{version}, found {' '.join(arguments) or 'none'}", file=sys.stderr
        )
        return 1
    print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
