"""The state that all checkers share: the reference history, the counters, and failures."""

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from waltz_core.records.record import BEFORE_FIRST
from waltz_sim.guarantees.history import History, Violation
from waltz_sim.guarantees.ledger import Ledger

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster


class CheckerState:
    """The shared state of the checkers of one world."""

    def __init__(self, cluster: "SimCluster") -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.history = History()
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.archived_last: int = BEFORE_FIRST  # according to ZooKeeper

    def count(self, name: str) -> None:
        """Count an occurrence of a state that runs should reach (27, Sometimes)."""
        self.counts[name] += 1

    def fail(self, rule: str, text: str) -> NoReturn:
        """Raise a Violation of the named rule."""
        raise Violation(rule, text)
