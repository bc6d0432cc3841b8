"""The messages that only the original's versions have: S 0, and the mount's answer up to L 2.

Why it stands alone: our own nodes never send them to each other. A server of ours speaks S 0 to a
storage of the original, a storage of ours hears it from a server of the original, and both have
to translate. What S 0 and S 1 have in common stands in `messages.py`. The rules are those of
`messages.py`; layouts and meaning are those of interop.md 2 and 3.1.

Prefix of S 0: type (1 byte), session id (8), sequence (8), partition id (4), echoed by answers.
`is_offline` marks the requests of the original's offline recovery tool.
"""

from typing import Annotated, ClassVar

from waltz_core.record import Record, RecordHeader
from waltz_core.values import value
from waltz_core.wire.messages import (
    Bool,
    ClientMessage,
    FieldKind,
    Headers,
    Int32,
    Int64,
    Records,
    StorageMessage,
    TextOrNull,
)

# (class, method, file or None, line) of each frame
Stack = Annotated[tuple[tuple[str, str, str | None, int], ...], FieldKind.STACK]
PresentRecord = Annotated[Record | None, FieldKind.PRESENT_RECORD]
PresentHeader = Annotated[RecordHeader | None, FieldKind.PRESENT_HEADER]


# ---------------------------------------------------------------------------------------------
# L 0 to L 2


@value(frozen=True, slots=True)
class MountOutcome(ClientMessage):
    """As `MountResponse`, before it could tell why not."""

    code = 1
    until: ClassVar[int | None] = 2
    is_ready: Bool


# ---------------------------------------------------------------------------------------------
# S 0


@value(frozen=True, slots=True)
class OriginalStorageMessage(StorageMessage):
    """A message that S 1 does not have: of ours only PREPARE raises a session."""

    until: ClassVar[int | None] = 0


@value(frozen=True, slots=True)
class LastSessionInfoRequest(OriginalStorageMessage):
    """Ask for the marks in the control file; raises the storage's session."""

    code = 2
    is_offline: Bool


@value(frozen=True, slots=True)
class LastSessionInfoResponse(OriginalStorageMessage):
    """What the control file says of the partition."""

    code = 3
    last_session: Int64
    low_water_mark: Int64
    local_low_water_mark: Int64


@value(frozen=True, slots=True)
class SetLowWaterMarkRequest(OriginalStorageMessage):
    """Write session and mark into the control file; refused where the log reaches beyond it."""

    code = 4
    low_water_mark: Int64
    is_offline: Bool


@value(frozen=True, slots=True)
class TruncateRequest(OriginalStorageMessage):
    """Cut everything after `last_to_keep`; answered by `MaxTransactionIdResponse`."""

    code = 5
    last_to_keep: Int64
    is_offline: Bool


@value(frozen=True, slots=True)
class AppendRecordsRequest(OriginalStorageMessage):
    """Append records that follow the storage's last one without a gap."""

    code = 6
    records: Records
    is_offline: Bool


@value(frozen=True, slots=True)
class FailureResponse(OriginalStorageMessage):
    """What was asked for is not done, and why, as a Java exception says it."""

    code = 8
    text: TextOrNull
    stack: Stack


@value(frozen=True, slots=True)
class RecordHeaderRequest(OriginalStorageMessage):
    """Read one record's header."""

    code = 9
    transaction_id: Int64


@value(frozen=True, slots=True)
class RecordHeaderResponse(OriginalStorageMessage):
    """The header, or None where there is no such record."""

    code = 10
    header: PresentHeader


@value(frozen=True, slots=True)
class RecordRequest(OriginalStorageMessage):
    """Read one record."""

    code = 11
    transaction_id: Int64


@value(frozen=True, slots=True)
class RecordResponse(OriginalStorageMessage):
    """The record, or None where there is none."""

    code = 12
    record: PresentRecord


@value(frozen=True, slots=True)
class MaxTransactionIdRequest(OriginalStorageMessage):
    """Ask for the last id of the log, -1 for an empty one."""

    code = 13
    is_offline: Bool


@value(frozen=True, slots=True)
class MaxTransactionIdResponse(OriginalStorageMessage):
    """The last id of the log; answers types 13 and 5."""

    code = 14
    transaction_id: Int64


@value(frozen=True, slots=True)
class RecordHeaderListRequest(OriginalStorageMessage):
    """Read headers from `first` on."""

    code = 15
    first: Int64
    count_max: Int32


@value(frozen=True, slots=True)
class RecordHeaderListResponse(OriginalStorageMessage):
    """What there is of them, maybe nothing."""

    code = 16
    headers: Headers


@value(frozen=True, slots=True)
class RecordListRequest(OriginalStorageMessage):
    """Read records from `first` on."""

    code = 17
    first: Int64
    count_max: Int32


@value(frozen=True, slots=True)
class RecordListResponse(OriginalStorageMessage):
    """What there is of them, maybe nothing."""

    code = 18
    records: Records
