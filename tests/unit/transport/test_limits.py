"""The limits of a principal at a port, over real sockets."""

import asyncio
import dataclasses
import logging

import pytest

from tests.loops import poll_until, run_on_loop
from tests.unit.transport.test_port_access import (
    PERMISSIONS,
    PROTOCOLS,
    REQ_ID,
    SECRET,
    open_port,
    trusting_connect_string,
)
from waltz_core.access.permissions import Grant, PrincipalLimits
from waltz_core.access.requirements import READ, REPLICATE
from waltz_core.config import ClientConfig
from waltz_core.errors import Overloaded
from waltz_core.metrics import Metrics
from waltz_core.records.record import ReqId
from waltz_core.transport import net, tls
from waltz_core.transport.admission import port_limits
from waltz_core.transport.quota_metrics import publish_quotas
from waltz_core.wire.messages import (
    FeedBatch,
    ServerPartitionsRequest,
    TransactionDataRequest,
    WireProtocol,
)


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET.hex()}\n")
    return file


def permissions_with_limits(revision=7, **limits):
    return dataclasses.replace(
        PERMISSIONS,
        revision=revision,
        grants=(Grant("spark-etl", False, READ, None),),
        limits={"spark-etl": PrincipalLimits(**limits)},
    )


class Dialer:
    """Opens connections of a client with a token."""

    def __init__(self, port, files, token_file, protocol):
        self._address, self._protocol = port.address, protocol
        connect = trusting_connect_string(files, f"&token_file={token_file}")
        self._context = tls.dial_context(ClientConfig(), connect)

    async def __call__(self):
        return await net.dial(self._protocol, self._address, ssl=self._context)


@PROTOCOLS
@run_on_loop
async def test_a_principal_over_its_connection_limit_gets_the_reason(
    files, token_file, protocol, caplog
):
    caplog.set_level(logging.WARNING)
    async with open_port(files, protocol, access="on") as port:
        port.apply(permissions_with_limits(connections=2))
        dial = Dialer(port, files, token_file, protocol)
        first, second = await dial(), await dial()
        for _ in range(2):
            with pytest.raises(
                Overloaded, match="exceeds its limit of 2 connections at this daemon"
            ):
                await dial()
        assert caplog.text.count("access.limit_exceeded peer=127.0.0.1") == 1
        rejected = (
            f"access.rejected_by_peer peer={port.address} error=spark-etl exceeds its limit of 2 "
        )
        assert caplog.text.count(rejected) == 1
        first.abort("done")
        await poll_until(lambda: len(port.peer.closed) == 3)
        third = await dial()
        # A revision with a lower limit closes the newest connections.
        port.apply(permissions_with_limits(revision=8, connections=1))
        await third.wait_closed()
        assert not second.is_closed
        port.apply(permissions_with_limits(revision=9, connections=3))
        fourth = await dial()
        second.abort("done")
        fourth.abort("done")


