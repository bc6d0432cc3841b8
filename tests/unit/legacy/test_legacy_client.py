"""The messages that a 0.13 client receives for answers of a partition (decision 020)."""

import struct
from typing import Any

import pytest

from waltz_core import errors
from waltz_core.legacy.feed_frames import feed_frames
from waltz_core.legacy.legacy_client import (
    MARK_WAIT_S,
    MOUNT_WAIT_S,
    EncodedFrames,
    EndConnection,
    InexpressibleError,
    LegacyClientAdapter,
)
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.server.partition_events import ConnectionId, error_answer
from waltz_core.wire import codec, messages
from waltz_core.wire.messages import ClientMessage, MountResponse, RowOutcomeCode

A = ConnectionId(1)
READY, NOT_READY, CLIENT_AHEAD = 0, 1, 2
VERSIONS = range(5)


def req(sequence: int, partition: int = 0) -> ReqId:
    return ReqId(ClientId(1), Generation(1), PartitionId(partition), sequence)


def translate(adapter: LegacyClientAdapter, message: ClientMessage, now_s: float = 0.0) -> Any:
    return adapter.translate_response(message, None, now_s)


def translate_error(
    adapter: LegacyClientAdapter, request: ClientMessage, error: errors.WaltzError
) -> Any:
    answer = error_answer(A, request.req_id, 9, error, request)
    return adapter.translate_response(answer.message, answer.request, 0.0)


def mounted_adapter(version: int = 4, sequence: int = 1) -> LegacyClientAdapter:
    adapter = LegacyClientAdapter(version)
    adapter.check_request(messages.MountRequest(req(sequence), -1, 0), 0.0)
    assert translate(adapter, MountResponse(req(sequence), READY)) is not None
    return adapter


def result(
    sequence: int, reason: RowOutcomeCode, conflict: int = -1, mark: int = 9
) -> ClientMessage:
    ids = struct.pack(">q", 8 if reason is RowOutcomeCode.COMMITTED else -1)
    return messages.AppendResult(
        req(sequence), mark, ids, bytes([reason]), struct.pack(">q", conflict)
    )


def append(sequence: int) -> messages.AppendRequest:
    return messages.AppendRequest(req(sequence), -1, (), (), (), 0, b"", 0)


# --- mounts


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("state", [READY, NOT_READY, CLIENT_AHEAD])
def test_the_answer_to_a_mount_depends_on_the_protocol_version(version: int, state: int) -> None:
    adapter = LegacyClientAdapter(version)
    assert adapter.check_request(messages.MountRequest(req(1), 5, 0), 0.0) is None
    expected = (
        messages.MountOutcome(req(1), state == READY)
        if version <= 2
        else MountResponse(req(1), state)
    )
    assert translate(adapter, MountResponse(req(1), state)) == expected


def test_the_answer_to_an_obsolete_mount_is_not_reported() -> None:
    adapter = mounted_adapter()
    adapter.check_request(messages.MountRequest(req(2), -1, 0), 0.0)
    assert translate(adapter, MountResponse(req(1), READY)) is None
    superseded = errors.ConnectionSuperseded("a later mount")
    assert translate_error(adapter, messages.MountRequest(req(1), -1, 0), superseded) is None
    assert translate_error(adapter, messages.FeedRequest(req(1), -1), superseded) is None
    assert translate(adapter, MountResponse(req(2), READY)) == MountResponse(req(2), READY)


@pytest.mark.parametrize(
    "error",
    [
        errors.NotOwned("elsewhere"),
        errors.NotMounted("of an earlier ownership"),
        errors.GenerationMismatch("it has moved on"),
        errors.Unavailable("no store session"),
        errors.SessionLost("no quorum"),
        errors.UnknownPartition("there is none"),
        errors.PermissionDenied("no read"),
    ],
)
def test_mount_and_feed_errors_are_reported_as_not_ready(
    error: errors.WaltzError,
) -> None:
    adapter = LegacyClientAdapter(4)
    request = messages.MountRequest(req(1), -1, 0)
    adapter.check_request(request, 0.0)
    assert translate_error(adapter, request, error) == MountResponse(req(1), NOT_READY)
    adapter = mounted_adapter()
    feed = messages.FeedRequest(req(1), -1)
    assert translate_error(adapter, feed, error) == MountResponse(req(1), NOT_READY)
    # The error is reported once: later the client receives the answer to its next mount.
    assert translate_error(adapter, feed, error) is None
    assert translate(adapter, result(7, RowOutcomeCode.NOT_MOUNTED)) is None
    adapter.check_request(messages.MountRequest(req(8), -1, 0), 0.0)
    assert translate(adapter, result(7, RowOutcomeCode.NOT_MOUNTED)) is None
    assert translate(adapter, MountResponse(req(8), READY)) == MountResponse(req(8), READY)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConnectionSuperseded("a later connection"),
        errors.ClientAheadOfLog("too far"),
        errors.BadRequest("twice"),
    ],
)
def test_errors_that_ended_a_connection_in_0_13_still_end_the_connection(
    error: errors.WaltzError,
) -> None:
    assert translate_error(
        mounted_adapter(), messages.FeedRequest(req(1), 99), error
    ) == EndConnection(str(error))


