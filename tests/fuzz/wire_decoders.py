"""Decoders of bytes from sockets: frames, hellos, streams, batches, answers with records."""

import asyncio
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa

from tests.fuzz.decoder import Decoder
from tests.golden.wire_examples import make_example, message_classes
from waltz_core.client.model.predecessors import _predecessors_in
from waltz_core.client.read.ranges import RangeQuery, ReaderConnection, chunk_from_server
from waltz_core.client.read.reported_rejections import decode_rejections
from waltz_core.client.stream.cursor import FeedCursor
from waltz_core.client.stream.outcome_tracker import _decode_outcome
from waltz_core.errors import (
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    DataLoss,
    RemoteProtocolError,
    TooLarge,
)
from waltz_core.records import batches, raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, ReqId, next_chain
from waltz_core.replication.replica_repair import (
    decode_damaged_ranges,
    verify_batches,
    verify_records,
)
from waltz_core.server.read.reads import _check_range, _FetchKey
from waltz_core.transport import client_hello
from waltz_core.wire import codec, messages
from waltz_core.wire.codec import FRAME_HEADER
from waltz_core.wire.connection import Connection, HelloReceived, ProtocolFailed
from waltz_core.wire.messages import Hello, RangeForm, WireProtocol
from waltz_core.wire.record_locations import (
    LOCATIONS,
    SEGMENT_REQUEST_BYTES,
    TICKET_BYTES,
    FileLocation,
    decode_segment,
    encode_locations,
    encode_segment,
)

PROTOCOLS = (WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN)
REQ_ID = ReqId(1, 1, 0, 1)
# A reader requests a whole log, so a range may state more transactions than any memory can hold.
QUERY_LAST = 1 << 40


# ---------------------------------------------------------------------------------------------
# frames, hellos, streams


def frames_of(protocol: WireProtocol) -> list[bytes]:
    """Return a frame of each message of each version."""
    return [
        bytes.fromhex(make_example(message_class, version)["frame_hex"])
        for version in protocol.versions
        for message_class in message_classes(protocol, version)
    ]


def decode_message(protocol: WireProtocol, data: bytes) -> messages.Message | None:
    """Return the message of a frame; None if it is of another protocol or version."""
    if len(data) < FRAME_HEADER.size:
        return None
    magic, version, _ = codec.decode_frame_header(data)
    if magic != protocol.magic or version not in protocol.versions:
        return None
    return codec.decode(protocol, version, memoryview(data)[FRAME_HEADER.size :])


def decode_frame(protocol: WireProtocol, data: bytes) -> None:
    """Decode a frame, and check that it is encoded to the same bytes."""
    message = decode_message(protocol, data)
    if message is not None:
        version = codec.decode_frame_header(data).version
        again = b"".join(codec.encode(message, version))
        assert codec.decode(protocol, version, memoryview(again)[FRAME_HEADER.size :]) == message


def with_header(protocol: WireProtocol, data: bytes) -> bytes:
    """Return bytes as the payload of a frame of one of the protocol's versions."""
    versions, stated = protocol.versions, int.from_bytes(data[1:3], "big")
    version = stated if stated in versions else versions[stated % len(versions)]
    payload = data[FRAME_HEADER.size :]
    return FRAME_HEADER.pack(protocol.magic, version, len(payload)) + payload


def hellos() -> list[bytes]:
    encoded_hellos = [
        Connection(protocol, is_listener=True).first_bytes() for protocol in PROTOCOLS
    ]
    return [
        each[FRAME_HEADER.size :] for each in (*encoded_hellos, codec.encode_hello(Hello((), "ü")))
    ]


def decode_hello(data: bytes) -> None:
    """Decode the payload of a hello, which has one encoding only."""
    hello = codec.decode_hello(data)
    assert codec.encode_hello(hello)[FRAME_HEADER.size :] == data


def client_hellos() -> list[bytes]:
    """Return the first bytes of TLS peers: with TLS 1.2 and 1.3."""
    groups = bytes.fromhex("000a 0006 0004 001d 0017")
    shares = bytes.fromhex("002b 0003 02 0304 0033 000a 0008 001d 0004 6b6b6b6b")
    hellos_of_clients = []
    for extensions in (groups, groups + shares):
        body = b"\3\3" + bytes(32) + b"\0" + bytes.fromhex("0002 1301 0100")
        body += len(extensions).to_bytes(2, "big") + extensions
        message = b"\1" + len(body).to_bytes(3, "big") + body
        hellos_of_clients.append(b"\x16\3\1" + len(message).to_bytes(2, "big") + message)
    return hellos_of_clients


def check_client_hello(data: bytes) -> None:
    """Process the first bytes of a peer like a port."""
    if data and client_hello.bytes_needed(data) <= len(data):
        client_hello.reject_reason(data)


