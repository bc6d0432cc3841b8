"""The Waltz in memory does for clients what a cluster does, in calm and in trouble."""

import pytest

from tests.client_contract import ALWAYS, STORIES, World, is_whole
from waltz_core.memory import MemoryWaltz


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_story(story):
    with MemoryWaltz(delay_ms=(0.5, 3.0)) as waltz:
        world = World(waltz.client, 1)
        story(world)
        assert is_whole(world)


@pytest.mark.parametrize("story", ALWAYS, ids=lambda story: story.__name__)
def test_story_with_faults(story):
    with MemoryWaltz(seed=7, fault_rate=0.2) as waltz:
        world = World(waltz.client, 1)
        story(world)
        assert is_whole(world)
