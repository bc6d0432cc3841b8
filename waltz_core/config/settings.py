"""Declares, loads, checks and writes the settings of a process.

`declarations.py` contains the list of settings. This module uses only one setting by its name:
`connect`, which all kinds of processes have.

Rules:
    1. A value comes from the first source that contains it: flag, environment, file, default.
    2. The environment variable for `port` of a storage is `WALTZ_STORAGE_PORT`. `WALTZ_CONNECT`
       applies to every kind of process, unless its configuration file sets `connect`. Without this
       exception, a value that is set for commands in a shell could connect a daemon to another
       cluster.
    3. An unknown name, in a file or in the environment, is an error. The error suggests the most
       similar valid name.
    4. An error about a value states the expected value, the found value, and the source.
"""

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from waltz_core.errors import BadConfig

SettingValue: TypeAlias = str | int | bool


def setting(
    default: SettingValue,
    doc: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    example: str = "",
) -> Any:  # noqa: ANN401 - the result of `field` fits every type
    """Declare a setting. A setting with an `example` has no usable default, and is required."""
    assert not example or default == "", "only a text can be required"
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum, "example": example}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base class of the settings of all kinds of processes; it checks all bounds."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for setting_field in fields(self):
            _check_value(setting_field.name, getattr(self, setting_field.name), setting_field)
        self.validate()

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""

    def _check_ports_differ(self, *names: str) -> None:
        """Raise BadConfig if two of these settings have the same port; port 0 is permitted."""
        setting_by_port: dict[int, str] = {}
        for name in names:
            port: int = getattr(self, name)
            if port and port in setting_by_port:
                raise BadConfig(
                    f"setting {name}: expected another port than that of {setting_by_port[port]}, "
                    f"found {port} for both"
                )
            setting_by_port[port] = name

    def _check_one_of(self, name: str, allowed_values: Collection[str]) -> None:
        """Raise BadConfig unless the value of a setting is one of `allowed_values`."""
        value = getattr(self, name)
        if value not in allowed_values:
            allowed_text = ", ".join(allowed_value or "nothing" for allowed_value in allowed_values)
            raise BadConfig(f"setting {name}: expected one of {allowed_text}, found {value!r}")

    def _check_at_most(self, smaller: str, greater: str) -> None:
        """Raise BadConfig if the value of setting `smaller` exceeds that of setting `greater`."""
        low, high = getattr(self, smaller), getattr(self, greater)
        if low > high:
            raise BadConfig(f"setting {smaller}: expected at most {greater} ({high}), found {low}")


ConfigT = TypeVar("ConfigT", bound=Config)


# --- Loading


class EffectiveSetting(NamedTuple):
    """A setting as printed by `waltz-core config show`."""

    name: str
    value: SettingValue
    origin: str


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """The settings of a process, and the origin of each value that is not the default."""

    config: ConfigT
    origins: Mapping[str, str]

    def effective_settings(self) -> list[EffectiveSetting]:
        """Return each setting with its value and its origin, in the order of the sample."""
        return [
            EffectiveSetting(
                setting_field.name,
                getattr(self.config, setting_field.name),
                self.origins.get(setting_field.name, "default"),
            )
            for setting_field in fields(self.config)
        ]


def load_config(
    config_type: type[ConfigT],
    *,
    path: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, SettingValue | None] | None = None,
) -> LoadedConfig[ConfigT]:
    """Load the settings of a process (rule 1). A flag that is None was not given.

    Raises:
        BadConfig: a file that cannot be read, an unknown name, a value out of bounds, or a
            required setting that is absent; the message has the source.
    """
    values: dict[str, SettingValue] = {}
    origins: dict[str, str] = {}
    fields_by_name = {setting_field.name: setting_field for setting_field in fields(config_type)}

    def set_value(name: str, value: object, origin: str) -> None:
        if name not in fields_by_name:
            raise BadConfig(
                f"{origin}: unknown setting {name!r}{nearest_name_hint(name, list(fields_by_name))}"
            )
        values[name] = _convert_value(name, value, fields_by_name[name].type, origin)
        _check_value(f"{origin}, setting {name}", values[name], fields_by_name[name])
        origins[name] = origin

    if path is not None:
        for name, value in _read_toml(path).items():
            set_value(name, value, os.fspath(path))
    for variable, name in _environment_variables(config_type, environment or {}, values):
        set_value(name, (environment or {})[variable], f"environment {variable}")
    for name, flag in (flags or {}).items():
        if flag is not None:
            set_value(name, flag, f"flag --{name.replace('_', '-')}")
    for name, setting_field in fields_by_name.items():
        if setting_field.metadata["example"] and not values.get(name):
            raise BadConfig(_missing_setting_text(config_type, name))
    return LoadedConfig(_validated_config(config_type, values, origins), origins)


def _validated_config(
    config_type: type[ConfigT], values: Mapping[str, SettingValue], origins: Mapping[str, str]
) -> ConfigT:
    """Create the settings; if `validate` rejects a setting, add its source to the error."""
    try:
        return config_type(**values)
    except BadConfig as error:
        name, *_ = str(error).removeprefix("setting ").replace(":", " ").split()
        origin = origins.get(name)
        raise BadConfig(str(error) if origin is None else f"{origin}, {error}") from None


def _read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    try:
        with open(path, "rb") as handle:
            values = tomllib.load(handle)
        repr(values)  # raises for a number of more than 4,300 digits, which cannot be printed
    except OSError as error:
        raise BadConfig(f"cannot read settings file {os.fspath(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{os.fspath(path)}: expected a TOML file: {error}") from None
    return values


