"""`python -m waltz_sim`: invalid arguments, and the output for a seed."""

import json
from collections import Counter

import pytest

from waltz_sim import cli as simulate
from waltz_sim.cli import INTERRUPTED_EXIT_CODE, main
from waltz_sim.coverage import Coverage, FailedSeed
from waltz_sim.faults.kinds import THEMES
from waltz_sim.run import ScheduleGenerator
from waltz_sim.schedule import LATER_KINDS, Fault, Schedule, Setup


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seeds", "0"], "--seeds: expected a number from 1"),
        (["--seed", "-1"], "--seed: expected a number from 0"),
        (["--steps", "0"], "--steps: expected a number from 1"),
        (["--steps", "9", "--schedule", "x"], "--steps cannot be used with --schedule"),
        (["--rough", "--schedule", "x"], "--rough cannot be used with --schedule"),
        (["--jobs", "0"], "--jobs: expected a number from 1"),
        (["--minutes", "0"], "--minutes: expected more than 0, found 0.0"),
        (["--minutes", "nan"], "--minutes: expected more than 0, found nan"),
        (["--trace"], "--trace requires --seed or --schedule"),
        (["--shrink", "--seeds", "3"], "--shrink requires --seed or --schedule"),
        (["--seed", "1", "--jobs", "2"], "--jobs requires --seeds; it cannot be used for one run"),
        (["--schedule", "nowhere.json"], "--schedule nowhere.json: expected a readable file"),
    ],
)
def test_bad_input_gets_one_sentence(capsys, words, sentence):
    assert main(words) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"waltz_sim: {sentence}")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"format": 9}', '{"format": 1, "seed": 1, "setup": {"horses": 3}, "faults": []}'],
)
def test_an_invalid_schedule_file_is_rejected(capsys, tmp_path, text):
    path = tmp_path / "schedule.json"
    path.write_text(text)
    assert main(["--schedule", str(path)]) == 1
    assert "schedule: expected" in capsys.readouterr().err


def test_an_unknown_kind_of_fault_is_rejected(capsys, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(Schedule(1, faults=(Fault(1_000, "earthquake", 7),)).to_json())
    assert main(["--schedule", str(path)]) == 1
    assert "expected kinds of faults, found earthquake" in capsys.readouterr().err


def test_a_schedule_is_replayed_with_its_trace(capsys, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(Schedule(5, Setup(duration_ms=100, clients=1)).to_json())
    assert main(["--schedule", str(path), "--trace"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("seed 5: good, ")
    assert len(lines) > 100
    assert main(["--schedule", str(path), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["rule"] is None
    assert outcome["trace"] in last


def test_a_few_seeds_are_run_and_reported(capsys, tmp_path):
    report = tmp_path / "build" / "report.md"
    words = ["--seeds", "2", "--first", "3", "--jobs", "1", "--json"]
    assert main([*words, "--report", str(report)]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["seeds"], outcome["first"], outcome["failures"], outcome["never"]) == (
        2,
        3,
        [],
        [],
    )
    assert "| seeds | 2 from 3 on |" in report.read_text()


def test_a_failing_seed_is_reported_with_the_command_that_replays_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = Coverage(seeds=1, failures=[FailedSeed(9, "Fork", "two chains at 3")])
    monkeypatch.setattr(simulate, "sweep", lambda *_, **__: broken)

    def write(verdict):
        assert verdict.schedule.seed == 9
        return tmp_path / "short.json"

    monkeypatch.setattr(simulate, "_write_shortened", write)
    assert main(["--seeds", "1", "--json"]) == 1
    captured = capsys.readouterr()
    (failure,) = json.loads(captured.out)["failures"]
    assert failure["command"] == "python -m waltz_sim --seed 9"
    assert failure["schedule"] == str(tmp_path / "short.json")
    assert "seed 9 broke Fork: two chains at 3\n  python -m waltz_sim --seed 9\n" in captured.err


def test_option_steps_limits_the_steps_before_the_simulated_cluster_is_repaired(capsys):
    words = ["--seed", "3", "--json"]
    assert main([*words, "--steps", "300"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert 300 < short["steps"] < whole["steps"]
    assert ScheduleGenerator(300).command(3) == "python -m waltz_sim --seed 3 --steps 300"


def test_option_rough_changes_the_run_of_a_seed_and_is_in_the_replay_command(capsys):
    words = ["--seed", "4", "--json"]
    assert main([*words, "--rough"]) == 0
    rough = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert rough["trace"] != plain["trace"]
    assert (
        ScheduleGenerator(300, is_rough=True).command(3)
        == "python -m waltz_sim --seed 3 --rough --steps 300"
    )
    kinds = [ScheduleGenerator(is_rough=True).schedule_of(seed) for seed in range(20)]
    for schedule in kinds:
        # Kinds of faults that were added later have separate random streams, also in rough worlds.
        fault_kinds = (fault.kind for fault in schedule.faults if fault.kind not in LATER_KINDS)
        assert {kind for kind, _ in Counter(fault_kinds).most_common(6)} & set(THEMES)
    assert {kind.setup.segment_bytes_max for kind in kinds} >= {600, 1_200, 2_048}


def test_the_cpu_time_and_the_steps_per_core_and_second_are_reported(capsys):
    assert main(["--seeds", "1", "--jobs", "1", "--steps", "300"]) == 0
    output = capsys.readouterr().out.splitlines()[-1]
    assert " s of CPU time; per second and core: " in output
    assert output.endswith(" steps")


def test_an_interrupt_reports_the_results_so_far_in_one_line(capsys, monkeypatch):
    def interrupted(*_, sums, **__):
        sums.merge(Coverage(seeds=40, failures=[FailedSeed(9, "Fork", "two chains at 3")]))
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "sweep", interrupted)
    assert main(["--seeds", "100", "--first", "3", "--jobs", "2"]) == INTERRUPTED_EXIT_CODE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "seeds from 3 on, 2 processes\n"
        "interrupted after 40 seeds from 3 on in 0 s: 1 broke a rule (seed 9: Fork)\n"
    )
