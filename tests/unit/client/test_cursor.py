"""The cursor of a feed: its position, and valid and invalid feed batches."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.client.scenarios import feed_batch, req
from waltz_core.client.stream.cursor import FeedCursor
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.server.read.feeds import select_headers
from waltz_core.wire.messages import FeedBatch

ROWS = tuple(req(i, 0, 99) for i in range(1, 10))


def mounted_cursor(mark: int, ahead_max: int = 10) -> FeedCursor:
    cursor = FeedCursor(ahead_max)
    cursor.start_after(mark)
    cursor.start_at_end(mark)
    cursor.on_mount_succeeded()
    return cursor


def test_no_feed_batch_is_accepted_before_a_subscription():
    cursor = FeedCursor(10)
    assert cursor.accept_batch(feed_batch(req(-1), 0, *ROWS)) is None
    assert cursor.take_request_mark() is None
    cursor.start_after(None)
    assert cursor.accept_batch(feed_batch(req(-1), 0, *ROWS)) is None
    assert cursor.start_at_end(4) == 4
    assert cursor.start_at_end(9) == 4


def test_records_before_the_start_do_not_count_as_lag():
    mark = 1_000_000
    cursor = FeedCursor(ahead_max=3)
    cursor.start_after(mark)
    cursor.on_mount_succeeded()
    assert cursor.take_request_mark() == mark
    latest = FeedCursor(ahead_max=3)
    latest.start_after(None)
    assert latest.start_at_end(mark) == mark
    latest.on_mount_succeeded()
    assert latest.take_request_mark() == mark


def test_a_batch_with_invalid_headers_is_rejected_with_a_reason():
    message = feed_batch(req(-1), 0, *ROWS[:2])
    wrong_count = type(message)(message.req_id, 0, 3, message.headers, 1, -1, bytes(16))
    assert "found 40" in mounted_cursor(BEFORE_FIRST).accept_batch(wrong_count)


def test_a_cursor_requests_more_records_when_half_are_applied():
    cursor = mounted_cursor(BEFORE_FIRST, ahead_max=3)
    assert cursor.take_request_mark() == BEFORE_FIRST
    assert cursor.take_request_mark() is None
    cursor.accept_batch(feed_batch(req(-1), 0, *ROWS[:3]))
    cursor.is_suspended = True
    assert cursor.take_request_mark() is None
    assert not cursor.note_applied(0)  # no request before half of the records are applied
    assert cursor.take_request_mark() is None
    assert cursor.note_applied(1)
    assert not cursor.note_applied(BEFORE_FIRST)  # a late batch has no effect
    assert cursor.take_request_mark() == 2


def test_a_lagging_cursor_accepts_no_feed_batch_until_it_resumes():
    cursor = mounted_cursor(4)
    cursor.is_lagging = True
    assert cursor.accept_batch(feed_batch(req(-1), 5, *ROWS)) is None
    assert cursor.take_request_mark() is None
    with pytest.raises(AssertionError):
        cursor.resume(3)
    cursor.resume(50)
    assert cursor.start_at_end(60) == 50


# ---------------------------------------------------------------------------------------------
# filters


def header_bytes(values: list[int]) -> bytes:
    return b"".join(struct.pack(">16si", b"r" * 16, value) for value in values)


def filtered_batch(first: int, values: list[int], wanted: tuple[int, ...]) -> FeedBatch:
    headers, offset_bytes = select_headers(header_bytes(values), wanted)
    return FeedBatch(req(-1), first, len(values), headers, 1, -1, bytes(16), offset_bytes)


def filtered_cursor(*wanted: int) -> FeedCursor:
    cursor = FeedCursor(10)
    cursor.start_after(BEFORE_FIRST, wanted)
    return cursor


values_of_a_log = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=40)
@given(values_of_a_log, st.sets(st.integers(0, 3), min_size=1), st.data())
def test_a_filtered_feed_has_no_gaps_or_duplicates_with_any_overlapping_batches(
    values, wanted, drawn
):
    wanted = tuple(sorted(wanted))
    cursor = filtered_cursor(*wanted)
    found, at = [], 0
    while at < len(values):
        first = drawn.draw(st.integers(max(0, at - 5), at))
        last = drawn.draw(st.integers(at, len(values) - 1))
        batch = cursor.accept_batch(filtered_batch(first, values[first : last + 1], wanted))
        assert (batch.first, batch.last) == (at, last)
        assert len(batch.headers) == 20 * len(batch.ids)
        found += [
            (number, value)
            for number, (_, value) in zip(
                batch.ids, struct.iter_unpack(">16si", batch.headers), strict=True
            )
        ]
        assert cursor.accept_batch(filtered_batch(first, values[first : last + 1], wanted)) is None
        at = last + 1
    assert found == [(i, value) for i, value in enumerate(values) if value in wanted]


@pytest.mark.parametrize("offsets", [(1, 0), (1, 1), (-1, 1), (1, 3)])
def test_offsets_that_are_out_of_order_or_outside_of_their_feed_batch_are_rejected(offsets):
    offset_bytes = struct.pack(">2i", *offsets)
    message = FeedBatch(req(-1), 0, 3, header_bytes([7, 8]), 1, -1, bytes(16), offset_bytes)
    assert "2 offsets" in filtered_cursor(7, 8).accept_batch(message)


@given(
    st.integers(-1, 4),
    st.lists(st.integers(-2, 5), max_size=4),
    st.lists(st.integers(6, 9), max_size=4),
    st.integers(0, 3),
)
def test_an_inconsistent_filtered_feed_batch_is_rejected_with_a_reason(
    count, offsets, values, surplus
):
    offset_bytes = struct.pack(f">{len(offsets)}i", *offsets) + bytes(surplus)
    message = FeedBatch(req(-1), 0, count, header_bytes(values), 1, -1, bytes(16), offset_bytes)
    batch = filtered_cursor(7, 8).accept_batch(message)
    is_ascending = offsets == sorted(set(offsets)) and all(
        0 <= offset < count for offset in offsets
    )
    is_filtered_batch = is_ascending and len(offsets) == len(values) and not surplus
    is_whole_batch = not offset_bytes and len(values) == count
    if count > 0 and (is_filtered_batch or is_whole_batch) and set(values) <= {7, 8}:
        assert (batch.first, batch.last) == (0, count - 1)
        assert list(batch.ids) == (list(range(count)) if is_whole_batch else offsets)
    else:
        assert "feed" in batch


def test_an_unrequested_filter_is_rejected():
    batch = filtered_cursor().accept_batch(filtered_batch(0, [7, 0, 7], (7,)))
    assert "found 40" in batch
