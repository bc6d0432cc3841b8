"""Flow control: which connections are read, by counts, bytes and the memory limit."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from tests.sample_messages import sample_message
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.server.partition_events import ConnectionId
from waltz_core.server.process.flow_control import (
    NUMBER_BYTES,
    REQUEST_OVERHEAD_BYTES,
    FlowControl,
    FlowLimits,
)
from waltz_core.wire.codec import message_classes
from waltz_core.wire.messages import (
    ANSWER,
    ENTRIES_MAX,
    AddPreferredRequest,
    AppendBatch,
    AppendRequest,
    FeedRequest,
    FieldKind,
    FlushRequest,
    MountWriter,
    RangeForm,
    RangeRequest,
    TransactionDataRequest,
    WireProtocol,
)

A, B, C = ConnectionId(1), ConnectionId(2), ConnectionId(3)
REQ = ReqId(ClientId(1), Generation(0), PartitionId(0), 0)
OVERHEAD = REQUEST_OVERHEAD_BYTES


def flow(
    *, count: int = 100, in_flight_bytes: int = 100_000, memory_bytes: int = 1_000_000
) -> FlowControl:
    new_flow = FlowControl(FlowLimits(count, in_flight_bytes, memory_bytes, range_bytes_max=10_000))
    for connection in (A, B, C):
        new_flow.open(connection)
    return new_flow


def batch(size: int) -> AppendBatch:
    return AppendBatch(REQ, -1, bytes(size), 0)


def test_over_the_count_limit_requests_wait_and_their_connection_is_not_read() -> None:
    machine = flow(count=2)
    machine.receive(A, [FlushRequest(REQ)] * 3)
    assert len(machine.admit(A)) == 2
    assert not machine.may_read(A)
    assert machine.may_read(B)
    machine.on_answered(A, OVERHEAD)
    assert len(machine.admit(A)) == 1
    assert machine.may_read(A)
    assert machine.in_flight_count(A) == 2


def test_requests_over_the_byte_limit_wait() -> None:
    machine = flow(in_flight_bytes=1_000)
    machine.receive(A, [batch(800), batch(800), batch(800)])
    (first,) = machine.admit(A)
    assert first.cost_bytes == 800 + OVERHEAD
    assert machine.admit(A) == []
    machine.on_answered(A, first.cost_bytes)
    assert len(machine.admit(A)) == 1


def test_range_requests_are_charged_for_their_answers_and_use_at_most_half_of_the_limit() -> None:
    machine = flow(in_flight_bytes=40_000)
    ask = RangeRequest(REQ, 0, 9, 1 << 30, RangeForm.WHOLE, ())
    machine.receive(A, [ask] * 3)
    first, second = machine.admit(A)
    assert first.cost_bytes == 10_000 + OVERHEAD
    assert machine.admit(A) == []
    machine.on_answered(A, second.cost_bytes)
    assert len(machine.admit(A)) == 1


def test_over_the_memory_limit_a_connection_has_one_read_in_progress() -> None:
    machine = flow(in_flight_bytes=80_000, memory_bytes=25_000)
    ask = RangeRequest(REQ, 0, 9, 1 << 30, RangeForm.WHOLE, ())
    machine.receive(A, [ask] * 5)
    assert len(machine.admit(A)) == 3, "each has 10,000 bytes, and the last one is over the limit"
    machine.receive(B, [ask] * 5)
    (first,) = machine.admit(B)
    assert machine.admit(B) == []
    machine.on_answered(B, first.cost_bytes)
    (second,) = machine.admit(B)
    machine.receive(C, [batch(10), batch(10), TransactionDataRequest(REQ, 7)])
    assert len(machine.admit(C)) == 2, "their partitions reject appends"
    machine.close(A)
    assert len(machine.admit(C)) == 1
    machine.on_answered(B, second.cost_bytes)
    assert len(machine.admit(B)) > 1


def test_over_the_memory_limit_an_open_feed_request_does_not_count_as_a_read() -> None:
    machine = flow(memory_bytes=2_000)
    machine.receive(A, [FeedRequest(REQ, -1)])
    machine.admit(A)
    machine.receive(B, [batch(4_000)])
    machine.admit(B)
    machine.receive(A, [TransactionDataRequest(REQ, 7), TransactionDataRequest(REQ, 8)])
    (read,) = machine.admit(A)
    machine.on_answered(A, read.cost_bytes)
    assert len(machine.admit(A)) == 1


def test_no_request_of_a_congested_connection_is_admitted() -> None:
    machine = flow()
    machine.note_backlog(A, 5_000, is_congested=True)
    machine.receive(A, [batch(10)])
    assert machine.admit(A) == []
    machine.note_backlog(A, 10, is_congested=False)
    assert len(machine.admit(A)) == 1


def test_admitted_bytes_are_counted_and_released() -> None:
    machine = flow(count=1)
    machine.receive(A, [batch(100), batch(100)])
    machine.admit(A)
    machine.note_backlog(A, 77, is_congested=False)
    assert machine.memory_bytes == 2 * (100 + OVERHEAD) + 77
    machine.on_answered(A, 100 + OVERHEAD)
    assert machine.memory_bytes == 100 + OVERHEAD + 77
    machine.close(A)
    assert machine.memory_bytes == 0
    machine.on_answered(A, 100 + OVERHEAD)
    machine.note_backlog(A, 1, is_congested=False)
    assert machine.admit(A) == []
    assert machine.memory_bytes == 0


def test_over_the_memory_limit_the_largest_connection_is_paused() -> None:
    machine = flow(memory_bytes=10_000)
    machine.receive(A, [batch(6_000)])
    machine.receive(B, [batch(3_000)])
    machine.admit(A)
    machine.admit(B)
    assert machine.apply_memory_limit() == [A]
    assert not machine.may_read(A)
    assert machine.may_read(B)
    assert machine.apply_memory_limit() == []
    machine.on_answered(B, 3_000 + OVERHEAD)
    assert machine.apply_memory_limit() == [A]
    assert machine.may_read(A)


def test_several_connections_are_paused_if_one_does_not_suffice() -> None:
    machine = flow(memory_bytes=4_000)
    machine.receive(A, [batch(3_000)])
    machine.receive(B, [batch(4_000)])
    machine.receive(C, [batch(100)])
    assert machine.apply_memory_limit() == [B, A]
    assert machine.may_read(C) is False  # a request of C is waiting
    machine.admit(C)
    assert machine.may_read(C)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda many: AppendRequest(REQ, -1, many, (), (), 0, b"", 0),
        lambda many: AppendRequest(REQ, -1, (), many, (), 0, b"", 0),
        lambda many: AppendRequest(REQ, -1, (), (), many, 0, b"", 0),
        lambda many: MountWriter(REQ, 1, -1, wants_feed=True, header_values=many),
        lambda many: RangeRequest(REQ, 0, 9, 0, RangeForm.WHOLE, many),
        lambda many: AddPreferredRequest(REQ, many),
    ],
)
def test_compressed_numbers_are_charged_with_their_decoded_size(request_of) -> None:
    """Decoded to Python numbers, a frame of 256 KiB takes ten times as much memory."""
    machine = flow(in_flight_bytes=1 << 20)
    machine.receive(A, [request_of(tuple(range(ENTRIES_MAX)))] * 2)
    (first,) = machine.admit(A)
    answer_bytes = first.cost_bytes - (OVERHEAD + ENTRIES_MAX * NUMBER_BYTES)
    assert answer_bytes in (0, 1)
    assert not machine.may_read(A)


SIZED = {
    FieldKind.BLOB: bytes(5_000),
    FieldKind.TEXT: "x" * 5_000,
    FieldKind.INT32S: (7,) * 1_250,
    FieldKind.PACKED_INT64S: bytes(5_000),
}


@pytest.mark.parametrize(
    "request_class",
    [
        message_class
        for message_class in message_classes(WireProtocol.CLIENT)
        if message_class.requires is not ANSWER
    ],
    ids=lambda each: each.__name__,
)
def test_every_request_is_charged_for_all_its_fields(request_class) -> None:
    """A request may wait for a long time, and the peer chooses its size."""
    hints = get_type_hints(request_class, include_extras=True)
    kinds = {field.name: hints[field.name].__metadata__[0] for field in fields(request_class)}
    large = {name: SIZED[kind] for name, kind in kinds.items() if kind in SIZED}
    each = flow()
    each.receive(A, [sample_message(request_class, 0, **large)])
    (admitted,) = each.admit(A)
    assert admitted.cost_bytes >= OVERHEAD + 5_000 * len(large)
