"""A partition log on a disk that loses power, and a model of its required contents."""

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_PREFIX,
    LineageEntry,
    next_chain,
)
from waltz_core.storage.files.control_file import ControlFile
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimDisk, Survival

CLUSTER_KEY = bytes(range(16))
ROOT = Path("/storage")
PARTITION = 2


def encode_record(transaction_id, data):
    """Return the bytes of one record, as in a segment file."""
    head = RECORD_PREFIX.pack(transaction_id, bytes(16), 7, len(data), crc32(data))
    return head + data + crc32(head + data).to_bytes(4, "big")


def make_batches(first, counts, session, chain, rng, *, bytes_max=200):
    """Return complete batches of random records: (list of records, lineage entries)."""
    records, entries = [], []
    for count in counts:
        last = first + count - 1
        encoded_records = [
            encode_record(one, rng.randbytes(rng.randint(0, bytes_max)))
            for one in range(first, last + 1)
        ]
        chain = next_chain(
            chain, first, last, session, b"".join(one[-4:] for one in encoded_records)
        )
        entries.append(LineageEntry(first, last, session, 1_000 + last, chain))
        records += encoded_records
        first = last + 1
    return records, entries


@dataclass
class ModeledLog:
    """A disk, a log on it, and the expected content of the log.

    `records` and `entries` contain all that was written and not truncated. The log has reported all
    IDs up to `acked` as durable, has promised the session `floor`, and has confirmed the mark
    `confirmed`. `cut_to` is the target of a truncation without an answer.
    """

    rng: Random
    segment_bytes_max: int = 900
    bytes_max: int = 200
    disk: SimDisk = field(default_factory=SimDisk)
    now_ms: int = 1_700_000_000_000
    records: list[bytes] = field(default_factory=list)
    entries: list[LineageEntry] = field(default_factory=list)
    acked: int = BEFORE_FIRST
    session: int = 0
    floor: int = -1
    confirmed: int = BEFORE_FIRST
    cut_to: int | None = None

    def __post_init__(self):
        self.disk.make_directory(ROOT)
        self.open()

    # ---- the log

    def open(self):
        self.control = ControlFile.open(self.disk, ROOT, CLUSTER_KEY, 4, self.now_ms)
        settings = LogSettings(CLUSTER_KEY, self.segment_bytes_max, lambda: self.now_ms)
        self.log = PartitionLog.open(
            self.disk, ROOT / str(PARTITION), PARTITION, self.control, settings
        )

    def close(self):
        self.log.close()
        self.control.close()
        self.acked = self.log.synced_max

    def lose_power(self, survival):
        """Lose power and restart; unacknowledged writes may be missing from now on."""
        self.disk.lose_power(survival, self.rng)
        self.open()
        self.check_after_crash()

    # ---- the model

    @property
    def max_id(self):
        return len(self.records) - 1

    def chain_at(self, last):
        if last == BEFORE_FIRST:
            return GENESIS_CHAIN
        return next((entry.chain for entry in self.entries if entry.last == last), None)

    def cut_model(self, last):
        """Truncate the model; a truncated batch gets a new chain."""
        del self.records[last + 1 :]
        kept = [one for one in self.entries if one.last <= last]
        cut = next((one for one in self.entries if one.first <= last < one.last), None)
        if cut is not None:
            before = kept[-1].chain if kept else GENESIS_CHAIN
            crcs = b"".join(one[-4:] for one in self.records[cut.first :])
            chain = next_chain(before, cut.first, last, cut.session_id, crcs)
            kept.append(cut._replace(last=last, chain=chain))
        self.entries = kept

    def check_after_crash(self):
        """Check that the log has all acknowledged records, and only records that were written."""
        log = self.log
        if self.cut_to is not None and log.max_id <= self.cut_to < self.max_id:
            # If a part of a truncation is visible, the model assumes the complete truncation.
            self.cut_model(self.cut_to)
            self.acked = self.max_id
        assert self.acked <= log.max_id <= self.max_id, (self.acked, log.max_id, self.max_id)
        assert not log.suspect
        assert log.damaged == ()
        assert log.synced_max == log.max_id
        assert log.promised >= self.floor
        assert log.confirmed_low_water_mark >= self.confirmed
        self.floor, self.confirmed = log.promised, log.confirmed_low_water_mark
        self.acked = log.max_id
        self.cut_model(log.max_id)
        self.cut_to = None
        self.check_content()

    def check_content(self):
        """Check that all records and batches equal the model, byte for byte."""
        log = self.log
        assert log.max_id == self.max_id
        assert log.chain == self.chain_at(self.max_id)
        if self.max_id == BEFORE_FIRST:
            return
        chain, entries = log.lineage(0, self.max_id)
        assert chain == GENESIS_CHAIN
        assert list(entries) == self.entries
        offset = 0
        while offset <= self.max_id:
            read = log.read_range(
                offset, self.max_id, self.rng.choice((1, 500, 100_000)), whole_batches=False
            )
            count = read.lengths.size
            assert read.records == b"".join(self.records[offset : offset + count])
            offset += count

    # ---- actions

    def prepare(self):
        self.session += self.rng.randint(1, 3)
        self.session = max(self.session, self.log.promised + 1)
        prepared = self.log.prepare(self.session, self.rng.randbytes(16))
        self.floor = self.session
        self.acked = prepared.synced_max
        assert prepared.synced_max == self.max_id
        assert prepared.chain == self.chain_at(self.max_id)

    def prepare_after_error(self):
        self.session = max(self.session, self.log.promised) + 1
        self.log.prepare(self.session, self.rng.randbytes(16))
        self.floor = self.session

    def set_mark(self):
        self.sync()
        self.log.set_low_water_mark(self.session, self.max_id, self.log.chain)
        if self.rng.random() < 0.7:
            self.log.engage(self.session, self.max_id)
            self.confirmed = self.max_id

    def append(self, counts=None):
        counts = counts or [
            self.rng.choice((1, 1, 2, 5, 12)) for _ in range(self.rng.randint(1, 3))
        ]
        records, entries = make_batches(
            self.max_id + 1,
            counts,
            self.session,
            self.log.chain,
            self.rng,
            bytes_max=self.bytes_max,
        )
        first, chain = self.max_id + 1, self.log.chain
        self.records += records
        self.entries += entries
        run = b"".join(records)
        lengths = raw_records.lengths_from_wire(
            b"".join(len(record).to_bytes(4, "big") for record in records), len(run)
        )
        self.log.append(self.session, first, lengths, memoryview(run), chain, entries)
        self.confirmed = max(self.confirmed, self.log.confirmed_low_water_mark)

    def sync(self):
        self.acked = max(self.acked, self.log.sync())
        assert self.acked == self.max_id

    def truncate(self):
        self.sync()
        low = max(self.log.confirmed_low_water_mark, self.max_id - 30)
        last = self.rng.randint(low, self.max_id)
        base = max(
            (entry.last for entry in self.entries if entry.last <= last), default=BEFORE_FIRST
        )
        self.cut_to = last
        found = self.log.truncate(self.session, last, base, self.chain_at(base))
        self.cut_model(last)
        self.acked, self.cut_to = last, None
        assert found == (last, self.chain_at(last))

    def pause(self):
        self.now_ms += self.rng.choice((10, 400, 1500))

    def step(self):
        """Run one random operation."""
        act = self.rng.choice(
            (self.append,) * 6
            + (self.sync,) * 4
            + (self.pause, self.truncate, self.set_mark, self.new_session, self.restart)
        )
        act()
        return act.__name__

    def new_session(self):
        self.prepare()
        self.set_mark()

    def restart(self):
        self.close()
        self.open()
        self.check_after_crash()
        self.prepare()

    # ---- after a failure

    def check_new_session(self):
        """Check that a new session accepts appends, in every state."""
        self.prepare()
        self.set_mark()
        self.append()
        self.sync()
        self.check_content()


