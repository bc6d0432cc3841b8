"""A world with an owner that archives, and replicas that report on its attempts."""

from dataclasses import replace

from tests.unit.replication.replication_world import LIMITS, A, ReplicationWorld, wire
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.session_events import ReplicaResponded

INTERVAL_MS = 10_000
ARCHIVING = replace(LIMITS, archive_interval_ms=INTERVAL_MS)


class ArchivingWorld(ReplicationWorld):
    """A world whose storages report the end of a collection at once, if `collects` is true.

    The storages reject requests of the kind `rejected`.
    """

    def __init__(self, *names, limits=ARCHIVING):
        super().__init__(*names, limits=limits)
        self.collects = True
        self.rejected = ()

    def deliver(self, replica):
        if isinstance(self.requests[replica][0], self.rejected):
            message = self.requests[replica].popleft()
            answer = wire.Nack(message.session_id, message.sequence, 0, 12, 0, "no")
            self.step(ReplicaResponded(message.session_id, replica, answer))
            return message, answer
        message, answer = super().deliver(replica)
        if isinstance(message, wire.CollectGarbage) and self.collects:
            end_collection(self, replica, message)
        return message, answer


def end_collection(world, replica, request, *, has_more=False, error=""):
    """Let a replica report the end of a collection."""
    prefix = request.session_id, 0, request.partition_id
    notice = wire.GarbageCollected(*prefix, request.attempt, has_more, error)
    world.step(ReplicaResponded(request.session_id, replica, notice))


def new_world(*names):
    world = ArchivingWorld(*names)
    world.open()
    world.append(2, batches=3)
    return world


def attempts(world):
    """Return the attempts so far, with the replica of each."""
    return [message for message in world.sent if isinstance(message[1], wire.ArchiveRange)]


def begin(world):
    """Wait until a replica archives a range; return both."""
    count = len(attempts(world))
    world.run_for(INTERVAL_MS)
    assert len(attempts(world)) == count + 1
    return attempts(world)[-1]


def progress(world, replica, request):
    prefix = request.session_id, 0, request.partition_id
    notice = wire.ArchiveProgress(*prefix, request.attempt)
    world.step(ReplicaResponded(request.session_id, replica, notice))


def chain_at(world, last):
    entries = world.storages[A].disk.entries
    return next(entry.lineage.chain for entry in entries if entry.lineage.last == last)


def finish(world, replica, request, **fields):
    """Let a replica report the end of an attempt."""
    last = fields.pop("last", request.last)
    if "chain" not in fields:
        fields["chain"] = chain_at(world, last) if last >= 0 else GENESIS_CHAIN
    known = {
        "stamp_ms": 9,
        "manifest": f"m{request.attempt}",
        "manifest_crc": 7,
        "error": "",
        **fields,
    }
    prefix = request.session_id, 0, request.partition_id
    notice = wire.RangeArchived(*prefix, request.attempt, last, **known)
    world.step(ReplicaResponded(request.session_id, replica, notice))


def archive(world, last=None):
    """Archive up to an ID, and record the archived mark."""
    replica, request = begin(world)
    finish(world, replica, request, last=request.last if last is None else last)
    world.run()
    return world.marker.archived


def end_attempt(world):
    """Let the current attempt end without a result."""
    replica, request = attempts(world)[-1]
    prefix = request.session_id, 0, request.partition_id
    nothing = wire.RangeArchived(*prefix, request.attempt, 3, bytes(16), 0, "", 0, "")
    world.step(ReplicaResponded(request.session_id, replica, nothing))


def archived_world():
    """Return three replicas with batches 0..1, 2..3 and 4..5, of which 0..3 are archived."""
    world = new_world()
    archive(world, last=3)
    world.run_for(INTERVAL_MS)
    end_attempt(world)
    return world


def next_owner_of(world):
    """Return a later owner of the partition, which archives nothing."""
    other = ArchivingWorld(*world.names)
    other.storages, other.storage_ids = world.storages, world.storage_ids
    other.store = other._new_store(replace(ARCHIVING, archive_interval_ms=0))
    other.check_replica_states(world)
    other.take_ownership(generation=2)
    other.reopen()
    return other
