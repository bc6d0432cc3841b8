"""Power loss at every step while records of a 0.13 storage get new batches.

No record is lost, the replica does not become suspect, and every record has a batch afterwards.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.crash import layout
from tests.storage_model import ALL_SURVIVALS, CLUSTER_KEY, PARTITION, ROOT
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, LineageEntry, next_chain
from waltz_core.storage.files.control_file import ControlFile
from waltz_core.storage.log import log_recovery
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimDisk

BATCH_IDS = 8
SEGMENT_IDS = 14  # the number of records in a segment that 0.13 has written


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(log_recovery, "ADOPTED_BATCH_IDS", BATCH_IDS)


def write_files_of_0_13(disk, records, *, session, mark):
    """Write the files of a partition in several segments, as a 0.13 storage does."""
    structures = [layout.Structure(-1, -1, -1, 1, 0)] * 4
    structures[PARTITION] = layout.Structure(session, mark, mark, 5, 4)
    directory = ROOT / str(PARTITION)
    disk.make_directory(directory)
    disk.write_durably(ROOT / "waltz-storage.ctl", layout.control(CLUSTER_KEY, structures))
    for first in range(0, len(records), SEGMENT_IDS):
        part = records[first : first + SEGMENT_IDS]
        seg, idx = layout.segment(CLUSTER_KEY, PARTITION, first, part)
        disk.write_durably(directory / f"{first:019d}.seg", seg)
        disk.write_durably(directory / f"{first:019d}.idx", idx)


@dataclass
class World:
    """A directory of a 0.13 storage, opened by this version."""

    rng: Random
    disk: SimDisk = field(default_factory=SimDisk)

    def __post_init__(self):
        self.records = [layout.record(number, self.rng.randbytes(50)) for number in range(35)]
        self.disk.make_directory(ROOT)
        write_files_of_0_13(self.disk, self.records, session=1, mark=29)
        self.open()

    def open(self):
        self.control = ControlFile.open(self.disk, ROOT, CLUSTER_KEY, 4, 1)
        settings = LogSettings(CLUSTER_KEY, 900, lambda: 1_700_000_000_000)
        self.log = PartitionLog.open(
            self.disk, ROOT / str(PARTITION), PARTITION, self.control, settings
        )

    @contextmanager
    def power(self, step):
        """Lose power at a step; no record is lost, and the log has batches."""
        self.disk.plan_fault(self.disk.step_count + step, DiskFault.POWER_LOSS)
        try:
            yield
        except PowerLoss:
            self.disk.lose_power(self.rng.choice(ALL_SURVIVALS), self.rng)
            self.open()
        self.disk.cancel_plans()


def other_batches(records, counts, session):
    """Return the fields of an append for each batch; `counts` has the batches' record counts."""
    first, chain = 0, GENESIS_CHAIN
    for count in counts:
        last = first + count - 1
        part = records[first : last + 1]
        before = chain
        chain = next_chain(chain, first, last, session, b"".join(one[-4:] for one in part))
        lengths = raw_records.np.array([len(one) for one in part], dtype="int64")
        entry = LineageEntry(first, last, session, 9, chain)
        yield first, lengths, b"".join(part), before, (entry,)
        first = last + 1


def test_no_power_loss_removes_a_record_while_an_owner_replaces_batches_of_0_13_records():
    step, interrupted = 0, True
    while interrupted:
        step += 1
        world = World(Random(step))
        # This replica had only a part of the last batch.
        records = [*world.records, layout.record(35, b"new")]
        appends = list(other_batches(records, (7, 9, 12, 8), 5))
        interrupted = True
        with world.power(step):
            log = world.log
            prepared = log.prepare(5, bytes(15) + b"x")
            assert (prepared.synced_max, prepared.mark_confirmed) == (34, False)
            assert log.truncate(5, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN)[0] == BEFORE_FIRST
            for fields in appends:
                log.append(5, *fields)
                log.sync()
            log.set_low_water_mark(5, 35, log.chain)
            log.engage(5, 35)
            interrupted = False
        log = world.log
        assert log.max_id in (34, 35)
        assert not log.suspect
        record_bytes = b"".join(records)
        read = log.read_range(0, log.max_id, 1 << 20, whole_batches=False)
        assert read.records == record_bytes[: len(read.records)]
        if interrupted:
            assert log.prepare(6, bytes(15) + b"y").synced_max == log.max_id
            log.close()
        else:
            entries = tuple(fields[-1][0] for fields in appends)
            assert log.lineage(0, 35)[1] == entries
            log.close()
            world.control.close()
            world.open()
            assert world.log.lineage(0, 35)[1] == entries
            assert not world.log.suspect
    assert step > 30, step
