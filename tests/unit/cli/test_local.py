"""The settings of a cluster on this machine: a file, the environment, flags."""

from waltz_core.cli import local
from waltz_core.cli.main import main
from waltz_core.config import LocalConfig
from waltz_core.errors import BadConfig


def test_a_local_cluster_is_what_file_environment_and_flags_say(tmp_path, monkeypatch):
    made = []

    class Cluster:
        def __init__(self, directory, **counts):
            made.append((str(directory), counts))

        def up(self, timeout_s):
            made.append(timeout_s)
            raise BadConfig("enough")

    monkeypatch.setattr(local, "LocalCluster", Cluster)
    config = tmp_path / "local.toml"
    config.write_text("storage_count = 5\nserver_count = 1\nready_timeout_ms = 9000\n")
    monkeypatch.setenv("WALTZ_LOCAL_DIRECTORY", "there")
    assert main(["local", "up", "--config", str(config), "--servers", "4"]) == 1
    (directory, counts), timeout_s = made
    assert (directory, timeout_s) == ("there", 9.0)
    assert (counts["storage_count"], counts["server_count"]) == (5, 4)
    assert counts["partition_count"] == LocalConfig().partition_count
    made.clear()
    assert main(["local", "up", "--directory", "here", "--timeout-s", "1.5"]) == 1
    assert (made[0][0], made[1]) == ("here", 1.5)


def test_a_count_that_cannot_be_is_told(capsys):
    assert main(["local", "up", "--storages", "0"]) == 1
    assert "flag --storage-count: storage_count: expected 1..9, found 0" in capsys.readouterr().err
