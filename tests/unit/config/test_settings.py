"""Sources of settings, rejected values, and generated files."""

import tomllib
from dataclasses import dataclass
from typing import ClassVar

import pytest

from waltz_core.config.settings import (
    Config,
    EffectiveSetting,
    load_config,
    render_settings,
    sample_toml,
    setting,
)
from waltz_core.errors import BadConfig


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """Settings of a fictitious process."""

    kind: ClassVar[str] = "sample"

    name: str = setting("", "The name of the process.", example="example")
    interval_ms: int = setting(2_000, "The interval of the work.", minimum=1_000, maximum=9_000)
    port: int = setting(15_000, "The port of the process.", minimum=0, maximum=65_535)
    is_enabled: bool = setting(True, "Whether the process works.")


@dataclass(frozen=True, kw_only=True)
class ConnectedConfig(SampleConfig):
    """Settings with `connect`."""

    kind: ClassVar[str] = "connected"

    connect: str = setting("", "The cluster.", example="here:1/x")


def write(tmp_path, text):
    path = tmp_path / "sample.toml"
    path.write_text(text)
    return path


def test_the_precedence_of_sources_is_flag_environment_file_default(tmp_path):
    path = write(tmp_path, 'name = "a"\ninterval_ms = 1_001\nport = 1\n')
    loaded = load_config(
        SampleConfig,
        path=path,
        environment={"WALTZ_SAMPLE_INTERVAL_MS": "1002", "WALTZ_SAMPLE_PORT": "2", "HOME": "/"},
        flags={"port": 3, "is_enabled": None},
    )
    assert loaded.config == SampleConfig(name="a", interval_ms=1_002, port=3, is_enabled=True)
    assert loaded.effective_settings() == [
        EffectiveSetting("name", "a", str(path)),
        EffectiveSetting("interval_ms", 1_002, "environment WALTZ_SAMPLE_INTERVAL_MS"),
        EffectiveSetting("port", 3, "flag --port"),
        EffectiveSetting("is_enabled", True, "default"),
    ]


def test_variable_waltz_connect_is_the_default_for_all_processes_with_setting_connect():
    environment = {"WALTZ_CONNECT": "general", "WALTZ_CONNECTED_NAME": "n"}
    assert load_config(ConnectedConfig, environment=environment).config.connect == "general"
    environment["WALTZ_CONNECTED_CONNECT"] = "own"
    assert load_config(ConnectedConfig, environment=environment).config.connect == "own"
    loaded = load_config(SampleConfig, environment={**environment, "WALTZ_SAMPLE_NAME": "p"})
    assert loaded.config.name == "p", "WALTZ_CONNECT is ignored by a kind without `connect`"


def test_connect_in_a_file_overrides_the_variable_waltz_connect(tmp_path):
    """A shell may set WALTZ_CONNECT for commands; a daemon started there must not use it."""
    path = write(tmp_path, 'connect = "test"\nname = "n"\n')
    environment = {"WALTZ_CONNECT": "production"}
    assert load_config(ConnectedConfig, path=path, environment=environment).config.connect == "test"
    environment["WALTZ_CONNECTED_CONNECT"] = "own"
    assert load_config(ConnectedConfig, path=path, environment=environment).config.connect == "own"


def test_the_error_for_an_unknown_name_suggests_the_nearest_name(tmp_path):
    path = write(tmp_path, 'name = "a"\ninterval_msec = 5\n')
    with pytest.raises(
        BadConfig, match=r"sample\.toml: unknown .*'interval_msec'.*mean 'interval_ms'"
    ):
        load_config(SampleConfig, path=path)
    with pytest.raises(BadConfig, match=r"WALTZ_SAMPLE_PROT: unknown .*'prot'.*mean 'port'"):
        load_config(SampleConfig, environment={"WALTZ_SAMPLE_PROT": "1"})
    with pytest.raises(BadConfig, match="unknown setting 'zzz'; expected one of name, interval_ms"):
        load_config(SampleConfig, flags={"zzz": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interval_ms = 999", "interval_ms: expected 1000..9000, found 999"),
        ("interval_ms = 9001", "expected 1000..9000, found 9001"),
        ("interval_ms = true", "interval_ms: expected an integer, found True"),
        ("interval_ms = 1.5", "expected an integer, found 1.5"),
        ('interval_ms = "soon"', "expected an integer, found 'soon'"),
        ("is_enabled = 1", "is_enabled: expected true or false, found 1"),
        ('is_enabled = "yes"', "expected true or false, found 'yes'"),
        ("name = 5", "name: expected a text, found 5"),
        ("name = []", "expected a text"),
        ("[name]", "expected a text"),
        ("name = ", "expected a TOML file"),
        ('name = ""', "name is required."),
        (
            "",
            (
                "sample: setting name is required. Hint: set it in sample.toml, in the environment "
                "as WALTZ_SAMPLE_NAME, or with the option --name"
            ),
        ),
    ],
)
def test_an_invalid_value_is_reported_with_its_location(tmp_path, text, message):
    with pytest.raises(BadConfig, match=message):
        load_config(SampleConfig, path=write(tmp_path, text))


def test_the_error_names_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BadConfig, match=r"cannot read settings file .*nothing\.toml: No such file"):
        load_config(SampleConfig, path=tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match=r"bytes\.toml: expected a TOML file"):
        load_config(SampleConfig, path=tmp_path / "bytes.toml")


def test_texts_of_flags_and_environment_get_the_type_of_the_setting():
    loaded = load_config(
        SampleConfig,
        environment={"WALTZ_SAMPLE_IS_ENABLED": "FALSE", "WALTZ_SAMPLE_INTERVAL_MS": "2_500"},
        flags={"name": "17"},
    )
    assert loaded.config == SampleConfig(name="17", interval_ms=2_500, is_enabled=False)


def test_a_config_object_is_checked_like_a_file():
    with pytest.raises(BadConfig, match=r"interval_ms: expected 1000\.\.9000, found 1"):
        SampleConfig(name="a", interval_ms=1)
    with pytest.raises(BadConfig, match="interval_ms: expected int, found '5'"):
        SampleConfig(name="a", interval_ms="5")


def test_rendered_settings_are_read_back(tmp_path):
    values = {"name": 'a "b" \\ c', "is_enabled": False, "port": 15_001, "interval_ms": 1_500}
    text = render_settings(SampleConfig, values)
    assert tomllib.loads(text) == values
    assert load_config(SampleConfig, path=write(tmp_path, text)).config == SampleConfig(**values)
    with pytest.raises(BadConfig, match="sample: unknown setting 'nam'; did you mean 'name'"):
        render_settings(SampleConfig, {"nam": "x"})
    with pytest.raises(BadConfig, match="control characters"):
        render_settings(SampleConfig, {"name": "a\nb"})
    with pytest.raises(BadConfig, match="sample, setting interval_ms: expected 1000"):
        render_settings(SampleConfig, {"interval_ms": 1})


def test_a_sample_is_complete_and_its_comments_are_the_defaults(tmp_path):
    sample = sample_toml(SampleConfig)
    assert tomllib.loads(sample) == {"name": "example"}
    live = "\n".join(
        line.removeprefix("# ") if " = " in line else line for line in sample.splitlines()
    )
    assert load_config(SampleConfig, path=write(tmp_path, live)).config == SampleConfig(
        name="example"
    )
    assert "# The interval of the work. [1_000..9_000]" in sample
    assert "# port = 15000" in sample
