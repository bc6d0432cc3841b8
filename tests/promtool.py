"""Evaluates the alert rules in conf/ with promtool, over the series of a test."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.reference.alerts import RULES, alert_rules
from tests.patience import HANG_S

STEP_MIN = 2  # between two values, and between two evaluations of the rules
_FIRING = re.compile(r"Labels:\{(?P<labels>.*)\}\s*Annotations:\{(?P<annotations>.*)\}")
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


class Line(NamedTuple):
    """The values of a series: the first one, and how much it grows per minute."""

    start: float
    growth: float = 0

    def after(self, minutes: int) -> "Line":
        """Return how it continues."""
        return Line(self.start + minutes * self.growth, self.growth)


class Series(NamedTuple):
    """A series before and during a fault; None: the series does not exist."""

    before: Line | None
    during: Line | None


class Alert(NamedTuple):
    """An alert that fires."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def promtool() -> str:
    """Return the path of promtool; skip the test if there is none."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool; Debian has it in the package prometheus")
    return found


def firing(
    series: Mapping[str, Series], directory: Path, *, before_min: int, during_min: int
) -> list[Alert]:
    """Return the alerts that fire when a fault has lasted for some minutes.

    promtool prints the alerts that it has not expected: here, all of them.
    """
    test = {
        "interval": f"{STEP_MIN}m",
        "input_series": [
            {"series": name, "values": _values(each, before_min, during_min)}
            for name, each in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{before_min + during_min}m", "alertname": name, "exp_alerts": []}
            for name in alert_rules()
        ],
    }
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{STEP_MIN}m",
        "tests": [test],
    }
    path = directory / "alerts.test.json"  # JSON is YAML, too
    path.write_text(json.dumps(content), encoding="utf-8")
    done = subprocess.run(
        [promtool(), "test", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    found = [_alert(each) for each in _FIRING.finditer(done.stdout + done.stderr)]
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found


def _values(series: Series, before_min: int, during_min: int) -> str:
    """Return the values as promtool takes them: `axn` has n + 1 values."""
    before = _line(series.before, before_min // STEP_MIN - 1)
    if series.before is not None and series.during is None:
        return f"{before} stale"
    return f"{before} {_line(series.during, during_min // STEP_MIN)}"


def _line(line: Line | None, count: int) -> str:
    if line is None:
        return f"_x{count + 1}"
    # promtool takes no exponents.
    return f"{line.start:.6f}{line.growth * STEP_MIN:+.6f}x{count}"


def _alert(found: re.Match[str]) -> Alert:
    labels, annotations = (
        {name: str(json.loads(text)) for name, text in _PAIR.findall(found[part])}
        for part in ("labels", "annotations")
    )
    return Alert(labels.pop("alertname"), labels, annotations)
