"""Sources of settings, rejected values, and generated files."""

import tomllib
from dataclasses import dataclass
from typing import ClassVar

import pytest

from waltz_core.config.settings import (
    Config,
    ShownSetting,
    load_config,
    render_settings,
    sample_toml,
    setting,
)
from waltz_core.errors import BadConfig


@dataclass(frozen=True, kw_only=True)
class PlantConfig(Config):
    """A plant."""

    kind: ClassVar[str] = "plant"

    name: str = setting("", "What it is called.", example="fern")
    water_ms: int = setting(2_000, "How often. Too often: it drowns.", minimum=1_000, maximum=9_000)
    port: int = setting(15_000, "Where it drains.", minimum=0, maximum=65_535)
    is_green: bool = setting(True, "Whether it is well.")


@dataclass(frozen=True, kw_only=True)
class CactusConfig(PlantConfig):
    """A plant with `connect`."""

    kind: ClassVar[str] = "cactus"

    connect: str = setting("", "Where.", example="here:1/x")


def write(tmp_path, text):
    path = tmp_path / "plant.toml"
    path.write_text(text)
    return path


def test_the_precedence_of_sources_is_flag_environment_file_default(tmp_path):
    path = write(tmp_path, 'name = "a"\nwater_ms = 1_001\nport = 1\n')
    loaded = load_config(
        PlantConfig,
        path=path,
        environment={"WALTZ_PLANT_WATER_MS": "1002", "WALTZ_PLANT_PORT": "2", "HOME": "/"},
        flags={"port": 3, "is_green": None},
    )
    assert loaded.config == PlantConfig(name="a", water_ms=1_002, port=3, is_green=True)
    assert loaded.effective_settings() == [
        ShownSetting("name", "a", str(path)),
        ShownSetting("water_ms", 1_002, "environment WALTZ_PLANT_WATER_MS"),
        ShownSetting("port", 3, "flag --port"),
        ShownSetting("is_green", True, "default"),
    ]


def test_a_general_connect_applies_to_every_kind_and_a_specific_one_wins():
    environment = {"WALTZ_CONNECT": "general", "WALTZ_CACTUS_NAME": "n"}
    assert load_config(CactusConfig, environment=environment).config.connect == "general"
    environment["WALTZ_CACTUS_CONNECT"] = "own"
    assert load_config(CactusConfig, environment=environment).config.connect == "own"
    plant = load_config(PlantConfig, environment={**environment, "WALTZ_PLANT_NAME": "p"})
    assert plant.config.name == "p", "WALTZ_CONNECT is ignored by a kind without `connect`"


def test_the_connect_of_a_file_overrides_the_general_one(tmp_path):
    """It is set in a shell for commands; a daemon started there must not join another cluster."""
    path = write(tmp_path, 'connect = "test"\nname = "n"\n')
    environment = {"WALTZ_CONNECT": "production"}
    assert load_config(CactusConfig, path=path, environment=environment).config.connect == "test"
    environment["WALTZ_CACTUS_CONNECT"] = "own"
    assert load_config(CactusConfig, path=path, environment=environment).config.connect == "own"


def test_an_unknown_name_is_reported_with_the_nearest(tmp_path):
    path = write(tmp_path, 'name = "a"\nwater_msec = 5\n')
    with pytest.raises(BadConfig, match=r"plant\.toml: unknown .*'water_msec'.*mean 'water_ms'"):
        load_config(PlantConfig, path=path)
    with pytest.raises(BadConfig, match=r"WALTZ_PLANT_PROT: unknown .*'prot'.*mean 'port'"):
        load_config(PlantConfig, environment={"WALTZ_PLANT_PROT": "1"})
    with pytest.raises(BadConfig, match="unknown setting 'zzz'; expected one of name, water_ms"):
        load_config(PlantConfig, flags={"zzz": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("water_ms = 999", "water_ms: expected 1000..9000, found 999"),
        ("water_ms = 9001", "expected 1000..9000, found 9001"),
        ("water_ms = true", "water_ms: expected an integer, found True"),
        ("water_ms = 1.5", "expected an integer, found 1.5"),
        ('water_ms = "soon"', "expected an integer, found 'soon'"),
        ("is_green = 1", "is_green: expected true or false, found 1"),
        ('is_green = "yes"', "expected true or false, found 'yes'"),
        ("name = 5", "name: expected a text, found 5"),
        ("name = []", "expected a text"),
        ("[name]", "expected a text"),
        ("name = ", "expected a TOML file"),
        ('name = ""', "name is required."),
        (
            "",
            (
                "plant: setting name is required. Hint: set it in plant.toml, in the environment "
                "as WALTZ_PLANT_NAME, or with the option --name"
            ),
        ),
    ],
)
def test_an_invalid_value_is_reported_with_its_location(tmp_path, text, message):
    with pytest.raises(BadConfig, match=message):
        load_config(PlantConfig, path=write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(BadConfig, match=r"cannot read settings file .*nothing\.toml: No such file"):
        load_config(PlantConfig, path=tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match=r"bytes\.toml: expected a TOML file"):
        load_config(PlantConfig, path=tmp_path / "bytes.toml")


def test_texts_of_flags_and_environment_get_the_type_of_the_setting():
    loaded = load_config(
        PlantConfig,
        environment={"WALTZ_PLANT_IS_GREEN": "FALSE", "WALTZ_PLANT_WATER_MS": "2_500"},
        flags={"name": "17"},
    )
    assert loaded.config == PlantConfig(name="17", water_ms=2_500, is_green=False)


def test_a_config_object_is_checked_like_a_file():
    with pytest.raises(BadConfig, match=r"water_ms: expected 1000\.\.9000, found 1"):
        PlantConfig(name="a", water_ms=1)
    with pytest.raises(BadConfig, match="water_ms: expected int, found '5'"):
        PlantConfig(name="a", water_ms="5")


def test_rendered_settings_are_read_back(tmp_path):
    values = {"name": 'a "b" \\ c', "is_green": False, "port": 15_001, "water_ms": 1_500}
    text = render_settings(PlantConfig, values)
    assert tomllib.loads(text) == values
    assert load_config(PlantConfig, path=write(tmp_path, text)).config == PlantConfig(**values)
    with pytest.raises(BadConfig, match="plant: unknown setting 'nam'; did you mean 'name'"):
        render_settings(PlantConfig, {"nam": "x"})
    with pytest.raises(BadConfig, match="control characters"):
        render_settings(PlantConfig, {"name": "a\nb"})
    with pytest.raises(BadConfig, match="plant, setting water_ms: expected 1000"):
        render_settings(PlantConfig, {"water_ms": 1})


def test_a_sample_is_complete_and_its_comments_are_the_defaults(tmp_path):
    sample = sample_toml(PlantConfig)
    assert tomllib.loads(sample) == {"name": "fern"}
    live = "\n".join(
        line.removeprefix("# ") if " = " in line else line for line in sample.splitlines()
    )
    assert load_config(PlantConfig, path=write(tmp_path, live)).config == PlantConfig(name="fern")
    assert "# How often. Too often: it drowns. [1_000..9_000]" in sample
    assert "# port = 15000" in sample
