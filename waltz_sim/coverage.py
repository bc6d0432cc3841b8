"""The coverage of a number of runs: which faults have fired, and which states have occurred.

Tests, the command line and the processes of a swarm run seeds; all of them use these sums, and the
same definition of sufficient coverage.

Rules:
    1. In `SEEDS_MIN` seeds or more every kind of fault has fired, and every state that is listed in
       `guarantees/sometimes.py` has occurred; otherwise the whole run counts as failed.
    2. The sums are small for any number of runs: they contain no traces and no schedules.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.guarantees.sometimes import never
from waltz_sim.run import RunVerdict

SEEDS_MIN: Final = 300


class FailedSeed(NamedTuple):
    """A seed that broke a rule, and the sentence about it."""

    seed: int
    rule: str
    text: str


@dataclass(slots=True)
class Coverage:
    """Sums over runs; `steps` are of worlds, `disk_steps` of their disks, `cpu_s` of one core."""

    seeds: int = 0
    steps: int = 0
    disk_steps: int = 0
    virtual_ms: int = 0
    committed: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[FailedSeed] = field(default_factory=list)

    def add(self, verdict: RunVerdict) -> None:
        """Add one run."""
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
        """How often each kind of fault has fired."""
        return {kind: self.counts[f"fault {kind}"] for kind in sorted(WEIGHTS)}

    def missing(self) -> list[str]:
        """Return what did not occur (rule 1); always empty for a few seeds."""
        if self.seeds < SEEDS_MIN:
            return []
        quiet = [f"fault {kind}" for kind, count in self.faults.items() if not count]
        return [*quiet, *never(self.counts)]

    @property
    def seeds_per_cpu_s(self) -> float:
        """How many seeds one core has run per second; 0 if not measured."""
        return self.seeds / self.cpu_s if self.cpu_s else 0.0

    @property
    def steps_per_cpu_s(self) -> float:
        """How many steps of worlds one core has run per second; 0 if not measured."""
        return self.steps / self.cpu_s if self.cpu_s else 0.0

    @property
    def is_good(self) -> bool:
        """Whether no rule was broken and the coverage is sufficient."""
        return not self.failures and not self.missing()


def covered(verdicts: Iterable[RunVerdict]) -> Coverage:
    """Return the sums of some runs."""
    sums = Coverage()
    for verdict in verdicts:
        sums.add(verdict)
    return sums
