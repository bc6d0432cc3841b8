"""An owner's cut of what an original has written: batches go, records stay."""

from unittest.mock import Mock

import pytest

from tests.property.test_original_crash import other_batches
from tests.unit.storage.test_replica_log import NONCE, World, records, whole
from waltz_core import raw_records
from waltz_core.errors import BadRequest, DataLoss, DiskFailed, NoSpace
from waltz_core.record import BEFORE_FIRST, GENESIS_CHAIN, next_chain
from waltz_core.storage import truncation


@pytest.fixture
def world(tmp_path):
    """Ten records of an original, its mark confirmed at 5, prepared by an owner."""
    made = World(tmp_path)
    made.log.promise(1)
    made.append(1, 6)
    made.log.set_original_mark(1, 5)
    made.append(1, 4)
    made.log.prepare(2, NONCE)
    yield made
    made.log.abandon()
    made.control.close()


def cover(world, last=BEFORE_FIRST):
    return world.log.truncate(2, last, BEFORE_FIRST, GENESIS_CHAIN)


def append(world, fields):
    world.log.append(2, *fields)
    world.log.sync()


def on_disk(world):
    """What the file has, counted or not."""
    return (world.directory / "0" / f"{0:019d}.seg").read_bytes()[128:]


def test_an_originals_mark_binds_no_owner(world):
    state = world.log.state()
    assert (state.low_water_mark, state.mark_confirmed) == (5, False)
    assert world.log.confirmed_low_water_mark == 5


def test_the_same_records_get_other_batches(world):
    assert cover(world) == (BEFORE_FIRST, GENESIS_CHAIN)
    assert (world.log.max_id, world.log.synced_max) == (BEFORE_FIRST, BEFORE_FIRST)
    first, second, third, fourth = other_batches(records(0, 12), (3, 4, 3, 2), 2)
    append(world, first)
    assert (world.log.max_id, world.log.synced_max) == (2, 2)
    world.log.mark_acked()
    append(world, second)
    append(world, third)
    world.log.append(2, *fourth)
    assert (world.log.max_id, world.log.synced_max) == (11, 9), "from here on as in any log"
    world.log.sync()
    world.log.set_low_water_mark(2, 11, world.log.chain)
    world.log.engage(2, 11)
    assert on_disk(world) == world.content() == whole(11)
    assert world.bounds() == [(0, 2), (3, 6), (7, 9), (10, 11)]
    assert world.log.state().mark_confirmed
    world.crash()
    assert world.bounds() == [(0, 2), (3, 6), (7, 9), (10, 11)]
    assert not world.log.suspect


def test_a_cut_in_the_middle_of_a_batch(world):
    """The mark is decided below the end: what is behind it goes when the mark is set."""
    last, chain = cover(world, 7)
    assert (last, world.log.chain) == (7, chain)
    assert on_disk(world) == whole(9)
    world.log.set_low_water_mark(2, 7, chain)
    assert on_disk(world) == world.content() == whole(7)
    assert world.bounds() == [(0, 5), (6, 7)]
    assert world.log.chain_at(7) == chain


def test_what_there_was_no_room_to_cut_is_cut_when_the_mark_is_set_again(world, monkeypatch):
    _, chain = cover(world, 7)
    with monkeypatch.context() as patch:
        patch.setattr(truncation, "carry_out", Mock(side_effect=NoSpace("full")))
        with pytest.raises(NoSpace):
            world.log.set_low_water_mark(2, 7, chain)
    world.log.set_low_water_mark(2, 7, chain)
    world.log.engage(2, 7)
    assert on_disk(world) == world.content() == whole(7)
    world.crash()
    assert world.log.chain == chain
    assert not world.log.suspect


def test_what_follows_the_last_record_is_appended(world):
    cover(world)
    first, second = other_batches(records(0, 14), (8, 6), 2)
    append(world, first)
    append(world, second)
    assert world.content() == whole(13)
    (more,) = list(other_batches(records(0, 14), (8, 6), 2))[1:]
    with pytest.raises(BadRequest):
        append(world, more)


