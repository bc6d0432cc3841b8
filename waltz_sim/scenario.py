"""Scenarios: commands for a cluster, and the resulting milestones, line by line.

A random run shows that no guarantee breaks; a scenario shows what happens. A scenario is a text for
people who know the protocol, and a test: a new run must produce the same text.

A file of scenarios begins with an introduction. Each scenario has a title (`## `), an introduction,
and steps. A step (`> `) has one or more commands, separated by semicolons; then the world runs
until it is quiet for a while. The milestones follow, indented:

    ## A storage dies
    Two of three replicas continue without it.

    > begin with A B C; append 5
        reported: 0..4 in the log
    > kill C
        session 0 ends: replica C: reset
        S claims session 1
        ...

Rules:
    1. The world of a scenario is calm: every delay is the middle one, and no fault occurs by
       itself.
    2. All checkers of the simulator are active. At its end a scenario is healed, and the cluster
       must recover, unless the scenario has the command `leave it broken`.
    3. `scenario_commands.py` has the commands, `milestones.py` the milestones.
"""

import re
from dataclasses import dataclass, field

from waltz_core.errors import BadFormat
from waltz_sim.scenario_commands import ScenarioRunner


@dataclass(slots=True)
class ScenarioStep:
    """Commands, and their milestones."""

    commands: str
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the step in a file."""
        return f"> {self.commands}\n" + "".join(f"    {each}\n" for each in self.lines)


@dataclass(slots=True)
class Scenario:
    """A title, an introduction, and steps."""

    title: str
    words: list[str] = field(default_factory=list)
    steps: list[ScenarioStep] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the scenario in a file."""
        words = "".join(f"{line}\n" for line in self.words)
        return f"## {self.title}\n{words}\n{''.join(each.text for each in self.steps)}"


def scenarios_in(text: str) -> tuple[str, list[Scenario]]:
    """Return the introduction of a file, and its scenarios; raises BadFormat."""
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
                scenario.words.append(line)
        scenarios.append(scenario)
    return intro, scenarios


def replayed(scenario: Scenario) -> Scenario:
    """Run a scenario; return it with the milestones of each step (rule 2).

    Raises BadFormat for an invalid command, `history.Violation` for a broken guarantee.
    """
    again = Scenario(scenario.title, scenario.words)
    opening = scenario.steps[0].commands if scenario.steps else ""
    stage = ScenarioRunner(opening.split(";")[0])
    for step in scenario.steps:
        again.steps.append(ScenarioStep(step.commands, stage.play(step.commands)))
    if not stage.is_left_broken:
        stage.cluster.run_until_recovered()
    return again
