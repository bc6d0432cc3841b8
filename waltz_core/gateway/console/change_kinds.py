"""The changes that the console offers, with their parameters and the corresponding commands.

Rules:
    1. Each change corresponds to a subcommand of `waltz-core cluster`, with the same name and the
       same function. So the audit log, the findings and the console use the same words.
    2. The console does not offer a change that can lose data. The page of findings shows the
       command instead.
"""

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from waltz_core.administration import preference_changes, replica_changes
from waltz_core.administration.change_run import ChangeResult
from waltz_core.config.connect_string import check_address
from waltz_core.errors import RequestRejected, WaltzError

_PLACEHOLDER_PATTERN: Final = re.compile(r"[A-Z][A-Z_:]*")
_PARTITIONS_PATTERN: Final = re.compile(r"all|[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*")
_COMMAND_WORDS: Final = ["waltz-core", "cluster"]
TEXT_CHARACTERS_MAX: Final = 1_000
_ChangeFunction: TypeAlias = Callable[..., Awaitable[ChangeResult]]


class ParameterKind(Enum):
    """The kind of a parameter's value; the page offers a list of the known storages and servers."""

    STORAGE = "storage"
    SERVER = "server"
    ADDRESS = "address"
    PARTITIONS = "partitions"
    INTEGER = "integer"


class ChangeParameter(NamedTuple):
    """One parameter of a change: a positional argument or an option of the subcommand.

    `keyword` is the keyword of the function. `option` is empty for a positional argument.
    """

    name: str
    keyword: str
    kind: ParameterKind
    text: str
    option: str = ""
    is_list: bool = False  # the function accepts several values, the console only one

    @property
    def is_required(self) -> bool:
        """Whether a change needs a value."""
        return not self.option


