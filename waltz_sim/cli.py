"""The command `python -m waltz_sim`: runs seeds, replays one seed, or shortens a failing schedule.

Rules:
    1. Exit code 0 means that every seed was run, that no seed broke a rule, and that the coverage
       is sufficient.
    2. The report of a failing seed contains the broken rule, a description, the command that
       replays the seed, and a file with a shortened schedule. The file stays valid when the meaning
       of seeds changes.
    3. An interrupt ends this command like any other command, and one line reports the results so
       far.
"""

import argparse
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.errors import BadConfig, WaltzError
from waltz_sim.coverage import Coverage
from waltz_sim.faults.kinds import KINDS
from waltz_sim.report import format_report
from waltz_sim.run import RunVerdict, ScheduleGenerator, run, run_seed
from waltz_sim.schedule import DEFAULT_STEPS_MAX, Schedule
from waltz_sim.shrink import shrink
from waltz_sim.swarm import sweep

DESCRIPTION = "For each seed, run a simulation with injected faults, and check every guarantee."
INTERRUPTED_EXIT_CODE = 130
DEFAULT_SEED_COUNT = 300
SEED_MAX = (1 << 63) - 1
SHRUNK_SEEDS_MAX = 3  # the number of failing seeds in one run whose schedules are shortened
SHRINK_S_MAX = 60.0
TEXT_CHARACTERS_MAX = 2_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    command = argparse.ArgumentParser(prog="python -m waltz_sim", description=DESCRIPTION)
    _add_options(command)
    try:
        return _simulate(command.parse_args(argv))
    except WaltzError as error:
        print_error(f"waltz_sim: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _add_options(command: argparse.ArgumentParser) -> None:
    runs = command.add_mutually_exclusive_group()
    runs.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"run this number of seeds [default: {DEFAULT_SEED_COUNT}]",
    )
    runs.add_argument("--seed", type=int, metavar="S", help="run only this seed")
    runs.add_argument("--schedule", type=Path, metavar="FILE", help="run a schedule from a file")
    command.add_argument("--first", type=int, metavar="F", help="the first seed [default: 0]")
    command.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="end after this number of minutes; without --first, the first seed is random",
    )
    command.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="repair all faults of a run after this number of steps "
        f"[default: {DEFAULT_STEPS_MAX}]",
    )
    command.add_argument("--rough", action="store_true", help="also inject repeated disk faults")
    command.add_argument(
        "--jobs", type=int, metavar="J", help="number of processes [default: one per core]"
    )
    command.add_argument("--trace", action="store_true", help="print all events of one run")
    command.add_argument(
        "--shrink", action="store_true", help="shorten the schedule of a failing run"
    )
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="write a report of the coverage, in Markdown"
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON value and nothing else"
    )


