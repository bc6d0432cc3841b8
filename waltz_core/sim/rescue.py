"""An operator who has the storages declare what ZooKeeper has forgotten, in the simulation.

Why it stands alone: what is believed is decided by the production code (`cluster/rebuilding.py`);
here storages are asked, and ZooKeeper is written, as the commands do it.

Rules:
    1. A session is claimed that is later than all that any storage has promised; only what is heard
       in it counts.
    2. ZooKeeper is written before the chosen log is marked in that session: a marked replica is
       trusted, so a command that ends between the two must not leave it under the old metadata.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from waltz_core.cluster import rebuilding
from waltz_core.cluster.model import MarkerState, PartitionMarker
from waltz_core.cluster.rebuilding import Log, Verdict
from waltz_core.record import NO_SESSION, PartitionId, ReplicaId, SessionId, TransactionId
from waltz_core.replication.recovery import NO_STORAGE_ID
from waltz_core.replication.repair import pairs_of
from waltz_core.sim.peer import Peer
from waltz_core.wire.messages import (
    Nack,
    Prepare,
    Prepared,
    ReplicaState,
    SetLowWaterMark,
    StorageMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_core.sim.cluster import SimCluster


class Rescue:
    """One command; `told` gets what was declared."""

    def __init__(self, cluster: "SimCluster", told: "Callable[[Verdict], None]") -> None:
        self._cluster = cluster
        self._peer = Peer(cluster, "operator")
        self._told = told
        self._nonce = self._peer.rng.randbytes(16)
        self._partition_id = PartitionId(cluster.partition_id)
        self._heard: dict[ReplicaId, StorageMessage | None] = {}
        metadata = cluster.coordinator.metadata
        newest = NO_SESSION if metadata is None else metadata.session_id
        self._claim(SessionId(newest + 1))

    def _claim(self, session_id: SessionId) -> None:
        """Ask every storage for its log, in a session (rule 1)."""
        cluster = self._cluster
        self._session_id = session_id
        self._heard = {}
        identity = (NO_STORAGE_ID, cluster.key, 1)
        prepare = Prepare(session_id, 1, self._partition_id, self._nonce, *identity)
        for replica in cluster.replicas:
            self._peer.ask(
                cluster.storages[replica],
                [prepare],
                partial(self._answered, replica),
            )

    def _answered(self, replica: ReplicaId, answers: list[StorageMessage]) -> None:
        self._heard[replica] = answers[0] if answers else None
        if len(self._heard) < len(self._cluster.replicas):
            return
        nacks = [each for each in self._heard.values() if isinstance(each, Nack)]
        newest = max((each.promised for each in nacks), default=NO_SESSION)
        if newest >= self._session_id:
            self._claim(SessionId(newest + 1))
        else:
            self._choose()

    def _choose(self) -> None:
        """Raises BadRequest when what was acknowledged may be where nobody was heard."""
        prepared = {each: said for each, said in self._heard.items() if isinstance(said, Prepared)}
        verdict = rebuilding.choose(
            self._partition_id,
            {each: _log_of(said) for each, said in prepared.items()},
            groups={},
            replica_count=len(self._cluster.replicas),
            unheard=[each for each in self._heard if each not in prepared],
        )
        source = prepared[verdict.source]
        self._declare(verdict)
        prefix = self._session_id, 2, self._partition_id
        identity = (self._nonce, NO_STORAGE_ID, self._cluster.key, 1)
        again = Prepare(self._session_id, 1, self._partition_id, *identity)
        mark = SetLowWaterMark(*prefix, source.synced_max, bytes(source.chain))
        self._peer.ask(
            self._cluster.storages[verdict.source],
            [again, mark],
            partial(self._marked, verdict),
        )

    def _declare(self, verdict: Verdict) -> None:
        """Rule 2."""
        coordinator = self._cluster.coordinator
        log = verdict.log._replace(last_session=self._session_id)
        declared = replace(verdict, log=log)
        metadata = declared.metadata(coordinator.assignment.generation, self._session_id)
        marker = PartitionMarker(MarkerState.OPEN, self._session_id, self._nonce)
        coordinator.put_back(metadata, marker)

    def _marked(self, verdict: Verdict, answers: list[StorageMessage]) -> None:
        assert isinstance(answers[-1], ReplicaState)
        self._cluster.reassign(verdict.first_members)
        self._told(verdict)


def _log_of(told: Prepared) -> Log:
    lasts = [last for _, last in pairs_of(told.damaged)]
    is_damaged = any(last > told.low_water_mark for last in lasts)
    last_id = TransactionId(told.synced_max)
    return Log(SessionId(told.last_session), last_id, told.suspect, is_damaged)