class ChangeKind(NamedTuple):
    """One change: the name of its subcommand, a summary, its function and its parameters.

    A change is disruptive if it takes a member out of service.
    """

    name: str
    summary: str
    function: _ChangeFunction
    parameters: tuple[ChangeParameter, ...]
    is_disruptive: bool = False

    def command_words(self, arguments: Mapping[str, str]) -> list[str]:
        """Return the words of the subcommand with these arguments, as users type them."""
        command_parts = ["cluster", self.name]
        for parameter in self.parameters:
            value = arguments.get(parameter.name, "")
            if value:
                command_parts += [parameter.option, value] if parameter.option else [value]
        return command_parts

    def keyword_arguments(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Return the keyword arguments for the function; raises RequestRejected."""
        return {
            parameter.keyword: _parse_value(parameter, arguments.get(parameter.name, ""))
            for parameter in self.parameters
        }


def _storage_parameter(
    name: str, keyword: str, text: str, *, is_list: bool = False
) -> ChangeParameter:
    return ChangeParameter(name, keyword, ParameterKind.STORAGE, text, is_list=is_list)


_PARTITIONS: Final = ChangeParameter(
    "partitions", "partitions", ParameterKind.PARTITIONS, "the partitions, such as 0-3,7, or all"
)
_SERVER: Final = ChangeParameter("server", "server", ParameterKind.SERVER, "the server")
_ADMIN_PORT: Final = ChangeParameter(
    "admin_port",
    "admin_port",
    ParameterKind.INTEGER,
    "the admin port of the new storage; default: its port + 1",
    "--admin-port",
)

CHANGE_KINDS: Final = {
    each.name: each
    for each in (
        ChangeKind(
            "replace-storage",
            "Move all replicas of a storage to its replacement.",
            replica_changes.replace_storage,
            (
                _storage_parameter("storage", "address", "the storage to replace"),
                ChangeParameter(
                    "replacement",
                    "successor",
                    ParameterKind.ADDRESS,
                    "host:port of its replacement, which may be an empty storage at the same "
                    "address",
                ),
                _ADMIN_PORT,
            ),
            is_disruptive=True,
        ),
        ChangeKind(
            "add-storage",
            "Add an empty storage to the cluster.",
            replica_changes.add_storage,
            (
                ChangeParameter(
                    "storage", "address", ParameterKind.ADDRESS, "host:port of the new storage"
                ),
                ChangeParameter(
                    "group",
                    "group",
                    ParameterKind.INTEGER,
                    "the number of its group; default: a new group",
                    "--group",
                ),
                _ADMIN_PORT,
            ),
        ),
        ChangeKind(
            "remove-storage",
            "Move a storage's replicas to other storages, then remove it from the cluster.",
            replica_changes.remove_storage,
            (_storage_parameter("storage", "address", "the storage to remove"),),
            is_disruptive=True,
        ),
        ChangeKind(
            "move-replica",
            "Move replicas of partitions from one storage to another.",
            replica_changes.move_replica,
            (
                _PARTITIONS,
                _storage_parameter("storage", "origin", "the storage that has the replicas"),
                _storage_parameter("replacement", "target", "the storage that should get them"),
            ),
        ),
        ChangeKind(
            "add-replica",
            "Add a replica of partitions to a storage.",
            replica_changes.add_replica,
            (_PARTITIONS, _storage_parameter("storage", "addresses", "the storage", is_list=True)),
        ),
        ChangeKind(
            "remove-replica",
            "Remove the replicas of partitions from a storage.",
            replica_changes.remove_replica,
            (_PARTITIONS, _storage_parameter("storage", "addresses", "the storage", is_list=True)),
            is_disruptive=True,
        ),
        ChangeKind(
            "auto-assign",
            "Distribute all replicas evenly over groups and storages.",
            replica_changes.auto_assign,
            (
                ChangeParameter(
                    "replicas",
                    "replicas",
                    ParameterKind.INTEGER,
                    "the number of replicas of each partition; default: unchanged",
                    "--replicas",
                ),
            ),
            is_disruptive=True,
        ),
        ChangeKind(
            "prefer",
            "Make a server the preferred owner of partitions.",
            preference_changes.prefer,
            (_PARTITIONS, _SERVER),
        ),
        ChangeKind(
            "unprefer",
            "No longer prefer a server as the owner of partitions.",
            preference_changes.unprefer,
            (_PARTITIONS, _SERVER),
        ),
        ChangeKind(
            "remove-server",
            "Remove a stopped server from ZooKeeper.",
            replica_changes.remove_server,
            (_SERVER,),
            is_disruptive=True,
        ),
        ChangeKind(
            "set-admin-port",
            "Change the admin port of a storage in ZooKeeper.",
            replica_changes.set_admin_port,
            (
                _storage_parameter("storage", "address", "the storage"),
                ChangeParameter(
                    "admin_port",
                    "admin_port",
                    ParameterKind.INTEGER,
                    "the port at which the storage accepts administration requests",
                ),
            ),
        ),
    )
}


def parse_change(fields: object) -> tuple[ChangeKind, dict[str, str]]:
    """Return the kind and the arguments in the body of a request; raises RequestRejected."""
    if not isinstance(fields, dict) or set(fields) != {"name", "arguments"}:
        raise RequestRejected(
            "the change", expected="an object with the fields name and arguments", found=fields
        )
    name, arguments = fields["name"], fields["arguments"]
    kind = CHANGE_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise RequestRejected("field name", expected=", ".join(CHANGE_KINDS), found=name)
    parameter_names = [parameter.name for parameter in kind.parameters]
    if not isinstance(arguments, dict) or not set(arguments) <= set(parameter_names):
        raise RequestRejected(
            "field arguments",
            expected=f"an object with {', '.join(parameter_names)}",
            found=arguments,
        )
    for key, value in arguments.items():
        if not isinstance(value, str) or len(value) > TEXT_CHARACTERS_MAX:
            raise RequestRejected(f"arguments.{key}", expected="a short text", found=value)
    values = {key: value.strip() for key, value in arguments.items()}
    kind.keyword_arguments(values)  # reports a missing or malformed argument
    return kind, values


def change_in_command(command: str) -> dict[str, Any] | None:
    """Return the change for the command of a finding; None if the console has no such change.

    A placeholder in the command becomes an empty argument.
    """
    try:
        command_parts = shlex.split(command)
    except ValueError:
        return None
    kind = (
        CHANGE_KINDS.get(command_parts[2])
        if command_parts[:2] == _COMMAND_WORDS and len(command_parts) > 2
        else None
    )
    if kind is None:
        return None
    option_values, arguments = _options_and_arguments(command_parts[3:])
    option_values.pop("--connect", None)
    required = [parameter for parameter in kind.parameters if not parameter.option]
    options = {
        parameter.option: parameter.name for parameter in kind.parameters if parameter.option
    }
    if len(arguments) != len(required) or not option_values.keys() <= options.keys():
        return None
    values_by_name = {
        parameter.name: word for parameter, word in zip(required, arguments, strict=True)
    }
    values_by_name |= {options[name]: value for name, value in option_values.items()}
    return {
        "name": kind.name,
        "arguments": {
            name: "" if _PLACEHOLDER_PATTERN.fullmatch(value) else value
            for name, value in values_by_name.items()
        },
    }


def _options_and_arguments(command_parts: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    arguments: list[str] = []
    remaining_words = iter(command_parts)
    for word in remaining_words:
        if word.startswith("--"):
            options[word] = next(remaining_words, "")
        else:
            arguments.append(word)
    return options, arguments


def _parse_value(parameter: ChangeParameter, text: str) -> object:
    """Return the value of an argument; raises RequestRejected if it is missing or malformed."""
    field_name = f"arguments.{parameter.name}"
    if not text:
        if parameter.is_required:
            raise RequestRejected(field_name, expected=parameter.text, found=None)
        return None
    if parameter.kind is ParameterKind.INTEGER:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RequestRejected(field_name, expected="a number", found=text)
        return int(text)
    if parameter.kind is ParameterKind.PARTITIONS and not _PARTITIONS_PATTERN.fullmatch(text):
        raise RequestRejected(field_name, expected="partitions such as 0-3,7, or all", found=text)
    if parameter.kind in (ParameterKind.STORAGE, ParameterKind.SERVER, ParameterKind.ADDRESS):
        try:
            check_address(text)
        except WaltzError as error:
            raise RequestRejected(field_name, expected="host:port", found=text) from error
    return (text,) if parameter.is_list else text
