"""Tools in separate environments, which scripts/tool_environment installs."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.time_limits import TEST_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]


def programs_of(tool: str) -> Path:
    """Return the directory with the programs of a tool."""
    return ROOT / "build" / "tools" / tool / "bin"


def needs_tools(*tools: str) -> pytest.MarkDecorator:
    """Skip a test if one of its tools is not installed."""
    missing = [tool for tool in tools if not (programs_of(tool).parent / ".installed").exists()]
    reason = f"not installed: {', '.join(missing)} (run make test-tools)"
    return pytest.mark.skipif(bool(missing), reason=reason)


def tool_environment(*tools: str, **variables: str) -> dict[str, str]:
    """Return the environment variables of a process that uses tools; tools send no usage data."""
    path = [*(str(programs_of(tool)) for tool in tools), os.environ["PATH"]]
    # The sources of this checkout precede an installed package, as in the process of the test.
    quiet = {"DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **quiet, "PATH": os.pathsep.join(path), **variables}


def run_program(*line: str | Path, env: Mapping[str, str], cwd: Path) -> str:
    """Run a program of a tool until it ends; return its output."""
    result = subprocess.run(
        line, env=env, cwd=cwd, check=False, text=True, timeout=TEST_TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    return result.stdout