def test_requests_that_waltz_0_13_rejects_end_the_connection() -> None:
    for request in (
        messages.MountRequest(req(1), -2, 0),  # not valid for a 0.13 client
        messages.AddPreferredRequest(req(0), ()),
        messages.RemovePreferredRequest(req(0), ()),
    ):
        assert isinstance(LegacyClientAdapter(4).check_request(request, 0.0), EndConnection)
    unrelated = messages.RemovePreferredRequest(req(0), (7,))
    assert LegacyClientAdapter(4).check_request(unrelated, 0.0) is None
    answer = messages.FlushResponse(req(1), 3)
    wrong = errors.BadRequest("FlushResponse is no request to a server")
    assert translate_error(LegacyClientAdapter(4), answer, wrong) == EndConnection(str(wrong))


# --- appends


def test_only_the_feed_reports_commits() -> None:
    for reason in (RowOutcomeCode.COMMITTED, RowOutcomeCode.OVERLOADED):
        assert translate(mounted_adapter(), result(2, reason)) is None
    assert isinstance(
        translate(mounted_adapter(), result(2, RowOutcomeCode.TOO_LARGE)), InexpressibleError
    )
    # A lock failure contains the ID that the client must reach before it retries.
    failure = translate(mounted_adapter(), result(2, RowOutcomeCode.LOCK, conflict=7))
    assert failure == messages.LockFailure(req(2), 7)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "reason",
    [
        RowOutcomeCode.LOST,
        RowOutcomeCode.AHEAD,
        RowOutcomeCode.NOT_MOUNTED,
        RowOutcomeCode.GENERATION,
        RowOutcomeCode.NO_SPACE,
    ],
)
def test_several_lost_appends_make_the_client_mount_again_only_once(
    version: int, reason: RowOutcomeCode
) -> None:
    adapter = mounted_adapter(version)
    not_ready: ClientMessage = MountResponse(req(1), NOT_READY)
    if version <= 2:
        not_ready = messages.MountOutcome(req(1), is_ready=False)
    assert translate(adapter, result(2, reason)) == not_ready
    assert translate(adapter, result(3, RowOutcomeCode.NOT_MOUNTED)) is None


def test_an_earlier_message_does_not_end_an_unanswered_mount() -> None:
    adapter = mounted_adapter()
    adapter.check_request(messages.MountRequest(req(5), -1, 0), 0.0)
    assert translate(adapter, result(2, RowOutcomeCode.LOST)) is None


def test_a_lost_append_ends_the_mount_of_its_partition_only() -> None:
    adapter = mounted_adapter()
    adapter.check_request(messages.MountRequest(req(2, partition=3), -1, 0), 0.0)
    translate(adapter, MountResponse(req(2, partition=3), READY))
    lost = messages.AppendResult(
        req(4, partition=3), 9, bytes(8), bytes([RowOutcomeCode.LOST]), bytes(8)
    )
    assert translate(adapter, lost) == MountResponse(req(2, partition=3), NOT_READY)
    assert translate(adapter, result(5, RowOutcomeCode.LOST)) == MountResponse(req(1), NOT_READY)


def test_a_rejected_append_ends_the_connection_only_if_its_data_is_corrupt() -> None:
    broken = errors.ChecksumMismatch("append: expected another CRC")
    assert translate_error(mounted_adapter(), append(2), broken) == EndConnection(str(broken))
    for error in (
        errors.NotOwned("gone"),
        errors.OutcomeUnknown("maybe"),
        errors.PermissionDenied("no append"),
    ):
        assert translate_error(mounted_adapter(), append(2), error) is None


# --- flushes, marks, data


