"""A bench with an owner that archives, and replicas that report on its attempts."""

from dataclasses import replace

from tests.unit.replication.bench import LIMITS, A, Bench, wire
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.session_events import ReplicaResponded

INTERVAL_MS = 10_000
ARCHIVING = replace(LIMITS, archive_interval_ms=INTERVAL_MS)


class ArchivingBench(Bench):
    """Its storages report the end of a collection at once, unless `collects` is False.

    They reject requests of the kind `rejected`.
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


def end_collection(bench, replica, request, *, has_more=False, error=""):
    """Let a replica report the end of a collection."""
    prefix = request.session_id, 0, request.partition_id
    notice = wire.GarbageCollected(*prefix, request.attempt, has_more, error)
    bench.step(ReplicaResponded(request.session_id, replica, notice))


def new_bench(*names):
    bench = ArchivingBench(*names)
    bench.open()
    bench.append(2, batches=3)
    return bench


def attempts(bench):
    """Return the attempts so far, with the replica of each."""
    return [each for each in bench.sent if isinstance(each[1], wire.ArchiveRange)]


def begin(bench):
    """Wait until a replica archives a range; return both."""
    count = len(attempts(bench))
    bench.run_for(INTERVAL_MS)
    assert len(attempts(bench)) == count + 1
    return attempts(bench)[-1]


def progress(bench, replica, request):
    prefix = request.session_id, 0, request.partition_id
    notice = wire.ArchiveProgress(*prefix, request.attempt)
    bench.step(ReplicaResponded(request.session_id, replica, notice))


def chain_at(bench, last):
    entries = bench.storages[A].disk.entries
    return next(each.lineage.chain for each in entries if each.lineage.last == last)


def finish(bench, replica, request, **fields):
    """Let a replica report the end of an attempt."""
    last = fields.pop("last", request.last)
    if "chain" not in fields:
        fields["chain"] = chain_at(bench, last) if last >= 0 else GENESIS_CHAIN
    known = {
        "stamp_ms": 9,
        "manifest": f"m{request.attempt}",
        "manifest_crc": 7,
        "error": "",
        **fields,
    }
    prefix = request.session_id, 0, request.partition_id
    notice = wire.RangeArchived(*prefix, request.attempt, last, **known)
    bench.step(ReplicaResponded(request.session_id, replica, notice))


def archive(bench, last=None):
    """Archive up to an ID, and record the archived mark."""
    replica, request = begin(bench)
    finish(bench, replica, request, last=request.last if last is None else last)
    bench.run()
    return bench.marker.archived


def end_attempt(bench):
    """Let the current attempt end without a result."""
    replica, request = attempts(bench)[-1]
    prefix = request.session_id, 0, request.partition_id
    nothing = wire.RangeArchived(*prefix, request.attempt, 3, bytes(16), 0, "", 0, "")
    bench.step(ReplicaResponded(request.session_id, replica, nothing))


def archived_bench():
    """Return three replicas with batches 0..1, 2..3 and 4..5, of which 0..3 are archived."""
    bench = new_bench()
    archive(bench, last=3)
    bench.run_for(INTERVAL_MS)
    end_attempt(bench)
    return bench


def next_owner_of(bench):
    """Return a later owner of the partition, which archives nothing."""
    other = ArchivingBench(*bench.names)
    other.storages, other.storage_ids = bench.storages, bench.storage_ids
    other.store = other._new_store(replace(ARCHIVING, archive_interval_ms=0))
    other.check_replica_states(bench)
    other.take_ownership(generation=2)
    other.reopen()
    return other
