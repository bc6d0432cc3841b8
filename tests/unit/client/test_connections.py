"""Connections to servers: shared dials, two for each server, and their pending requests."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from tests.loops import run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client.links.connections import ServerLinks
from waltz_core.records.record import CONTROL_SEQUENCE_MIN
from waltz_core.transport import net
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import HighWaterMarkRequest, HighWaterMarkResponse, WireProtocol


class CountedDials:
    """Replaces `net.dial`: lets dials through when it is open, and counts them."""

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
def dials(monkeypatch):
    return CountedDials(monkeypatch)


async def request_concurrently(dials, count, *, cancelled=None, address=None):
    """Request one address several times; return each caller's link number or error.

    None for the caller that was cancelled.
    """
    listener = await listen(
        WireProtocol.CLIENT, "127.0.0.1", 0, lambda link: link.start(print, len)
    )
    links = ServerLinks(dial_timeout_s=5, late_answers_s=0)
    server_address = address or f"127.0.0.1:{listener.port}"

    async def get():
        try:
            link = await links.get(server_address)
        except errors.WaltzError as error:
            return error
        assert not link.is_closed
        return link.number

    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(get()) for _ in range(count)]
        while dials.count == 0:  # noqa: ASYNC110 - the first one dials
            await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
            await asyncio.wait([tasks[cancelled]])
        dials.may_pass.set()
    await links.close("the test is over")
    await listener.close()
    return [None if task.cancelled() else task.result() for task in tasks]


def test_a_cancelled_wait_for_a_dial_does_not_cancel_others(dials):
    assert asyncio.run(request_concurrently(dials, 3, cancelled=1)) == [1, None, 1]
    assert dials.count == 1


def test_if_the_dialing_caller_is_cancelled_another_caller_dials(dials):
    assert asyncio.run(request_concurrently(dials, 3, cancelled=0)) == [None, 1, 1]
    assert dials.count == 2


def test_a_failed_dial_fails_all_its_waiters(dials):
    # No process listens there.
    result = asyncio.run(request_concurrently(dials, 3, address="127.0.0.1:1"))
    assert isinstance(result[0], errors.Unreachable)
    assert result == [result[0]] * 3
    assert dials.count == 1


@run_on_loop
async def test_a_connection_that_breaks_right_after_the_hello_counts_as_failed(monkeypatch):
    """If the connection were returned, a stream would wait on it for the answer to its mount."""
    listener = await listen(WireProtocol.CLIENT, "127.0.0.1", 0, lambda link: link.abort("dead"))
    dial = net.dial

    async def dial_and_wait_for_close(*args, **options):
        link = await dial(*args, **options)
        await link.wait_closed()
        return link

    monkeypatch.setattr(net, "dial", dial_and_wait_for_close)
    links = ServerLinks(dial_timeout_s=5, late_answers_s=0)
    with pytest.raises(errors.Unreachable, match=r"closed by the peer|connection lost"):
        await links.get(f"127.0.0.1:{listener.port}")
    assert not links._open
    assert not links._links
    await links.close("the test is over")
    await listener.close()


@asynccontextmanager
async def client_and_server(mark_suspect=lambda: None):
    """Yield a client's links, a server's address, and the messages that the server receives."""
    received, links = [], ServerLinks(dial_timeout_s=5, late_answers_s=0, mark_suspect=mark_suspect)
    listener = await listen(
        WireProtocol.CLIENT, "127.0.0.1", 0, lambda link: record_messages(link, received)
    )
    async with asyncio.timeout(TEST_TIMEOUT_S):
        yield links, f"127.0.0.1:{listener.port}", received
        await links.close("the test is over")
    await listener.close()


def record_messages(link, received):
    link.start(lambda messages: received.extend((link, message) for message in messages), len)


def send_request(link):
    return link.request(
        HighWaterMarkResponse, HighWaterMarkRequest, client_id=-1, partition_id=0, timeout_s=600
    )


async def wait_until(condition):
    while not condition():  # noqa: ASYNC110 - conditions of all kinds
        await asyncio.sleep(0)


@run_on_loop
async def test_an_avoided_connection_stays_open_while_it_is_in_use():
    async with client_and_server() as (links, address, _):
        old = await links.get(address)
        old.attach_stream(0, print, print, lambda: False, print)
        new = await links.get(address, excluded=(old.number,))
        assert new is not old
        assert not old.is_closed, "a stream still uses the connection"
        old.detach_stream(0)
        await old.wait_closed()
        assert await links.get(address) is new
        assert not new.is_closed


@run_on_loop
async def test_a_waiting_request_fails_when_the_connection_breaks():
    async with client_and_server() as (links, address, received), asyncio.TaskGroup() as group:
        link = await links.get(address)
        waiting = group.create_task(answer_or_error(send_request(link)))
        await wait_until(lambda: received)
        received[0][0].abort("the server has died")
        assert isinstance(await waiting, errors.Unreachable)
        # A later request still does not wait.
        assert isinstance(await answer_or_error(send_request(link)), errors.Unreachable)


async def answer_or_error(waiting):
    try:
        return await waiting
    except errors.WaltzError as error:
        return error


@run_on_loop
async def test_requests_and_streams_use_different_sequence_numbers():
    """The number of an answer decides whether a request or a stream gets the answer."""
    async with client_and_server() as (links, address, received), asyncio.TaskGroup() as group:
        link = await links.get(address)
        for _ in range(3):
            waiting = group.create_task(send_request(link))
            await wait_until(lambda: received)
            server, request = received.pop()
            assert request.req_id.sequence < CONTROL_SEQUENCE_MIN
            server.send(HighWaterMarkResponse(request.req_id, 7))
            assert (await waiting).high_water_mark == 7
            link._sequence = -(1 << 31)  # the next number is the last before a wraparound


@run_on_loop
async def test_a_connection_dialed_during_a_close_is_not_kept(dials):
    async with client_and_server() as (links, address, _), asyncio.TaskGroup() as group:
        dialing = group.create_task(answer_or_error(links.get(address)))
        await wait_until(lambda: dials.count)
        await links.close("the client ends")
        dials.may_pass.set()
        assert isinstance(await dialing, errors.Unreachable)
        assert not links._open


@run_on_loop
async def test_a_server_is_silent_if_a_request_waits_and_nothing_was_received(monkeypatch, caplog):
    # The test calls the check itself.
    monkeypatch.setattr("waltz_core.client.links.silent_servers.SILENCE_CHECK_S", 600)
    caplog.set_level("INFO", "waltz_core.client.links.silent_servers")
    silence_reports = []
    async with client_and_server(lambda: silence_reports.append(1)) as (links, address, received):
        link = await links.get(address)
        is_waiting = [False]
        link.attach_stream(0, print, print, lambda: is_waiting[0], print)
        async with asyncio.TaskGroup() as group:
            pending_request = group.create_task(send_request(link))
            await wait_until(lambda: received)
            ((server, request),) = received
            for has_received, count in ((False, 1), (True, 1), (False, 2)):
                if has_received:
                    other = request.req_id._replace(sequence=-7)
                    server.send(HighWaterMarkResponse(other, 7))
                    await wait_until(lambda: link._watch._has_received)
                pass_check_interval(link)
                assert len(silence_reports) == count
            server.send(HighWaterMarkResponse(request.req_id, 7))
            await pending_request
        link._watch._has_received = False
        pass_check_interval(link)
        assert len(silence_reports) == 2, "no request waits for the server any more"
        link.send(HighWaterMarkRequest(request.req_id))
        is_waiting[0] = True  # a stream
        pass_check_interval(link)
        assert len(silence_reports) == 3
    logged = [(record.levelname, *record.getMessage().split()[:2]) for record in caplog.records]
    assert logged[:2] == [
        ("WARNING", "server.silent", f"server={address}"),
        ("INFO", "server.responsive", f"server={address}"),
    ]


def pass_check_interval(link):
    """Let the time until a check pass; a check is planned whenever a request waits."""
    assert link._watch._timer is not None
    link._watch._timer.cancel()
    link._watch._check()


@pytest.mark.parametrize("is_logged", [True, False])
@run_on_loop
async def test_a_server_without_a_hello_is_reported_as_silent_and_then_as_closed(
    monkeypatch, caplog, is_logged
):
    monkeypatch.setattr("waltz_core.client.links.silent_servers.SILENCE_CHECK_S", 0.01)
    caplog.set_level("INFO", "waltz_core.client.links.silent_servers")
    options = {} if is_logged else {"mark_suspect": None}
    links = ServerLinks(dial_timeout_s=0.1, late_answers_s=0, **options)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # like a stopped process
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        with pytest.raises(errors.Unreachable):
            await links.get(address)
    await links.close("the test is over")
    logged = [record.getMessage().split(" server=")[0] for record in caplog.records]
    assert logged == (["server.silent", "server.silent_until_closed"] if is_logged else [])
    assert all(address in record.getMessage() for record in caplog.records)
