"""Evaluates the alert rules in conf/ with promtool, with time series of a test."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.reference.alerts import RULES, alert_rules
from tests.time_limits import TEST_TIMEOUT_S

INTERVAL_MIN = 2  # between two values, and between two evaluations of the rules
_FIRING_ALERT = re.compile(r"Labels:\{(?P<labels>.*)\}\s*Annotations:\{(?P<annotations>.*)\}")
_LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


class LinearValues(NamedTuple):
    """The values of a series: the first one, and how much it grows per minute."""

    start: float
    growth: float = 0

    def after(self, minutes: int) -> "LinearValues":
        """Return the values from some minutes later on."""
        return LinearValues(self.start + minutes * self.growth, self.growth)


class FaultSeries(NamedTuple):
    """A series before and during a fault; None: the series does not exist."""

    before: LinearValues | None
    during: LinearValues | None


class FiringAlert(NamedTuple):
    """An alert that fires."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def find_promtool() -> str:
    """Return the path of promtool; skip the test if there is none."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    return found


def firing_alerts(
    series: Mapping[str, FaultSeries], directory: Path, *, before_min: int, during_min: int
) -> list[FiringAlert]:
    """Return the alerts that fire when a fault has lasted for some minutes.

    promtool prints alerts that differ from the expected ones. The test expects no alerts, so
    promtool prints all of them.
    """
    test = {
        "interval": f"{INTERVAL_MIN}m",
        "input_series": [
            {"series": name, "values": _series_values(each, before_min, during_min)}
            for name, each in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{before_min + during_min}m", "alertname": name, "exp_alerts": []}
            for name in alert_rules()
        ],
    }
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{INTERVAL_MIN}m",
        "tests": [test],
    }
    path = directory / "alerts.test.json"  # JSON is YAML, too
    path.write_text(json.dumps(content), encoding="utf-8")
    result = subprocess.run(
        [find_promtool(), "test", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    found = [_parse_alert(each) for each in _FIRING_ALERT.finditer(result.stdout + result.stderr)]
    assert bool(found) == bool(result.returncode), result.stdout + result.stderr
    return found


def _series_values(series: FaultSeries, before_min: int, during_min: int) -> str:
    """Return the values as promtool takes them: `axn` has n + 1 values."""
    before = _linear_values(series.before, before_min // INTERVAL_MIN - 1)
    if series.before is not None and series.during is None:
        return f"{before} stale"
    return f"{before} {_linear_values(series.during, during_min // INTERVAL_MIN)}"


def _linear_values(line: LinearValues | None, count: int) -> str:
    if line is None:
        return f"_x{count + 1}"
    # promtool does not accept exponents.
    return f"{line.start:.6f}{line.growth * INTERVAL_MIN:+.6f}x{count}"


def _parse_alert(found: re.Match[str]) -> FiringAlert:
    labels, annotations = (
        {name: str(json.loads(text)) for name, text in _LABEL.findall(found[part])}
        for part in ("labels", "annotations")
    )
    return FiringAlert(labels.pop("alertname"), labels, annotations)
