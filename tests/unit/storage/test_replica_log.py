"""A log that originals' servers write: what is promised, refused, kept, and made of it later."""

import dataclasses
from unittest.mock import Mock

import pytest

from tests.property.test_original_crash import other_batches
from tests.unit.storage.test_service import KEY, MoodyDisk
from waltz_core.errors import (
    BadRequest,
    DataLoss,
    DiskFailed,
    NoSpace,
    ReplicaSuspect,
    SessionFenced,
    TooLarge,
)
from waltz_core.record import BEFORE_FIRST, NO_SESSION, TRANSACTION_BYTES_MAX, Record, ReqId
from waltz_core.storage import truncation
from waltz_core.storage.control_file import ControlFile
from waltz_core.storage.partition_log import LogSettings
from waltz_core.storage.replica_log import INDEX_SYNC_IDS, ReplicaLog, encoded_record
from waltz_core.storage.unbatched import is_unbatched

NONCE = b"n" * 16


def records(first, count, data=b"data"):
    return [Record(one, ReqId(1, 1, 0, one), 7, data) for one in range(first, first + count)]


class World:
    def __init__(self, directory):
        self.directory = directory
        self.disk = MoodyDisk()
        self.open()

    def open(self):
        self.control = ControlFile.open(self.disk, self.directory, KEY, 1, 0)
        settings = LogSettings(KEY, 4_000, lambda: 1)
        self.log = ReplicaLog.open(self.disk, self.directory / "0", 0, self.control, settings)

    def crash(self):
        self.log.abandon()
        self.control.close()
        self.open()

    def append(self, session, count):
        self.log.append_records(session, records(self.log.max_id + 1, count))
        self.log.sync_records()

    def content(self):
        return self.log.read_range(0, self.log.max_id, 1 << 20, whole_batches=False).records

    def bounds(self):
        return [(one.first, one.last) for one in self.log.lineage(0, self.log.max_id)[1]]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.log.abandon()
    made.control.close()


@pytest.fixture
def begun(world):
    world.log.promise(1)
    world.log.set_original_mark(1, BEFORE_FIRST)
    return world


def whole(last):
    return b"".join(map(encoded_record, records(0, last + 1)))


def test_a_promise_is_durable_and_has_no_nonce(world):
    world.log.promise(5)
    world.crash()
    assert (world.log.promised, world.log.slot.nonce) == (5, bytes(16))
    world.log.promise(5)
    for session in (4, NO_SESSION):
        with pytest.raises(SessionFenced):
            world.log.promise(session)
    with pytest.raises(SessionFenced):
        world.log.prepare(5, NONCE)
    world.log.prepare(6, NONCE)
    with pytest.raises(SessionFenced):
        world.log.promise(6)


def test_what_was_appended_is_there_after_a_crash_and_gets_batches(begun):
    begun.append(1, 1_500)
    assert is_unbatched(begun.log.slot)
    assert begun.log.slot.promised == 1
    begun.crash()
    assert begun.content() == whole(1_499)
    assert begun.bounds() == [(0, 1023), (1024, 1499)]
    assert not is_unbatched(begun.log.slot)
    assert not begun.log.suspect


def test_batches_end_where_ids_and_mark_say_however_often_it_was_opened(begun):
    for session, count in ((2, 600), (3, 700), (4, 900)):
        begun.log.promise(session)
        begun.log.set_original_mark(session, begun.log.max_id)
        begun.append(session, count)
        if session != 3:
            begun.crash()
    assert begun.bounds() == [(0, 1023), (1024, 1299), (1300, 2047), (2048, 2199)]


def test_a_cut_that_found_no_room_is_finished_by_its_own_session_and_id_only(begun, monkeypatch):
    begun.append(1, 8)
    with monkeypatch.context() as patched:
        patched.setattr(truncation, "carry_out", Mock(side_effect=NoSpace("no room")))
        with pytest.raises(NoSpace):
            begun.log.cut_to(1, 5)
    for session, last in ((0, 5), (1, 4), (1, 6)):
        with pytest.raises(DiskFailed, match="a write failed in this session"):
            begun.log.cut_to(session, last)
    assert begun.log.cut_to(1, 5) == 5
    assert begun.content() == whole(5)