def test_a_failed_flush_is_dropped_or_ends_the_mount() -> None:
    flush = messages.FlushRequest(req(2))
    assert translate_error(mounted_adapter(), flush, errors.NotOwned("gone")) is None
    for error in (errors.Unavailable("no session"), errors.SessionLost("no quorum")):
        assert translate_error(mounted_adapter(), flush, error) == MountResponse(req(1), NOT_READY)
        assert translate_error(LegacyClientAdapter(4), flush, error) is None


def test_a_mark_request_gets_the_mark_or_no_answer() -> None:
    mark = messages.HighWaterMarkResponse(req(1), -1)
    assert translate(LegacyClientAdapter(4), mark) == mark
    adapter = LegacyClientAdapter(4)
    for error in (errors.NotOwned("elsewhere"), errors.Unavailable("no session")):
        first = translate_error(adapter, messages.HighWaterMarkRequest(req(1)), error)
        again = translate_error(adapter, messages.HighWaterMarkRequest(req(2)), error)
        if error.code == errors.NotOwned.code:
            assert first == EndConnection("elsewhere", MARK_WAIT_S)
        else:
            assert first is None  # no answer: a session opens again soon
        assert again is None


def test_a_denied_request_gets_the_same_answer_as_other_failed_requests() -> None:
    denied = errors.PermissionDenied("no read")
    flush, mark = messages.FlushRequest(req(2)), messages.HighWaterMarkRequest(req(3))
    assert translate_error(mounted_adapter(), flush, denied) == MountResponse(req(1), NOT_READY)
    assert translate_error(LegacyClientAdapter(4), mark, denied) == EndConnection(
        "no read", MARK_WAIT_S
    )
    data = messages.TransactionDataRequest(req(4), 44)
    expected = messages.TransactionDataResponse(data.req_id, 44, (None, "no read"))
    assert translate_error(LegacyClientAdapter(4), data, denied) == expected
    add_request = messages.AddPreferredRequest(req(0), (1,))
    not_added = messages.AddPreferredResponse(req(0), is_done=False)
    assert translate_error(LegacyClientAdapter(4), add_request, denied) == not_added


def test_unavailable_data_is_reported_with_the_error_of_waltz_0_13() -> None:
    request = messages.TransactionDataRequest(req(1, partition=6), 44)

    def unavailable(text: str) -> messages.TransactionDataResponse:
        return messages.TransactionDataResponse(request.req_id, 44, (None, text))

    expected = "com.wepay.waltz.store.exception.TransactionNotFoundException: "
    assert translate(LegacyClientAdapter(4), unavailable("not in the log")) == unavailable(
        f"{expected}partition=6transactionId=44"
    )
    available = messages.TransactionDataResponse(request.req_id, 44, (b"data", None))
    assert translate(LegacyClientAdapter(4), available) is available
    for error in (
        errors.NotOwned("gone"),
        errors.UnknownPartition("there is none"),
        errors.Unavailable("no session"),
        errors.SessionLost("no quorum"),
    ):
        assert translate_error(LegacyClientAdapter(4), request, error) == unavailable(
            "partition not ready"
        )
    fault = errors.Unreachable("no replica gave it")
    assert translate_error(LegacyClientAdapter(4), request, fault) == unavailable(
        "no replica gave it"
    )


def test_a_preference_that_cannot_be_recorded_is_reported_as_not_done() -> None:
    outage = errors.CoordinatorUnavailable("ZooKeeper is away")
    add_request = messages.AddPreferredRequest(req(0), (1,))
    not_added = messages.AddPreferredResponse(req(0), is_done=False)
    assert translate_error(LegacyClientAdapter(4), add_request, outage) == not_added
    remove_request = messages.RemovePreferredRequest(req(0), (1,))
    not_removed = messages.RemovePreferredResponse(req(0), is_done=False)
    assert translate_error(LegacyClientAdapter(4), remove_request, outage) == not_removed


# --- the feed


@pytest.mark.parametrize("version", VERSIONS)
def test_a_range_of_the_feed_becomes_frames(version: int) -> None:
    headers = b"".join(req(row).to_bytes() + struct.pack(">i", row) for row in range(3))
    batch = messages.FeedBatch(req(1), 10, 3, headers, 1, -1, bytes(16))
    assert translate(mounted_adapter(version), batch) == EncodedFrames(
        feed_frames(10, headers, version)
    )


