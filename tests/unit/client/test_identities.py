"""Client IDs: issued by a server or by ZooKeeper, and replaced after a denial."""

import asyncio

import pytest

from tests.loops import poll_until, run_on_virtual_loop
from tests.unit.client.memory_cluster import memory_cluster
from waltz_core import errors
from waltz_core.access.client_ids import FIRST_ISSUED_ID, NO_PROOF, ClientIdentity
from waltz_core.client.links.directory import Owner
from waltz_core.client.links.identities import ClientIdentities
from waltz_core.records.record import Generation, PartitionId
from waltz_core.wire.messages import WireProtocol

PROOF = bytes(range(16))


class Link:
    """A connection to a server; `answer` is the ID that it issues, or an error."""

    def __init__(self, address, answer):
        self.address, self.answer = address, answer
        self.request_count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def issues_client_ids(self):
        return self.answer is not None

    async def request(self, kind, make, **_):
        self.request_count += 1
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        self.answer += 1
        return kind(make((-1, 0, -1, -1)).req_id, self.answer, PROOF)


class LinksAndDirectory:
    """Replaces both the links and the directory of a client."""

    def __init__(self, *links):
        self.links_by_address = {link.address: link for link in links}
        self.owners = {
            PartitionId(number): Owner(address, Generation(0))
            for number, address in enumerate([*self.links_by_address, "gone:1"])
        }

    async def get(self, address):
        if address not in self.links_by_address:
            raise errors.Unreachable(address)
        return self.links_by_address[address]

    async def next_client_id(self):
        return 5

    def ids(self, **named):
        return ClientIdentities(self, self, timeout_s=1.0, **named)


@run_on_virtual_loop
async def test_the_server_of_the_first_mount_issues_one_client_id_for_all_partitions():
    one, two = Link("one:1", FIRST_ISSUED_ID), Link("two:1", FIRST_ISSUED_ID + 50)
    ids = LinksAndDirectory(one, two).ids()
    assert ids.current is None
    first = ClientIdentity(FIRST_ISSUED_ID + 1, PROOF)
    assert await ids.get(one, replaced_id=-1) == first
    assert await ids.get(two, replaced_id=-1) == first
    assert (one.request_count, two.request_count) == (1, 0)


@run_on_virtual_loop
async def test_the_client_id_comes_from_zookeeper_if_no_server_issues_ids():
    old, older = Link("one:1", None), Link("two:1", None)
    assert await LinksAndDirectory(old, older).ids().get(old, replaced_id=-1) == ClientIdentity(
        5, NO_PROOF
    )


@run_on_virtual_loop
async def test_another_server_issues_the_client_id_if_the_owner_has_an_older_version():
    old, new = Link("one:1", None), Link("two:1", FIRST_ISSUED_ID)
    links = LinksAndDirectory(old, new)
    assert (await links.ids().get(old, replaced_id=-1)).client_id == FIRST_ISSUED_ID + 1
    new.answer = errors.CoordinatorUnavailable("no ZooKeeper")
    with pytest.raises(errors.CoordinatorUnavailable):
        await links.ids().get(old, replaced_id=-1)


@run_on_virtual_loop
async def test_all_partitions_share_the_replacement_of_a_denied_client_id():
    one, two = Link("one:1", FIRST_ISSUED_ID), Link("two:1", FIRST_ISSUED_ID + 50)
    ids = LinksAndDirectory(one, two).ids()
    denied = (await ids.get(one, replaced_id=-1)).client_id
    other = await ids.get(two, replaced_id=denied)
    assert other.client_id == FIRST_ISSUED_ID + 51
    assert await ids.get(one, replaced_id=denied) == other


@run_on_virtual_loop
async def test_an_id_that_the_application_has_set_is_not_replaced_after_a_denial():
    link = Link("one:1", FIRST_ISSUED_ID)
    ids = LinksAndDirectory(link).ids(fixed_identity=ClientIdentity(7))
    assert ids.current == ClientIdentity(7)
    with pytest.raises(
        errors.ClientIdDenied, match=r"argument client_id: .* rejects ID 7, because"
    ):
        await ids.get(link, replaced_id=7)
    assert link.request_count == 0
    # An ID without free sequence numbers is replaced, even if the application has set it.
    other = ClientIdentity(FIRST_ISSUED_ID + 1, PROOF)
    for _ in range(2):
        assert await ids.get(link, replaced_id=7, is_used_up=True) == other
    assert link.request_count == 1


@run_on_virtual_loop
async def test_another_server_issues_the_client_id_for_all_requests_if_one_server_is_frozen():
    frozen, other = Link("one:1", FIRST_ISSUED_ID), Link("two:1", FIRST_ISSUED_ID + 50)
    ids = LinksAndDirectory(frozen, other).ids()
    frozen.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(ids.get(frozen, replaced_id=-1)) for _ in range(10)]
        while not frozen.request_count:  # noqa: ASYNC110 - until the first of them has sent its request
            await asyncio.sleep(0)
        found = await ids.get(other, replaced_id=-1)
        frozen.may_answer.set()
    assert found.client_id == FIRST_ISSUED_ID + 51
    assert {task.result() for task in waiting} == {found}
    assert frozen.request_count == 1


@pytest.mark.parametrize("constant", ["versions_offered", "versions_accepted"])
@run_on_virtual_loop
async def test_the_client_id_comes_from_zookeeper_if_client_or_server_has_an_older_version(
    constant, monkeypatch
):
    """With protocol L 7 the ID comes from ZooKeeper, and read-back uses all headers."""
    client = WireProtocol.CLIENT
    monkeypatch.setattr(
        client, constant, tuple(each for each in getattr(client, constant) if each < 8)
    )
    async with (
        memory_cluster(partition_count=1) as cluster,
        cluster.client().open_during() as opened,
    ):
        await opened.mount()
        assert opened.client_id == 1
        server = cluster.servers[0]
        server.partitions[0].store.is_holding = True
        outcome = await opened.append(b"row", partition=0)
        await poll_until(lambda: server.partitions[0].store.held_batches)
        server.received.clear()
        server.cut()
        server.release(0)
        assert await outcome == 0
        assert "RangeRequest" in server.received
        assert "ClientIdRequest" not in server.received
