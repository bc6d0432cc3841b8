"""Chaos: real daemons under real faults; every reported outcome is compared with the log.

    python -m tests.chaos --minutes 5
    python -m tests.chaos --seed 17 --rounds 1       # the same schedule again

`make chaos MINUTES=5` and `make chaos SEED=17 ROUNDS=1` also install the required packages.

Each round has its own seed and cluster. If a round finds an error, the exit code is 1, and
the logs, journals and feeds of that round are kept.
"""

import argparse
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from random import SystemRandom

from tests.chaos.archive_checks import EVENT_PATTERNS
from tests.chaos.network import PROJECT_ROOT
from tests.chaos.round import RoundOutcome, run_round
from tests.chaos.schedule import draw_schedule

ROUND_FAULTS_S = 60.0
KILLS_MIN = 20
ARCHIVE_COUNTS = {
    *EVENT_PATTERNS,
    "collected files of failed attempts",
    "files in the archive",
    "objects",
    *(f"killed: {kind}" for kind in ("server", "storage", "store")),
}
SHOWN_ERRORS_MAX = 10


def print_line(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)  # noqa: T201 - the person at the terminal


def main() -> int:
    """Play rounds; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="time after which no round begins; default 5"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds, in place of --minutes")
    parser.add_argument("--seed", type=int, help="seed of the first round; default: random")
    parser.add_argument(
        "--round-s",
        type=float,
        default=ROUND_FAULTS_S,
        help=f"duration of the faults of a round; default {ROUND_FAULTS_S:.0f}",
    )
    parser.add_argument(
        "--processes-only",
        action="store_true",
        help="no faults of the network and of disks, as without root",
    )
    parser.add_argument("--archive", action="store_true", help="use an archive in all rounds")
    parser.add_argument(
        "--keep", action="store_true", help="keep the logs of successful rounds, too"
    )
    parser.add_argument("--report", type=Path, default=PROJECT_ROOT / "build" / "chaos-report.md")
    parser.add_argument("--directory", type=Path, default=PROJECT_ROOT / "build" / "chaos")
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else SystemRandom().randrange(1_000_000)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    outcomes: list[RoundOutcome] = []
    while (
        len(outcomes) < arguments.rounds
        if arguments.rounds is not None
        else not outcomes or time.monotonic() < deadline_s
    ):
        seed = first + len(outcomes)
        schedule = draw_schedule(seed, arguments.round_s, archives=arguments.archive)
        directory = arguments.directory / str(schedule.seed)
        shutil.rmtree(directory, ignore_errors=True)
        print_line(f"seed {schedule.seed}: {schedule.cluster_size}")
        outcome = run_round(
            schedule, directory, print_line, in_namespaces=not arguments.processes_only
        )
        outcomes.append(outcome)
        _print_outcome(outcome, _repeat_command(outcome, arguments), directory)
        if not outcome.wrong and not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(format_report(outcomes, arguments), encoding="utf-8")
    wrong = [each.schedule.seed for each in outcomes if each.wrong]
    verdict = f"seeds with errors: {wrong}" if wrong else "no errors"
    print_line(f"chaos: {len(outcomes)} rounds, {verdict}; {arguments.report}")
    if missed := _missing_effects(outcomes):
        print_line(
            f"chaos: expected in all rounds together, but found none of: {', '.join(missed)}"
        )
    return 1 if wrong or missed else 0


def _missing_effects(outcomes: list[RoundOutcome]) -> list[str]:
    """Return the expected effects of kills that did not occur; empty if there were few kills."""
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    if counts["killed: store"] < KILLS_MIN or counts["killed: storage"] < KILLS_MIN:
        return []
    expected = ("failed uploads", "failed attempts", "collected files of failed attempts")
    return [what for what in expected if not counts[what]]


def _repeat_command(outcome: RoundOutcome, arguments: argparse.Namespace) -> str:
    """Return the command that repeats the round."""
    more = [f"--round-s {arguments.round_s:g}"] if arguments.round_s != ROUND_FAULTS_S else []
    more += ["--processes-only"] if arguments.processes_only else []
    more += ["--archive"] if arguments.archive else []
    words = f"make chaos SEED={outcome.schedule.seed} ROUNDS=1"
    return f"{words} ARGS='{' '.join(more)}'" if more else words


def _print_outcome(outcome: RoundOutcome, repeat_command: str, directory: Path) -> None:
    for effect, count in outcome.skipped_faults.items():
        print_line(f"  left out: {count} x {effect}")
    counts = outcome.counts
    print_line(
        f"  {outcome.faults.total()} faults; committed {counts['committed']:,}, rejected "
        f"{counts['rejected']:,} ({counts['rejected by a new session']} by a new session), "
        f"lost {counts['lost']:,}, unknown {counts['unknown']:,}; ZooKeeper answers after "
        f"{outcome.zookeeper_s:.1f} s, all clients write again {outcome.recovered_s:.1f} s later, "
        f"all replicas are engaged after {outcome.engaged_s:.1f} s, "
        f"longest gap {outcome.gap_s:.1f} s"
    )
    if outcome.schedule.cluster_size.stores:
        found = "; ".join(
            f"{effect} {counts[effect]:,}" for effect in sorted(counts) if effect in ARCHIVE_COUNTS
        )
        print_line(f"  {found}")
    for wrong in outcome.wrong[:SHOWN_ERRORS_MAX]:
        print_line(f"  WRONG: {wrong}")
    if outcome.wrong:
        print_line(f"  {len(outcome.wrong)} errors; logs in {directory}")
        print_line(f"  to repeat: {repeat_command}")
    else:
        print_line("  OK")


def format_report(outcomes: list[RoundOutcome], arguments: argparse.Namespace) -> str:
    """Return the faults, outcomes and findings of all rounds as Markdown."""
    faults: Counter[str] = Counter()
    skipped_faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        skipped_faults.update(outcome.skipped_faults)
        counts.update(outcome.counts)
    wrong = sum(bool(each.wrong) for each in outcomes)
    lines = [
        "# Chaos",
        "",
        f"{len(outcomes)} rounds of {arguments.round_s:g} s of faults; {wrong} of them had errors.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(faults.items())),
        *(f"| left out: {kind} | {count} |" for kind, count in sorted(skipped_faults.items())),
        "",
        "| transactions | |",
        "|---|---|",
        *(f"| {what} | {count:,} |" for what, count in sorted(counts.items())),
        "",
        "| seed | faults | committed | writes again | engaged | longest gap | verdict |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {each.schedule.seed} | {each.faults.total()} | {each.counts['committed']:,} | "
            f"{each.recovered_s:.1f} s | {each.engaged_s:.1f} s | {each.gap_s:.1f} s | "
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
