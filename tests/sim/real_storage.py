"""The real storage service and its files, as a storage of the replication world.

Every request goes to the real one and to a model storage beside it; what both say of the log must
be the same. Only processes crash here: what a disk may lose is the storage's own simulation.
"""

import shutil
import time
from pathlib import Path

from tests.sim.model_storage import ModelStorage
from tests.sim.replication_world import KEY, Storage, Violation
from waltz_core import raw_records
from waltz_core.storage import service
from waltz_core.storage.disk import RealDisk
from waltz_core.storage.engine import Engine
from waltz_core.storage.partition_log import LogSettings
from waltz_core.storage.service import Identity, StorageService
from waltz_core.storage.work import Request
from waltz_core.wire import messages as wire

COMPARED = (wire.Prepare, wire.Truncate, wire.AppendRaw, wire.SetLowWaterMark, wire.Engage)


class RealModel(ModelStorage):
    """The model beside, which only speaks when the real one is asked about the world's checks."""

    def lose_power(self):
        self.crash()


class RealStorage(Storage):
    """See the module; `directory` is where the worlds' storages keep their files."""

    directory = Path("/tmp")

    def __init__(self, sim, name):
        super().__init__(sim, name)
        self.model = RealModel(sim.world, name, sim.checker)
        self.home = self.directory / f"{sim.world.seed}-{name.replace(':', '-')}"
        shutil.rmtree(self.home, ignore_errors=True)
        self.connections = {}
        self.engine = None
        self.boot()

    def boot(self):
        settings = LogSettings(KEY, 4096, lambda: time.time_ns() // 1_000_000)
        storage_id = self.model.disk.storage_id
        self.engine = Engine.open(
            RealDisk(), self.home, settings, partition_count=1, new_storage_id=storage_id
        )
        self.service = StorageService(Identity(KEY, 1, storage_id), queue_bytes_max=1 << 20)
        log = self.engine.logs.get(0) or self.engine.assign(0)
        self.log = log
        self.take(service.Opened(log))
        if (log.max_id, log.chain) != (self.model.last, self.model.chain):
            raise Violation(f"Differ: {self.name} reopened at {log.max_id}, not {self.model.last}")

    def take(self, event):
        """Step the service and run all its work; return what it answers."""
        answers, events = [], [event]
        while events:
            for effect in self.service.step(events.pop(0), self.world.now_ms):
                match effect:
                    case service.Answer(connection, message):
                        answers.append((self.connections[connection], message))
                    case service.RunWork(work):
                        events.append(service.WorkDone(work, work.run()))
                    case service.CloseConnection(connection, reason):
                        self.sim.break_link(self.connections[connection], reason)
        return answers

    def arrive(self, link, message):
        self.connections.setdefault(id(link), link)
        super().arrive(link, message)

    def _serve(self):
        self.is_busy = False
        if not self.is_up or self.is_paused or not self.queue:
            return
        link, message = self.queue.popleft()
        for answered, answer in self.take(Request(id(link), message)):
            self.world.note(f"{self.name} {type(message).__name__} -> {answer}"[:200])
            self.compare(message, answer)
            if isinstance(answer, wire.Nack):
                self.sim.checker.counts[f"nack {type(message).__name__}"] += 1
            self.sim.reply(answered, answer)
        self.work()

    def compare(self, message, answer):
        """Let the model do the same, and look at both logs."""
        if isinstance(answer, wire.Nack) or not isinstance(message, COMPARED):
            return
        expected = self.model.handle(message)
        self.model.sync()
        if isinstance(expected, wire.Nack):
            raise Violation(f"Differ: {self.name} {message}: {answer}, the model {expected}")
        if (self.log.max_id, self.log.chain) != (self.model.last, self.model.chain):
            raise Violation(f"Differ: {self.name} {message}: {self.log.max_id}, {self.model.last}")
        if isinstance(answer, wire.Prepared):
            for field in (
                "last_session",
                "low_water_mark",
                "mark_confirmed",
                "synced_max",
                "chain",
            ):
                if getattr(answer, field) != getattr(expected, field):
                    raise Violation(f"Differ: {self.name} {field}: {answer}, {expected}")
            if answer.suspect:
                raise Violation(f"Differ: {self.name} is suspect after a crash")

    def stop(self):
        super().stop()
        self.engine.abandon()
        self.boot()

    def records(self):
        """Return the payloads as they lie in the files."""
        read, first = [], 0
        while first <= self.log.max_id:
            part = self.log.read_range(first, self.log.max_id, 1 << 20, whole_batches=False)
            assert raw_records.first_bad_record(part.records, part.lengths) is None
            offset = 0
            for length in part.lengths:
                record = bytes(part.records[offset : offset + int(length)])
                read.append(int.from_bytes(record[-12:-4], "big"))
                offset += int(length)
            first += part.lengths.size
        return read
