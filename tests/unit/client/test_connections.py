"""A dial that many wait for: nobody's cancellation is another's."""

import asyncio

import pytest

from waltz_core import errors, net
from waltz_core.client.connections import ServerLinks
from waltz_core.wire.messages import Surface

PATIENCE_S = 20


class Door:
    """Stands before `net.dial`: lets dials through when it is open, and counts them."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.may_pass = asyncio.Event()
        dial = net.dial

        async def counted(*args, **options):
            self.count += 1
            await self.may_pass.wait()
            return await dial(*args, **options)

        monkeypatch.setattr(net, "dial", counted)


@pytest.fixture
def door(monkeypatch):
    return Door(monkeypatch)


async def share(door, count, *, cancelled=None, address=None):
    """Have many want one address; return the number of the link that each got, or its error.

    None for the one that was cancelled.
    """
    listener = await net.listen(Surface.CLIENT, "127.0.0.1", 0, lambda link: link.start(print, len))
    links = ServerLinks(dial_timeout_s=5, late_answers_s=0)
    where = address or f"127.0.0.1:{listener.port}"

    async def get():
        try:
            link = await links.get(where)
        except errors.WaltzError as error:
            return error
        assert not link.is_closed
        return link.number

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(get()) for _ in range(count)]
        while door.count == 0:  # noqa: ASYNC110 - the first one dials
            await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
            await asyncio.wait([tasks[cancelled]])
        door.may_pass.set()
    await links.close("the test is over")
    await listener.close()
    return [None if each.cancelled() else each.result() for each in tasks]


def test_who_waits_for_a_dial_and_is_cancelled_cancels_nobody_else(door):
    assert asyncio.run(share(door, 3, cancelled=1)) == [1, None, 1]
    assert door.count == 1


def test_when_the_one_that_dials_is_cancelled_another_one_dials_for_all(door):
    assert asyncio.run(share(door, 3, cancelled=0)) == [None, 1, 1]
    assert door.count == 2


def test_a_dial_that_fails_is_told_to_all_who_wait_for_it(door):
    found = asyncio.run(share(door, 3, address="127.0.0.1:1"))  # nobody listens there
    assert isinstance(found[0], errors.Unreachable)
    assert found == [found[0]] * 3
    assert door.count == 1
