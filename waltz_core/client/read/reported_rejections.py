"""The newest rejections of a partition, as its owner reports them."""

import struct
from typing import NamedTuple

from waltz_core import errors
from waltz_core.records.record import REQ_ID, ReqId, TransactionId
from waltz_core.wire.messages import RejectionsResponse, RowOutcomeCode


class Rejection(NamedTuple):
    """One rejected transaction: its time, request ID and reason, and the conflicting transaction.

    `time_ms` is the wall clock time of the server, in milliseconds since 1970 (UTC). `req_id` is
    the request ID of the rejected transaction, whose `client_id` names its client. `reason` is
    LOCK, AHEAD or TOO_LARGE. For LOCK, `conflicting` is the ID of the conflicting transaction, or a
    higher ID if the server does not know the exact one. For other reasons, it is -1.
    """

    time_ms: int
    req_id: ReqId
    reason: RowOutcomeCode
    conflicting: TransactionId


def decode_rejections(answer: RejectionsResponse) -> list[Rejection]:
    """Return the rejections in an answer; raise RemoteProtocolError if they are not valid."""
    count = len(answer.reasons)
    sizes = (len(answer.stamps_ms), len(answer.request_ids), len(answer.conflicting))
    if sizes != (8 * count, REQ_ID.size * count, 8 * count):
        raise errors.RemoteProtocolError(
            f"rejections: expected values for {count} rows, found {sizes[0] // 8} stamps, "
            f"{sizes[1] / REQ_ID.size:g} request IDs and {sizes[2] // 8} conflicting IDs"
        )
    try:
        reasons = [RowOutcomeCode(code) for code in bytes(answer.reasons)]
    except ValueError as error:
        raise errors.RemoteProtocolError(
            f"rejections: expected reasons in 0..{max(RowOutcomeCode)}, found {error}"
        ) from error
    int64s = struct.Struct(f">{count}q")
    return [
        Rejection(time_ms, ReqId.from_bytes(req_id), reason, TransactionId(conflicting))
        for time_ms, req_id, reason, conflicting in zip(
            int64s.unpack(answer.stamps_ms),
            _split_fixed_width(bytes(answer.request_ids), REQ_ID.size),
            reasons,
            int64s.unpack(answer.conflicting),
            strict=True,
        )
    ]


def _split_fixed_width(data: bytes, width: int) -> list[bytes]:
    return [data[offset : offset + width] for offset in range(0, len(data), width)]
