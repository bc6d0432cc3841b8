"""The metrics of a running cluster as series of Prometheus, and the alerts that they fire.

A fault of a test lasts seconds, but an alert waits for minutes. So the series are extended: the
last values of gauges are repeated, and counters continue to grow at the rate of the samples.
"""

import re
import time
import urllib.request
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from scripts.reference.alerts import RULES
from tests.promtool import FaultSeries, FiringAlert, LinearValues, firing_alerts
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.local import LocalCluster

BEFORE_MIN, DURING_MIN = 80, 40
PAUSE_S, SCRAPE_S = 0.5, 5
# The metrics that the rules read.
USED_METRICS = set(re.findall(r"\w+", RULES.read_text(encoding="utf-8")))
_SAMPLE = re.compile(r"(?m)^(\w+)(?:\{(.*)\})? (\S+)$")
_COUNTER = re.compile(r"_(total|bucket|count|sum)\{")


class MetricsSample(NamedTuple):
    """All values at one time. A process that does not answer has only the metric `up`."""

    at_s: float
    values: dict[str, float]


class SampledPeriod(NamedTuple):
    """The samples at both ends of a time."""

    first: MetricsSample
    last: MetricsSample

    def linear_values(self, name: str) -> LinearValues | None:
        """Return the value and the growth of a series at the end of the period."""
        value = self.last.values.get(name)
        if value is None:
            return None
        earlier = self.first.values.get(name, value)
        minutes = (self.last.at_s - self.first.at_s) / 60
        if not _COUNTER.search(name) or value <= earlier:
            return LinearValues(value)
        return LinearValues(value, (value - earlier) / minutes)


def sample_metrics(cluster: LocalCluster) -> MetricsSample:
    """Read the metrics of all daemons."""
    values: dict[str, float] = {}
    for member in cluster.members:
        if member.kind not in ("server", "storage"):
            continue
        at = f"127.0.0.1:{member.http_port}"
        member_labels = f'job="waltz-{member.kind}",instance="{at}"'
        try:
            with urllib.request.urlopen(f"http://{at}/metrics", timeout=SCRAPE_S) as page:
                text = page.read().decode()
        except OSError:
            text = ""
        values[f"up{{{member_labels}}}"] = float(bool(text))
        for name, labels, value in _SAMPLE.findall(text):
            if name in USED_METRICS:
                values[f"{name}{{{member_labels}{labels and ',' + labels}}}"] = float(value)
    return MetricsSample(time.monotonic(), values)


def expect_alerts(
    cluster: LocalCluster,
    wanted: AbstractSet[str],
    directory: Path,
    before: SampledPeriod | None = None,
) -> SampledPeriod:
    """Wait until exactly these alerts would fire; return the samples from now on."""
    deadline, first = time.monotonic() + TEST_TIMEOUT_S, sample_metrics(cluster)
    while True:
        time.sleep(PAUSE_S)  # daemons update their metrics once a second
        period = SampledPeriod(first, sample_metrics(cluster))
        names = {each.name for each in _alerts_between(before or period, period, directory)}
        if names == wanted:
            return period
        assert time.monotonic() < deadline, f"expected the alerts {set(wanted)}, found {names}"


def _alerts_between(
    before: SampledPeriod, during: SampledPeriod, directory: Path
) -> list[FiringAlert]:
    names = before.last.values.keys() | during.last.values.keys()
    series = {}
    for name in names:
        earlier, line = before.linear_values(name), during.linear_values(name)
        if earlier is not None:
            earlier = earlier.after(-BEFORE_MIN)
        series[name] = FaultSeries(earlier, line)
    return firing_alerts(series, directory, before_min=BEFORE_MIN, during_min=DURING_MIN)
