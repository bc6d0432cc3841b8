"""A test world for a partition's replication: modeled storages and ZooKeeper, stepped by a test.

The test controls every step: `deliver` passes the next request to a storage, and the answer to the
machine. `run` continues until no work is left.
"""

from collections import deque
from random import Random

from tests.unit.replication.model_storage import ModelStorage, make_batch
from waltz_core.cluster.znodes.model import MarkerState, PartitionMarker, PartitionMetadata
from waltz_core.machine import Report, Wakeup
from waltz_core.replication import session_events
from waltz_core.replication.invariants import check
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.wire import messages as wire

KEY = b"cluster-key-16-b"
A, B, C, D, E = (f"storage{n}:1" for n in range(5))
LIMITS = SessionLimits(lag_bytes_max=500, range_bytes_max=300)


class ReplicationWorld:
    """The machine of one partition, with modeled storages and ZooKeeper."""

    def __init__(self, *names, state=MarkerState.NEW, limits=LIMITS):
        self.names = names or (A, B, C)
        self.now_ms = 1000
        self.storage_ids = {}
        self.storages = {}
        for name in self.names:
            self.add_storage(name)
        self.down = set()
        self.silent = set()
        self.metadata, self.metadata_version = PartitionMetadata(), 0
        self.marker = None if state is None else PartitionMarker(state)
        self.marker_version = -1 if state is None else 0
        self.rng = Random(3)
        self.store = self._new_store(limits)
        self.limits = limits
        self.reported = []  # reports, and effects for the owner
        self.sent = []  # all (replica, message) pairs so far
        self.zookeeper_requests = deque()  # effects for the coordinator
        self.requests = {}  # replica -> queue of requests
        self.dials = deque()
        self.numbers = 0

    def _new_store(self, limits):
        return PartitionStore(0, KEY, 1, self.storage_ids, rng=self.rng, limits=limits)

    def add_storage(self, name):
        self.storages[name] = ModelStorage(name, lineage_max=3, range_batches_max=2)
        self.storage_ids[name] = self.storages[name].disk.storage_id

    # --- events in

    def step(self, event):
        effects = self.store.step(event, self.now_ms)
        check(self.store)
        for effect in effects:
            match effect:
                case session_events.ReadMetadata() | session_events.WriteMetadata():
                    self.zookeeper_requests.append(effect)
                case session_events.OpenReplica():
                    self.requests[effect.replica] = deque()
                    self.dials.append(effect)
                case session_events.SendToReplica():
                    self.sent.append((effect.replica, effect.message))
                    self.requests[effect.replica].append(effect.message)
                case session_events.CloseReplica():
                    del self.requests[effect.replica]
                    self.dials = deque(
                        dial for dial in self.dials if dial.replica != effect.replica
                    )
                case _:
                    self.reported.append(effect)
        return effects

    def take_ownership(self, generation=1, replicas=None):
        self.step(session_events.TakeOwnership(generation, tuple(replicas or self.names)))

    def wait(self, ms):
        """Advance the time, and wake the machine whenever it requests this."""
        end_ms = self.now_ms + ms
        while True:
            at_ms = self.store.wake_at_ms
            if at_ms is None or at_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, at_ms)
            self.step(Wakeup())
        self.now_ms = end_ms

    def lose(self, replica, reason="reset"):
        session = self.store.session.claim.session_id
        del self.requests[replica]
        self.step(session_events.ReplicaLost(session, replica, reason))

    # --- answers of storages and ZooKeeper

    def connect(self):
        """Let the oldest dial succeed, or fail if the storage is down."""
        effect = self.dials.popleft()
        if effect.replica in self.down:
            del self.requests[effect.replica]
            self.step(session_events.ReplicaLost(effect.session_id, effect.replica, "refused"))
        else:
            self.step(session_events.ReplicaOpened(effect.session_id, effect.replica))

    def deliver(self, replica):
        """Let a storage serve its oldest request and answer it."""
        message = self.requests[replica].popleft()
        answer = self.storages[replica].handle(message)
        self.step(session_events.ReplicaResponded(message.session_id, replica, answer))
        return message, answer

    def answer_zookeeper(self, outcome="ok"):
        """Answer the oldest request: "ok", "lost" (done without an answer) or "away" (not done)."""
        effect = self.zookeeper_requests.popleft()
        if outcome == "away":
            self.step(session_events.MetadataOutcomeUnknown(effect.attempt, "away"))
            return effect
        if isinstance(effect, session_events.ReadMetadata):
            view = (self.metadata, self.metadata_version, self.marker, self.marker_version)
            self.step(session_events.MetadataRead(effect.attempt, *view))
            return effect
        if (effect.metadata_version, effect.marker_version) != (
            self.metadata_version,
            self.marker_version,
        ):
            self.step(session_events.MetadataConflict(effect.attempt))
            return effect
        self.metadata, self.marker = effect.metadata, effect.marker
        self.metadata_version += 1
        self.marker_version += 1
        if outcome == "lost":
            self.step(session_events.MetadataOutcomeUnknown(effect.attempt, "connection loss"))
        else:
            versions = self.metadata_version, self.marker_version
            self.step(session_events.MetadataWritten(effect.attempt, *versions))
        return effect

    def run(self, *, answers_zookeeper=True):
        """Continue until there is no work left except waiting."""
        while True:
            ready = [
                name
                for name in sorted(self.requests)
                if self.requests[name] and name not in self.silent
            ]
            if self.dials:
                self.connect()
            elif ready:
                self.deliver(ready[0])
            elif answers_zookeeper and self.zookeeper_requests:
                self.answer_zookeeper()
            else:
                return

    def run_for(self, ms):
        """Run all work, advance the time, and run all work again."""
        self.run()
        self.wait(ms)
        self.run()

    def open(self, generation=1, replicas=None):
        """Own the partition and let the session open."""
        self.take_ownership(generation, replicas)
        self.run_for(self.limits.opening_grace_ms)
        assert self.store.open_session_id is not None

    def decide(self):
        """Own the partition, up to the write of the decided states to ZooKeeper."""
        self.take_ownership()
        self.answer_zookeeper()
        self.answer_zookeeper()
        self.run(answers_zookeeper=False)
        assert isinstance(self.zookeeper_requests[0], session_events.WriteMetadata)

    def step_until(self, is_reached):
        """Step until a condition holds."""
        while not is_reached():
            if self.dials:
                self.connect()
            elif ready := [name for name in self.names if self.requests.get(name)]:
                self.deliver(ready[0])
            else:
                self.answer_zookeeper()

    def reopen(self):
        """Let the next session open after a session was lost."""
        for _ in range(20):
            self.run()
            if self.store.open_session_id is not None:
                return
            self.wait(50)
        raise AssertionError("no session opens")

    def submit(self, count=1):
        """Append one batch; return its last ID."""
        payloads = list(range(self.numbers, self.numbers + count))
        self.numbers += count
        batch = make_batch(self.store.next_transaction_id, payloads, self.now_ms)
        self.step(session_events.SubmitToSession(self.store.open_session_id, batch))
        return batch.last

    def append(self, count=1, *, batches=1):
        """Append batches, and deliver them to all replicas."""
        for _ in range(batches):
            self.submit(count)
        self.run()

    # --- other servers

    def claim_elsewhere(self, session_id):
        """Record the claim of another server."""
        nonce = session_id.to_bytes(16, "big")
        self.metadata = PartitionMetadata(1, session_id, self.metadata.states)
        self.marker = PartitionMarker(self.marker.state, session_id, nonce)
        self.metadata_version += 1
        self.marker_version += 1

    def other_server(self):
        """Return another server's world over the same storages and the same ZooKeeper."""
        other = ReplicationWorld(*self.names)
        other.storages, other.storage_ids = self.storages, self.storage_ids
        other.store = other._new_store(other.limits)
        other.check_replica_states(self)
        return other

    def check_replica_states(self, other):
        self.metadata, self.metadata_version = other.metadata, other.metadata_version
        self.marker, self.marker_version = other.marker, other.marker_version

    # --- reports

    def all_reported(self, kind):
        return [one for one in self.reported if isinstance(one, kind)]

    def reports(self, name):
        return [dict(one.fields) for one in self.all_reported(Report) if one.name == name]

    def all_sent(self, kind, replica=None):
        return [
            message
            for name, message in self.sent
            if isinstance(message, kind) and replica in (None, name)
        ]

    def logs(self):
        return {name: self.storages[name].payloads() for name in self.names}


__all__ = ["KEY", "LIMITS", "A", "B", "C", "D", "E", "ReplicationWorld", "wire"]
