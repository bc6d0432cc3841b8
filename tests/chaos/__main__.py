"""Chaos: real daemons under real faults; every reported outcome is compared with the log.

    python -m tests.chaos --minutes 5
    python -m tests.chaos --seed 17 --rounds 1       # the same schedule again

`make chaos MINUTES=5` and `make chaos SEED=17 ROUNDS=1` are the same with everything installed.

Each round has a seed and a cluster of its own. If a round finds an error, the exit code is 1, and
the logs, journals and feeds of that round are kept.
"""

import argparse
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from random import SystemRandom

from tests.chaos.archived import EVENTS
from tests.chaos.network import ROOT
from tests.chaos.round import Outcome, run_round
from tests.chaos.schedule import draw_schedule

ROUND_S = 60.0
KILLS_MIN = 20
ARCHIVE = {
    *EVENTS,
    "collected files of failed attempts",
    "files in the archive",
    "objects",
    *(f"killed: {kind}" for kind in ("server", "storage", "store")),
}
SHOWN_MAX = 10


def print_line(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)  # noqa: T201 - the person at the terminal


def main() -> int:
    """Play rounds; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="no round begins later; default 5"
    )
    parser.add_argument("--rounds", type=int, help="so many instead")
    parser.add_argument("--seed", type=int, help="of the first round; default: any")
    parser.add_argument(
        "--round-s", type=float, default=ROUND_S, help=f"faults last so long; default {ROUND_S:.0f}"
    )
    parser.add_argument("--processes-only", action="store_true", help="as without root")
    parser.add_argument("--archive", action="store_true", help="all rounds have an archive")
    parser.add_argument("--keep", action="store_true", help="the logs of good rounds, too")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "chaos-report.md")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "chaos")
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else SystemRandom().randrange(1_000_000)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    outcomes: list[Outcome] = []
    while (
        len(outcomes) < arguments.rounds
        if arguments.rounds is not None
        else not outcomes or time.monotonic() < deadline_s
    ):
        seed = first + len(outcomes)
        schedule = draw_schedule(seed, arguments.round_s, archives=arguments.archive)
        where = arguments.directory / str(schedule.seed)
        shutil.rmtree(where, ignore_errors=True)
        print_line(f"seed {schedule.seed}: {schedule.world}")
        outcome = run_round(schedule, where, print_line, apart=not arguments.processes_only)
        outcomes.append(outcome)
        _report(outcome, _repeat_command(outcome, arguments), where)
        if not outcome.wrong and not arguments.keep:
            shutil.rmtree(where, ignore_errors=True)
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(report(outcomes, arguments), encoding="utf-8")
    wrong = [each.schedule.seed for each in outcomes if each.wrong]
    verdict = f"seeds with something wrong: {wrong}" if wrong else "nothing wrong"
    print_line(f"chaos: {len(outcomes)} rounds, {verdict}; {arguments.report}")
    if missed := _missing_effects(outcomes):
        print_line(f"chaos: in all rounds together there were no {', '.join(missed)}")
    return 1 if wrong or missed else 0


def _missing_effects(outcomes: list[Outcome]) -> list[str]:
    """Return the expected effects of kills that no round had; empty after a few kills only."""
    counts = sum((each.counts for each in outcomes), Counter[str]())
    if counts["killed: store"] < KILLS_MIN or counts["killed: storage"] < KILLS_MIN:
        return []
    expected = ("failed uploads", "failed attempts", "collected files of failed attempts")
    return [what for what in expected if not counts[what]]


def _repeat_command(outcome: Outcome, arguments: argparse.Namespace) -> str:
    """Return the command that repeats the round."""
    more = [f"--round-s {arguments.round_s:g}"] if arguments.round_s != ROUND_S else []
    more += ["--processes-only"] if arguments.processes_only else []
    more += ["--archive"] if arguments.archive else []
    words = f"make chaos SEED={outcome.schedule.seed} ROUNDS=1"
    return f"{words} ARGS='{' '.join(more)}'" if more else words


def _report(outcome: Outcome, again: str, where: Path) -> None:
    for what, count in outcome.skipped.items():
        print_line(f"  left out: {count} x {what}")
    counts = outcome.counts
    print_line(
        f"  {outcome.faults.total()} faults; committed {counts['committed']:,}, rejected "
        f"{counts['rejected']:,} ({counts['rejected by a new session']} by a new session), "
        f"lost {counts['lost']:,}, unknown {counts['unknown']:,}; ZooKeeper answers after "
        f"{outcome.zookeeper_s:.1f} s, all clients write again {outcome.recovered_s:.1f} s later, "
        f"all replicas are engaged after {outcome.whole_s:.1f} s, longest gap {outcome.gap_s:.1f} s"
    )
    if outcome.schedule.world.stores:
        found = "; ".join(f"{what} {counts[what]:,}" for what in sorted(counts) if what in ARCHIVE)
        print_line(f"  {found}")
    for wrong in outcome.wrong[:SHOWN_MAX]:
        print_line(f"  WRONG: {wrong}")
    if outcome.wrong:
        print_line(f"  {len(outcome.wrong)} wrong; logs in {where}")
        print_line(f"  again: {again}")
    else:
        print_line("  OK")


def report(outcomes: list[Outcome], arguments: argparse.Namespace) -> str:
    """Return the faults, outcomes and findings of all rounds as Markdown."""
    faults: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        skipped.update(outcome.skipped)
        counts.update(outcome.counts)
    wrong = sum(bool(each.wrong) for each in outcomes)
    lines = [
        "# Chaos",
        "",
        f"{len(outcomes)} rounds of {arguments.round_s:g} s of faults; something wrong in {wrong}.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(faults.items())),
        *(f"| left out: {kind} | {count} |" for kind, count in sorted(skipped.items())),
        "",
        "| transactions | |",
        "|---|---|",
        *(f"| {what} | {count:,} |" for what, count in sorted(counts.items())),
        "",
        "| seed | faults | committed | writes again | engaged | longest gap | verdict |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {each.schedule.seed} | {each.faults.total()} | {each.counts['committed']:,} | "
            f"{each.recovered_s:.1f} s | {each.whole_s:.1f} s | {each.gap_s:.1f} s | "
            f"{f'{len(each.wrong)} wrong' if each.wrong else 'OK'} |"
            for each in outcomes
        ),
    ]
    for each in outcomes:
        if each.wrong:
            lines += [
                "",
                f"## Seed {each.schedule.seed}",
                "",
                f"`{_repeat_command(each, arguments)}`",
                "",
            ]
            lines += [f"- {fault.at_s:.1f} s: {fault}" for fault in each.schedule.faults]
            lines += ["", *(f"- **{wrong}**" for wrong in each.wrong)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
