"""Encodes messages to frames and decodes frames, according to the tables of messages.

The codec keeps no state of a connection. Decoding either returns a message or raises
`RemoteProtocolError`, whatever the bytes. Encoding raises `LocalProtocolError` if the version
cannot express the message.

There is one layout for each message class and version. A layout joins neighboring fields of fixed
size into one `struct` call, and has one function for each field of variable size.

Rules:
    1. `decode(encode(m)) == m` for every value that the version can express. The codec silently
       omits only the fields that messages.py marks `is_extra`.
    2. Bytes after the last field are an error.
    3. Large byte fields are never copied: encoding returns the caller's buffers, decoding returns
       views of the frame.
"""

import dataclasses
import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, get_type_hints

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.wire import admin_messages, messages
from waltz_core.wire.fields import (
    EMPTY_VALUES,
    FIXED_FORMATS,
    VARIABLE_FORMATS,
    FieldReader,
    FieldWriter,
    read_count,
    read_text,
)
from waltz_core.wire.messages import Buffer, FieldKind, Hello, Message, WireProtocol

FRAME_HEADER: Final = struct.Struct(">Bhi")  # magic, version, payload length
HELLO_VERSION: Final = 0
_INT32: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")
assert FRAME_HEADER.size == 7


class FrameHeader(NamedTuple):
    """The header of a frame. `payload_bytes` is the received number, which may be negative."""

    magic: int
    version: int
    payload_bytes: int


# ---------------------------------------------------------------------------------------------
# Frames


def decode_frame_header(data: Buffer, offset: int = 0) -> FrameHeader:
    """Decode a frame header of 7 bytes; the caller has checked that `data` contains all of them."""
    return FrameHeader._make(FRAME_HEADER.unpack_from(data, offset))


def encode_keep_alive(protocol: WireProtocol, version: int) -> bytes:
    """Return the bytes of a keep-alive: an empty frame (docs/design/wire-format.md 1.1)."""
    return FRAME_HEADER.pack(protocol.magic, version, 0)


def encode_hello(hello: Hello) -> bytes:
    """Return the bytes of a complete hello frame."""
    text = hello.text.encode()
    payload = struct.pack(f">i{len(hello.versions)}h", len(hello.versions), *hello.versions)
    payload += _INT32.pack(len(text)) + text
    return FRAME_HEADER.pack(WireProtocol.HELLO.magic, HELLO_VERSION, len(payload)) + payload


def decode_hello(payload: Buffer) -> Hello:
    """Decode the payload of a hello; raise RemoteProtocolError for invalid bytes."""
    view = memoryview(payload)
    values: list[Any] = []
    try:
        count, offset = read_count(view, 0, _INT16.size)
        versions = struct.unpack_from(f">{count}h", view, offset)
        offset = read_text(view, offset + count * _INT16.size, values)
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the hello message cannot be decoded: {error}") from error
    if offset != len(view):
        raise RemoteProtocolError(
            f"hello message: expected no bytes after its last field, found {len(view) - offset}"
        )
    return Hello(versions=versions, text=values[0])


def encode(message: Message, version: int) -> list[Buffer]:
    """Encode a message as a frame; return the buffers to write in order.

    Some buffers belong to the message itself (rule 3). The caller must not change these buffers
    until they are written. Raises LocalProtocolError if this version cannot express the message.
    """
    layout = _layout_of(type(message), version)
    out = FieldWriter()
    try:
        for write in layout.writers:
            write(message, out)
    except (struct.error, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"{layout.name} cannot be encoded in version {version}: {error}"
        ) from error
    if not out.finished:
        header = FRAME_HEADER.pack(layout.magic, version, len(out.small_bytes) + 1)
        return [header + layout.code_byte + out.small_bytes]
    buffers = out.finish()
    payload_bytes = sum(map(len, buffers)) + 1
    header = FRAME_HEADER.pack(layout.magic, version, payload_bytes) + layout.code_byte
    buffers[0] = header + buffers[0]
    return buffers


def decode(protocol: WireProtocol, version: int, payload: memoryview) -> Message:
    """Decode the message in a frame's payload; raise RemoteProtocolError for invalid bytes."""
    if len(payload) == 0:
        raise RemoteProtocolError(
            f"protocol {protocol.name}, version {version}: expected a message type, found an "
            "empty payload"
        )
    layout = _layouts(protocol, version).get(payload[0])
    if layout is None:
        raise RemoteProtocolError(
            f"protocol {protocol.name}, version {version}: there is no message with type "
            f"{payload[0]}"
        )
    values: list[Any] = []
    offset = 1
    try:
        for read in layout.readers:
            offset = read(payload, offset, values)
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"{layout.name}, version {version}, cannot be decoded at byte {offset} of "
            f"{len(payload)}: {error}"
        ) from error
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{layout.name}, version {version}: {error}") from error
    if offset != len(payload):
        raise RemoteProtocolError(
            f"{layout.name}, version {version}: expected no bytes after its last field, "
            f"found {len(payload) - offset}"
        )
    message: Message = layout.make(*values)
    return message


# ---------------------------------------------------------------------------------------------
# Layouts


_Writer: TypeAlias = Callable[[Message, FieldWriter], None]


class _MessageLayout(NamedTuple):
    """The layout of one message class in one version: how its frame is written and read."""

    name: str
    magic: int
    code_byte: bytes
    make: Callable[..., Message]
    writers: tuple[_Writer, ...]
    readers: tuple[FieldReader, ...]


# Layouts are created on demand and never change. There are a few dozen classes and few versions.
_layouts_by_message: dict[tuple[type[Message], int], _MessageLayout] = {}
_tables_by_version: dict[tuple[WireProtocol, int], dict[int, _MessageLayout]] = {}


