"""What all checkers share: the books, the counts, and the way to say no.

Every subject has a file of its own, and none of them needs another one to be told apart from it;
this is all that they have in common.
"""

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from waltz_sim.promises.history import History, Violation
from waltz_sim.promises.ledger import Ledger

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster


class Witness:
    """The books of one world."""

    def __init__(self, cluster: "SimCluster") -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.history = History()
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()

    def count(self, what: str) -> None:
        """Note that something worth knowing has come to pass (27, Sometimes)."""
        self.counts[what] += 1

    def fail(self, rule: str, text: str) -> NoReturn:
        """Raise what was found."""
        raise Violation(rule, text)
