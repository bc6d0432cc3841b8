"""The coverage of many runs: which faults were injected, and which states have occurred.

Tests, the command line and the processes of a swarm use the same sums, and the same definition of
sufficient coverage.

Rules:
    1. After `SEEDS_MIN` seeds or more, every kind of fault must have been injected, and every state
       in `guarantees/required_states.py` must have occurred. Otherwise the whole run fails.
    2. The size of the sums does not grow with the number of runs: they contain no traces and no
       schedules.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.guarantees.required_states import missing_states
from waltz_sim.run import RunVerdict

SEEDS_MIN: Final = 300


class FailedSeed(NamedTuple):
    """A seed that broke a rule, with a sentence about the violation."""

    seed: int
    rule: str
    text: str


@dataclass(slots=True)
class Coverage:
    """Sums over runs: `steps` of worlds, `disk_steps` of their disks, CPU seconds in `cpu_s`."""

    seeds: int = 0
    steps: int = 0
    disk_steps: int = 0
    virtual_ms: int = 0
    committed: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[FailedSeed] = field(default_factory=list)

    def add(self, verdict: RunVerdict) -> None:
        """Add the verdict of one run."""
        self.seeds += 1
        self.steps += verdict.steps
        self.disk_steps += verdict.disk_steps
        self.virtual_ms += verdict.virtual_ms
        self.committed += verdict.committed
        self.counts.update(verdict.counts)
        if verdict.rule is not None:
            failure = FailedSeed(verdict.schedule.seed, verdict.rule, verdict.text)
            self.failures.append(failure)

    def merge(self, other: "Coverage") -> None:
        """Add the sums of other runs."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.disk_steps += other.disk_steps
        self.virtual_ms += other.virtual_ms
        self.committed += other.committed
        self.cpu_s += other.cpu_s
        self.counts.update(other.counts)
        self.failures = sorted([*self.failures, *other.failures])

    @property
    def faults(self) -> dict[str, int]:
        """The number of injected faults of each kind."""
        return {kind: self.counts[f"fault {kind}"] for kind in sorted(WEIGHTS)}

    def find_missing(self) -> list[str]:
        """Return the faults and states that did not occur (rule 1); empty for few seeds."""
        if self.seeds < SEEDS_MIN:
            return []
        quiet = [f"fault {kind}" for kind, count in self.faults.items() if not count]
        return [*quiet, *missing_states(self.counts)]

    @property
    def seeds_per_cpu_s(self) -> float:
        """The number of seeds per second of CPU time; 0 if the CPU time was not measured."""
        return self.seeds / self.cpu_s if self.cpu_s else 0.0

    @property
    def steps_per_cpu_s(self) -> float:
        """The steps of all worlds per second of CPU time; 0 if the CPU time was not measured."""
        return self.steps / self.cpu_s if self.cpu_s else 0.0

    @property
    def is_good(self) -> bool:
        """Whether no seed broke a rule and the coverage is sufficient."""
        return not self.failures and not self.find_missing()


def sum_verdicts(verdicts: Iterable[RunVerdict]) -> Coverage:
    """Sum the verdicts of several runs."""
    sums = Coverage()
    for verdict in verdicts:
        sums.add(verdict)
    return sums