def _layouts(protocol: WireProtocol, version: int) -> dict[int, _MessageLayout]:
    """Return the layouts of all messages in a version of a protocol, by type code."""
    layouts = _tables_by_version.get((protocol, version))
    if layouts is None:
        layouts = _tables_by_version[protocol, version] = _make_table(protocol, version)
    return layouts


def _layout_of(message_class: type[Message], version: int) -> _MessageLayout:
    layout = _layouts_by_message.get((message_class, version))
    if layout is None:
        layout = _layouts_by_message[message_class, version] = _make_layout(message_class, version)
    return layout


def _make_table(protocol: WireProtocol, version: int) -> dict[int, _MessageLayout]:
    layouts_by_code: dict[int, _MessageLayout] = {}
    for message_class in message_classes(protocol):
        if _exists_in_version(message_class, version):
            assert message_class.code not in layouts_by_code, (
                "messages.py rule 3: a code is used twice"
            )
            layouts_by_code[message_class.code] = _layout_of(message_class, version)
    return layouts_by_code


def message_classes(protocol: WireProtocol) -> list[type[Message]]:
    """Return all classes of the tables that have a type code, in the order of their files."""
    return [
        value
        for table in (messages, admin_messages)
        for value in vars(table).values()
        if isinstance(value, type)
        and issubclass(value, Message)
        and getattr(value, "protocol", None) is protocol
        and hasattr(value, "code")
    ]


def _exists_in_version(message_class: type[Message], version: int) -> bool:
    last_version = message_class.until
    return message_class.since <= version and (last_version is None or version <= last_version)


def _make_layout(message_class: type[Message], version: int) -> _MessageLayout:
    protocol = message_class.protocol
    if not _exists_in_version(message_class, version):
        raise LocalProtocolError(
            f"{message_class.__name__} is not in version {version} of protocol {protocol.name}"
        )
    hints = get_type_hints(message_class, include_extras=True)
    writers: list[_Writer] = []
    readers: list[FieldReader] = []
    run: list[tuple[str, FieldKind]] = []

    def end_run() -> None:
        if run:
            write, read = _fixed_run(tuple(run))
            writers.append(write)
            readers.append(read)
            run.clear()

    for field in dataclasses.fields(message_class):
        kind: FieldKind = hints[field.name].__metadata__[0]
        if field.metadata.get("since", 0) > version:
            end_run()
            write, read = _absent_field(field, kind)
        elif kind in FIXED_FORMATS:
            run.append((field.name, kind))
            continue
        else:
            end_run()
            write, read = _variable_field(field.name, kind)
        writers.append(write)
        readers.append(read)
    end_run()
    return _MessageLayout(
        name=message_class.__name__,
        magic=protocol.magic,
        code_byte=bytes((message_class.code,)),
        make=message_class,
        writers=tuple(writers),
        readers=tuple(readers),
    )


def _fixed_run(run: tuple[tuple[str, FieldKind], ...]) -> tuple[_Writer, FieldReader]:
    """Return the writer and the reader of neighboring fields of fixed size."""
    layout = struct.Struct(">" + "".join(FIXED_FORMATS[kind].letter for _, kind in run))
    pack, unpack_from, size = layout.pack, layout.unpack_from, layout.size
    names = [name for name, _ in run]
    get = attrgetter(*names)
    is_single = len(names) == 1
    value_encoders = [
        (i, FIXED_FORMATS[kind].to_wire)
        for i, (_, kind) in enumerate(run)
        if FIXED_FORMATS[kind].to_wire
    ]
    value_decoders = [
        (i, FIXED_FORMATS[kind].from_wire)
        for i, (_, kind) in enumerate(run)
        if FIXED_FORMATS[kind].from_wire
    ]

    def write(message: Message, out: FieldWriter) -> None:
        if not value_encoders and not is_single:
            out.small_bytes += pack(*get(message))
            return
        values = [get(message)] if is_single else list(get(message))
        for index, convert in value_encoders:
            assert convert is not None
            values[index] = convert(values[index])
        out.small_bytes += pack(*values)

    def read(view: memoryview, at: int, values: list[Any]) -> int:
        raw_values = unpack_from(view, at)
        if value_decoders:
            converted = list(raw_values)
            for index, convert in value_decoders:
                assert convert is not None
                converted[index] = convert(converted[index])
            values += converted
        else:
            values += raw_values
        return at + size

    return write, read


def _variable_field(name: str, kind: FieldKind) -> tuple[_Writer, FieldReader]:
    put, read = VARIABLE_FORMATS[kind]
    get = attrgetter(name)

    def write(message: Message, out: FieldWriter) -> None:
        put(get(message), out)

    return write, read


def _absent_field(field: "dataclasses.Field[Any]", kind: FieldKind) -> tuple[_Writer, FieldReader]:
    """Return the writer and the reader of a field that this version does not have.

    The reader returns the field's empty value. The writer raises LocalProtocolError for any other
    value. If the field is extra, the writer accepts any value and does not send it.
    """
    is_extra = field.metadata.get("is_extra", False)
    empty = field.default if is_extra else EMPTY_VALUES[kind]
    get = attrgetter(field.name)

    def write(message: Message, _out: FieldWriter) -> None:
        if not is_extra and get(message) != empty:
            raise LocalProtocolError(
                f"field {field.name} of {type(message).__name__} cannot be sent to a peer "
                "with this older version"
            )

    def read(_view: memoryview, at: int, values: list[Any]) -> int:
        values.append(empty)
        return at

    return write, read
