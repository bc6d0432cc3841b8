"""The bench with storages of the original: what is sent to them goes through the bytes of S 0."""

from tests.original_storage import OriginalStorage
from tests.unit.replication.bench import KEY, LIMITS, Bench
from waltz_core.replication import events
from waltz_core.wire import codec
from waltz_core.wire.connection import FRAME_HEADER
from waltz_core.wire.messages import Surface


class OriginalBench(Bench):
    """Some of the replicas are originals (all by default); `models` are their storages."""

    def __init__(self, *names, originals=None, limits=LIMITS, **more):
        self.originals = originals
        self.models = {}
        super().__init__(*names, limits=limits, **more)

    def add_storage(self, name):
        if self.originals is None or name in self.originals:
            self.models[name] = OriginalStorage(KEY, 1)
        else:
            super().add_storage(name)

    def partition(self, name):
        """What an original has on disk."""
        return self.models[name].partitions[0]

    def payloads(self, name):
        """The numbers that were appended to an original, in order."""
        partition = self.partition(name)
        return [int.from_bytes(partition.data(at), "big") for at in range(partition.last + 1)]

    def restart_storage(self, name):
        """What is in memory only is gone."""
        partition = self.partition(name)
        partition.session = partition.saved_session

    def connect(self):
        effect = self.dials[0]
        if effect.replica in self.down or effect.replica not in self.models:
            super().connect()
            return
        self.dials.popleft()
        self.step(events.ReplicaOpened(effect.session_id, effect.replica, is_original=True))

    def deliver(self, replica):
        if replica not in self.models:
            return super().deliver(replica)
        message = self.requests[replica].popleft()
        session_id = self.store.session.claim.session_id
        told = self.say(replica, message)
        self.step(events.ReplicaAnswered(session_id, replica, told))
        return message, told

    def say(self, replica, message):
        """Let an original serve a request; return its answer, which nobody is told of."""
        payload = b"".join(codec.encode(message, 0))[FRAME_HEADER.size :]
        answer = self.models[replica].handle(payload)
        return codec.decode(Surface.STORAGE, 0, memoryview(answer))
