"""How ZooKeeper is called."""

from pathlib import Path

from waltz_core.zookeeper_process import JAVA_OPTIONS, MAIN_CLASS, command


def test_the_users_java_options_come_after_ours(monkeypatch):
    monkeypatch.setenv("SERVER_JVMFLAGS", "-Xmx1g '-Dzookeeper.some.path=/a b'")
    line = command(Path("zoo.cfg"))
    assert line.index("-Xmx1g") > line.index("-Xmx192m")
    assert line[line.index("-Xmx1g") + 1] == "-Dzookeeper.some.path=/a b"
    assert line[-2:] == [MAIN_CLASS, "zoo.cfg"]


def test_without_any_there_are_ours_alone(monkeypatch):
    monkeypatch.delenv("SERVER_JVMFLAGS", raising=False)
    line = command(Path("zoo.cfg"))
    assert line[1 : line.index("-cp")] == list(JAVA_OPTIONS)
