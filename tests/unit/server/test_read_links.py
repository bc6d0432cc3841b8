"""Links of readers to storages, with real sockets: matching of answers, and timeouts."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.loops import poll_until, run_on_loop
from waltz_core.errors import ClusterKeyMismatch, Unreachable
from waltz_core.records.record import GENESIS_CHAIN, ReplicaId
from waltz_core.server.process import storage_links
from waltz_core.server.process.storage_links import ReadLinks
from waltz_core.transport import net
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import (
    Nack,
    OpenRequest,
    RangeBytes,
    RangeForm,
    RangeRaw,
    WireProtocol,
)

KEY = bytes(16)


def request(sequence: int, first: int) -> RangeRaw:
    return RangeRaw(-1, sequence, 3, first, first, 100, RangeForm.WHOLE, False, True)


def answer_to(request: RangeRaw) -> RangeBytes:
    fields = (request.session_id, request.sequence, request.partition_id, request.first, 0)
    return RangeBytes(*fields, RangeForm.WHOLE, b"", b"", 0, GENESIS_CHAIN, ())


class Storage:
    """Receives requests, and answers when the test decides."""

    def __init__(self) -> None:
        self.links: list[net.Link] = []
        self.requests: list[RangeRaw] = []

    def accept(self, link: net.Link) -> None:
        self.links.append(link)
        link.start(self.take, lambda _reason: None)

    def take(self, messages) -> None:
        self.requests += [message for message in messages if not isinstance(message, OpenRequest)]


@contextlib.asynccontextmanager
async def storage() -> AsyncIterator[tuple[Storage, ReplicaId]]:
    peer = Storage()
    listener = await listen(WireProtocol.STORAGE, "127.0.0.1", 0, peer.accept)
    try:
        yield peer, ReplicaId(f"127.0.0.1:{listener.port}")
    finally:
        await listener.close()


@contextlib.contextmanager
def silent_storage(timeout: str) -> Iterator[ReplicaId]:
    """Accepts connections, and never answers."""
    with socket.socket() as silent, pytest.MonkeyPatch.context() as patched:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        patched.setattr(storage_links, timeout, 0.05)
        yield ReplicaId(f"127.0.0.1:{silent.getsockname()[1]}")


@run_on_loop
async def test_clients_with_equal_request_ids_get_their_own_answers():
    """A new ownership restarts the request IDs, and earlier requests may still wait."""
    async with storage() as (storage_peer, replica), asyncio.TaskGroup() as tasks:
        links = ReadLinks(KEY, 4)
        fetches = [tasks.create_task(links.fetch(replica, request(1, each))) for each in (10, 20)]
        await poll_until(lambda: len(storage_peer.requests) == 2)
        for request_received in reversed(storage_peer.requests):
            storage_peer.links[0].send(answer_to(request_received))
        found = [await fetch for fetch in fetches]
        assert [(each.first, each.sequence) for each in found] == [(10, 1), (20, 1)]
        links.close()


@run_on_loop
async def test_a_link_that_breaks_after_the_hello_fails_at_once(monkeypatch):
    dial = net.dial

    async def dial_and_be_slow(*args, **options):
        link = await dial(*args, **options)
        link.abort("dead")
        await link.wait_closed()
        return link

    async with storage() as (_, replica):
        monkeypatch.setattr(storage_links, "dial", dial_and_be_slow)
        with pytest.raises(Unreachable, match="dead"):
            await ReadLinks(KEY, 4).fetch(replica, request(1, 0))


@run_on_loop
async def test_a_late_answer_is_dropped():
    async with storage() as (storage_peer, replica), asyncio.TaskGroup() as tasks:
        links = ReadLinks(KEY, 4)
        # The link exists before the timeout starts: a cancelled dial has requested nothing.
        first = tasks.create_task(links.fetch(replica, request(1, 0)))
        await poll_until(lambda: len(storage_peer.requests) == 1)
        storage_peer.links[0].send(answer_to(storage_peer.requests[0]))
        await first
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(storage_links, "READ_TIMEOUT_S", 0.05)
            with pytest.raises(Unreachable, match="did not answer within"):
                await links.fetch(replica, request(1, 10))
        again = tasks.create_task(links.fetch(replica, request(1, 20)))
        await poll_until(lambda: len(storage_peer.requests) == 3)
        for request_received in storage_peer.requests[1:]:
            storage_peer.links[0].send(answer_to(request_received))
        assert (await again).first == 20
        links.close()


@run_on_loop
async def test_an_urgent_read_from_a_silent_storage_has_a_short_timeout():
    with (
        silent_storage("URGENT_READ_TIMEOUT_S") as replica,
        pytest.raises(Unreachable, match=r"not answer within 0\.05 s"),
    ):
        await ReadLinks(KEY, 4).fetch(replica, request(1, 10), is_urgent=True)


@run_on_loop
async def test_a_wait_for_a_shared_dial_times_out():
    with silent_storage("READ_TIMEOUT_S") as replica:
        links = ReadLinks(KEY, 4)
        failures = []

        async def fetch(sequence):
            with pytest.raises(Unreachable) as failure:
                await links.fetch(replica, request(sequence, 10))
            failures.append(str(failure.value))

        async with asyncio.TaskGroup() as tasks:
            for sequence in (1, 2, 3):
                tasks.create_task(fetch(sequence))
        assert failures == [f"replica {replica} did not answer within 0.05 s"] * 3


@run_on_loop
async def test_a_storage_of_another_cluster_answers_no_reader():
    async with storage() as (storage_peer, replica):
        refusal = Nack(-1, -1, -1, ClusterKeyMismatch.code, -1, "this storage is of cluster 11")
        storage_peer.take = lambda _messages: storage_peer.links[0].send(refusal)
        with pytest.raises(Unreachable, match="this storage is of cluster 11"):
            await ReadLinks(KEY, 4).fetch(replica, request(1, 10))
