"""Rules, dashboards and docs/alerts.md agree with each other and with the table of metrics."""

import json
import re
from typing import Any

import pytest

from scripts.dashboards import COLUMNS, dashboards
from scripts.reference.alerts import RULES, alert_rules
from tests.tidy.sources import PROJECT_ROOT
from waltz_core.metrics import METRIC_BY_NAME, MetricKind

# Matches a metric, but not a metric that a rule records: such a metric has a colon in its name.
METRIC = re.compile(r"(?<![\w:-])waltz_\w+(?!\w*:)")
OF_PROMETHEUS = {"up", "process_start_time_seconds"}
SUFFIXES = ("_bucket", "_sum", "_count")
PAGE = PROJECT_ROOT / "docs" / "alerts.md"
PANELS = [
    pytest.param(panel, id=f"{name} {panel['title']}")
    for name, text in dashboards().items()
    for panel in json.loads(text)["panels"]
]


def is_metric(name: str) -> bool:
    for suffix in SUFFIXES:
        stem = name.removesuffix(suffix)
        if stem != name and stem in METRIC_BY_NAME:
            return METRIC_BY_NAME[stem].kind is MetricKind.HISTOGRAM
    return name in METRIC_BY_NAME and METRIC_BY_NAME[name].kind is not MetricKind.HISTOGRAM


@pytest.mark.parametrize("name", [RULES.name, PAGE.name, *dashboards()])
def test_each_metric_is_in_the_table(name: str) -> None:
    texts = {RULES.name: RULES, PAGE.name: PAGE}
    text = texts[name].read_text(encoding="utf-8") if name in texts else dashboards()[name]
    matches = set(METRIC.findall(text))
    assert matches
    assert sorted(each for each in matches if not is_metric(each)) == []


def test_a_histogram_name_is_a_metric_only_with_its_suffix() -> None:
    assert is_metric("waltz_server_append_seconds_bucket")
    assert not is_metric("waltz_server_append_seconds")
    assert not is_metric("waltz_server_queued_bytes_bucket")
    assert not is_metric("waltz_server_queued")


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    sections = re.findall(r"(?m)^## (Waltz\w+)$", PAGE.read_text(encoding="utf-8"))
    assert sections == list(alert_rules())


@pytest.mark.parametrize("name", alert_rules())
def test_an_alert_has_all_annotations_and_its_page_section_is_complete(name: str) -> None:
    rule = alert_rules()[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    texts = rule["annotations"]
    assert set(texts) == {"summary", "description", "runbook"}
    assert texts["runbook"] == f"docs/alerts.md#{name.lower()}"
    assert "waltz-core " in texts["description"]
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert [part for part in ("Meaning", "Look at", "Do") if f"**{part}" not in section] == []


def labels_of(query: str) -> set[str]:
    """Return the labels that the result of a query has."""
    if "sum by" in query:
        return set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
    names = set(METRIC.findall(query)) & set(METRIC_BY_NAME)
    return {"instance"}.union(*(METRIC_BY_NAME[name].labels for name in names))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_texts_and_a_unit(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert "[[" not in target["expr"]
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert used <= labels_of(target["expr"])


@pytest.mark.parametrize("name", dashboards())
def test_panels_do_not_overlap(name: str) -> None:
    occupied_cells: set[tuple[int, int]] = set()
    for panel in json.loads(dashboards()[name])["panels"]:
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        cells = {(number, row) for number in range(x, x + width) for row in range(y, y + height)}
        assert x + width <= COLUMNS
        assert not cells & occupied_cells
        occupied_cells |= cells
