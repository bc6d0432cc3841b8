"""The two formats of log lines, text and JSON, and the log line for the report of a machine.

Each log call of the project has a template of the form `area.event field=%s field=%s`. The JSON
format takes the name of the event and the names of the fields from this template. So one log call
is sufficient for both formats.

Rules:
    1. A JSON line is one object. It begins with the keys `time`, `level`, `logger`, and `event` or
       `message`. No event has a field with one of these names, or with the name `exception`.
    2. A log line whose template has another form, for example from a library, has a `message`
       instead of an `event`.
    3. A value for which JSON has no type is written as text.
"""

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from types import NoneType
from typing import Final

from waltz_core.machine import Report

TEXT_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"

EVENT_NAME: Final = re.compile(r"[a-z]+\.[a-z]+(?:_[a-z]+)*")
# The value of a field is a conversion (`count=%d`), a text in quotes, or a word.
FIELD: Final = re.compile(
    r" (?P<name>\w+)=(?:%(?:\((?P<key>\w+)\))?(?P<conversion>(?:\.\d)?[dfrs])"
    r"|'(?P<text>[^'%]*)'|(?P<word>[\w./-]+))"
)
_JSON_TYPES: Final = (str, int, float, bool, NoneType, list, tuple, dict)


def set_log_format(name: str) -> None:
    """Set the format of the root logger's outputs to a value of the setting `log_format`."""
    formatter = JsonFormatter() if name == "json" else logging.Formatter(TEXT_FORMAT, TIME_FORMAT)
    for output in logging.getLogger().handlers:
        output.setFormatter(formatter)


def log_report(log: logging.Logger, level: int, report: Report, **owner: object) -> None:
    """Log a machine's report; the fields of `owner` identify the machine."""
    if log.isEnabledFor(level):
        fields = {**owner, **dict(report.fields)}
        template = report.name + "".join(f" {name}=%s" for name in fields)
        log.log(level, template, *fields.values())


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = _fields_of(record)
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object] | None:
    """Return the event and its fields; None if the template has another form (rule 2)."""
    template = str(record.msg)
    event = EVENT_NAME.match(template)
    if event is None:
        return None
    values_by_name = record.args if isinstance(record.args, Mapping) else {}
    values = list(record.args) if isinstance(record.args, tuple) else []
    fields: dict[str, object] = {"event": event[0]}
    position = event.end()
    while field := FIELD.match(template, position):
        conversion = field["conversion"]
        if conversion is None:
            fields[field["name"]] = field["text"] if field["word"] is None else field["word"]
        elif field["key"] in values_by_name:
            fields[field["name"]] = _json_value(conversion, values_by_name[field["key"]])
        elif values:
            fields[field["name"]] = _json_value(conversion, values.pop(0))
        else:
            return None
        position = field.end()
    return None if values or position != len(template) else fields


def _json_value(conversion: str, value: object) -> object:
    if conversion.endswith("f"):
        return float(f"%{conversion}" % value)  # as many decimals as in the text format
    # NB: not `isinstance`: json would write a NamedTuple, such as a request ID, as a list.
    return value if type(value) in _JSON_TYPES else str(value)