def test_prepare_makes_the_batches_in_place(begun):
    begun.append(1, 5)
    prepared = begun.log.prepare(2, NONCE)
    assert (prepared.synced_max, prepared.last_session, prepared.suspect) == (4, 1, False)
    assert prepared.chain == begun.log.chain == begun.log.chain_at(4)
    assert begun.bounds() == [(0, 4)]
    assert begun.content() == whole(4)
    begun.log.set_low_water_mark(2, 4, prepared.chain)
    begun.log.promise(3)
    begun.append(3, 2)
    assert begun.log.prepare(4, NONCE).synced_max == 6
    assert begun.content() == whole(6)


def test_records_that_do_not_follow_are_refused(begun):
    begun.append(1, 2)
    for wrong in (records(1, 1), records(3, 1), [*records(2, 1), *records(2, 1)]):
        with pytest.raises(BadRequest, match="transaction out of order"):
            begun.log.append_records(1, wrong)
    assert begun.log.append_records(1, []) == 0
    assert begun.log.max_id == 1


def test_a_record_that_no_opening_would_find_again_is_refused(begun):
    with pytest.raises(TooLarge):
        begun.log.append_records(1, records(0, 1, bytes(TRANSACTION_BYTES_MAX + 1)))
    begun.log.append_records(1, records(0, 1, bytes(TRANSACTION_BYTES_MAX)))
    begun.log.sync_records()
    begun.crash()
    assert begun.log.max_id == 0


def test_a_mark_is_where_the_log_ends_or_above_and_never_goes_back(begun):
    begun.append(1, 5)
    with pytest.raises(BadRequest, match="lower than the max transaction id"):
        begun.log.set_original_mark(1, 3)
    begun.log.promise(2)
    begun.log.set_original_mark(2, 4)
    begun.append(2, 1)
    begun.log.promise(3)
    with pytest.raises(DataLoss, match="below the low-water mark 4"):
        begun.log.cut_to(3, 3)
    assert begun.log.cut_to(3, 4) == 4
    info = begun.control.info(0)
    assert info[:3] == (2, 4, 4)
    assert info.sequence == begun.log.slot.original_sequence


def test_a_mark_that_no_append_has_passed_binds_nobody(begun):
    """The session may never have opened: the next one may decide less."""
    begun.append(1, 8)
    begun.log.promise(2)
    begun.log.set_original_mark(2, 12)
    begun.append(2, 3)
    assert begun.log.last_session_info() == (2, 12, 7)
    assert begun.log.confirmed_low_water_mark == BEFORE_FIRST
    begun.log.promise(3)
    assert begun.log.cut_to(3, 9) == 9
    begun.log.set_original_mark(3, 9)
    assert begun.log.last_session_info() == (3, 9, 9)


def test_a_log_below_its_mark_does_not_vouch_for_the_session(begun):
    begun.append(1, 3)
    begun.log.promise(2)
    begun.log.set_original_mark(2, 7)
    begun.append(2, 2)
    assert begun.log.prepare(3, NONCE).last_session == NO_SESSION
    begun.log.promise(4)
    begun.append(4, 3)
    assert begun.log.prepare(5, NONCE).last_session == 2


def test_a_suspect_replica_takes_part_in_nothing(begun):
    begun.append(1, 3)
    slots = begun.log._slots
    slots.write(dataclasses.replace(slots.slot, suspect=True))
    for call in (
        begun.log.last_session_info,
        begun.log.check_vouches,
        lambda: begun.log.append_records(1, records(3, 1)),
        lambda: begun.log.cut_to(1, 1),
        lambda: begun.log.set_original_mark(1, 2),
    ):
        with pytest.raises(ReplicaSuspect):
            call()
    assert begun.content() == whole(2)


def test_a_cut_goes_on_without_batches_and_is_there_after_a_crash(begun):
    begun.append(1, 200)
    assert begun.log.cut_to(1, 120) == 120
    assert begun.log.cut_to(1, 150) == 120
    begun.append(1, 30)
    begun.crash()
    assert begun.content() == whole(150)
    assert begun.bounds() == [(0, 150)]