def streams() -> list[bytes]:
    """Return the bytes that a peer sends, after two bytes for the receiving end and the seed."""
    byte_streams = []
    for number, protocol in enumerate(PROTOCOLS):
        version = max(protocol.versions_accepted)
        frames = [each for each in frames_of(protocol) if each[1:3] == version.to_bytes(2, "big")]
        for is_listener in (False, True):
            hello = Connection(protocol, is_listener=not is_listener).first_bytes()
            start = bytes((2 * number + is_listener, 7))
            alive = codec.encode_keep_alive(protocol, version)
            byte_streams.append(start + hello + alive + b"".join(frames[:5]))
            byte_streams.append(start + hello + b"".join(frames[-3:]))
    return byte_streams


def receive_stream(data: bytes) -> None:
    """Receive a stream in random pieces; the receiver fails at most once, and then ends."""
    choice, seed = (*data[:2], 0, 0)[:2]
    protocol = PROTOCOLS[choice // 2 % len(PROTOCOLS)]
    near = Connection(protocol, is_listener=bool(choice % 2))
    rng, rest, events = Random(seed), data[2:], []
    while rest:
        size = rng.choice((1, 3, 7, 100, 100_000))
        events += near.receive(rest[:size])
        rest = rest[size:]
    failures = [event for event in events if isinstance(event, ProtocolFailed)]
    assert failures in ([], events[-1:])
    assert not events or isinstance(events[0], HelloReceived | ProtocolFailed)
    if failures:
        assert near.receive(b"more") == []


# ---------------------------------------------------------------------------------------------
# append batches


def append_batches() -> list[bytes]:
    rows = pa.record_batch({"data": pa.array([b"a", None, b"c"], pa.binary())}).drop_null()
    none: list[list[int]] = [[], [], []]
    return [
        batches.encode_append(
            [1, 2, 3],
            [b"first row", b"", b"third"],
            write_locks=[[1], [], [2, 3]],
            read_locks=[[], [4], []],
            append_locks=[[5], [6], []],
            marks=marks,
        )
        for marks in ([0, 7, -1], None)
    ] + [
        batches.encode_append(
            [0] * 3, [b"x" * 50] * 3, write_locks=none, read_locks=none, append_locks=none
        ),
        bytes(batches.encode_append_arrow(rows)),
    ]


def decode_append(data: bytes) -> None:
    """Decode an append batch; the rows are complete, and make records."""
    before = pa.default_memory_pool().bytes_allocated()
    rows = batches.decode_append(data, rows_max=100, bytes_max=1 << 16)
    assert pa.default_memory_pool().bytes_allocated() - before <= 1 << 16
    assert rows.crcs.tolist() == [crc32(row) for row in rows.data.to_pylist()]
    for column in (rows.write_locks, rows.read_locks, rows.append_locks):
        assert column.offsets.size == rows.count + 1
        assert column.offsets[-1] == column.values.size
        assert np.all(column.counts >= 0)
    encoded = batches.encode_records(rows, None, 0, REQ_ID)
    assert crc32(encoded.records) == encoded.records_crc


# ---------------------------------------------------------------------------------------------
# answers with records


def some_records() -> tuple[list[bytes], tuple[LineageEntry, ...]]:
    """Return the records 0..4 and their batches."""
    records = [
        raw_records.encode_record(number, REQ_ID, number % 2, data, crc32(data))
        for number, data in enumerate((b"", b"abc", b"x" * 70, b"de", b"f"))
    ]
    entries, chain = [], GENESIS_CHAIN
    for first, end in pairwise((0, 2, 5)):
        crcs = b"".join(record[-4:] for record in records[first:end])
        chain = next_chain(chain, first, end - 1, 3, crcs)
        entries.append(LineageEntry(first, end - 1, 3, 1_700_000_000_000, chain))
    return records, tuple(entries)


def packed_lengths(records: list[bytes]) -> bytes:
    return b"".join(len(record).to_bytes(4, "big") for record in records)


def frame_of(message: messages.Message) -> bytes:
    return b"".join(codec.encode(message, max(message.protocol.versions)))


def server_ranges() -> list[bytes]:
    records, entries = some_records()
    headers = b"".join(record[:28] for record in records)
    middle = (0, 7, entries)
    whole_log = [
        messages.RangeData(
            REQ_ID, 0, count, count, RangeForm.WHOLE, packed_lengths(part), b"".join(part), *middle
        )
        for count, part in ((5, records), (1, records[:1]), (0, []))
    ]
    found = messages.RangeData(REQ_ID, 0, 5, 5, RangeForm.HEADERS, b"", headers, *middle)
    return [frame_of(each) for each in (*whole_log, found)]


def read_server_range(data: bytes) -> None:
    """Process a server's answer to a read of the whole log, and convert it to Arrow."""
    message = decode_message(WireProtocol.CLIENT, data)
    if not isinstance(message, messages.RangeData):
        return
    form = RangeForm.HEADERS if message.form == RangeForm.HEADERS else RangeForm.WHOLE
    for header_values in ((), (1,)):
        query = RangeQuery(message.first, QUERY_LAST, form, header_values)
        to_arrow(chunk_from_server(0, query, message))


def to_arrow(chunk) -> None:
    columns = list(batches.READ_SCHEMA.names)
    if chunk.form is RangeForm.WHOLE:
        found = batches.range_to_arrow(
            chunk.records, chunk.lengths, chunk.stamps, columns, partition_id=0
        )
        assert [row.data for row in chunk.rows()] == [
            row for batch in found for row in batch.column("data").to_pylist()
        ]
    else:
        columns.remove("data")
        found = batches.headers_to_arrow(chunk.records, chunk.stamps, columns, partition_id=0)
    for each in found:
        each.validate(full=True)


def storage_ranges() -> list[bytes]:
    records, entries = some_records()
    run, lengths = b"".join(records), packed_lengths(records)
    headers = b"".join(record[:28] for record in records)
    locations = encode_locations([FileLocation(0, 128, 100), FileLocation(0, 228, len(run) - 100)])
    forms = (
        (RangeForm.WHOLE, lengths, run),
        (RangeForm.HEADERS, b"", headers),
        (LOCATIONS, lengths, locations),
    )
    return [
        frame_of(
            messages.RangeBytes(
                *(1, 1, 0, 0, 5, form, sizes, content, crc32(content), GENESIS_CHAIN, entries)
            )
        )
        for form, sizes, content in forms
    ]


def with_record_crcs(data: bytes) -> bytes:
    """Return a frame with records whose CRCs fit, and with the CRC of all of them."""
    protocol = next((each for each in PROTOCOLS if data[:1] == bytes((each.magic,))), None)
    try:
        message = None if protocol is None else decode_message(protocol, data)
        if not isinstance(message, messages.RangeData | messages.RangeBytes):
            return data
        run = bytearray(message.records)
        lengths = raw_records.lengths_from_wire(message.lengths, len(run)).tolist()
    except (RemoteProtocolError, BadFormat):
        return data
    end = 0
    for length in lengths:
        start, end = end, end + length
        run[end - 4 : end] = crc32(run[start : end - 4]).to_bytes(4, "big")
    old = bytes(message.records)
    sealed = data.replace(old, bytes(run)) if old else data
    if isinstance(message, messages.RangeBytes):
        crc = message.records_crc.to_bytes(4, "big")
        sealed = sealed.replace(bytes(run) + crc, bytes(run) + crc32(run).to_bytes(4, "big"))
    return sealed


class Answering:
    """A link to a storage that gives one answer."""

    address = "s1:6001"
    is_closed = False

    def __init__(self, message: messages.RangeBytes) -> None:
        self._message = message

    def send(self, request: messages.Message) -> None:
        """Drop the message."""

    def abort(self, reason: str) -> None:
        """Do nothing."""

    async def receive(self):
        return self._message, 0


def read_storage_range(data: bytes) -> None:
    """Process a storage's answer to a read of the whole log."""
    message = decode_message(WireProtocol.STORAGE, data)
    if not isinstance(message, messages.RangeBytes):
        return
    link = ReaderConnection(Answering(message))
    if message.form == LOCATIONS:
        query = RangeQuery(message.first, QUERY_LAST)
        asyncio.run(link.request_locations(0, query, session_id=1, timeout_s=60.0))
        return
    form = RangeForm.HEADERS if message.form == RangeForm.HEADERS else RangeForm.WHOLE
    query = RangeQuery(message.first, QUERY_LAST, form)
    fetch = link.fetch(0, query, session_id=1, high_water_mark=QUERY_LAST, timeout_s=60.0)
    to_arrow(asyncio.run(fetch))


def check_storage_range(data: bytes) -> None:
    """Process a storage's answer like a server, which reads and repairs."""
    message = decode_message(WireProtocol.STORAGE, data)
    if not isinstance(message, messages.RangeBytes):
        return
    uses = [
        partial(_check_range, message, _FetchKey(message.first, QUERY_LAST, 1 << 20, form))
        for form in (RangeForm.WHOLE, RangeForm.HEADERS)
        if message.form == form
    ]
    if message.form == RangeForm.WHOLE:
        uses.append(partial(verify_records, message, first=message.first, last=QUERY_LAST))
    wrong = None
    for use in uses:
        try:
            use()
        except _DAMAGED as error:
            wrong = error
    if wrong is not None:
        raise wrong
    verify_batches(message, GENESIS_CHAIN)  # of records that were verified


# ---------------------------------------------------------------------------------------------
# other answers


def feed_batches() -> list[bytes]:
    headers = b"".join(bytes(REQ_ID.to_bytes()) + each.to_bytes(4, "big") for each in (7, 7, 8))
    picked = b"".join(each.to_bytes(4, "big") for each in (0, 3, 9))
    rest = (1, 2, bytes(range(16)))
    return [
        frame_of(messages.FeedBatch(REQ_ID, 0, 3, headers, *rest)),
        frame_of(messages.FeedBatch(REQ_ID, 0, 10, headers, *rest, picked)),
    ]


def take_feed(data: bytes) -> None:
    """Process a batch of a feed, with a filter and without."""
    message = decode_message(WireProtocol.CLIENT, data)
    if not isinstance(message, messages.FeedBatch):
        return
    for header_values in ((), (7, 8)):
        cursor = FeedCursor(1_000)
        cursor.start_after(-1, header_values)
        cursor.accept_batch(message)


def append_results() -> list[bytes]:
    numbers = b"".join(each.to_bytes(8, "big", signed=True) for each in (9, 10, -1))
    rows = messages.AppendResult(REQ_ID, 10, numbers, bytes((0, 0, 1)), numbers)
    row = messages.AppendResult(REQ_ID, 10, numbers[:8], bytes(1), b"\xff" * 8)
    records, _ = some_records()
    others = messages.Predecessors(REQ_ID, 3, 1, 4, packed_lengths(records), b"".join(records))
    return [frame_of(each) for each in (rows, row, others)]


def take_append_result(data: bytes) -> None:
    """Process the answer to an append."""
    message = decode_message(WireProtocol.CLIENT, data)
    if isinstance(message, messages.AppendResult):
        _decode_outcome(message, max(1, len(message.reasons)))
    elif isinstance(message, messages.Predecessors):
        list(_predecessors_in(message))


def rejection_lists() -> list[bytes]:
    """Return answers with no rejection, and with two of them."""
    numbers = b"".join(each.to_bytes(8, "big", signed=True) for each in (9, -1))
    rows = messages.RejectionsResponse(
        REQ_ID, numbers, 2 * REQ_ID.to_bytes(), bytes((1, 3)), numbers
    )
    return [
        frame_of(each) for each in (messages.RejectionsResponse(REQ_ID, b"", b"", b"", b""), rows)
    ]


def take_rejections(data: bytes) -> None:
    """Process the newest rejections of a partition."""
    message = decode_message(WireProtocol.CLIENT, data)
    if isinstance(message, messages.RejectionsResponse):
        decode_rejections(message)


def segment_requests() -> list[bytes]:
    """Return requests without and with a ticket."""
    return [encode_segment(3, 1 << 33, ticket) for ticket in (b"", bytes(range(TICKET_BYTES)))]


def decode_segment_request(data: bytes) -> None:
    """Decode a request at the Unix socket; each request has one of these two sizes."""
    if len(data) in (SEGMENT_REQUEST_BYTES, SEGMENT_REQUEST_BYTES + TICKET_BYTES):
        assert encode_segment(*decode_segment(data)) == data


def _frames(protocol: WireProtocol) -> Decoder:
    return Decoder(
        f"frames-{protocol.name.lower()}",
        partial(decode_frame, protocol),
        (RemoteProtocolError,),
        partial(frames_of, protocol),
        partial(with_header, protocol),
    )


_DAMAGED = (BadFormat, ChecksumMismatch, RemoteProtocolError)
DECODERS = (
    *map(_frames, PROTOCOLS),
    Decoder("hello", decode_hello, (RemoteProtocolError,), hellos),
    Decoder("client-hello", check_client_hello, (), client_hellos),
    Decoder("stream", receive_stream, (), streams),
    Decoder("append-batch", decode_append, (BadRequest, TooLarge), append_batches),
    Decoder(
        "range-of-server", read_server_range, (*_DAMAGED, DataLoss), server_ranges, with_record_crcs
    ),
    Decoder(
        "range-of-storage",
        read_storage_range,
        (*_DAMAGED, DataLoss),
        storage_ranges,
        with_record_crcs,
    ),
    Decoder("range-at-server", check_storage_range, _DAMAGED, storage_ranges, with_record_crcs),
    Decoder("feed-batch", take_feed, (RemoteProtocolError,), feed_batches),
    Decoder("append-result", take_append_result, (RemoteProtocolError,), append_results),
    Decoder("rejections", take_rejections, (RemoteProtocolError,), rejection_lists),
    Decoder(
        "damaged-ranges",
        decode_damaged_ranges,
        (RemoteProtocolError,),
        lambda: [bytes(7) + b"\1" + bytes(7) + b"\5"],
    ),
    Decoder("segment-request", decode_segment_request, (), segment_requests),
)
