"""How far a feed has come, and what it takes in."""

import pytest

from tests.unit.client.stories import feed_batch, req
from waltz_core.client.cursor import FeedCursor
from waltz_core.record import BEFORE_FIRST

ROWS = tuple(req(i, 0, 99) for i in range(1, 10))


def fed(mark: int, ahead_max: int = 10) -> FeedCursor:
    cursor = FeedCursor(ahead_max)
    cursor.want(mark)
    cursor.know(mark)
    cursor.mounted()
    return cursor


def test_nothing_is_taken_before_it_is_wanted():
    cursor = FeedCursor(10)
    assert cursor.take(feed_batch(req(-1), 0, *ROWS)) is None
    assert cursor.ask() is None
    cursor.want(None)
    assert cursor.take(feed_batch(req(-1), 0, *ROWS)) is None
    assert cursor.know(4) == 4
    assert cursor.know(9) == 4


def test_stretches_follow_one_another():
    cursor = fed(BEFORE_FIRST)
    stretch = cursor.take(feed_batch(req(-1), 0, *ROWS[:3]))
    assert (stretch.first, stretch.count, stretch.last, len(stretch.headers)) == (0, 3, 2, 60)
    stretch = cursor.take(feed_batch(req(-1), 1, *ROWS[1:5]))
    assert (stretch.first, stretch.count, len(stretch.headers)) == (3, 2, 40)
    assert cursor.take(feed_batch(req(-1), 0, *ROWS[:5])) is None
    assert "gap: transaction 6 after 4" in cursor.take(feed_batch(req(-1), 6, ROWS[6]))


def test_a_batch_with_odd_headers_is_refused_in_words():
    message = feed_batch(req(-1), 0, *ROWS[:2])
    spoiled = type(message)(message.req_id, 0, 3, message.headers, 1, -1, bytes(16))
    assert "3 has 40 bytes" in fed(BEFORE_FIRST).take(spoiled)


def test_more_is_asked_for_once_for_each_grant_and_within_bounds():
    cursor = fed(BEFORE_FIRST, ahead_max=3)
    assert cursor.ask() == BEFORE_FIRST
    assert cursor.ask() is None
    cursor.take(feed_batch(req(-1), 0, *ROWS[:3]))
    cursor.is_suspended = True
    assert cursor.ask() is None
    assert not cursor.applied(0)  # not before it is half way
    assert cursor.ask() is None
    assert cursor.applied(1)
    assert not cursor.applied(BEFORE_FIRST)  # told late, changes nothing
    assert cursor.ask() == 2


def test_while_it_lags_nothing_is_taken_and_then_it_goes_on():
    cursor = fed(4)
    cursor.is_lagging = True
    assert cursor.take(feed_batch(req(-1), 5, *ROWS)) is None
    assert cursor.ask() is None
    with pytest.raises(AssertionError):
        cursor.resume(3)
    cursor.resume(50)
    assert cursor.know(60) == 50


def test_the_last_chain_is_remembered():
    cursor = fed(BEFORE_FIRST)
    cursor.take(feed_batch(req(-1), 0, *ROWS[:3], chain_at=1, chain=b"a" * 16))
    cursor.take(feed_batch(req(-1), 3, *ROWS[3:4]))
    assert cursor.chain == (1, b"a" * 16)
