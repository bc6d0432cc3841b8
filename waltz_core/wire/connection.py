"""One connection without any I/O: converts received bytes to messages, and messages to bytes.

This module implements version negotiation, frame limits and protocol errors. `net.py` and the
simulator's network use it.

Bytes arrive through `get_buffer` and `buffer_updated`. Thus a socket can read directly into the
memory of a large frame. `receive` does the same for bytes that are already in memory.

Rules:
    1. The first frame of either side is a hello. From then on, both sides use the highest common
       version.
    2. After a failure, the connection receives and sends nothing.
    3. Messages that were received before a failure are returned before the failure.
    4. A frame over the limit is rejected before memory is allocated for it. The limit of a listener
       depends on its peer (`peer_frame_bytes_max`). Before the hello, the limit is the maximum size
       of a hello.
    5. An empty frame of the correct protocol and version is a keep-alive.
    6. Each frame's payload has its own memory. A view of the payload stays valid as long as the
       view exists.
    7. An idle connection has no read buffer, because nearly all of a thousand connections are idle.
       A connection is idle if it has received no part of the next frame, or only a part of the
       frame's header. Before the hello, each connection has its own read buffer of
       `HELLO_BYTES_MAX`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

import numpy as np

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.record import FRAME_BYTES_MAX
from waltz_core.wire import codec
from waltz_core.wire.codec import FRAME_HEADER, FrameHeader
from waltz_core.wire.messages import Buffer, Hello, Message, WireProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO_BYTES_MAX: Final = 4 * 1024
# Frames up to this size are accepted from each peer, whatever `peer_frame_bytes_max` returns.
SMALL_FRAME_BYTES_MAX: Final = 64 * 1024
# The size of a read buffer. Only the first part of a large frame is read into it; the other parts
# are read into the frame's own memory.
_READ_BUFFER_BYTES: Final = 64 * 1024
_READ_BUFFERS_KEPT_MAX: Final = 16
# The first bytes of a TLS peer: the record type (alert or handshake), and the major version 3.
_TLS_RECORD_STARTS: Final = ((0x15, 3), (0x16, 3))
FOUND_TLS_TEXT: Final = "expected plain TCP, found TLS"
assert FRAME_HEADER.size < HELLO_BYTES_MAX < _READ_BUFFER_BYTES
_OLD_PEER_HINTS: Final = {
    WireProtocol.CLIENT: "servers before version 2 do not support append locks, and servers "
    "before version 3 cannot report that a client is ahead of the log. Hint: upgrade the "
    "server.",
    WireProtocol.STORAGE: "servers and storages of Waltz 0.13 and of this version cannot work "
    "together. Hint: migrate the whole cluster at once, as docs/compatibility.md describes.",
}


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """The peer's hello has arrived; `version` is the version that both sides use from now on."""

    peer: Hello
    version: int


@dataclass(frozen=True, slots=True)
class ProtocolFailed:
    """The peer has violated the protocol; the caller must close the connection."""

    error: RemoteProtocolError


ConnectionEvent: TypeAlias = HelloReceived | Message | ProtocolFailed


