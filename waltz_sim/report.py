"""The report of a swarm in Markdown: its coverage and failures.

This module only formats figures. It counts and decides nothing.
"""

from collections.abc import Iterable
from typing import Final

from waltz_sim.coverage import Coverage
from waltz_sim.run import DEFAULT_GENERATOR, ScheduleGenerator

# Groups of rules. For each group, the report has the number of seeds that broke one of its rules.
RULE_GROUPS: Final = (
    (
        "lost, changed or forked",
        ("AckUnique", "AckQuorum", "Fork", "DecisionCovers", "LogMatching"),
    ),
    ("duplicated", ("AtMostOnce",)),
    ("wrong outcome reported", ("OutcomeTruth", "GateCAS2")),
    ("conflicts committed", ("LockSerial", "NotAhead")),
    ("wrong feed", ("Dense", "ClientPrefix", "HwmMono", "NoRotServed")),
    ("not recovered after all faults were repaired", ("Converged", "Fixed")),
)


def format_report(
    sums: Coverage, *, first: int, seconds: float, generator: ScheduleGenerator = DEFAULT_GENERATOR
) -> str:
    """Format the whole report as Markdown."""
    rate = sums.seeds / seconds if seconds else 0.0
    faults, steps = sums.faults, f"{sums.steps_per_cpu_s:,.0f}"
    figures = [
        ("seeds", f"{sums.seeds:,} from {first} on{generator.options}"),
        ("real time", f"{seconds:,.0f} s, {rate:.1f} seeds per second"),
        ("virtual time", f"{sums.virtual_ms / 3_600_000:,.1f} h"),
        ("steps", f"{sums.steps:,} of worlds, {sums.disk_steps:,} of disks"),
        (
            "CPU time",
            f"{sums.cpu_s:,.0f} s; per second {sums.seeds_per_cpu_s:.1f} seeds, {steps} steps",
        ),
        ("injected faults", f"{sum(faults.values()):,} of {len(faults)} kinds"),
        ("transactions committed and checked", f"{sums.committed:,}"),
        *((name, f"{_count_broken(sums, rules):,}") for name, rules in RULE_GROUPS),
        ("seeds that broke any rule", f"{len(sums.failures):,}"),
    ]
    parts = ["# Simulator report\n", _format_table(("", ""), figures)]
    missing = sums.find_missing()
    if missing:
        parts.append("## Did not occur\n\n" + "".join(f"- {name}\n" for name in missing))
    if sums.failures:
        rows = [
            (f"`{generator.command(failure.seed)}`", failure.rule, _first_line(failure.text))
            for failure in sums.failures
        ]
        parts.append(
            "## Seeds that broke a rule\n\n" + _format_table(("replay", "rule", "found"), rows)
        )
    rows_of_faults = [(kind, f"{count:,}") for kind, count in faults.items()]
    parts.append("## Faults\n\n" + _format_table(("kind", "injected"), rows_of_faults))
    others = sorted((name, n) for name, n in sums.counts.items() if not name.startswith("fault "))
    rows_of_others = [(name, f"{count:,}") for name, count in others]
    parts.append("## States that occurred\n\n" + _format_table(("state", "times"), rows_of_others))
    return "\n".join(parts)


def _count_broken(sums: Coverage, rules: tuple[str, ...]) -> int:
    return sum(failure.rule in rules for failure in sums.failures)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    return lines[-1].replace("|", "\\|")[:200]


def _format_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
