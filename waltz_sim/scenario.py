"""Told stories: what is done to a cluster, and the milestones that come of it, line by line.

A random run shows that nothing breaks, a story shows what happens instead. It is a text for people
who know the protocol, and a test: told again, it must read the same.

A file of stories begins with some words about them. Each story has a title (`## `), some words, and
steps. A step (`> `) is one or more commands, parted by semicolons; after it the world goes on until
nothing has happened for a while; what did happen stands below it, indented:

    ## A storage dies
    Two of three go on without it.

    > begin with A B C; append 5
        told: 0..4 in the log
    > kill C
        session 0 ends: replica C: reset
        S claims session 1
        ...

Rules:
    1. A world of stories is calm: every delay is the middle one, and nothing goes wrong by itself.
    2. All checkers of the simulator look on. At its end a story is healed, and all must be whole,
       but where the story says that it is left broken.
    3. What can be done stands in `stage.py`, what is told of it in `telling.py`.
"""

import re
from dataclasses import dataclass, field

from waltz_core.errors import BadFormat
from waltz_sim.stage import Stage


@dataclass(slots=True)
class ScenarioStep:
    """What is done, and what came of it."""

    commands: str
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The step as it stands in a file."""
        return f"> {self.commands}\n" + "".join(f"    {each}\n" for each in self.lines)


@dataclass(slots=True)
class Story:
    """A title, some words, and steps."""

    title: str
    words: list[str] = field(default_factory=list)
    steps: list[ScenarioStep] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The story as it stands in a file."""
        words = "".join(f"{line}\n" for line in self.words)
        return f"## {self.title}\n{words}\n{''.join(each.text for each in self.steps)}"


def stories_in(text: str) -> tuple[str, list[Story]]:
    """Return the words at the beginning of a file, and its stories; raises BadFormat."""
    intro, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    stories = []
    for part in parts:
        title, *lines = part.strip().split("\n")
        story = Story(title)
        for line in lines:
            if line.startswith("> "):
                story.steps.append(ScenarioStep(line[2:]))
            elif line.startswith("    ") and story.steps:
                story.steps[-1].lines.append(line[4:])
            elif story.steps:
                raise BadFormat(f"story {title!r}: expected a step or what came of it: {line!r}")
            elif line:
                story.words.append(line)
        stories.append(story)
    return intro, stories


def told_again(story: Story) -> Story:
    """Let a story happen; return it with what came of each step (rule 2).

    Raises BadFormat for a command that is none, `history.Violation` for a broken promise.
    """
    again = Story(story.title, story.words)
    opening = story.steps[0].commands if story.steps else ""
    stage = Stage(opening.split(";")[0])
    for step in story.steps:
        again.steps.append(ScenarioStep(step.commands, stage.play(step.commands)))
    if not stage.is_left_broken:
        stage.cluster.run_healed()
    return again