@run_on_loop
async def test_a_principal_without_a_limit_has_a_share_of_the_connections(
    files, token_file, monkeypatch, caplog
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(port_limits, "TENANT_SHARE", port_limits.LINKS_MAX // 2)
    async with open_port(files, access="on") as port:
        port.apply(permissions_with_limits())
        dial = Dialer(port, files, token_file, WireProtocol.STORAGE)
        first, second = await dial(), await dial()
        with pytest.raises(Overloaded, match="spark-etl exceeds the limit of 2 connections at"):
            await dial()
        assert "access.limit_exceeded peer=127.0.0.1" in caplog.text
        first.abort("done")
        await poll_until(lambda: len(port.peer.closed) == 2)
        third = await dial()
        port.apply(
            permissions_with_limits(revision=8, connections=3)
        )  # the principal's limit replaces the share
        fourth = await dial()
        server = Grant("spark-etl", False, REPLICATE, None)
        port.apply(
            dataclasses.replace(
                permissions_with_limits(revision=9),
                grants=(*permissions_with_limits().grants, server),
            )
        )
        others = [await dial() for _ in range(3)]
        for each in (second, third, fourth, *others):
            each.abort("done")


@run_on_loop
async def test_an_anonymous_connection_over_the_limit_gets_the_reason(files):
    async with open_port(files, WireProtocol.CLIENT, access="on") as port:
        limits = {"*": PrincipalLimits(connections=1)}
        port.apply(dataclasses.replace(permissions_with_limits(), limits=limits))
        context = tls.dial_context(ClientConfig(), trusting_connect_string(files))
        links = [await net.dial(WireProtocol.CLIENT, port.address, ssl=context) for _ in range(2)]
        request = ServerPartitionsRequest(REQ_ID)
        links[0].send(request)
        await poll_until(lambda: port.peer.messages)
        links[1].send(request)
        (answer,) = await links[1].receive()
        assert answer.error_code == Overloaded.code
        assert answer.retry_after_ms > 0
        assert answer.message.startswith("anonymous exceeds its limit of 1 connection at")
        await links[1].wait_closed()
        assert port.peer.messages == [request]
        links[0].abort("done")


@run_on_loop
async def test_a_0_13_client_over_the_limit_is_disconnected_and_its_requests_are_dropped(
    files, monkeypatch
):
    monkeypatch.setattr(
        WireProtocol.CLIENT, "versions_offered", WireProtocol.CLIENT.versions_accepted[:1]
    )
    async with open_port(files, WireProtocol.CLIENT, access="on") as port:
        limits = {"*": PrincipalLimits(connections=1)}
        port.apply(dataclasses.replace(permissions_with_limits(), limits=limits))
        context = tls.dial_context(ClientConfig(), trusting_connect_string(files))
        links = [await net.dial(WireProtocol.CLIENT, port.address, ssl=context) for _ in range(2)]
        requests = [TransactionDataRequest(REQ_ID, number) for number in range(10)]
        links[0].send(requests[0])
        await poll_until(lambda: port.peer.messages)
        monkeypatch.setattr(net, "CLOSE_S_MAX", 0.01)
        links[1].send_all(requests[1:])  # not answered, because 0.13 lacks this error
        await links[1].wait_closed()
        assert port.peer.messages == requests[:1]
        links[0].abort("done")


@run_on_loop
async def test_requests_over_the_limit_wait_in_the_connection_or_are_denied(files, token_file):
    async with open_port(files, WireProtocol.CLIENT, access="on") as port:
        port.apply(permissions_with_limits(bytes_per_s=5 * 512))
        link = await Dialer(port, files, token_file, WireProtocol.CLIENT)()
        (peer,) = port.peer.links
        requests = [TransactionDataRequest(ReqId(1, 0, 3, -n), 0) for n in range(1, 101)]
        link.send_all(requests)
        await poll_until(lambda: not peer._is_reading)
        await poll_until(lambda: len(port.peer.messages) == 100)
        await poll_until(lambda: peer._is_reading)
        assert port.peer.messages == requests
        denials = [peer.denial(message) for message in port.peer.messages]
        granted = sum(denial is None for denial in denials)
        assert granted < 50
        assert {type(denial) for denial in denials[granted:]} == {Overloaded}
        # Each error occurs once; without it, the same requests are permitted.
        assert [peer.denial(message) for message in port.peer.messages] == [None] * 100
        link.abort("done")


@run_on_loop
async def test_the_limits_of_the_newest_revision_apply(files, token_file):
    async with open_port(files, WireProtocol.CLIENT, access="on") as port:
        port.apply(dataclasses.replace(permissions_with_limits(), limits={}))
        link = await Dialer(port, files, token_file, WireProtocol.CLIENT)()
        (peer,) = port.peer.links
        assert peer.access.quota is None
        port.apply(permissions_with_limits(revision=8, bytes_per_s=512))
        link.send_all([TransactionDataRequest(ReqId(1, 0, 3, -n), 0) for n in range(1, 11)])
        await poll_until(lambda: len(port.peer.messages) == 10)
        assert any(isinstance(peer.denial(message), Overloaded) for message in port.peer.messages)
        port.apply(dataclasses.replace(permissions_with_limits(revision=9), limits={}))
        assert peer.access.quota is None
        # The feeds of the connection were not counted before, so the client must mount again.
        port.apply(permissions_with_limits(revision=10, feeds=3))
        await link.wait_closed()


@run_on_loop
async def test_a_feed_pauses_when_a_revision_introduces_limits(files, token_file):
    async with open_port(files, WireProtocol.CLIENT, access="on") as port:
        port.apply(dataclasses.replace(permissions_with_limits(), limits={}))
        link = await Dialer(port, files, token_file, WireProtocol.CLIENT)()
        await poll_until(lambda: port.peer.links)
        (peer,) = port.peer.links
        resumed = asyncio.Event()
        peer._on_drained = resumed.set
        frame = FeedBatch(ReqId(1, 0, 3, -1), 0, 4_096, b"", 1, -1, bytes(16))
        peer.send(frame)
        assert not peer.must_pause_feeds
        port.apply(permissions_with_limits(revision=8, bytes_per_s=75_000))
        for send in (lambda: peer.send(frame), lambda: peer.send_frames(bytes(4))):
            send()
            assert peer.must_pause_feeds
            assert not peer.is_congested
            await resumed.wait()
            assert not peer.must_pause_feeds
            resumed.clear()
            peer.access.quota.charge_sent_bytes(75_000, peer.access.now_ns)
        peer.send(frame)
        link.abort("done")
        await poll_until(lambda: peer.is_closed)
        assert not peer.must_pause_feeds


@pytest.mark.parametrize("access", ["report", "on"])
@run_on_loop
async def test_no_limits_apply_in_report_mode_or_to_servers(files, token_file, access):
    async with open_port(files, WireProtocol.CLIENT, access=access) as port:
        permissions = permissions_with_limits(connections=1)
        if access == "on":
            grants = (Grant("spark-etl", False, REPLICATE, ((0, 0),)),)
            permissions = dataclasses.replace(permissions, grants=grants)
        port.apply(permissions)
        dial = Dialer(port, files, token_file, WireProtocol.CLIENT)
        for link in [await dial() for _ in range(3)]:
            assert not link.is_closed
            link.abort("done")


@run_on_loop
async def test_the_metrics_of_principals_follow_the_labels_of_the_permissions(files, token_file):
    async with (
        open_port(files, WireProtocol.CLIENT, access="on") as port,
        asyncio.TaskGroup() as tasks,
    ):
        port.apply(permissions_with_limits(connections=5))
        metrics = Metrics("server")
        publishing = tasks.create_task(publish_quotas(metrics, "server", port.context))
        link = await Dialer(port, files, token_file, WireProtocol.CLIENT)()
        link.send(TransactionDataRequest(REQ_ID, 0))
        await poll_until(
            lambda: metrics.value("waltz_server_principal_bytes_total", principal="spark-etl")
        )
        assert metrics.value("waltz_server_principal_connections", principal="spark-etl") == 1
        without = dataclasses.replace(permissions_with_limits(revision=8, connections=5), grants=())
        port.apply(without)
        await poll_until(lambda: 'principal="other"' in metrics.page().decode())
        await poll_until(lambda: 'principal="spark-etl"' not in metrics.page().decode())
        link.abort("done")
        publishing.cancel()
