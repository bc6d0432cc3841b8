"""The positions of records in a storage's files, for a reader on the same machine.

With the positions, the reader reads the records from the files itself. If a `RangeRaw` has form
`LOCATIONS`, the `RangeBytes` in the answer contain locations instead of records; lengths and
lineage are as usual. An older storage rejects this form, so the protocol needs no other change.

Rules:
    1. Each location is a run of bytes in a segment file. The locations are in the order of the IDs,
       and there is no gap between their records.
    2. The sizes of the locations and the record lengths in the answer have the same sum.
    3. The reader requests each segment file at the storage's Unix socket. With access control, a
       request also contains the ticket of the last answer. The socket then has another name. So
       older readers, which have no ticket, do not find the socket.
"""

from collections.abc import Iterable
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

from waltz_core.errors import BadFormat
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.wire.messages import Buffer

# The form of such a request and of its answer, in addition to the forms of `RangeForm`.
LOCATIONS: Final = 2
# The maximum size of the records in one answer, in bytes: their lengths need memory.
LOCATIONS_BYTES_MAX: Final = 64 * 1024 * 1024
_LOCATION_STRUCT: Final = Struct(">qqq")
_SEGMENT_REQUEST_STRUCT: Final = Struct(">iq")
SEGMENT_REQUEST_BYTES: Final = _SEGMENT_REQUEST_STRUCT.size
TICKET_BYTES: Final = 24


class FileLocation(NamedTuple):
    """A run of bytes in a segment file; `segment` is the first ID of this segment."""

    segment: TransactionId
    offset: int
    size: int


def encode_locations(locations: Iterable[FileLocation]) -> bytes:
    """Encode the locations, 24 bytes each."""
    return b"".join(_LOCATION_STRUCT.pack(*location) for location in locations)


def decode_locations(packed: Buffer, records_bytes: int) -> tuple[FileLocation, ...]:
    """Decode locations; raise BadFormat if they are not valid.

    `records_bytes` is the expected sum of their sizes.
    """
    if len(packed) % _LOCATION_STRUCT.size:
        raise BadFormat(
            f"locations of records: expected {_LOCATION_STRUCT.size} bytes each, found "
            f"{len(packed)} bytes in total"
        )
    locations = tuple(
        FileLocation(TransactionId(segment), offset, size)
        for segment, offset, size in _LOCATION_STRUCT.iter_unpack(packed)
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
    """Return the name of the Unix socket at which a storage passes open segment files to readers.

    A cluster has one storage for each address, so the name is unique on a machine.
    """
    prefix = "waltz-tickets" if with_tickets else "waltz"
    # An address can be longer than the maximum length of a socket name.
    return f"{prefix}/{cluster_key.hex()}/{sha256(address.encode()).hexdigest()[:32]}"


def encode_segment(partition_id: PartitionId, segment: TransactionId, ticket: bytes) -> bytes:
    """Encode the request for a segment file; without access control, the ticket is empty."""
    return _SEGMENT_REQUEST_STRUCT.pack(partition_id, segment) + ticket


def decode_segment(request: bytes) -> tuple[PartitionId, TransactionId, bytes]:
    """Decode the request for a segment file; return its partition, first ID and ticket.

    The ticket consists of all bytes after `SEGMENT_REQUEST_BYTES`.
    """
    partition_id, segment = _SEGMENT_REQUEST_STRUCT.unpack_from(request)
    return PartitionId(partition_id), TransactionId(segment), request[SEGMENT_REQUEST_BYTES:]
