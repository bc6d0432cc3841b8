"""The schedule of the scrub: order of partitions, times, and rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.storage.logs import ROOT, new_disk
from waltz_core.storage.log.scrub import (
    PASS_PAUSE_MS,
    PIECE_BYTES_MAX,
    PROGRESS_FILE_NAME,
    REQUESTED_BYTES_PER_S,
    Scrub,
    ScrubPiece,
    ScrubResult,
    read_scrub_positions,
    write_scrub_positions,
)

DAY_MS = 86_400_000


def new_scrub(*partitions, bytes_per_s=100_000, interval_ms=DAY_MS, positions=None):
    scrub = Scrub(bytes_per_s=bytes_per_s, interval_ms=interval_ms, positions=positions)
    for partition in partitions:
        scrub.on_partition_opened(partition, 0)
    return scrub


def read(scrub, now_ms, *, last=99, next_id=None, size=50_000, error=None):
    """Read the piece that is due; return the partition, the piece, and whether a pass has ended."""
    partition = scrub.next_partition(now_ms)
    assert partition is not None
    piece = scrub.begin(partition, last, now_ms)
    assert scrub.next_partition(now_ms) is None, "one piece at a time"
    assert scrub.wake_at_ms is None
    next_id = last + 1 if next_id is None else next_id
    is_finished = scrub.on_piece_done(partition, ScrubResult(next_id, size, error), now_ms)
    return partition, piece, is_finished


def test_pauses_keep_the_scrub_at_its_rate():
    scrub = new_scrub(3)
    assert scrub.wake_at_ms == 0
    assert read(scrub, 0, next_id=40) == (3, ScrubPiece(0, 100_000), False)
    assert scrub.wake_at_ms == 500
    assert scrub.next_partition(499) is None
    assert read(scrub, 500, next_id=41, size=1_000_000) == (3, ScrubPiece(40, 100_000), False)
    assert scrub.wake_at_ms == 10_500


def test_partitions_are_read_in_turn_up_to_their_initial_marks():
    scrub = new_scrub(5, 2)
    assert read(scrub, 0, last=10, next_id=6)[0] == 2
    assert read(scrub, 500, last=80, next_id=11) == (2, ScrubPiece(6, 100_000), True)
    assert read(scrub, 1_000, last=10)[::2] == (5, True)
    assert scrub.wake_at_ms == DAY_MS


def test_the_interval_between_passes_is_measured_from_their_starts():
    scrub = new_scrub(2, interval_ms=5_000)
    read(scrub, 0, next_id=50)
    read(scrub, 3_000)
    assert scrub.wake_at_ms == 5_000
    scrub = new_scrub(2, interval_ms=5_000)
    read(scrub, 0, next_id=50)
    read(scrub, 6_000)
    assert scrub.wake_at_ms == 6_000 + PASS_PAUSE_MS


def test_the_scrub_of_an_empty_log_ends_at_once_and_is_repeated_later():
    scrub = new_scrub(2, interval_ms=0)
    assert scrub.next_partition(0) == 2
    assert scrub.begin(2, -1, 0) is None
    assert scrub.next_partition(0) is None
    assert scrub.wake_at_ms == PASS_PAUSE_MS


def test_a_log_that_was_truncated_is_not_read_beyond_its_end():
    scrub = new_scrub(2)
    read(scrub, 0, last=99, next_id=50)
    assert scrub.begin(2, 30, 500) is None
    assert scrub.positions == {}


def test_with_rate_zero_only_requested_passes_run():
    scrub = new_scrub(1, 2, bytes_per_s=0)
    assert scrub.wake_at_ms is None
    scrub.request([2], 70)
    assert scrub.wake_at_ms == 70
    assert read(scrub, 70, next_id=9, size=REQUESTED_BYTES_PER_S // 10)[0] == 2
    assert scrub.wake_at_ms == 170
    assert read(scrub, 170)[2]
    assert scrub.wake_at_ms is None
    assert [state.passes_count for state in scrub.states(170)] == [0, 1]


def test_requested_passes_run_first_and_from_the_beginning():
    scrub = new_scrub(1, 2)
    read(scrub, 0, next_id=50)
    scrub.request([2], 100)
    assert scrub.wake_at_ms == 100
    assert read(scrub, 100)[:2] == (2, ScrubPiece(0, PIECE_BYTES_MAX))
    assert read(scrub, 5_000)[:2] == (1, ScrubPiece(50, 100_000))


def test_a_scrub_request_during_a_piece_restarts_the_pass():
    scrub = new_scrub(1)
    scrub.begin(1, 99, 0)
    scrub.request([1], 3)
    assert not scrub.on_piece_done(1, ScrubResult(60, 10), 5)
    assert read(scrub, 6)[1].first == 0


def test_a_dropped_partition_does_not_block_the_scrub():
    scrub = new_scrub(1, 2)
    scrub.begin(1, 99, 0)
    assert scrub.wake_at_ms is None
    scrub.on_partition_dropped(1)
    assert scrub.next_partition(0) == 2
    scrub.on_partition_dropped(2)
    assert scrub.wake_at_ms is None


def test_the_scrub_position_survives_a_restart():
    scrub = new_scrub(1, 2)
    read(scrub, 0, next_id=50)
    assert scrub.positions == {1: 50}
    again = new_scrub(1, 2, positions=scrub.positions)
    assert read(again, 0, next_id=60)[:2] == (1, ScrubPiece(50, 100_000))
    read(again, 9_000)
    assert again.positions == {}


def test_the_progress_of_a_scrub_is_reported():
    scrub = new_scrub(1)
    (state,) = scrub.states(0)
    assert (state.is_running, state.finished_age_ms, state.read_bytes) == (False, -1, 0)
    read(scrub, 0, next_id=50, error="rot in the batches")
    (state,) = scrub.states(10)
    assert (state.is_running, state.next_id, state.last_id) == (True, 50, 99)
    assert state.error == "rot in the batches"
    read(scrub, 500)
    (state,) = scrub.states(700)
    assert (state.is_running, state.finished_age_ms, state.read_bytes) == (False, 200, 100_000)
    assert state.error == "rot in the batches", "until the next pass begins"


@given(
    lasts=st.lists(st.integers(-1, 40), min_size=1, max_size=5),
    rate=st.integers(1, 200_000),
    sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=20),
)
@pytest.mark.filterwarnings("ignore")
def test_every_log_is_read_once_in_a_pass_and_no_faster_than_allowed(lasts, rate, sizes):
    scrub = new_scrub(*range(len(lasts)), bytes_per_s=rate, interval_ms=1 << 40)
    now_ms = total = turns = 0
    positions = dict.fromkeys(range(len(lasts)), 0)
    while (at_ms := scrub.wake_at_ms) is not None and at_ms < 1 << 39:
        now_ms = max(now_ms, at_ms)
        partition = scrub.next_partition(now_ms)
        piece = scrub.begin(partition, lasts[partition], now_ms)
        if piece is None:
            continue
        assert total <= rate * now_ms / 1_000 + 1, "not faster than the rate"
        assert piece.first == positions[partition], "in the order of ids, without a gap"
        size = sizes[turns % len(sizes)]
        turns += 1
        positions[partition] = piece.first + 1 + turns % 7
        scrub.on_piece_done(partition, ScrubResult(positions[partition], size), now_ms)
        total += size
    assert all(positions[number] > last for number, last in enumerate(lasts))
    assert [state.passes_count for state in scrub.states(now_ms)] == [1] * len(lasts)


# ---- the file


@given(st.dictionaries(st.integers(0, 10_000), st.integers(0, (1 << 63) - 1)))
def test_scrub_positions_round_trip(positions):
    disk = new_disk()
    write_scrub_positions(disk, ROOT, positions)
    assert read_scrub_positions(disk, ROOT) == positions


def test_a_corrupt_file_of_scrub_positions_is_ignored():
    disk = new_disk()
    assert read_scrub_positions(disk, ROOT) == {}
    write_scrub_positions(disk, ROOT, {3: 70, 11: 5})
    path = ROOT / PROGRESS_FILE_NAME
    for offset in range(len(disk.visible_content(path))):
        disk.flip_bits(path, offset, 4)
        assert read_scrub_positions(disk, ROOT) == {}
        disk.flip_bits(path, offset, 4)
    for size in range(len(disk.visible_content(path)) - 1, -1, -1):
        disk.shorten_file(path, size)
        assert read_scrub_positions(disk, ROOT) == {}
    write_scrub_positions(disk, ROOT, {3: 71})
    assert read_scrub_positions(disk, ROOT) == {3: 71}
