"""The tables of `waltz-core follow`, from its options or from a TOML file.

The TOML file has a section for each table:

["/lake/accounts"]
key = "id"
columns = ["id:int64", "owner:string"]
delete_headers = [2]
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from waltz_core.cli.client import payload_columns
from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.config.settings import nearest_name_hint
from waltz_core.errors import BadConfig
from waltz_core.tables.followed_log import transactions_schema
from waltz_core.tables.row_changes import ChangeRules, changes_function, parse_condition

TABLE_FORMATS = ("delta", "parquet")


class TableOptions(NamedTuple):
    """The options of one table; each field except `location` is also a name in the TOML file."""

    location: str
    format: str | None = None
    key: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    headers: tuple[int, ...] = ()
    delete_headers: tuple[int, ...] = ()
    delete_where: str | None = None
    changes: str | None = None

    def change_rules(self, declared_columns: ArrowSchema | None) -> ChangeRules:
        """Return the rules by which transactions change the table.

        Raises:
            BadConfig: an option is not valid, or the changes function does not exist.
            BadRequest: the result of the changes function is not valid.
        """
        condition = None if self.delete_where is None else parse_condition(self.delete_where)
        function = None
        if self.changes is not None:
            if declared_columns is None:
                raise BadConfig(
                    f"changes function {self.changes}: expected declared columns of the "
                    "transactions, found none. Hint: declare the columns that the function needs."
                )
            function = changes_function(
                self.changes, transactions_schema(declared_columns), self.key
            )
        return ChangeRules(self.key, self.delete_headers, condition, function)

    def declared_columns(self) -> ArrowSchema | None:
        """Return the declared columns; None if the follower infers them from the payloads."""
        return payload_columns.declared_schema(self.columns)


_LIST_OPTIONS = {"key": str, "columns": str, "headers": int, "delete_headers": int}
_TEXT_OPTIONS = ("format", "delete_where", "changes")


def read_tables(file: Path) -> list[TableOptions]:
    """Read the tables in a TOML file, which has a section for each table.

    Raises:
        BadConfig: the file cannot be read, has no table, or a name or a value is not valid.
    """
    try:
        with file.open("rb") as stream:
            sections = tomllib.load(stream)
    except (OSError, ValueError) as error:
        raise BadConfig(f"--tables {file}: {error}") from None
    if not sections or not all(isinstance(section, dict) for section in sections.values()):
        raise BadConfig(
            f'--tables {file}: expected a section such as ["/lake/accounts"] for each table'
        )
    return [
        TableOptions(location, **_parse_section(file, location, section))
        for location, section in sections.items()
    ]


def _parse_section(file: Path, location: str, section: Mapping[str, Any]) -> dict[str, Any]:
    location_text = f'--tables {file}, section ["{location}"]'
    options: dict[str, Any] = {}
    for name, value in section.items():
        if name not in _LIST_OPTIONS and name not in _TEXT_OPTIONS:
            option_names = [*_LIST_OPTIONS, *_TEXT_OPTIONS]
            raise BadConfig(
                f"{location_text}: unknown option {name!r}{nearest_name_hint(name, option_names)}"
            )
        kind = _LIST_OPTIONS.get(name, str)
        parts = value if isinstance(value, list) and name in _LIST_OPTIONS else [value]
        if not all(type(part) is kind for part in parts):
            expected, plural = ("a number", "numbers") if kind is int else ("a text", "texts")
            list_note = f" or a list of {plural}" if name in _LIST_OPTIONS else ""
            raise BadConfig(
                f"{location_text}, option {name}: expected {expected}{list_note}, found {value!r}"
            )
        options[name] = tuple(parts) if name in _LIST_OPTIONS else value
    if options.get("format") not in (None, *TABLE_FORMATS):
        expected = " or ".join(TABLE_FORMATS)
        raise BadConfig(
            f"{location_text}, option format: expected {expected}, found {options['format']!r}"
        )
    return options
