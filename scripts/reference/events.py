"""The log events: names, levels and fields from the code, meanings from `events.toml`.

Rules:
    1. An event is logged as `_log.info("area.event field=%s", ...)`. An event of a machine is a
       `Report("area.event", (("field", value),))`, and the machine's driver logs it.
    2. A function that passes its parameter `name` to a `Report` is a reporter. Each call of a
       reporter is an event. The event has the reporter's own fields, and the keywords of the call.
    3. An event has one level and one meaning. An event of level WARNING or ERROR also has an
       action.
"""

import ast
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scripts.reference.markdown import cell, code, table
from waltz_core.log_lines import EVENT_NAME, FIELD
from waltz_core.server.process.host import LOG_LEVELS as SERVER_LEVELS
from waltz_core.storage.process.storage_daemon import LOG_LEVELS as STORAGE_LEVELS

ROOT = Path(__file__).resolve().parents[2]
TEXTS_FILE = Path(__file__).with_name("events.toml")
# A pattern that is repeated cannot have named groups.
_FIELDS = re.sub(r"\?P<\w+>", "?:", FIELD.pattern)
LINE = re.compile(f"{EVENT_NAME.pattern}(?:{_FIELDS})*")
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
}


class Component(NamedTuple):
    """A part of the code, and how its drivers log reports."""

    title: str
    folders: tuple[str, ...]
    levels: Mapping[str, int] = {}
    level: int = logging.INFO
    field: str = ""


COMPONENTS = (
    Component(
        "server",
        ("waltz_core/server/", "waltz_core/replication/"),
        SERVER_LEVELS,
        field="partition",
    ),
    Component("storage", ("waltz_core/storage/",), STORAGE_LEVELS, logging.DEBUG),
    Component("client", ("waltz_core/client/",), field="machine"),
    Component("gateway", ("waltz_core/gateway/",)),
    Component("spark", ("waltz_spark/",)),
    Component("every-process", ("waltz_core/",)),
)


@dataclass
class LogEvent:
    """An event, as the code logs it."""

    name: str
    component: Component
    levels: set[int] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)  # in order

    @property
    def level(self) -> str:
        """The name of the event's only level (rule 3)."""
        (level,) = self.levels or {self.component.levels.get(self.name, self.component.level)}
        return logging.getLevelName(level)

    @property
    def requires_action(self) -> bool:
        """Whether an operator should look at it."""
        return self.level in ("WARNING", "ERROR")


class Description(NamedTuple):
    """What an event means, and what an operator does about it."""

    meaning: str
    action: str = ""


def tables() -> dict[str, str]:
    """Return a table for each component."""
    return {component.title: _table(component) for component in COMPONENTS}


def _table(component: Component) -> str:
    texts = descriptions()
    rows = [
        (code(name), event.level, ", ".join(map(code, event.fields)), *map(cell, texts[name]))
        for name, event in sorted(events().items())
        if event.component is component
    ]
    return table(("event", "level", "fields", "meaning", "what to do"), rows)


def descriptions() -> dict[str, Description]:
    """Return the description of each event by name."""
    areas = tomllib.loads(TEXTS_FILE.read_text(encoding="utf-8"))
    return {
        f"{area}.{name}": Description(**text)
        for area, texts in areas.items()
        for name, text in texts.items()
    }


@cache
def events() -> dict[str, LogEvent]:
    """Return each event of the code by name."""
    events_by_name: dict[str, LogEvent] = {}
    for path, tree in _modules():
        component = next(each for each in COMPONENTS if path.startswith(each.folders))
        for call, fields in _report_calls(tree):
            name = _literal_text(call.args[0])
            event = events_by_name.setdefault(name, LogEvent(name, component))
            event.fields |= dict.fromkeys(filter(None, (component.field, *fields)))
        for call in _log_calls(tree):
            line = _literal_text(call.args[0])
            name = line.partition(" ")[0]
            event = events_by_name.setdefault(name, LogEvent(name, component))
            event.fields |= dict.fromkeys(each["name"] for each in FIELD.finditer(line))
            event.levels.add(LEVELS[_called_name(call)])
    return events_by_name


def invalid_event_calls() -> list[str]:
    """Return the log calls and reports that rule 1 does not allow."""
    lines = [(path, call, LINE) for path, tree in _modules() for call in _log_calls(tree)]
    names = [
        (path, call, EVENT_NAME) for path, tree in _modules() for call, _ in _report_calls(tree)
    ]
    return [
        f"{path}:{call.lineno}: {ast.unparse(call.args[0])}"
        for path, call, pattern in (*lines, *names)
        if not pattern.fullmatch(_literal_text(call.args[0]))
    ]


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    paths = sorted(
        path for name in ("waltz_core", "waltz_spark") for path in (ROOT / name).rglob("*.py")
    )
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(text))
        for path, text in texts
        if "_log." in text or "Report(" in text
    ]


def _log_calls(tree: ast.Module) -> list[ast.Call]:
    """Return the calls of a logger that have a fixed level."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "_log"
        and node.func.attr in LEVELS
    ]


def _report_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, list[str]]]:
    """Yield each report with its fields (rules 1 and 2)."""
    reporters: dict[str, list[str]] = {"Report": []}
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (report_name := _report_call_in(node)):
            reporters[node.name] = _pair_names(node)
            inside.add(report_name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called_name(node) in reporters and node not in inside:
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            yield node, reporters[_called_name(node)] + _pair_names(node) + keywords


def _report_call_in(function: ast.FunctionDef) -> ast.Call | None:
    """Return the call `Report(name, ...)` of a reporter."""
    if "name" not in (arg.arg for arg in function.args.args):
        return None
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="Report"), args=[ast.Name(id="name"), *_]):
                return node
            case _:
                pass
    return None


def _called_name(call: ast.Call) -> str:
    """Return the last part of the name of the called function."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _literal_text(node: ast.expr) -> str:
    """Return the value of a string literal; empty for other nodes."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _pair_names(node: ast.AST) -> list[str]:
    """Return the names in all pairs `("name", value)`, in order."""
    return [
        _literal_text(child_node.elts[0])
        for child_node in ast.walk(node)
        if isinstance(child_node, ast.Tuple)
        and len(child_node.elts) == 2
        and _literal_text(child_node.elts[0])
    ]
