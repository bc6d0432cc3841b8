"""The declarations of settings: complete, within bounds, documented, consistent with formats."""

import tomllib
from dataclasses import fields

import pytest

from waltz_core.config import (
    CONFIG_TYPES_BY_KIND,
    ClientConfig,
    ServerConfig,
    StorageConfig,
    render_toml,
)
from waltz_core.config.settings import load_config, sample_toml
from waltz_core.errors import BadConfig
from waltz_core.records.record import FRAME_BYTES_MAX, RECORD_OVERHEAD_BYTES, TRANSACTION_BYTES_MAX

CONNECT = "127.0.0.1:2181/waltz/test"
UNITS = (
    "_bytes",
    "_bytes_max",
    "_bytes_per_s",
    "_ms",
    "_ms_min",
    "_ms_max",
    "_count",
    "_count_max",
    "_count_min",
    "_max",
)


@pytest.mark.parametrize("config_type", CONFIG_TYPES_BY_KIND.values(), ids=CONFIG_TYPES_BY_KIND)
def test_the_sample_file_is_a_valid_configuration(config_type, tmp_path):
    path = tmp_path / "sample.toml"
    path.write_text(sample_toml(config_type))
    loaded = load_config(config_type, path=path)
    assert all(
        shown.origin == "default" or shown.name in ("connect", "directory")
        for shown in loaded.effective_settings()
    )


@pytest.mark.parametrize("config_type", CONFIG_TYPES_BY_KIND.values(), ids=CONFIG_TYPES_BY_KIND)
def test_each_setting_has_a_doc_sentence_a_valid_default_and_a_unit_in_its_name(config_type):
    for field in fields(config_type):
        assert field.metadata["doc"].endswith("."), field.name
        if field.type is int:
            minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
            assert minimum <= field.default <= maximum, field.name
            assert field.name.endswith((*UNITS, "port", "port_base", "group")), (
                f"{field.name} does not end with its unit"
            )


@pytest.mark.parametrize("config_type", CONFIG_TYPES_BY_KIND.values(), ids=CONFIG_TYPES_BY_KIND)
def test_every_bound_of_a_setting_is_enforced(config_type):
    given = {
        field.name: field.metadata["example"]
        for field in fields(config_type)
        if field.metadata["example"]
    }
    for field in fields(config_type):
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if field.metadata[bound] is not None:
                value = field.metadata[bound] + step
                with pytest.raises(BadConfig, match=f"{field.name}: expected"):
                    config_type(**given, **{field.name: value})


def test_relations_between_settings_are_checked():
    with pytest.raises(BadConfig, match="setting admin_port: expected another port than that"):
        StorageConfig(connect=CONNECT, directory="d", port=9, admin_port=9)
    assert StorageConfig(connect=CONNECT, directory="d", port=0, admin_port=0).port == 0
    with pytest.raises(
        BadConfig,
        match=r"setting retry_interval_ms_min: expected at most "
        r"retry_interval_ms_max \(400\), found 500",
    ):
        ServerConfig(connect=CONNECT, retry_interval_ms_min=500, retry_interval_ms_max=400)
    with pytest.raises(BadConfig, match="memory_bytes_max: expected at least"):
        ServerConfig(connect=CONNECT, memory_bytes_max=100 << 20)
    with pytest.raises(BadConfig, match="batch_bytes_max: expected at most in_flight_bytes_max"):
        ClientConfig(connect=CONNECT, batch_bytes_max=6 << 20, in_flight_bytes_max=5 << 20)


def test_one_transaction_of_the_greatest_size_fits_every_limit():
    whole = TRANSACTION_BYTES_MAX + RECORD_OVERHEAD_BYTES
    minimum = {field.name: field.metadata["minimum"] for field in fields(ServerConfig)}
    assert minimum["batch_bytes_max"] > whole
    assert minimum["partition_queue_bytes_max"] > whole
    assert minimum["connection_in_flight_bytes_max"] > whole
    assert (
        next(f for f in fields(ServerConfig) if f.name == "batch_bytes_max").metadata["maximum"]
        < FRAME_BYTES_MAX
    )
    assert (
        next(f for f in fields(StorageConfig) if f.name == "queue_bytes_max").metadata["minimum"]
        > FRAME_BYTES_MAX
    )
    client = {field.name: field.metadata["minimum"] for field in fields(ClientConfig)}
    assert client["in_flight_bytes_max"] > whole


def test_the_default_number_of_lock_slots_is_a_prime_number():
    count = ServerConfig(connect=CONNECT).lock_slot_count
    assert all(count % divisor for divisor in range(2, int(count**0.5) + 1))


def test_the_error_for_an_unknown_kind_of_process_suggests_the_nearest_kind():
    assert tomllib.loads(render_toml("storage", {"reserve_bytes": 4096})) == {"reserve_bytes": 4096}
    with pytest.raises(BadConfig, match="unknown kind of process 'storag'; did you mean 'storage'"):
        render_toml("storag", {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize(
    ("kind", "more"), [(ServerConfig, {}), (StorageConfig, {"directory": "data"})]
)
def test_a_listen_host_that_no_client_can_dial_requires_an_advertised_host(kind, more, host):
    settings = {"connect": "zk:2181/w", "listen_host": host, **more}
    with pytest.raises(BadConfig, match="setting advertised_host is"):
        kind(**settings)
    assert kind(**settings, advertised_host="db1").listen_host == host


@pytest.mark.parametrize("host", ["waltz..example", "x" * 64, ".example", "db1:80", "a b"])
@pytest.mark.parametrize("name", ["listen_host", "advertised_host"])
@pytest.mark.parametrize(
    ("kind", "more"), [(ServerConfig, {}), (StorageConfig, {"directory": "data"})]
)
def test_an_invalid_host_name_is_rejected(kind, more, name, host):
    with pytest.raises(BadConfig, match=rf"{name}: .* is not a valid host name: .* Hint: "):
        kind(connect="zk:2181/w", **{name: host}, **more)


def test_a_valid_host_name_is_accepted_as_the_advertised_host():
    for host in ("[::1]", "::1", "db1", "waltz_storage_1"):
        assert ServerConfig(connect=CONNECT, advertised_host=host).advertised_host == host


def test_a_daemon_waits_for_zookeeper_longer_than_a_client():
    """A starting daemon must survive a ZooKeeper that does not answer for 30 s."""
    daemons = (
        ServerConfig(connect=CONNECT),
        StorageConfig(connect=CONNECT, directory="there"),
    )
    assert {daemon.zookeeper_connect_timeout_ms for daemon in daemons} == {60_000}
    assert ClientConfig(connect=CONNECT).zookeeper_connect_timeout_ms == 10_000


def test_the_error_for_an_unknown_choice_names_its_source(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text('connect = "zk:2181/w"\ndirectory = "/d"\nlog_format = "JSON"\n')
    wrong = r"setting log_format: expected one of text, json, found 'JSON'"
    with pytest.raises(BadConfig, match=rf"^{file}, {wrong}$"):
        load_config(StorageConfig, path=file)
    variables = {"WALTZ_STORAGE_LOG_FORMAT": "JSON", "WALTZ_STORAGE_CONNECT": "zk:2181/w"}
    with pytest.raises(BadConfig, match=rf"^environment WALTZ_STORAGE_LOG_FORMAT, {wrong}$"):
        load_config(StorageConfig, environment={**variables, "WALTZ_STORAGE_DIRECTORY": "/d"})