def test_other_records_take_the_place_of_those_above_the_mark_and_of_no_others(world):
    cover(world)
    other = [*records(0, 6), *records(6, 4, b"else")]
    for fields in other_batches(other, (6, 4), 2):
        append(world, fields)
    assert world.content() == whole(5) + on_disk(world)[6 * 44 :]
    assert world.bounds() == [(0, 5), (6, 9)]
    assert b"else" in world.content()


def test_batches_that_do_not_follow_on_are_refused_and_cover_nothing(world):
    cover(world)
    batches = list(other_batches(records(0, 10), (3, 4, 3), 2))
    first, lengths, data, chain, (entry,) = batches[0]
    other = b"\1" * len(chain)  # the same records, behind some that are not here
    crcs = b"".join(data[end - 4 : end] for end in lengths.cumsum())
    behind = entry._replace(chain=next_chain(other, 0, 2, 2, crcs))
    for start, before, told in ((1, chain, entry), (first, other, entry), (first, other, behind)):
        with pytest.raises(BadRequest):
            world.log.append(2, start, lengths, data, before, (told,))
        assert world.log.max_id == BEFORE_FIRST
    for each in batches:
        append(world, each)
    assert on_disk(world) == world.content() == whole(9)


def test_nothing_below_the_confirmed_mark_is_given_up(world):
    cover(world)
    (wrong,) = other_batches([*records(0, 3), *records(3, 4, b"else")], (7,), 2)
    with pytest.raises(DataLoss, match="below the low-water mark 5"):
        append(world, wrong)
    assert on_disk(world) == whole(9)
    world.crash()
    assert world.content() == whole(9)
    assert not world.log.suspect


def test_a_later_session_of_either_kind_finds_all_records(world):
    cover(world)
    append(world, next(other_batches(records(0, 10), (3,), 2)))
    assert world.log.prepare(3, NONCE).synced_max == 9
    assert world.log.truncate(3, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN)[0] == BEFORE_FIRST
    world.log.promise(4)
    assert (world.log.max_id, world.log.synced_max) == (9, 9)
    world.append(4, 2)
    assert world.log.prepare(5, NONCE).synced_max == 11
    assert world.content() == whole(11)


def test_a_clean_stop_in_between_leaves_all_records(world):
    cover(world)
    world.log.close()
    world.control.close()
    world.open()
    assert world.content() == whole(9)
    assert not world.log.suspect


def test_a_disk_that_fails_in_between_takes_nothing_with_it(world):
    cover(world)
    first, second = other_batches(records(0, 10), (3, 7), 2)
    append(world, first)
    world.disk.next_errors["sync"] = DiskFailed("no")
    with pytest.raises(DiskFailed):
        append(world, second)
    assert world.log.prepare(3, NONCE).synced_max == 9
    assert world.content() == whole(9)


def test_one_cut_in_a_session_and_at_a_batch_that_is_here(world):
    with pytest.raises(BadRequest, match="expected a batch that ends at 3"):
        world.log.truncate(2, 8, 3, GENESIS_CHAIN)
    cover(world)
    append(world, next(other_batches(records(0, 10), (3,), 2)))
    with pytest.raises(BadRequest, match="one cut"):
        world.log.truncate(2, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN)


def test_what_an_owner_has_written_is_cut_as_ever(world):
    log = world.log
    log.set_low_water_mark(2, 9, log.chain)
    log.engage(2, 9)
    (fields,) = list(other_batches(records(0, 12), (10, 2), 2))[1:]
    first, lengths, data, _, (entry,) = fields
    before = log.chain
    chain = next_of(before, entry, data, lengths)
    append(world, (first, lengths, data, before, (entry._replace(chain=chain),)))
    assert log.truncate(2, 9, 9, before) == (9, before)
    assert on_disk(world) == whole(9)


def next_of(before, entry, data, lengths):
    crcs = raw_records.record_crcs(data, lengths)
    return next_chain(before, entry.first, entry.last, entry.session_id, crcs)
