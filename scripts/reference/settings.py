"""The settings, from the declarations in `waltz_core/config/declarations.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from typing import Any

from scripts.reference.markdown import cell, code, table
from waltz_core.config.declarations import CONFIG_TYPES_BY_KIND, TlsConfig, ZooKeeperConfig
from waltz_core.config.settings import Config, toml_literal

SHARED_CONFIG_TYPES: dict[str, type[Config]] = {"zookeeper": ZooKeeperConfig, "tls": TlsConfig}
# Part of a name -> unit; the first part that the name contains applies.
UNITS = {
    "bytes_per_s": "bytes per second",
    "bytes": "bytes",
    "_ms": "milliseconds",
    "port": "port",
    "group": "group",
}


def tables() -> dict[str, str]:
    """Return the settings that several kinds share, then those of each kind alone."""
    shared_names = {
        field.name for config_type in SHARED_CONFIG_TYPES.values() for field in fields(config_type)
    }
    texts = {}
    for name, config_type in SHARED_CONFIG_TYPES.items():
        config_types = [
            each for each in CONFIG_TYPES_BY_KIND.values() if issubclass(each, config_type)
        ]
        texts[name] = _table(fields(config_type), config_types)
    for name, config_type in CONFIG_TYPES_BY_KIND.items():
        if name not in SHARED_CONFIG_TYPES:
            own_settings = [
                field for field in fields(config_type) if field.name not in shared_names
            ]
            texts[name] = _table(own_settings, [config_type])
    return texts


def _table(settings: Iterable[Field[Any]], config_types: Sequence[type[Config]]) -> str:
    rows = [
        (
            code(setting.name),
            _type(setting),
            _default(setting, config_types),
            _bounds(setting),
            cell(setting.metadata["doc"]),
        )
        for setting in settings
    ]
    return table(("setting", "type", "default", "bounds", "meaning"), rows)


def _type(setting_field: Field[Any]) -> str:
    if setting_field.type is not int:
        return "text" if setting_field.type is str else "true or false"
    return next((unit for part, unit in UNITS.items() if part in setting_field.name), "number")


def _default(setting_field: Field[Any], config_types: Sequence[type[Config]]) -> str:
    """Return the default, or those of all kinds that use the setting."""
    if example := setting_field.metadata["example"]:
        return f"required, for example {code(example)}"
    kinds: dict[str, list[str]] = {}
    for config_type in config_types:
        (matching,) = [
            setting for setting in fields(config_type) if setting.name == setting_field.name
        ]
        default: Any = matching.default
        default_text = "empty" if default == "" else code(toml_literal(setting_field.name, default))
        kinds.setdefault(default_text, []).append(config_type.kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(names)}: {default_text}" for default_text, names in kinds.items())


def _bounds(setting_field: Field[Any]) -> str:
    minimum, maximum = setting_field.metadata["minimum"], setting_field.metadata["maximum"]
    return "" if minimum is None else f"{minimum:_} to {maximum:_}"
