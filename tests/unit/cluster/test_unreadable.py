"""Unit tests of `waltz_core.cluster.zookeeper.unreadable`."""

import asyncio

import pytest

from waltz_core import errors
from waltz_core.cluster.zookeeper import unreadable


def test_a_view_is_kept_while_nodes_cannot_be_decoded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ending would end all servers or storages at once."""
    monkeypatch.setattr(unreadable, "UNREADABLE_PAUSE_S", 0.0)
    rot = (errors.BadFormat("/w/s_0: rotten"), errors.BadRequest("the partitions shrink"))
    looks, seen = [1, rot[0], 2, rot[1], 3, errors.BadConfig("enough")], []

    async def follow(take):
        while True:
            found = looks.pop(0)
            if isinstance(found, Exception):
                raise found
            take(found)

    async def rotten(take):
        raise errors.BadFormat("/w/s_0: rotten")

    async def scenario() -> None:
        with pytest.raises(errors.BadConfig, match="enough"):
            await unreadable.follow_readable(follow, seen.append)
        with pytest.raises(errors.BadFormat):  # no view to keep
            await unreadable.follow_readable(rotten, seen.append)

    asyncio.run(scenario())
    assert seen == [1, 2, 3]
    assert [each.message for each in caplog.records] == [
        f"zookeeper.node_unreadable error={each}" for each in rot
    ]
