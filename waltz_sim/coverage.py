"""What a number of runs have really tried: a quiet simulator proves nothing.

Seeds are run by tests, by the command line and by processes of a swarm; all of them add up here,
and all mean the same by "enough was tried".

Rules:
    1. In `SEEDS_MIN` seeds or more every kind of fault has fired, and all that is listed in
       `promises/sometimes.py` has come to pass; otherwise the whole run counts as failed.
    2. What is added up is small, whatever the runs were: traces and schedules stay behind.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.promises.sometimes import never
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
        """Take one run in."""
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
        """Take the sums of other runs in."""
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
        """Return what never came to pass (rule 1); nothing is asked of a few seeds."""
        if self.seeds < SEEDS_MIN:
            return []
        quiet = [f"fault {kind}" for kind, count in self.faults.items() if not count]
        return [*quiet, *never(self.counts)]

    @property
    def seeds_per_cpu_s(self) -> float:
        """How many seeds one core has run in a second; 0 where that was not measured."""
        return self.seeds / self.cpu_s if self.cpu_s else 0.0

    @property
    def steps_per_cpu_s(self) -> float:
        """How many steps of worlds one core has made in a second; 0 where not measured."""
        return self.steps / self.cpu_s if self.cpu_s else 0.0

    @property
    def is_good(self) -> bool:
        """Whether no rule was broken and enough was tried."""
        return not self.failures and not self.missing()


def covered(verdicts: Iterable[RunVerdict]) -> Coverage:
    """Return the sums of some runs."""
    sums = Coverage()
    for verdict in verdicts:
        sums.add(verdict)
    return sums
