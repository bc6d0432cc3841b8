"""The partitions of one connection to a 0.13 server, and their shared state."""

from waltz_core.legacy.legacy_server_link import (
    LegacyServerLink,
    OwnershipChecked,
    ReceivedFromLegacyServer,
    SendToLegacyServer,
)
from waltz_core.legacy.legacy_server_stream import (
    FLUSH_AFTER_MS,
    CheckOwnership,
    SendToServer,
    SendToStream,
)
from waltz_core.machine import Wakeup
from waltz_core.records.record import ReqId
from waltz_core.wire import messages as m
from waltz_core.wire.messages import LATEST_MARK


def mount_id(partition):
    return ReqId(7, 1, partition, -1)


def messages_sent_by(effects):
    return [
        message
        for effect in effects
        if isinstance(effect, SendToServer)
        for message in effect.messages
    ]


def test_mounts_share_a_sequence_and_answers_are_routed_by_partition():
    link = LegacyServerLink()
    for partition, sequence in ((0, 5), (1, 6)):
        mount = m.MountWriter(mount_id(partition), sequence, LATEST_MARK, wants_feed=False)
        link.step(SendToLegacyServer(mount), 0)
    received = [m.HighWaterMarkResponse(mount_id(each), 9 - each) for each in (1, 0)]
    assert messages_sent_by(link.step(ReceivedFromLegacyServer(received), 0)) == [
        m.MountRequest(mount_id(1), 8, 5),
        m.MountRequest(mount_id(0), 9, 5),
    ]
    ready = [m.MountResponse(mount_id(1), 0), m.FlushResponse(mount_id(1), 8)]
    proofs = [
        each
        for each in link.step(ReceivedFromLegacyServer(ready), 0)
        if isinstance(each, CheckOwnership)
    ]
    assert [proof.partition_id for proof in proofs] == [1]
    (received,) = link.step(OwnershipChecked(1, proofs[0].number, is_owner=True), 0)
    assert isinstance(received, SendToStream)
    assert isinstance(received.message, m.Mounted)
    link.step(Wakeup(), 0)
    assert link.wake_at_ms is None
    link.step(SendToLegacyServer(m.AppendRequest(ReqId(7, 1, 1, 1), 8, (), (), (), 0, b"", 0)), 100)
    assert link.wake_at_ms == 100 + FLUSH_AFTER_MS
    assert messages_sent_by(link.step(Wakeup(), link.wake_at_ms)) == [
        m.FlushRequest(ReqId(7, 1, 1, 1))
    ]


def test_messages_for_other_partitions_are_ignored():
    assert (
        LegacyServerLink().step(
            ReceivedFromLegacyServer([m.HighWaterMarkResponse(mount_id(3), 9)]), 0
        )
        == []
    )