def test_other_answers_are_reported_unchanged() -> None:
    for answer in (
        messages.FeedSuspended(req(1)),
        messages.FlushResponse(req(2), 5),
        messages.CheckConnectivityResponse(req(0), (("a:1", True),)),
        messages.ServerPartitionsResponse(req(0), (0, 1)),
        messages.PartitionsHealthResponse(req(0), ((0, True),)),
    ):
        assert translate(mounted_adapter(), answer) is answer


# --- all errors and requests


def all_errors() -> list[errors.WaltzError]:
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each("why") for each in found if issubclass(each, errors.WaltzError)]


def requests_of(version: int) -> list[ClientMessage]:
    requests: list[ClientMessage] = [
        messages.MountRequest(req(1), -1, 0),
        messages.FeedRequest(req(1), -1),
        append(2),
        messages.FlushRequest(req(2)),
        messages.HighWaterMarkRequest(req(3)),
        messages.TransactionDataRequest(req(4), 7),
        messages.AddPreferredRequest(req(0), (1,)),
        messages.RemovePreferredRequest(req(0), (1,)),
    ]
    return [request for request in requests if request.since <= version]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_answer_is_encodable_in_the_protocol_version_of_the_client(version: int) -> None:
    responses: list[Any] = [
        translate(mounted_adapter(version), result(2, reason, 3)) for reason in RowOutcomeCode
    ]
    for request in requests_of(version):
        for error in all_errors():
            responses.append(translate_error(mounted_adapter(version), request, error))
            responses.append(translate_error(LegacyClientAdapter(version), request, error))
    assert len(all_errors()) > 30
    for response in responses:
        assert not isinstance(response, messages.ErrorResponse)
        if isinstance(response, ClientMessage):
            assert codec.encode(response, version)
        else:
            assert response is None or isinstance(response, EndConnection | InexpressibleError)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rejected_request_for_mount_feed_mark_or_data_gets_an_answer(version: int) -> None:
    mount, feed, _, _, mark, data, *_ = requests_of(version)
    for error in all_errors():
        adapter = LegacyClientAdapter(version)
        adapter.check_request(mount, 0.0)
        assert translate_error(adapter, mount, error) is not None
        assert translate_error(mounted_adapter(version), feed, error) is not None
        assert translate_error(LegacyClientAdapter(version), mark, error) is not None
        assert translate_error(LegacyClientAdapter(version), data, error) is not None


@pytest.mark.parametrize("later_request", [append(7), messages.FeedRequest(req(1), -1)])
def test_a_client_that_ignores_the_end_of_its_mount_is_disconnected(
    later_request: ClientMessage,
) -> None:
    adapter = mounted_adapter()
    assert translate(adapter, result(6, RowOutcomeCode.LOST), 100.0) == MountResponse(
        req(1), NOT_READY
    )
    # Requests that the client sent earlier may still arrive, and other partitions continue.
    assert adapter.check_request(later_request, 100.0 + MOUNT_WAIT_S) is None
    late_s = 100.1 + MOUNT_WAIT_S
    assert adapter.check_request(messages.FlushRequest(req(7)), late_s) is None
    assert (
        adapter.check_request(messages.AppendRequest(req(7, 3), -1, (), (), (), 0, b"", 0), late_s)
        is None
    )
    assert isinstance(adapter.check_request(later_request, late_s), EndConnection)
    # A client that mounts again has processed the end of its earlier mount.
    assert adapter.check_request(messages.MountRequest(req(8), -1, 0), late_s) is None
    assert adapter.check_request(later_request, late_s) is None
    assert translate(adapter, MountResponse(req(8), READY), late_s) == MountResponse(req(8), READY)
    assert adapter.check_request(later_request, late_s + 2 * MOUNT_WAIT_S) is None


@pytest.mark.parametrize(
    "unknown",
    [
        errors.UnknownPartition("the cluster has 3"),
        errors.PermissionDenied("no read"),
        errors.PermissionsNotLoaded("not read yet"),
        errors.Overloaded("over a limit"),
    ],
)
def test_mounts_of_unknown_partitions_use_no_memory(unknown: errors.WaltzError) -> None:
    adapter = LegacyClientAdapter(4)
    for partition in range(3, 103):
        mount = messages.MountRequest(req(1, partition), -1, 0)
        assert adapter.check_request(mount, 0.0) is None
        assert translate_error(adapter, mount, unknown) == MountResponse(mount.req_id, NOT_READY)
    assert not adapter._mount_ended_s
    assert not adapter._mounts
