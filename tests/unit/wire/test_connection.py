"""A connection: hello, versions, limits and failure."""

import pytest

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.record import ReqId
from waltz_core.wire import codec
from waltz_core.wire.connection import (
    HELLO_BYTES_MAX,
    SMALL_FRAME_BYTES_MAX,
    Connection,
    HelloReceived,
    ProtocolFailed,
)
from waltz_core.wire.messages import (
    Appended,
    AppendRaw,
    FlushRequest,
    Hello,
    SuccessResponse,
    WireProtocol,
)


def storage(*, is_listener, **more):
    return Connection(WireProtocol.STORAGE, is_listener=is_listener, **more)


def pair(**more):
    """Return a dialler and a listener after their hellos."""
    dialler, listener = storage(is_listener=False, **more), storage(is_listener=True, **more)
    dialler.receive(listener.first_bytes())
    listener.receive(dialler.first_bytes())
    assert dialler.version == listener.version == 4
    return dialler, listener


def append_raw(records):
    return AppendRaw(1, 2, 3, 4, b"", records, 0, bytes(16), ())


def send_bytes(connection, message):
    return b"".join(connection.send(message))


def failure(connection, data):
    events = connection.receive(data)
    assert isinstance(events[-1], ProtocolFailed)
    assert connection.failure is events[-1].error
    return str(events[-1].error)


def test_the_highest_common_version_is_used():
    mine = Connection(WireProtocol.CLIENT, is_listener=True, versions=(0, 3, 4, 5))
    (event,) = mine.receive(codec.encode_hello(Hello((0, 1, 2, 3, 4), "Waltz Client")))
    assert event == HelloReceived(Hello((0, 1, 2, 3, 4), "Waltz Client"), 4)
    assert mine.version == 4
    assert send_bytes(mine, FlushRequest(ReqId(1, 1, 1, 1)))[:3] == b"L\x00\x04"


def test_no_common_version_ends_the_connection():
    listener = storage(is_listener=True)
    text = failure(listener, codec.encode_hello(Hello((7, 8), "Waltz Storage Client")))
    assert "this side supports [1, 2, 3, 4]" in text
    assert "supports [7, 8]" in text
    assert "Hint" not in text


@pytest.mark.parametrize(
    ("is_listener", "peer"), [(True, "Waltz Storage Client"), (False, "Waltz Storage Server")]
)
def test_the_error_for_a_0_13_peer_has_a_hint(is_listener, peer):
    text = failure(storage(is_listener=is_listener), codec.encode_hello(Hello((0,), peer)))
    assert text.startswith(
        "the two sides support no common version of protocol 'S': this side supports [1, 2, 3, 4], "
    )
    assert f"{peer!r} supports [0]" in text
    assert "Hint: migrate the whole cluster at once, as docs/compatibility.md describes." in text


def test_no_message_is_sent_before_the_peers_hello():
    dialler = storage(is_listener=False)
    with pytest.raises(LocalProtocolError, match="a version yet"):
        dialler.send(SuccessResponse(1, 2, 3))
    assert dialler.keep_alive() == bytes.fromhex("48000000000000")


def test_messages_received_together_with_the_hello_are_delivered_after_it():
    dialler, _ = pair()
    listener = storage(is_listener=True)
    message = SuccessResponse(1, 2, 3)
    events = listener.receive(dialler.first_bytes() + send_bytes(dialler, message) * 2)
    assert isinstance(events[0], HelloReceived)
    assert events[1:] == [message, message]


def test_keep_alive_frames_have_no_effect():
    dialler, listener = pair()
    message = SuccessResponse(1, 2, 3)
    stream = dialler.keep_alive() + send_bytes(dialler, message) + dialler.keep_alive()
    assert listener.receive(stream) == [message]
    assert storage(is_listener=True).receive(storage(is_listener=False).keep_alive()) == []


def test_a_second_hello_ends_the_connection():
    _, listener = pair()
    assert "found 'H' version 0" in failure(listener, storage(is_listener=False).first_bytes())


@pytest.mark.parametrize("start", [b"L\x00\x01", b"S\x00\x00", b"GET", b"\x16\x03\x01"])
def test_a_frame_of_another_protocol_ends_the_connection(start):
    _, listener = pair()
    assert "expected a frame of protocol 'S' version 4" in failure(listener, start + bytes(4))


@pytest.mark.parametrize("start", [b"\x16\x03\x01\x02\x00", b"\x15\x03\x03\x00\x02"])
def test_the_error_reports_a_peer_that_uses_tls(start):
    assert failure(storage(is_listener=True), start + bytes(2)) == "expected plain TCP, found TLS"
    # Later bytes may have any format, and are returned unchanged.
    _, listener = pair()
    assert "expected a frame of protocol 'S' version 4" in failure(listener, start + bytes(2))


