"""Settings of a local cluster: from a file, the environment and options."""

from pathlib import Path

import pytest

from waltz_core.cli import local_command
from waltz_core.cli.main import main
from waltz_core.config import LocalConfig
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster


def test_settings_of_a_local_cluster_come_from_file_environment_and_options(tmp_path, monkeypatch):
    starts = []

    class Cluster:
        def __init__(self, directory, **counts):
            starts.append((str(directory), counts))

        def exists(self):
            return False

        def up(self, timeout_s, show_line):
            starts.append(timeout_s)
            raise BadConfig("enough")

    monkeypatch.setattr(local_command, "LocalCluster", Cluster)
    config = tmp_path / "local.toml"
    config.write_text("storage_count = 5\nserver_count = 1\nready_timeout_ms = 9000\n")
    monkeypatch.setenv("WALTZ_LOCAL_DIRECTORY", "there")
    assert main(["local", "up", "--config", str(config), "--servers", "4"]) == 1
    _, (directory, counts), timeout_s = starts
    assert (directory, timeout_s) == ("there", 9.0)
    assert (counts["storage_count"], counts["server_count"]) == (5, 4)
    assert counts["partition_count"] == LocalConfig().partition_count
    assert counts["tls"] is None
    starts.clear()
    arguments = ["--directory", "here", "--timeout-s", "1.5", "--tls", "tls.toml"]
    assert main(["local", "up", *arguments]) == 1
    assert (starts[1][0], starts[2]) == ("here", 1.5)
    assert starts[1][1]["tls"] == Path("tls.toml")


def test_an_existing_cluster_is_not_started_with_other_counts(tmp_path, monkeypatch, capsys):
    cluster = LocalCluster(tmp_path, partition_count=4)
    cluster._load_or_create()
    cluster._release_ports()
    monkeypatch.setattr(LocalCluster, "up", lambda *_: "started:1/w")
    up = ["local", "up", "--directory", str(tmp_path)]
    assert main([*up, "--partitions", "5"]) == 1
    output = capsys.readouterr()
    assert f"--partitions: the cluster in {tmp_path} was created with 4, which" in output.err
    assert "found 5" in output.err
    assert output.out == ""
    assert main([*up, "--storages", "3", "--partitions", "4"]) == 0
    assert main(up) == 0
    monkeypatch.setenv("WALTZ_LOCAL_SERVER_COUNT", "3")
    assert main(up) == 1
    assert "environment WALTZ_LOCAL_SERVER_COUNT: server_count: the" in capsys.readouterr().err


def test_all_processes_of_a_cluster_get_tls_from_its_connect_string(tmp_path):
    local_cluster = LocalCluster(tmp_path, tls=tmp_path / "tls.toml")
    local_cluster._load_or_create()
    local_cluster._release_ports()
    second_start = LocalCluster(tmp_path)
    for cluster in (local_cluster, second_start):
        assert cluster.connect.endswith(f"/waltz/local?tls={tmp_path}/tls.toml")
        assert all(
            cluster._settings_of(member)["connect"] == cluster.connect for member in cluster.members
        )


def test_a_cluster_for_other_machines_needs_an_explicit_option(tmp_path):
    with pytest.raises(BadConfig, match=r"a loopback address, found '10\.1\.2\.3'\. Hint:"):
        LocalCluster(tmp_path, host="10.1.2.3")
    cluster = LocalCluster(tmp_path, host="127.0.0.1")
    cluster._load_or_create()
    cluster._release_ports()
    assert cluster._settings_of(cluster.member("server-1"))["insecure_network"] is False
    cluster._load_state().host = "10.1.2.3"
    for name in ("server-1", "storage-1"):
        values = cluster._settings_of(cluster.member(name))
        assert (values["insecure_network"], values["http_host"]) == (True, "10.1.2.3")


def test_an_archive_is_kept_for_later_starts_and_does_not_change(tmp_path, monkeypatch, capsys):
    def up(cluster, *_):
        cluster._load_or_create()
        cluster._release_ports()
        cluster._store_archive_url()
        return "started:1/w"

    monkeypatch.setattr(LocalCluster, "up", up)
    arguments = ["local", "up", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    assert main([*arguments, "--archive", "tmp/archive"]) == 1
    assert "Hint: use a URL such as file:///srv/archive" in capsys.readouterr().err
    url = f"file://{tmp_path}/archive"
    assert main([*arguments, "--archive", url]) == 0
    assert main(arguments) == 0
    cluster = LocalCluster(tmp_path)
    storage, server = map(cluster.member, ("storage-1", "server-1"))
    assert cluster._settings_of(storage)["archive_url"] == url
    assert cluster._settings_of(server)["archive_interval_ms"] > 0
    assert main([*arguments, "--archive", f"{url}-2"]) == 1
    assert f"archive: the cluster in {tmp_path} uses {url}, which" in capsys.readouterr().err


def test_a_running_cluster_gets_no_archive(tmp_path, monkeypatch):
    cluster = LocalCluster(tmp_path)
    cluster._load_or_create()
    cluster._release_ports()
    monkeypatch.setattr(
        type(cluster.members[0]), "process", lambda each: each.name == "server-1" or None
    )
    second_start = LocalCluster(tmp_path, archive_url=f"file://{tmp_path}/archive")
    second_start._load_or_create()
    with pytest.raises(
        BadConfig,
        match=r"storage and no server runs, but server-1 run\. "
        r"Hint:",
    ):
        second_start._store_archive_url()
    assert "archive_url" not in second_start._settings_of(second_start.member("storage-1"))


def test_an_impossible_count_is_reported(capsys):
    assert main(["local", "up", "--storages", "0"]) == 1
    assert (
        "flag --storage-count, setting storage_count: expected 1..9, found 0"
        in capsys.readouterr().err
    )
