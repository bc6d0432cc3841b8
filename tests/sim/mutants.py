"""Searches seeds that detect each mutant, and stores a short failing schedule for each mutant.

    python -m tests.sim.mutants --search all          # mutants that no stored trace detects
    python -m tests.sim.mutants --search NAME ...     # these mutants, even if they have a trace
    python -m tests.sim.mutants --table               # write the table in docs/testing.md again

A trace is `traces/<switch>.json`: the schedule, the rule that it breaks with the switch on, and the
number of seeds that the search needed. `test_mutants.py` runs each trace twice: it must fail with
the switch, and pass without it.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.sim import (
    broken_archive,
    broken_client,
    broken_replication,
    broken_server,
    broken_storage,
)
from tests.sim.switches import SWITCHES, broken
from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.run import RunVerdict, run
from waltz_sim.schedule import Schedule, schedule_of
from waltz_sim.shrink import shrink

assert SWITCHES, (broken_archive, broken_client, broken_replication, broken_server, broken_storage)
TRACES = Path(__file__).parent / "traces"
DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
TABLE_BEGINS = "<!-- broken rules: python -m tests.sim.mutants --table -->\n"
TABLE_ENDS = "<!-- end of broken rules -->\n"
SEEDS_MAX = 3_000
# CPU time of one core, because the machine may do other work.
RUN_S_MAX = 20
SHRINK_RUNS_MAX = 200
SHRINK_S_MAX = 60.0
# If several seeds detect a mutant, the schedule with the most specific rule is shortened.
CANDIDATES = 3
UNSPECIFIC_RULES = ("Converged", "ClientStopped", "Crash")


@dataclass
class Trace:
    """The result of a search for one switch."""

    switch: str
    rule: str
    text: str
    seed: int
    seeds: list[int]  # that detect the mutant; empty for a hand-written schedule
    rules: dict[str, int]
    schedule: Schedule = field(repr=False)

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds of the search; None if the schedule was written by hand."""
        return self.seeds[0] + 1 if self.seeds else None

    @property
    def path(self) -> Path:
        """The file of the trace."""
        return TRACES / f"{self.switch}.json"

    def save(self) -> None:
        """Write the trace to its file."""
        outcome = {
            "switch": self.switch,
            "rule": self.rule,
            "text": self.text,
            "seed": self.seed,
            "seeds": self.seeds,
            "rules": self.rules,
            "schedule": json.loads(self.schedule.to_json()),
        }
        TRACES.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Trace:
    """Read a trace."""
    outcome = json.loads(path.read_text(encoding="utf-8"))
    schedule = Schedule.from_json(json.dumps(outcome.pop("schedule")))
    return Trace(schedule=schedule, **outcome)


def traces() -> list[Trace]:
    """Return all traces, by name."""
    return [load(path) for path in sorted(TRACES.glob("*.json"))]


def run_broken(name: str, schedule: Schedule) -> RunVerdict:
    """Run a schedule with a switch on."""
    with broken(name):
        return run(schedule)


def is_detected(trace: Trace) -> bool:
    """Whether the schedule fails with the switch and passes without it."""
    if trace.switch not in SWITCHES:
        return False
    return (
        run_broken(trace.switch, trace.schedule).rule == trace.rule and run(trace.schedule).is_good
    )


def search(name: str, seeds_max: int) -> Trace | str:
    """Search seeds that detect a switch; return the shortened best schedule, or a message."""
    signal.signal(signal.SIGVTALRM, _raise_timeout)
    found: list[RunVerdict] = []
    is_of_archive = SWITCHES[name].__module__ == broken_archive.__name__
    for seed in range(seeds_max):
        schedule = schedule_of(seed, WEIGHTS)
        if is_of_archive and not schedule.setup.archive_interval_ms:
            continue
        verdict = _run_with_limit(name, schedule)
        # A run that only hangs breaks no rule, and is slow to shorten.
        is_hung = verdict.rule == "Crash" and "TimeoutError" in verdict.text
        if verdict.is_good or is_hung or not run(schedule).is_good:
            continue
        found.append(verdict)
        if len(found) == CANDIDATES or seed > 3 * found[0].schedule.seed + 60:
            break
    seeds = [verdict.schedule.seed for verdict in found]
    rules = Counter(str(verdict.rule) for verdict in found)
    for verdict in sorted(found, key=lambda each: _unspecific_rank(each, rules)):
        short = _shrink_schedule(name, verdict)
        if run(short.schedule).is_good:
            text = short.text.strip().splitlines()[-1][:300]
            rule, seed = str(short.rule), verdict.schedule.seed
            trace = Trace(name, rule, text, seed, seeds, dict(rules), short.schedule)
            trace.save()
            return trace
    return (
        f"{name}: not found in {seeds_max} seeds"
        if not found
        else f"{name}: found, but no schedule passes without the mutant"
    )


def _unspecific_rank(verdict: RunVerdict, rules: Counter[str]) -> tuple[int, int, int]:
    rule = str(verdict.rule)
    return (
        UNSPECIFIC_RULES.index(rule) + 1 if rule in UNSPECIFIC_RULES else 0,
        -rules[rule],
        verdict.schedule.seed,
    )


def _run_with_limit(name: str, schedule: Schedule) -> RunVerdict:
    signal.setitimer(signal.ITIMER_VIRTUAL, RUN_S_MAX)
    try:
        return run_broken(name, schedule)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError(f"a run has taken more than {RUN_S_MAX} s of CPU time")


def _shrink_schedule(name: str, verdict: RunVerdict) -> RunVerdict:
    end_s = time.process_time() + SHRINK_S_MAX
    return shrink(
        verdict,
        runs_max=SHRINK_RUNS_MAX,
        is_out_of_time=lambda: time.process_time() >= end_s,
        run_one=lambda schedule: _run_with_limit(name, schedule),
    ).verdict


def table() -> str:
    """Return the traces as a Markdown table."""
    lines = ["| mutant | what is broken | seeds | found by | its trace |", "|---|---|---|---|---|"]
    for trace in traces():
        why = (SWITCHES[trace.switch].__doc__ or "").strip().splitlines()[0]
        rules = ", ".join(sorted(trace.rules))
        faults = len(trace.schedule.faults)
        size = f"{faults} fault{'s' * (faults != 1)}, {trace.schedule.setup.duration_ms} ms"
        seeds = trace.seeds_needed or "-"
        lines.append(f"| `{trace.switch}` | {why} | {seeds} | {rules} | {size} |")
    return "\n".join([*lines, ""])


def with_table(text: str) -> str:
    """Return the docs with the table as it is now."""
    before, _, rest = text.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}{table()}{TABLE_ENDS}{after}"


def main() -> int:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    names = arguments.search
    if names == ["all"]:
        detected = {trace.switch for trace in traces() if is_detected(trace)}
        names = [name for name in SWITCHES if name not in detected]
        _print(f"{len(detected)} traces detect their mutant, {len(names)} mutants need a trace")
    missed = 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed(pool.submit(search, name, arguments.seeds) for name in names):
            result = future.result()
            missed += isinstance(result, str)
            line = result if isinstance(result, str) else _summary(result)
            _print(line)
    return 1 if missed else 0


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _summary(trace: Trace) -> str:
    size = f"{len(trace.schedule.faults)} faults {trace.schedule.setup.duration_ms} ms"
    return f"{trace.switch}: {trace.seeds_needed} seeds, {trace.rules}; {size}; {trace.text[:160]}"


if __name__ == "__main__":
    sys.exit(main())
