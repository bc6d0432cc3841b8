"""The site, built once for all tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; a warning ends its build."""
    pytest.importorskip("sphinx", reason="the extra `site` is missing: run scripts/bootstrap site")
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-d", folder / "doctrees"]
    run = subprocess.run(
        [sys.executable, *command, "-c", "docs/site", ".", folder / "html"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.stderr == ""
    assert run.returncode == 0
    return folder / "html"
