"""The positions of a range's records in a storage's files, for a reader on the same machine.

A storage answers a `RangeRaw` of form `LOCATIONS` with `RangeBytes` that contain lengths and
lineage as usual, and these locations instead of the records. An older storage rejects the form, so
nothing else of the protocol changes.

Rules:
    1. The locations are runs of a segment file's bytes, in the order of the ids, without a gap
       between their records.
    2. Their sizes add up to the lengths of the answer.
    3. The reader requests each segment file at the storage's Unix socket. With access control, the
       socket has another name, and a request also contains the ticket of the last answer: older
       readers, which have no ticket, do not find the name.
"""

from collections.abc import Iterable
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

from waltz_core.errors import BadFormat
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.wire.messages import Buffer

# The form of the request and the answer, in addition to those of `RangeForm`.
LOCATIONS: Final = 2
# The limit of the records in one answer, in bytes, because their lengths take memory.
LOCATIONS_BYTES_MAX: Final = 64 * 1024 * 1024
_LOCATION: Final = Struct(">qqq")
_SEGMENT: Final = Struct(">iq")
SEGMENT_REQUEST_BYTES: Final = _SEGMENT.size
TICKET_BYTES: Final = 24


class FileLocation(NamedTuple):
    """A run of bytes of the segment whose first ID is `segment`."""

    segment: TransactionId
    offset: int
    size: int


def encode_locations(locations: Iterable[FileLocation]) -> bytes:
    """Return the locations, 24 bytes each."""
    return b"".join(_LOCATION.pack(*location) for location in locations)


def decode_locations(packed: Buffer, records_bytes: int) -> tuple[FileLocation, ...]:
    """Decode the locations of `records_bytes` bytes of records; raise BadFormat if not valid."""
    if len(packed) % _LOCATION.size:
        raise BadFormat(
            f"locations of records: expected {_LOCATION.size} bytes each, found "
            f"{len(packed)} bytes in total"
        )
    locations = tuple(
        FileLocation(TransactionId(segment), offset, size)
        for segment, offset, size in _LOCATION.iter_unpack(packed)
    )
    for location in locations:
        if location.segment < 0 or location.offset < 0 or location.size <= 0:
            raise BadFormat(
                f"locations of records: expected a run of bytes in a segment, found {location}"
            )
    total = sum(location.size for location in locations)
    if total != records_bytes:
        raise BadFormat(
            f"locations of records: expected {records_bytes} bytes of records, found {total}"
        )
    return locations


def socket_name_of(cluster_key: bytes, address: str, *, with_tickets: bool) -> str:
    """Return the socket name under which the storage of an address passes its open segments.

    A cluster has one storage for each address, so the name is unique on a machine.
    """
    prefix = "waltz-tickets" if with_tickets else "waltz"
    # An address may be longer than a socket name.
    return f"{prefix}/{cluster_key.hex()}/{sha256(address.encode()).hexdigest()[:32]}"


def encode_segment(partition_id: PartitionId, segment: TransactionId, ticket: bytes) -> bytes:
    """Return the request for a segment; without access control the ticket is empty."""
    return _SEGMENT.pack(partition_id, segment) + ticket


def decode_segment(request: bytes) -> tuple[PartitionId, TransactionId, bytes]:
    """Return the requested segment and the ticket, all bytes after `SEGMENT_REQUEST_BYTES`."""
    partition_id, segment = _SEGMENT.unpack_from(request)
    return PartitionId(partition_id), TransactionId(segment), request[SEGMENT_REQUEST_BYTES:]
