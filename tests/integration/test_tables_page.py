"""The commands and the Python of docs/tables.md, in their order, against a local cluster."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.commands import run_command
from waltz_core.local import running

PAGE = Path(__file__).resolve().parents[2] / "docs/tables.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONNECT = "zk1:2181,zk2:2181/waltz/payments"


def test_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WALTZ_CONNECT", "")  # restored after the test, which exports it
    names: dict[str, object] = {}
    with running(tmp_path / "local", storage_count=1, server_count=1, partition_count=2) as cluster:
        text = PAGE.read_text(encoding="utf-8")
        assert CONNECT in text
        text = text.replace(CONNECT, cluster.connect).replace("/lake/", f"{tmp_path}/lake/")
        blocks = BLOCK.findall(text)
        assert [language for language, _ in blocks] == [
            *["bash", "bash"],
            *["python"] * 3,
            *["bash", "python"],
        ]
        for language, block in blocks:
            if language == "python":
                exec(compile(block, PAGE, "exec"), names)
                continue
            for words in map(shlex.split, block.splitlines()):
                if words[0] == "export":
                    name, _, value = words[1].partition("=")
                    os.environ[name] = value
                    continue
                done = run_command(*words[1:])
                assert done.returncode == 0, done.stderr
