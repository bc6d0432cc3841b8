"""The two formats of log lines."""

import json
import logging
import sys

import pytest

from scripts.reference.events import events
from waltz_core.log_lines import JsonFormatter, log_report, set_log_format
from waltz_core.machine import Report
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId


def line_of(template: object, *values: object, **extra: object) -> dict[str, object]:
    """Return the JSON object of a log call."""
    record = logging.LogRecord("waltz_core.x", logging.WARNING, "x.py", 1, template, values, None)
    vars(record).update(extra)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document: dict[str, object] = json.loads(line)
    return document


def fields_of(template: object, *values: object) -> dict[str, object]:
    """Return the JSON object without the keys that each line has."""
    line = line_of(template, *values)
    return {key: line[key] for key in line if key not in ("time", "level", "logger")}


def test_a_json_line_has_the_event_and_its_fields():
    line = line_of("append.slow partition=%s took_ms=%d", 3, 250, created=1_700_000_000.25)
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "waltz_core.x",
        "event": "append.slow",
        "partition": 3,
        "took_ms": 250,
    }
    assert [*line][:4] == ["time", "level", "logger", "event"]


def test_json_values_keep_their_types_and_texts_have_no_extra_quotes():
    fields = fields_of("x.y load=%.1f reason=%r port=%s ids=%s", 0.251, "it's \n", None, {1: "a"})
    assert fields == {
        "event": "x.y", "load": 0.3, "reason": "it's \n", "port": None, "ids": {"1": "a"}
    }  # fmt: skip


def test_a_template_with_named_placeholders_takes_its_values_from_a_dictionary():
    fields = fields_of(
        "x.y rows=%(row_count)d took_s=%(seconds).1f", {"row_count": 3, "seconds": 2}
    )
    assert fields == {"event": "x.y", "rows": 3, "took_s": 2.0}


def test_constants_in_a_template_are_fields():
    fields = fields_of("x.y server=%s reason='nothing listens' operation=feed", 7)
    assert fields == {
        "event": "x.y", "server": 7, "reason": "nothing listens", "operation": "feed"
    }  # fmt: skip


def test_a_value_without_a_json_type_is_text():
    req_id = ReqId(ClientId(17), Generation(3), PartitionId(0), 40)
    assert fields_of("x.y request=%s", req_id) == {"event": "x.y", "request": "17.3.0.40"}
    assert fields_of("x.y error=%s", OSError(2, "gone")) == {
        "event": "x.y", "error": "[Errno 2] gone"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        ("Connecting to %s:%d", ("zk", 2181), "Connecting to zk:2181"),
        ("x.y and more: a=%s", (1,), "x.y and more: a=1"),
        ("x.y a=%s b", (1,), "x.y a=1 b"),
        ({"no": "text"}, (), "{'no': 'text'}"),
    ],
)
def test_a_line_in_another_format_is_a_message(
    template: object, values: tuple[object, ...], message: str
):
    assert fields_of(template, *values) == {"message": message}


def test_a_stack_trace_is_a_text_in_the_line():
    try:
        int("wrong")
    except ValueError:
        line = line_of("x.y a=%s", 1, exc_info=sys.exc_info())
    assert "ValueError: invalid literal" in str(line["exception"])


def test_no_event_field_has_the_name_of_a_reserved_key():
    keys = {"time", "level", "logger", "event", "message", "exception"}
    assert not {name: keys & {*event.fields} for name, event in events().items()
                if keys & {*event.fields}}  # fmt: skip


def test_a_report_has_the_same_fields_in_both_formats(caplog: pytest.LogCaptureFixture):
    report = Report("append.slow", (("replica", "a:1"), ("took_ms", 9)))
    log_report(logging.getLogger("waltz_core.x"), logging.WARNING, report, partition=2)
    (record,) = caplog.records
    assert record.getMessage() == "append.slow partition=2 replica=a:1 took_ms=9"
    assert json.loads(JsonFormatter().format(record))["took_ms"] == 9


@pytest.mark.parametrize(("name", "first"), [("json", "{"), ("text", "20")])
def test_set_log_format_changes_the_format_of_the_root_logger(
    monkeypatch: pytest.MonkeyPatch, name: str, first: str
):
    output = logging.StreamHandler()
    # The handler is not set in a fixture: pytest adds its own handlers before each phase of a test,
    # and other tests read the outputs of these handlers as text.
    monkeypatch.setattr(logging.getLogger(), "handlers", [output])
    set_log_format(name)
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "x.y a=%s", (1,), None)
    assert output.format(record).startswith(first)
