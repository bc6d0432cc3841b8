"""The metrics, from the table in `waltz_core/metrics.py`."""

from scripts.reference.markdown import cell, code, table
from waltz_core.metrics import METRIC_BY_NAME, Metric

# The last word of a metric's name -> the unit, if the word itself is not the unit.
UNITS = {
    "mark": "transaction ID",
    "transaction": "transaction ID",
    "session": "session number",
    "ratio": "0 to 1",
    "ms": "milliseconds",
    "sync": "0 or 1",
    "connected": "0 or 1",
    "info": "1",
}


def tables() -> dict[str, str]:
    """Return a table for each area."""
    return {
        area: _table(f"waltz_{area}_")
        for area in ("server", "storage", "gateway", "client", "spark")
    }


def _table(prefix: str) -> str:
    rows = [
        (
            code(each.name),
            each.kind.value,
            ", ".join(map(code, each.labels)),
            _unit(each),
            cell(each.help),
        )
        for each in METRIC_BY_NAME.values()
        if each.name.startswith(prefix)
    ]
    return table(("metric", "type", "labels", "unit", "meaning"), rows)


def _unit(metric: Metric) -> str:
    word = metric.name.removesuffix("_total").rpartition("_")[2]
    return UNITS.get(word, word)