ALL_SURVIVALS = tuple(Survival)


def random_log(seed):
    rng = Random(seed)
    segment_bytes_max = rng.choice((300, 900, 5000, 1_000_000))
    return ModeledLog(rng, segment_bytes_max, rng.choice((20, 200, 1500)))


def run_until_power_loss(world, steps, fault_at):
    """Run random operations until the power fails at the planned step of the disk."""
    if fault_at is not None:
        world.disk.plan_fault(world.disk.step_count + fault_at, DiskFault.POWER_LOSS)
    try:
        world.prepare()
        for _ in range(steps):
            world.step()
    except PowerLoss:
        return
    world.disk.cancel_plans()


def run_until_error(world, fault):
    """Run random operations with a planned fault; return the error, and if open or close failed."""
    world.disk.plan_fault(world.disk.step_count + world.rng.randint(1, 60), fault)
    for _ in range(25):
        try:
            world.step()
        except (DiskFailed, NoSpace) as error:
            names = {one.name for one in traceback.extract_tb(error.__traceback__)}
            return error, bool(names & {"open", "close"})
    world.disk.cancel_plans()
    return None, False


def check_after_error(world):
    """Check that the log in memory has all acknowledged records, and only written records."""
    log = world.log
    if world.cut_to is not None and log.max_id <= world.cut_to:
        world.cut_model(world.cut_to)
        world.acked = world.max_id
    assert log.suspect or world.acked <= log.max_id <= world.max_id
    world.cut_model(log.max_id)
    world.acked, world.cut_to = log.max_id, None
    world.check_content()