def test_messages_before_a_failure_are_delivered():
    dialler, listener = pair()
    message = SuccessResponse(1, 2, 3)
    events = listener.receive(
        send_bytes(dialler, message) + b"garbage" + send_bytes(dialler, message)
    )
    assert events[0] == message
    assert isinstance(events[1], ProtocolFailed)
    assert isinstance(events[1].error, RemoteProtocolError)
    assert len(events) == 2


def test_after_a_failure_nothing_is_received_or_sent():
    dialler, listener = pair()
    failure(listener, b"garbage")
    assert listener.receive(send_bytes(dialler, SuccessResponse(1, 2, 3))) == []
    assert not listener.is_inside_frame
    with pytest.raises(LocalProtocolError, match="has failed"):
        listener.send(SuccessResponse(1, 2, 3))
    assert listener.buffer_updated(7) == []


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, 16 * 1024 * 1024])
def test_a_length_out_of_bounds_ends_the_connection_without_allocation(length):
    _, listener = pair()
    header = codec.FRAME_HEADER.pack(ord("S"), 4, length)
    assert "as its length" in failure(listener, header)


def test_a_hello_has_a_smaller_frame_limit_than_messages():
    listener = storage(is_listener=True)
    header = codec.FRAME_HEADER.pack(ord("H"), 0, HELLO_BYTES_MAX - 6)
    assert "as its length" in failure(listener, header)


def test_a_connection_without_a_partial_payload_has_no_buffer():
    """Most of ten thousand connections are idle, or wait for the rest of a header."""
    dialler, listener = pair()
    hello = bytes(dialler.first_bytes())
    fresh = storage(is_listener=True)
    assert len(fresh.get_buffer()) == HELLO_BYTES_MAX
    assert fresh.receive(hello[:5]) == []
    assert fresh._read_buffer is None
    assert fresh.is_inside_frame
    assert len(fresh.receive(hello[5:])) == 1
    frame = send_bytes(dialler, Appended(1, 2, 3, 4))
    for end in range(1, 7):
        assert listener.receive(frame[:end]) == []
        assert listener._read_buffer is None
        assert listener.incomplete_bytes == 0
        assert listener.is_inside_frame
        assert listener.receive(frame[end:]) == [Appended(1, 2, 3, 4)]
        assert not listener.is_inside_frame
    assert listener.receive(frame[:10]) == []
    assert (listener._read_buffer, listener.incomplete_bytes) == (None, 3)


def test_the_frame_limit_of_a_peer_applies_to_received_frames_only():
    dialler, listener = pair()
    limit = 16 * 1024 * 1024
    listener.peer_frame_bytes_max = lambda: limit
    assert len(listener.receive(send_bytes(dialler, append_raw(bytes(100_000))))) == 1
    limit = SMALL_FRAME_BYTES_MAX
    small, large = (
        send_bytes(dialler, append_raw(bytes(60_000))),
        send_bytes(dialler, append_raw(bytes(70_000))),
    )
    assert len(listener.receive(small)) == 1
    assert listener.send(append_raw(bytes(100_000)))
    assert "a payload of at most 65529 bytes" in failure(listener, large)


def test_a_frame_over_the_limit_is_not_sent():
    dialler, _ = pair(frame_bytes_max=10_000)
    assert dialler.send(append_raw(bytes(9_000)))
    with pytest.raises(LocalProtocolError, match="the limit is 10000"):
        dialler.send(append_raw(bytes(10_000)))


@pytest.mark.parametrize("step", [1, 7, 64 * 1024, 100_000, 10_000_000])
def test_frames_of_all_sizes_are_decoded_from_any_split(step):
    dialler, listener = pair()
    messages = [append_raw(bytes(size)) for size in (0, 10, 70_000, 5, 200_000)] + [
        Appended(1, 2, 3, n) for n in range(50)
    ]
    stream = memoryview(b"".join(send_bytes(dialler, message) for message in messages))
    if step == 1:
        stream = stream[:300]  # tests splits within headers
        messages = []
    received = []
    for offset in range(0, len(stream), step):
        received += listener.receive(stream[offset : offset + step])
    assert messages == [] or received == messages
    assert listener.failure is None


def test_a_large_frame_is_read_into_a_separate_buffer():
    dialler, listener = pair()
    first, second = append_raw(b"a" * 300_000), append_raw(b"b" * 300_000)
    stream = send_bytes(dialler, first) + send_bytes(dialler, second)
    received = listener.receive(stream)
    # The second frame does not change the fields of the first one (rule 6).
    assert received == [first, second]
    room = listener.get_buffer()
    room[: len(stream[:1000])] = stream[:1000]
    assert listener.buffer_updated(1000) == []
    assert listener.is_inside_frame
    assert len(listener.get_buffer()) == len(stream) // 2 - 1000


def test_the_fields_of_a_small_frame_do_not_change_later():
    dialler, listener = pair()
    (first,) = listener.receive(send_bytes(dialler, append_raw(b"a" * 50)))
    (second,) = listener.receive(send_bytes(dialler, append_raw(b"b" * 50)))
    assert (bytes(first.records), bytes(second.records)) == (b"a" * 50, b"b" * 50)
