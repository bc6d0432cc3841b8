"""When it is told that a server owes an answer and says nothing, and when that it is over."""

import asyncio
import logging

import pytest

from tests.loops import in_virtual_time
from waltz_core.client.links.outage import AGAIN_S
from waltz_core.client.links.silence import Silences

SERVER = "host-1:15180"


class Story:
    """Silences on a clock of its own, and what was logged of them."""

    def __init__(self, caplog):
        self.doubts = 0
        self.silences = Silences(self._doubt)
        self.now_s = 100.0
        self._caplog = caplog
        caplog.set_level(logging.INFO, "waltz_core.client.links.silence")

    def _doubt(self):
        self.doubts += 1

    def at(self, now_s, call, *args, **named):
        """Call at a time; return what was logged meanwhile, as (level, text)."""
        self._caplog.clear()

        async def run():
            asyncio.get_running_loop().time = lambda: now_s
            call(*args, **named)

        in_virtual_time(run())
        return [(each.levelname, each.getMessage()) for each in self._caplog.records]


@pytest.fixture
def story(caplog):
    return Story(caplog)


def test_a_silence_is_reported_once_and_its_end_once_and_zookeeper_is_looked_at_each_time(story):
    silences = story.silences
    assert story.at(101, silences.detected, SERVER, 1, since_s=99.5) == [
        ("WARNING", f"server.silent server={SERVER} owes_answer_s=1.5")
    ]
    for now_s in range(102, 300):
        assert story.at(now_s, silences.detected, SERVER, 1, since_s=now_s - 1) == []
    assert story.doubts == 199
    assert story.at(300, silences.received, SERVER, 1) == [
        ("INFO", f"server.responsive server={SERVER} after_s=200.5")
    ]
    assert story.at(301, silences.received, SERVER, 1) == []


def test_one_that_is_left_is_reported_with_the_reason(story):
    story.at(101, story.silences.detected, SERVER, 1, since_s=100)
    assert story.at(104, story.silences.left, SERVER, 1, "reset by peer") == [
        ("INFO", f"server.silent_until_closed server={SERVER} after_s=4.0 reason=reset by peer")
    ]
    assert story.at(105, story.silences.left, SERVER, 1, "reset by peer") == []


def test_nothing_is_notified_of_one_that_was_not_silent(story):
    assert story.at(100, story.silences.received, SERVER, 1) == []
    assert story.at(100, story.silences.left, SERVER, 1, "closed") == []


def test_a_servers_connections_are_silent_as_one(story):
    silences = story.silences
    assert story.at(101, silences.detected, SERVER, 1, since_s=100)
    assert story.at(102, silences.detected, SERVER, 2, since_s=101) == []
    assert story.at(103, silences.received, SERVER, 3) == [], "it was never silent there"
    assert story.at(104, silences.left, SERVER, 1, "closed") == []
    assert story.at(105, silences.received, SERVER, 2) == [
        ("INFO", f"server.responsive server={SERVER} after_s=5.0")
    ]
    assert story.at(106, silences.detected, "host-2:15180", 1, since_s=105), "another server"


def test_one_that_is_tried_again_and_again_is_reported_now_and_then(story):
    told = []
    for now_s in range(100, 100 + 2 * int(AGAIN_S) + 1, 5):
        if story.at(now_s, story.silences.detected, SERVER, 0, since_s=now_s - 1):
            told.append(now_s)
        story.at(now_s + 1, story.silences.left, SERVER, 0, "no hello")
    assert told == [100, 100 + AGAIN_S, 100 + 2 * AGAIN_S]
