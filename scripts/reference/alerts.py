"""The alerts, from the rules in `conf/prometheus/`."""

import re
from pathlib import Path

import yaml

from scripts.reference.markdown import code, table

RULES = Path(__file__).resolve().parents[2] / "conf" / "prometheus" / "waltz.rules.yml"
_TEMPLATE = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")


def table_of_alerts() -> str:
    """Return the table of all alerts."""
    rows = [
        (
            f"[{code(name)}](#{name.lower()})",
            rule["labels"]["severity"],
            rule.get("for", "0m"),
            _TEMPLATE.sub(r"{\1}", rule["annotations"]["summary"]),
        )
        for name, rule in alert_rules().items()
    ]
    return table(("alert", "severity", "fires after", "summary"), rows)


def alert_rules() -> dict[str, dict[str, dict[str, str]]]:
    """Return the alerts by name, in the order of the file."""
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}