class Connection:
    """One end of a connection: the agreed version, and the frame that is being received."""

    _read_buffers: ClassVar[list[memoryview]] = []

    def __init__(
        self,
        protocol: WireProtocol,
        *,
        is_listener: bool,
        versions: tuple[int, ...] | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        assert protocol is not WireProtocol.HELLO
        assert FRAME_HEADER.size < frame_bytes_max <= FRAME_BYTES_MAX
        self.protocol = protocol
        self.version: int | None = None
        self.peer: Hello | None = None
        self.failure: RemoteProtocolError | None = None
        own_versions = protocol.versions_accepted if is_listener else protocol.versions_offered
        self._versions = own_versions if versions is None else versions
        self._text = protocol.listener_text if is_listener else protocol.dialler_text
        self._frame_bytes_max = frame_bytes_max
        # Returns the size limit for received frames of more than `SMALL_FRAME_BYTES_MAX` bytes.
        self.peer_frame_bytes_max: Callable[[], int] | None = None
        self._read_buffer: memoryview | None = None
        self._read_buffer_end = 0
        self._header_part = b""  # the received part of a frame header
        # An incomplete frame: its header, its memory, and the number of bytes received.
        self._header: FrameHeader | None = None
        self._frame = memoryview(b"")
        self._frame_end = 0

    # ------------------------------------------------------------------ sending

    def first_bytes(self) -> bytes:
        """Return the hello of this side. Send it at once, without waiting for the peer's hello."""
        return codec.encode_hello(Hello(self._versions, self._text))

    def send(self, message: Message) -> list[Buffer]:
        """Encode a message as a frame; return the buffers to write in order.

        Raises LocalProtocolError before the peer's hello has arrived, and after a failure. Also
        raises it for a frame over the limit, and for a message that the agreed version cannot
        express.
        """
        if self.version is None or self.failure is not None:
            state = "has failed" if self.failure else "has not negotiated a version yet"
            raise LocalProtocolError(
                f"cannot send {type(message).__name__}, because the connection {state}"
            )
        assert message.protocol is self.protocol
        buffers = codec.encode(message, self.version)
        frame_bytes = sum(map(len, buffers))
        if frame_bytes > self._frame_bytes_max:
            raise LocalProtocolError(
                f"{type(message).__name__} is too large: its frame has {frame_bytes} bytes, "
                f"the limit is {self._frame_bytes_max}"
            )
        return buffers

    def keep_alive(self) -> bytes:
        """Return the bytes of an empty frame, as a keep-alive."""
        if self.version is None:
            return codec.encode_keep_alive(WireProtocol.HELLO, codec.HELLO_VERSION)
        return codec.encode_keep_alive(self.protocol, self.version)

    # ------------------------------------------------------------------ receiving

    @property
    def is_inside_frame(self) -> bool:
        """Whether the peer has sent only a part of a frame so far."""
        return self._header is not None or self._read_buffer_end > 0 or bool(self._header_part)

    @property
    def incomplete_bytes(self) -> int:
        """How many bytes of an incomplete large frame have arrived; 0 without such a frame."""
        return 0 if self._header is None else self._frame_end

    def receive(self, data: Buffer) -> list[ConnectionEvent]:
        """Process received bytes; return the events that they complete, in order."""
        view = memoryview(data)
        events: list[ConnectionEvent] = []
        while view and self.failure is None:
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            events += self.buffer_updated(count)
        return events

    def get_buffer(self) -> memoryview:
        """Return the buffer into which the next bytes must be read; it is never empty."""
        if self._header is None:
            if self._read_buffer is None:
                self._take_read_buffer()
                assert self._read_buffer is not None
            return self._read_buffer[self._read_buffer_end :]
        return self._frame[self._frame_end :]

    def buffer_updated(self, count: int) -> list[ConnectionEvent]:
        """Process `count` bytes, read into `get_buffer()`; return the completed events in order."""
        assert count > 0
        if self.failure is not None:
            return []
        events: list[ConnectionEvent] = []
        try:
            if self._header is None:
                self._read_buffer_end += count
                self._process_read_buffer(events)
                self._return_read_buffer()
            else:
                self._frame_end += count
                if self._frame_end == len(self._frame):
                    self._end_frame(events)
        except RemoteProtocolError as error:
            self.failure = error
            self._header, self._frame, self._frame_end = None, memoryview(b""), 0
            self._read_buffer, self._read_buffer_end = None, 0
            events.append(ProtocolFailed(error))
        return events

    def _take_read_buffer(self) -> None:
        """Get a read buffer, and copy the received part of a frame header into it (rule 7)."""
        if self.version is None:
            self._read_buffer = memoryview(bytearray(HELLO_BYTES_MAX))
        elif self._read_buffers:
            self._read_buffer = self._read_buffers.pop()
        else:
            self._read_buffer = memoryview(bytearray(_READ_BUFFER_BYTES))
        self._read_buffer_end = len(self._header_part)
        self._read_buffer[: self._read_buffer_end] = self._header_part
        self._header_part = b""

    def _return_read_buffer(self) -> None:
        buffer, self._read_buffer = self._read_buffer, None
        assert buffer is not None
        self._header_part, self._read_buffer_end = bytes(buffer[: self._read_buffer_end]), 0
        if len(buffer) == _READ_BUFFER_BYTES and len(self._read_buffers) < _READ_BUFFERS_KEPT_MAX:
            self._read_buffers.append(buffer)

    def _process_read_buffer(self, events: list[ConnectionEvent]) -> None:
        """Process the complete frames in the read buffer; move an incomplete one elsewhere."""
        buffer, end, offset = self._read_buffer, self._read_buffer_end, 0
        assert buffer is not None, "buffer_updated without get_buffer"
        while end - offset >= FRAME_HEADER.size:
            header = codec.decode_frame_header(buffer, offset)
            self._check_header(header)
            offset += FRAME_HEADER.size
            if header.payload_bytes > end - offset:
                # NumPy does not clear this memory: that would be most of the cost of a large frame.
                self._frame = np.empty(header.payload_bytes, dtype=np.uint8).data
                self._frame_end = end - offset
                self._frame[: end - offset] = buffer[offset:end]
                self._header = header
                offset = end
            elif header.payload_bytes:
                payload = bytes(buffer[offset : offset + header.payload_bytes])
                offset += header.payload_bytes
                self._process_payload(memoryview(payload), events)
        if offset:
            buffer[: end - offset] = bytes(buffer[offset:end])
        self._read_buffer_end = end - offset

    def _end_frame(self, events: list[ConnectionEvent]) -> None:
        payload = self._frame
        self._header = None
        self._frame = memoryview(b"")
        self._process_payload(payload, events)

    def _check_header(self, header: FrameHeader) -> None:
        """Raise RemoteProtocolError unless this frame is allowed now (rules 1 and 4)."""
        if self.version is None:
            protocol, version, limit = WireProtocol.HELLO, codec.HELLO_VERSION, HELLO_BYTES_MAX
        else:
            protocol, version, limit = self.protocol, self.version, self._frame_bytes_max
        if self.version is None and (header.magic, header.version >> 8) in _TLS_RECORD_STARTS:
            raise RemoteProtocolError(FOUND_TLS_TEXT)
        if header.magic != protocol.magic or header.version != version:
            raise RemoteProtocolError(
                f"expected a frame of protocol {chr(protocol.magic)!r} version {version}, "
                f"found {chr(header.magic)!r} version {header.version}"
            )
        if header.payload_bytes > SMALL_FRAME_BYTES_MAX and self.peer_frame_bytes_max is not None:
            limit = min(limit, self.peer_frame_bytes_max())
        if not 0 <= header.payload_bytes <= limit - FRAME_HEADER.size:
            raise RemoteProtocolError(
                f"expected a frame with a payload of at most {limit - FRAME_HEADER.size} "
                f"bytes, found {header.payload_bytes} as its length"
            )

    def _version_hint(self, peer: Hello) -> str:
        """Return a hint if all versions of the peer are older than those of this side."""
        is_older = bool(peer.versions) and max(peer.versions) < min(self._versions)
        hint = _OLD_PEER_HINTS.get(self.protocol)
        return f"; {hint}" if is_older and hint else ""

    def _process_payload(self, payload: memoryview, events: list[ConnectionEvent]) -> None:
        if self.version is not None:
            events.append(codec.decode(self.protocol, self.version, payload))
            return
        peer = codec.decode_hello(payload)
        common_versions = set(peer.versions) & set(self._versions)
        if not common_versions:
            raise RemoteProtocolError(
                "the two sides support no common version of protocol "
                f"{chr(self.protocol.magic)!r}: this side supports {list(self._versions)}, "
                f"{peer.text[:80]!r} supports "
                f"{list(peer.versions[:32])}{self._version_hint(peer)}"
            )
        self.peer = peer
        self.version = max(common_versions)
        events.append(HelloReceived(peer, self.version))
