"""Every scenario of `scenarios/` runs again and must produce the same text.

`WALTZ_REWRITE_SCENARIOS=1` writes the current output; review the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

from waltz_core.errors import BadFormat
from waltz_core.replication import session_recovery
from waltz_sim.guarantees.history import Violation
from waltz_sim.scenario import parse_scenarios, replay_scenario

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
SCENARIOS = [
    pytest.param(scenario, id=f"{path.stem}: {scenario.title}")
    for path in FILES
    for scenario in parse_scenarios(path.read_text(encoding="utf-8"))[1]
]
IS_REWRITTEN = "WALTZ_REWRITE_SCENARIOS" in os.environ


@pytest.mark.skipif(IS_REWRITTEN, reason="the scenarios are rewritten")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_replayed_scenario_gives_the_recorded_text(scenario):
    assert replay_scenario(scenario).text == scenario.text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_has_its_canonical_form(path):
    text = path.read_text(encoding="utf-8")
    intro, scenarios = parse_scenarios(text)
    if IS_REWRITTEN:
        scenarios = [replay_scenario(scenario) for scenario in scenarios]
    written = intro + "\n".join(scenario.text for scenario in scenarios)
    if IS_REWRITTEN:
        path.write_text(written, encoding="utf-8")
    assert written == text or IS_REWRITTEN
    assert len({scenario.title for scenario in scenarios}) == len(scenarios)


BEGINNING = "A few words.\n\n## A storage dies\nAnd more.\n\n> begin with A B C; append 1\n"


def outcome(steps: str) -> list[str]:
    """Return the milestones of the last step."""
    (scenario,) = parse_scenarios(f"## A title\n\n{steps}\n")[1]
    return replay_scenario(scenario).steps[-1].lines


def test_a_scenario_file_round_trips():
    intro, (scenario,) = parse_scenarios(BEGINNING + "    reported: 0 in the log\n> kill C\n")
    assert intro == "A few words.\n\n"
    assert scenario.introduction == ["And more."]
    assert [(step.commands, step.lines) for step in scenario.steps] == [
        ("begin with A B C; append 1", ["reported: 0 in the log"]),
        ("kill C", []),
    ]
    assert intro + scenario.text == BEGINNING + "    reported: 0 in the log\n> kill C\n"


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ("> append 1", "expected a first command such as 'begin with A B C', found 'append 1'"),
        ("> begin with A B C\n> burn C", "expected a command, found 'burn C'"),
        ("> begin with A B C\nand then", "expected a step or a milestone, found 'and then'"),
    ],
)
def test_an_invalid_scenario_is_reported(steps, sentence):
    with pytest.raises(BadFormat, match=sentence):
        outcome(steps)


def test_a_scenario_with_wrong_milestones_fails():
    (scenario,) = parse_scenarios(BEGINNING + "    reported: 0..1 in the log\n")[1]
    assert replay_scenario(scenario).text != scenario.text
    assert replay_scenario(scenario).steps[0].lines == ["reported: 0 in the log"]


def test_checkers_run_during_a_scenario(monkeypatch):
    """A broken guarantee ends a scenario with an error, whatever milestones the scenario lists."""
    monkeypatch.setattr(
        session_recovery, "decided_mark", lambda maxes, **_: min(maxes, default=None)
    )
    with pytest.raises(Violation, match="DecisionCovers"):
        outcome(
            "> begin with A B C; append 5\n"
            "> pause A; append 1; wait 20 ms; kill S; kill A\n"
            "> start A; start S"
        )


def test_simultaneous_actions_are_listed_by_replica_name():
    lines = outcome("> begin slowly with A B C")
    assert lines[2] == "A B C: fenced with nothing, marked at nothing"


def test_ids_that_depend_on_the_load_are_shown_as_names():
    lines = outcome("> begin with A B C\n> start writes\n> checkpoint\n> checkpoint")
    assert "S opens session 2 with 0..h2" in lines
