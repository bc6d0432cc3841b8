"""Scenarios: commands for a simulated cluster, and the milestones that follow from them.

A random run shows that no guarantee breaks. A scenario shows what happens. A scenario is a text for
readers who know the protocol, and it is also a test: a new run must produce the same text.

A file of scenarios begins with an introduction. Each scenario has a title (`## `), an introduction,
and steps. A step (`> `) has one or more commands, separated by semicolons. After the commands, the
world runs until no milestone has occurred for a while. The milestones of the step follow, indented:

    ## A storage dies
    Two of three replicas continue without it.

    > begin with A B C; append 5
        reported: 0..4 in the log
    > kill C
        session 0 ends: replica C: reset
        S claims session 1
        ...

Rules:
    1. The world of a scenario is calm: every delay is the middle of its range, and faults occur
       only by commands.
    2. All checkers of the simulator are active. At the end of a scenario all faults are repaired,
       and the cluster must recover, unless the scenario has the command `leave the cluster broken`.
    3. `scenario_commands.py` has the commands, and `milestones.py` has the milestones.
"""

import re
from dataclasses import dataclass, field

from waltz_core.errors import BadFormat
from waltz_sim.scenario_commands import ScenarioRunner


@dataclass(slots=True)
class ScenarioStep:
    """A step of a scenario: its commands, and the lines of its milestones."""

    commands: str
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of this step in a file of scenarios."""
        return f"> {self.commands}\n" + "".join(f"    {line}\n" for line in self.lines)


@dataclass(slots=True)
class Scenario:
    """A scenario: its title, its introduction, and its steps."""

    title: str
    introduction: list[str] = field(default_factory=list)
    steps: list[ScenarioStep] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of this scenario in a file of scenarios."""
        words = "".join(f"{line}\n" for line in self.introduction)
        return f"## {self.title}\n{words}\n{''.join(step.text for step in self.steps)}"


def parse_scenarios(text: str) -> tuple[str, list[Scenario]]:
    """Return the introduction and the scenarios of a file; raise BadFormat if it is invalid."""
    intro, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    scenarios = []
    for part in parts:
        title, *lines = part.strip().split("\n")
        scenario = Scenario(title)
        for line in lines:
            if line.startswith("> "):
                scenario.steps.append(ScenarioStep(line[2:]))
            elif line.startswith("    ") and scenario.steps:
                scenario.steps[-1].lines.append(line[4:])
            elif scenario.steps:
                raise BadFormat(
                    f"scenario {title!r}: expected a step or a milestone, found {line!r}"
                )
            elif line:
                scenario.introduction.append(line)
        scenarios.append(scenario)
    return intro, scenarios


def replay_scenario(scenario: Scenario) -> Scenario:
    """Run a scenario's commands; return the scenario with the milestones of each step (rule 2).

    Raises BadFormat for an invalid command, and `history.Violation` for a broken guarantee.
    """
    again = Scenario(scenario.title, scenario.introduction)
    opening = scenario.steps[0].commands if scenario.steps else ""
    stage = ScenarioRunner(opening.split(";")[0])
    for step in scenario.steps:
        again.steps.append(ScenarioStep(step.commands, stage.run_step(step.commands)))
    if not stage.is_left_broken:
        stage.cluster.run_until_recovered()
    return again