def _simulate(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    if arguments.schedule is not None:
        return _run_one(_read_schedule(arguments.schedule), arguments)
    if arguments.seed is not None:
        return _run_one(_create_generator(arguments).schedule_of(arguments.seed), arguments)
    return _run_many(arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    """Check the options.

    Raises:
        BadConfig: an option is out of its range, or conflicts with another option.
    """
    numbers = (("seeds", 1), ("jobs", 1), ("seed", 0), ("first", 0), ("steps", 1))
    for name, least in numbers:
        value = getattr(arguments, name)
        if value is not None and not least <= value <= SEED_MAX:
            raise BadConfig(
                f"--{name}: expected a number from {least} to {SEED_MAX}, found {value}"
            )
    if arguments.minutes is not None and not 0 < arguments.minutes < float("inf"):
        raise BadConfig(f"--minutes: expected more than 0, found {arguments.minutes}")
    is_one = arguments.seed is not None or arguments.schedule is not None
    for name in ("trace", "shrink"):
        if getattr(arguments, name) and not is_one:
            raise BadConfig(f"--{name} requires --seed or --schedule")
    for name in ("steps", "rough"):
        if getattr(arguments, name) and arguments.schedule is not None:
            raise BadConfig(f"--{name} cannot be used with --schedule")
    for name in ("first", "minutes", "jobs", "report"):
        if getattr(arguments, name) is not None and is_one:
            raise BadConfig(f"--{name} requires --seeds; it cannot be used for one run")


def _create_generator(arguments: argparse.Namespace) -> ScheduleGenerator:
    steps_max = DEFAULT_STEPS_MAX if arguments.steps is None else int(arguments.steps)
    return ScheduleGenerator(steps_max, is_rough=arguments.rough)


def _read_schedule(path: Path) -> Schedule:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--schedule {path}: expected a readable file: {error}") from None
    schedule = Schedule.from_json(text)
    unknown = sorted({fault.kind for fault in schedule.faults} - set(KINDS))
    if unknown:
        raise BadConfig(f"--schedule {path}: expected kinds of faults, found {', '.join(unknown)}")
    return schedule


# ---- one seed or schedule


def _run_one(schedule: Schedule, arguments: argparse.Namespace) -> int:
    verdict = run(schedule, is_traced=True, keeps_all=arguments.trace)
    if arguments.trace and not arguments.json:
        for line in verdict.notes:
            print_result(line)
    result: dict[str, object] = {
        "seed": schedule.seed,
        "rule": verdict.rule,
        "text": verdict.text,
        "steps": verdict.steps,
        "virtual_ms": verdict.virtual_ms,
        "committed": verdict.committed,
        "faults": len(schedule.faults),
        "fingerprint": verdict.fingerprint,
        "trace": verdict.trace,
        "counts": dict(sorted(verdict.counts.items())),
    }
    if arguments.json:
        print_json({**result, "lines": list(verdict.notes)} if arguments.trace else result)
    else:
        print_result(
            f"seed {schedule.seed}: {verdict.rule or 'good'}, {verdict.steps} steps in "
            f"{verdict.virtual_ms} ms, {verdict.committed} transactions committed, trace "
            f"{verdict.trace}"
        )
    if verdict.is_good:
        return 0
    print_error(_shorten_text(verdict.text))
    if arguments.shrink:
        _write_shortened(verdict)
    return 1


def _shorten_text(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else "…" + text[-TEXT_CHARACTERS_MAX:]


def _write_shortened(verdict: RunVerdict) -> Path:
    """Write a shortened schedule into the working directory, and print the replay command."""
    shrunk = shrink(verdict, is_out_of_time=_deadline(SHRINK_S_MAX))
    path = Path(f"waltz-seed-{verdict.schedule.seed}.json")
    try:
        path.write_text(shrunk.schedule.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"{path}: expected a writable file: {error}") from None
    before, after = verdict.schedule, shrunk.schedule
    print_error(
        f"  shortened from {len(before.faults)} faults to {len(after.faults)}, from "
        f"{before.setup.duration_ms} ms to {after.setup.duration_ms} ms, in "
        f"{shrunk.run_count} runs:\n  python -m waltz_sim --schedule {path}"
    )
    return path


def _deadline(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s


# ---- many seeds


def _run_many(arguments: argparse.Namespace) -> int:
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    seed_count: int | None = arguments.seeds
    first, seconds = arguments.first, None
    if arguments.minutes is not None:
        seconds = 60 * arguments.minutes
        if first is None:
            first = secrets.randbelow(1 << 40)
    elif seed_count is None:
        seed_count = DEFAULT_SEED_COUNT
    first = first or 0
    generator = _create_generator(arguments)
    print_error(f"seeds from {first} on, {jobs} processes")
    began_s = time.monotonic()
    sums = Coverage()
    try:
        sums = sweep(
            first,
            seed_count,
            jobs=jobs,
            seconds=seconds,
            generator=generator,
            on_progress=_make_progress_printer(seed_count),
            sums=sums,
        )
        took_s = time.monotonic() - began_s
        files = _print_failures(sums, generator)
    except KeyboardInterrupt:
        print_error(_progress_text(sums, first, time.monotonic() - began_s))
        raise
    missing = sums.find_missing()
    for name in missing:
        print_error(f"did not occur in {sums.seeds} seeds: {name}")
    if arguments.report is not None:
        _write_report(
            arguments.report, format_report(sums, first=first, seconds=took_s, generator=generator)
        )
    if arguments.json:
        print_json(_coverage_json(sums, first, took_s, files, generator))
    else:
        print_result(
            f"{sums.seeds} seeds from {first} on in {took_s:.0f} s: {len(sums.failures)} broke a "
            f"rule; {sums.committed} transactions checked over {sums.virtual_ms // 1000} s of "
            f"virtual time, {sum(sums.faults.values())} faults"
        )
        print_result(
            f"{sums.steps} steps in {sums.cpu_s:.1f} s of CPU time; per second and core: "
            f"{sums.seeds_per_cpu_s:.1f} seeds, {sums.steps_per_cpu_s:.0f} steps"
        )
    return 0 if sums.is_good else 1


def _progress_text(sums: Coverage, first: int, seconds: float) -> str:
    """Return the line that an interrupt prints (rule 3)."""
    broken = ", ".join(f"seed {failure.seed}: {failure.rule}" for failure in sums.failures)
    return (
        f"interrupted after {sums.seeds} seeds from {first} on in {seconds:.0f} s: "
        f"{len(sums.failures)} broke a rule{f' ({broken})' if broken else ''}"
    )


def _make_progress_printer(seed_count: int | None) -> Callable[[Coverage, float], None]:
    of = "" if seed_count is None else f" of {seed_count}"
    known = 0

    def on_progress(sums: Coverage, seconds: float) -> None:
        nonlocal known
        for failure in sums.failures[known:]:
            print_error(f"seed {failure.seed} broke {failure.rule}; details at the end")
        known = len(sums.failures)
        rate = sums.seeds / seconds
        print_error(
            f"{sums.seeds}{of} seeds, {rate:.1f} per second, {len(sums.failures)} broke a rule"
        )

    return on_progress


def _print_failures(sums: Coverage, generator: ScheduleGenerator) -> dict[int, Path]:
    """Print all failures; shorten the first schedules, and return their files by seed (rule 2)."""
    files: dict[int, Path] = {}
    for failure in sums.failures:
        print_error(f"seed {failure.seed} broke {failure.rule}: {_shorten_text(failure.text)}")
        print_error(f"  {generator.command(failure.seed)}")
        if len(files) < SHRUNK_SEEDS_MAX:
            files[failure.seed] = _write_shortened(run_seed(failure.seed, generator))
    return files


def _write_report(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"--report {path}: expected a writable file: {error}") from None
    print_error(f"report: {path}")


def _coverage_json(
    sums: Coverage, first: int, seconds: float, files: dict[int, Path], generator: ScheduleGenerator
) -> dict[str, object]:
    failures: Sequence[dict[str, object]] = [
        {
            **failure._asdict(),
            "command": generator.command(failure.seed),
            "schedule": str(files[failure.seed]) if failure.seed in files else None,
        }
        for failure in sums.failures
    ]
    return {
        **{name: value for name, value in asdict(sums).items() if name != "counts"},
        "first": first,
        "seconds": round(seconds, 1),
        "seeds_per_cpu_s": round(sums.seeds_per_cpu_s, 2),
        "steps_per_cpu_s": round(sums.steps_per_cpu_s),
        "failures": failures,
        "never": sums.find_missing(),
        "counts": dict(sorted(sums.counts.items())),
    }
