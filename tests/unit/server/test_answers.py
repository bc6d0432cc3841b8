"""What clients receive, in the words of the original's messages and of ours."""

from waltz_core import errors
from waltz_core.records.record import (
    ClientId,
    Generation,
    PartitionId,
    ReplicaId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.server.append import answers
from waltz_core.server.append.mounts import PartitionPlace
from waltz_core.server.partition_events import (
    Answer,
    ConnectionId,
    PartitionIdentity,
    PartitionLimits,
    Received,
)
from waltz_core.wire import messages
from waltz_core.wire.messages import ClientMessage

REQ = ReqId(ClientId(1), Generation(0), PartitionId(3), 7)
PLACE = PartitionPlace(PartitionId(3), Generation(1), TransactionId(9))
A = ConnectionId(1)
OLD_MOUNT = messages.MountRequest(REQ, -1, 0)
NEW_MOUNT = messages.MountWriter(REQ, 0, -1, wants_feed=False)


def ask(message: ClientMessage) -> Received:
    return Received(A, message, 70, 0)


def test_an_error_carries_its_code_and_its_sentence() -> None:
    answer = answers.reject(ask(NEW_MOUNT), errors.NotMounted("mount first"))
    expected = messages.ErrorResponse(REQ, errors.NotMounted.code, True, "mount first")
    assert answer == Answer(A, expected, 70)


def test_waltz_0_13_s_mount_is_answered_by_a_state() -> None:
    assert answers.not_owned(ask(OLD_MOUNT), PLACE).message == messages.MountResponse(REQ, 1)
    ahead = errors.ClientAhead("too far")
    assert answers.reject_mount(ask(OLD_MOUNT), ahead).message == messages.MountResponse(REQ, 2)


def test_ours_is_answered_by_an_error() -> None:
    found = answers.not_owned(ask(NEW_MOUNT), PLACE).message
    assert isinstance(found, messages.ErrorResponse)
    assert found.error_code == errors.NotOwned.code
    assert "partition 3" in found.message
    found = answers.reject_mount(ask(NEW_MOUNT), errors.ClientAhead("too far")).message
    assert isinstance(found, messages.ErrorResponse)
    assert found.error_code == errors.ClientAhead.code


def test_a_mark_is_reported_in_the_words_of_the_question() -> None:
    identity = PartitionIdentity(PartitionId(3), 8, bytes(16))
    replicas = [ReplicaId("s:1")]

    def answered(message: ClientMessage) -> ClientMessage:
        answer = answers.with_mark(ask(message), TransactionId(9), SessionId(2), replicas, identity)
        assert (answer.connection, answer.cost_bytes) == (A, 70)
        return answer.message

    assert answered(messages.FlushRequest(REQ)) == messages.FlushResponse(REQ, 9)
    assert answered(messages.HighWaterMarkRequest(REQ)) == messages.HighWaterMarkResponse(REQ, 9)
    asked = messages.ReplicasRequest(REQ, linearizable=False)
    assert answered(asked) == messages.ReplicasResponse(REQ, 2, 9, ("s:1",), bytes(16), 8)


def test_a_writer_gets_its_limits_and_an_older_client_that_it_is_ready() -> None:
    limits = PartitionLimits(lock_slot_count=1009)
    answered = answers.mounted(ask(NEW_MOUNT), TransactionId(4), SessionId(2), limits).message
    assert answered == messages.Mounted(
        REQ, 2, 4, limits.batch_rows_max, limits.batch_bytes_max, limits.connection_bytes_max
    )
    old = answers.mounted(ask(OLD_MOUNT), TransactionId(4), SessionId(2), limits).message
    assert old == messages.MountResponse(REQ, 0)
