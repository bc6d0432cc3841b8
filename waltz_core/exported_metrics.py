"""Metrics of applications, in prometheus_client's registry; each scrape reads the values.

Daemons instead use the class `Metrics`, with their own registry and port (docs/decisions/067).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

from waltz_core.errors import BadConfig
from waltz_core.metrics import METRIC_BY_NAME, SECONDS_BUCKETS, MetricKind

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricValues:
    """The values of one scrape; a name or label not in `METRIC_BY_NAME` raises an exception."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, value: float, **labels: str | int) -> None:
        """Add the value of a counter or gauge."""
        texts = _texts_of(name, labels)
        family = self._families.get(name)
        if family is None:
            kind, about = (
                METRIC_BY_NAME[name].kind,
                (METRIC_BY_NAME[name].help, None, METRIC_BY_NAME[name].labels),
            )
            assert kind is not MetricKind.HISTOGRAM
            is_counter = kind is MetricKind.COUNTER
            family_class = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = self._families[name] = family_class(name, *about)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(texts, value)

    def add_histogram(
        self, name: str, bucket_counts: Sequence[int], seconds: float, **labels: str | int
    ) -> None:
        """Add a histogram: a count for each of `SECONDS_BUCKETS`, and one for longer durations."""
        texts = _texts_of(name, labels)
        family = self._families.get(name)
        if family is None:
            metric = METRIC_BY_NAME[name]
            assert metric.kind is MetricKind.HISTOGRAM
            family = HistogramMetricFamily(name, metric.help, labels=metric.labels)
            self._families[name] = family
        assert isinstance(family, HistogramMetricFamily)
        total, buckets = 0, []
        for limit, count in zip((*SECONDS_BUCKETS, INF), bucket_counts, strict=True):
            total += count
            text: str = floatToGoString(limit)  # type: ignore[no-untyped-call]
            buckets.append((text, total))
        family.add_metric(texts, buckets, seconds)

    @property
    def families(self) -> Iterable[Family]:
        """The metrics, by name, with all their values."""
        return self._families.values()


def _texts_of(name: str, labels: dict[str, str | int]) -> list[str]:
    assert set(labels) == set(METRIC_BY_NAME[name].labels), name
    return [str(labels[label]) for label in METRIC_BY_NAME[name].labels]


class _ExportedValues(Collector):
    """All sources of metrics in this process, each of them once."""

    def __init__(self) -> None:
        self._read_functions: dict[Callable[[MetricValues], None], None] = {}

    def add(self, read: Callable[[MetricValues], None]) -> None:
        if not self._read_functions:
            REGISTRY.register(self)
        self._read_functions[read] = None

    def describe(self) -> Iterable[Family]:
        """Return nothing: the registration must not read values."""
        return ()

    def collect(self) -> Iterable[Family]:
        values = MetricValues()
        for read in list(self._read_functions):
            read(values)
        return values.families


_EXPORTED_VALUES: Final = _ExportedValues()


def export(read: Callable[[MetricValues], None], port: int | None, host: str) -> None:
    """Let each scrape of prometheus_client's registry call `read`; with a port, serve the registry.

    Raises:
        BadConfig: this process cannot listen at the address.
    """
    _EXPORTED_VALUES.add(read)
    if port is not None:
        try:
            start_http_server(port, host)
        except OSError as error:
            raise BadConfig(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}"
            ) from error
