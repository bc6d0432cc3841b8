"""The commands and the Python of docs/tables.md, in their order, against a local cluster."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from waltz_core.local import running_cluster

PAGE = Path(__file__).resolve().parents[2] / "docs/tables.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.\w+)\n")  # the first line of a block that is a file
CONNECT = "zk1:2181,zk2:2181/waltz/payments"


def test_the_commands_and_the_python_of_the_tables_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WALTZ_CONNECT", "")  # restored after the test, which exports it
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with running_cluster(
        tmp_path / "local", storage_count=1, server_count=1, partition_count=2
    ) as cluster:
        text = PAGE.read_text(encoding="utf-8")
        assert CONNECT in text
        text = text.replace(CONNECT, cluster.connect).replace("/lake/", f"{tmp_path}/lake/")
        blocks = BLOCK.findall(text)
        assert len(blocks) == 12
        for language, block in blocks:
            if file := FILE.match(block):
                (tmp_path / file[1]).write_text(block)
                continue
            if language == "python":
                exec(compile(block, PAGE, "exec"), names)
                continue
            for words in map(shlex.split, block.splitlines()):
                if words[0] == "export":
                    name, _, value = words[1].partition("=")
                    os.environ[name] = value
                    continue
                result = run_command(*words[1:])
                assert result.returncode == 0, result.stderr
