"""A command's links to storages ignore unrequested messages and report invalid ones."""

import asyncio
import struct
from dataclasses import replace

import pytest

from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.cli.storage.owner_connection import (
    ClaimedSession,
    ExpectedCluster,
    OwnerConnection,
    reported_log,
)
from waltz_core.cluster.change.rebuilding import NO_IDS, MaximumIds
from waltz_core.errors import RemoteProtocolError, SessionFenced
from waltz_core.records.record import RECORD_HEADER, REQ_ID
from waltz_core.wire.messages import (
    DamageFound,
    Nack,
    Prepare,
    Prepared,
    RangeBytes,
    RangeForm,
    RangeRaw,
    ReplicaEnd,
    SetLowWaterMark,
    SuccessResponse,
)

FACTS = ExpectedCluster(bytes(16), 4)
SESSION = ClaimedSession(7, b"n" * 16)
DAMAGE = DamageFound(6, 0, 2, struct.pack(">2q", 3, 3))


class Link:
    """A link that receives the given lists of messages."""

    def __init__(self, *received):
        self.received, self.sent = list(received), []

    def send(self, message):
        self.sent.append(message)

    async def receive(self):
        return self.received.pop(0)


def prepared_answer(partition=2, *, mark=10, damaged=()):
    packed = struct.pack(f">{2 * len(damaged)}q", *[each for pair in damaged for each in pair])
    fields = (bytes(16), 6, mark, True, 20, b"c" * 16, False, packed)
    return Prepared(7, partition, partition, *fields)


def run_request(link, call):
    return asyncio.run(call(OwnerConnection("a:1", link, FACTS)))


def test_an_unrequested_damage_report_is_not_mistaken_for_an_answer():
    link = Link([DAMAGE], [prepared_answer(2), DAMAGE], [DAMAGE, prepared_answer(3)])
    result = run_request(link, lambda replica: replica.prepare({2: SESSION, 3: SESSION}))
    assert result == {2: prepared_answer(2), 3: prepared_answer(3)}
    assert [(type(message), message.partition_id) for message in link.sent] == [
        (Prepare, 2),
        (Prepare, 3),
    ]
    unexpected = ReplicaEnd(7, 1_000_000, 2, 20, b"c" * 16)
    link = Link([DAMAGE, unexpected])
    assert (
        run_request(link, lambda replica: replica.set_low_water_mark(2, SESSION, prepared_answer()))
        is None
    )
    assert [type(message) for message in link.sent] == [SetLowWaterMark]


def test_unexpected_answers_and_rejections_are_reported():
    with pytest.raises(
        RemoteProtocolError, match="a:1 answered with an unexpected message, SuccessResponse"
    ):
        run_request(Link([SuccessResponse(7, 0, 2)]), lambda replica: replica.prepare({2: SESSION}))
    refusal = Nack(7, 1_000_000, 2, SessionFenced.code, 9, "a later one")
    with pytest.raises(SessionFenced, match="a:1: a later one"):
        run_request(
            Link([refusal]),
            lambda replica: replica.set_low_water_mark(2, SESSION, prepared_answer()),
        )


def test_only_damage_above_the_mark_makes_a_log_untrusted():
    assert not reported_log(prepared_answer(damaged=[(3, 4), (9, 10)])).is_damaged
    assert reported_log(prepared_answer(damaged=[(3, 4), (9, 11)])).is_damaged
    assert reported_log(prepared_answer()).rank == (6, 20)


def header_range(first, *ids):
    records = b"".join(
        RECORD_HEADER.pack(record_id, REQ_ID.pack(client_id, generation, 2, 1), 0)
        for record_id, (client_id, generation) in enumerate(ids, first)
    )
    sizes = (b"", records, 0, b"c" * 16, b"")
    return RangeBytes(7, 1_000_001, 2, first, len(ids), RangeForm.HEADERS, *sizes)


def prepared_up_to(last, **changes):
    return replace(prepared_answer(), synced_max=last, **changes)


def test_the_highest_client_ids_and_generations_are_read_from_the_last_records():
    issued = FIRST_ISSUED_ID + 6  # a server has issued these IDs; ZooKeeper's are lower
    link = Link([header_range(0, (issued, 3), (70, 2))], [DAMAGE, header_range(2, (8, 4))])
    result = run_request(link, lambda replica: replica.highest_ids(2, SESSION, prepared_up_to(2)))
    assert result == MaximumIds(70, 4, issued)
    assert [(message.first, message.last) for message in link.sent] == [(0, 2), (2, 2)]
    assert all(isinstance(message, RangeRaw) and not message.reader for message in link.sent)
    link = Link([header_range(20_000, (9, 3))])
    with pytest.raises(IndexError):  # the test's link has no more answers
        run_request(link, lambda replica: replica.highest_ids(2, SESSION, prepared_up_to(30_000)))
    assert link.sent[0].first == 20_001
    # The log begins at this ID: older records are only in the archive.
    link = Link([header_range(26_000, (9, 3))])
    with pytest.raises(IndexError):
        run_request(
            link,
            lambda replica: replica.highest_ids(2, SESSION, prepared_up_to(30_000, start=25_999)),
        )
    assert link.sent[0].first == 26_000
    assert (
        run_request(Link(), lambda replica: replica.highest_ids(2, SESSION, prepared_up_to(-1)))
        == NO_IDS
    )
    with pytest.raises(RemoteProtocolError, match="unexpected message, RangeBytes"):
        run_request(
            Link([header_range(0)]),
            lambda replica: replica.highest_ids(2, SESSION, prepared_up_to(2)),
        )