def test_the_index_is_as_durable_as_an_originals(begun):
    syncs = []
    index_sync = begun.log._sync_index
    begun.log._sync_index = lambda: (syncs.append(begun.log.synced_max), index_sync())
    for _ in range(5):
        begun.append(1, INDEX_SYNC_IDS // 2)
    assert [each for each in syncs if each >= 0] == [999, 1999]


def test_after_a_failed_write_the_next_session_goes_on_in_a_new_segment(begun):
    begun.append(1, 4)
    begun.disk.next_errors["sync"] = DiskFailed("no")
    with pytest.raises(DiskFailed):
        begun.append(1, 2)
    with pytest.raises(DiskFailed):
        begun.log.append_records(1, records(4, 1))
    begun.log.promise(2)
    assert begun.log.max_id == 3
    begun.append(2, 3)
    assert begun.log.prepare(3, NONCE).synced_max == 6
    assert begun.content() == whole(6)
    assert begun.bounds() == [(0, 6)]


def test_a_full_disk_takes_nothing_and_loses_nothing(begun):
    begun.append(1, 4)
    begun.disk.next_errors["pwrite"] = NoSpace("full")
    with pytest.raises(NoSpace):
        begun.log.append_records(1, records(4, 2))
    begun.append(1, 2)
    begun.crash()
    assert begun.content() == whole(5)


def test_batches_that_cannot_be_made_break_the_log_until_it_is_opened(begun):
    begun.append(1, 4)
    begun.disk.next_errors["pread"] = DiskFailed("no")
    with pytest.raises(DiskFailed, match="making batches"):
        begun.log.prepare(2, NONCE)
    assert begun.log.is_broken
    with pytest.raises(DiskFailed):
        begun.log.prepare(2, NONCE)
    with pytest.raises(DiskFailed):
        begun.log.promise(2)
    begun.open()
    assert begun.log.prepare(2, NONCE).synced_max == 3


def of_an_owner(world, last_of_first, last):
    """Two batches of session 2; return the appends."""
    world.log.prepare(2, NONCE)
    found = list(other_batches(records(0, last + 1), (last_of_first + 1, last - last_of_first), 2))
    for fields in found:
        world.log.append(2, *fields)
    world.log.sync()
    return found


@pytest.mark.parametrize("restarts", [False, True])
def test_what_an_owner_has_written_stays_when_it_is_cut_after_an_originals_mark(world, restarts):
    """Another replica has other batches of it, from an original: both would vote for the cut."""
    first, _ = of_an_owner(world, 5, 9)
    world.log.promise(6)
    world.log.set_original_mark(6, 9)
    assert world.log.prepare(7, NONCE).last_session == 6
    if restarts:
        world.crash()
        world.log.prepare(8, NONCE)
    chain = first[-1][0].chain
    assert world.log.truncate(world.log.promised, 5, 5, chain) == (5, chain)
    world.crash()
    found = world.log.prepare(9, NONCE)
    assert (found.synced_max, found.last_session) == (9, 6)
    assert world.content() == whole(9)


def test_other_records_make_no_log_credible_that_never_reached_an_originals_mark(world):
    first, _ = of_an_owner(world, 5, 9)
    world.log.promise(6)
    world.log.set_original_mark(6, 20)
    assert world.log.prepare(7, NONCE).last_session == NO_SESSION
    chain = first[-1][0].chain
    assert world.log.truncate(7, 5, 5, chain) == (5, chain)
    other = [*records(0, 6), *records(6, 2, b"else")]
    world.log.append(7, *list(other_batches(other, (6, 2), 2))[1])
    world.crash()
    found = world.log.prepare(8, NONCE)
    assert found.synced_max < 9
    assert (found.last_session, found.mark_confirmed) == (NO_SESSION, False)
    world.log.set_low_water_mark(8, found.synced_max, found.chain)
    assert world.log.state().last_session == 8


def test_in_which_session_an_owner_had_it_engaged_is_kept_beside_an_originals(world):
    of_an_owner(world, 5, 9)
    world.log.set_low_water_mark(2, 9, world.log.chain)
    world.log.engage(2, 9)
    world.log.promise(6)
    world.log.set_original_mark(6, 10)
    # It does not reach its mark: whoever decides without it, or by it, is told of no session.
    assert (world.log.state().last_session, world.log.state().engaged_session) == (-1, -1)
    for first in (10, 11):  # the second one confirms the mark
        world.log.append_records(6, records(first, 1))
    world.log.sync_records()
    state = world.log.state()
    assert (state.last_session, state.mark_confirmed, state.engaged_session) == (6, True, 2)