def _environment_variables(
    config_type: type[Config], environment: Mapping[str, str], file: Collection[str]
) -> list[tuple[str, str]]:
    """Return the environment variables of this kind, each with its setting (rule 2)."""
    prefix = f"WALTZ_{config_type.kind.upper()}_"
    has_connect = any(setting_field.name == "connect" for setting_field in fields(config_type))
    is_general = has_connect and "WALTZ_CONNECT" in environment and "connect" not in file
    names = [("WALTZ_CONNECT", "connect")] if is_general else []
    own_variables = sorted(variable for variable in environment if variable.startswith(prefix))
    return names + [(variable, variable.removeprefix(prefix).lower()) for variable in own_variables]


def _convert_value(name: str, value: object, expected_type: Any, origin: str) -> SettingValue:  # noqa: ANN401 - a type
    """Convert a value to the type of its setting; flags and the environment have only texts."""
    if isinstance(value, str) and expected_type is int:
        try:
            return int(value)
        except ValueError:
            raise BadConfig(
                f"{origin}, setting {name}: expected an integer, found {value!r}"
            ) from None
    if isinstance(value, str) and expected_type is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) is not expected_type:
        expected = {int: "an integer", bool: "true or false", str: "a text"}[expected_type]
        raise BadConfig(f"{origin}, setting {name}: expected {expected}, found {value!r}")
    assert isinstance(value, str | int | bool)
    return value


def _check_value(source: str, value: SettingValue, setting_field: Any) -> None:  # noqa: ANN401 - a `Field` of any type
    """Raise BadConfig if a value has the wrong type or is out of bounds."""
    if type(value) is not setting_field.type:
        raise BadConfig(f"{source}: expected {setting_field.type.__name__}, found {value!r}")
    minimum, maximum = setting_field.metadata["minimum"], setting_field.metadata["maximum"]
    if isinstance(value, int) and (
        (minimum is not None and value < minimum) or (maximum is not None and value > maximum)
    ):
        raise BadConfig(f"{source}: expected {minimum}..{maximum}, found {value}")


def _missing_setting_text(config_type: type[Config], name: str) -> str:
    """Return the error text for a required setting without a value."""
    kind, flag = config_type.kind, name.replace("_", "-")
    variable = "WALTZ_CONNECT" if name == "connect" else f"WALTZ_{kind.upper()}_{name.upper()}"
    return (
        f"{kind}: setting {name} is required. Hint: set it in {kind}.toml, in the environment as "
        f"{variable}, or with the option --{flag}"
    )


def first_names_text(names: Sequence[str], count_max: int) -> str:
    """Return the first names, separated by commas, with "..." if there are more."""
    suffix = ", ..." if len(names) > count_max else ""
    return ", ".join(names[:count_max]) + suffix or "none"


def nearest_name_hint(name: str, known_names: list[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    similar_names = difflib.get_close_matches(name, known_names, n=1, cutoff=0.5)
    return (
        f"; did you mean {similar_names[0]!r}?"
        if similar_names
        else f"; expected one of {', '.join(known_names)}"
    )


# --- Writing


def render_settings(config_type: type[Config], values: Mapping[str, object]) -> str:
    """Return the text of a configuration file of one kind, with only these values.

    Raises:
        BadConfig: an unknown setting, or a value of another type or out of bounds.
    """
    kind = config_type.kind
    fields_by_name = {setting_field.name: setting_field for setting_field in fields(config_type)}
    lines = []
    for name, value in values.items():
        if name not in fields_by_name:
            raise BadConfig(
                f"{kind}: unknown setting {name!r}{nearest_name_hint(name, list(fields_by_name))}"
            )
        converted = _convert_value(name, value, fields_by_name[name].type, kind)
        _check_value(f"{kind}, setting {name}", converted, fields_by_name[name])
        lines.append(f"{name} = {toml_literal(name, converted)}\n")
    return "".join(lines)


def sample_toml(config_type: type[Config]) -> str:
    """Return the commented sample file of one kind, in which required settings are active."""
    doc = (config_type.__doc__ or "").strip()
    lines = [
        f"# {doc}",
        "# Written by `make docs`. A line that is commented out has the default.",
    ]
    for setting_field in sorted(
        fields(config_type), key=lambda candidate: not candidate.metadata["example"]
    ):
        lines.append("")
        lines.extend(
            f"# {line}"
            for line in _wrap_text(setting_field.metadata["doc"] + _bounds_text(setting_field))
        )
        example: str = setting_field.metadata["example"]
        mark = "" if example else "# "
        default: Any = setting_field.default
        lines.append(
            f"{mark}{setting_field.name} = {toml_literal(setting_field.name, example or default)}"
        )
    return "\n".join(lines) + "\n"


def _bounds_text(setting_field: Any) -> str:  # noqa: ANN401 - a `Field` of any type
    minimum, maximum = setting_field.metadata["minimum"], setting_field.metadata["maximum"]
    return "" if minimum is None else f" [{minimum:_}..{maximum:_}]"


def _wrap_text(text: str, width: int = 96) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def toml_literal(name: str, value: SettingValue) -> str:
    """Return a value as TOML.

    Raises:
        BadConfig: a text with control characters.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if name.endswith("port") else f"{value:_}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    if not value.isprintable():
        raise BadConfig(f"expected a string without control characters, found {value!r}")
    return f'"{escaped}"'
