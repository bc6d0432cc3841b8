"""Every message of protocol A: the administration of a storage.

This is a table like `messages.py`, with the same rules. Version 0 has the bytes of Waltz 0.13
(docs/design/wire-format.md 3.2); versions 1 and 2 add messages.

Each message starts with a prefix: type (1 byte), sequence number (8 bytes). An answer has the
sequence number of its request. Type 5 of 0.13 is not supported.
"""

from dataclasses import field
from typing import Annotated

from waltz_core.access.requirements import (
    ADMINISTER,
    ANSWER,
    CREDENTIAL,
    READ,
    REPLICATE,
    Scope,
    require_all,
)
from waltz_core.values import value
from waltz_core.wire.messages import (
    Blob,
    Bool,
    Crc32,
    FieldKind,
    Int32,
    Int32BoolMap,
    Int32s,
    Int64,
    Lineage,
    Message,
    PackedInt32s,
    PackedInt64s,
    Raw16,
    Raw32,
    Records,
    Text,
    TextOrNull,
    WireProtocol,
)

# each frame of the stack: (class, method, file or None, line)
Stack = Annotated[tuple[tuple[str, str, str | None, int], ...], FieldKind.STACK]


@value(frozen=True, slots=True)
class AdminMessage(Message):
    """A message between a storage and an administration tool."""

    protocol = WireProtocol.ADMIN
    sequence: Int64


# ---------------------------------------------------------------------------------------------
# A 0: Waltz 0.13


@value(frozen=True, slots=True)
class Done(AdminMessage):
    """The storage has durably processed the request. Answers messages 3, 4, 6, 69, 70, 71, 78."""

    code = 1
    requires = ANSWER


@value(frozen=True, slots=True)
class AdminFailure(AdminMessage):
    """The request failed; `text` is the reason. Sent only to peers of version 0."""

    code = 2
    requires = ANSWER
    text: TextOrNull
    stack: Stack


@value(frozen=True, slots=True)
class CheckCluster(AdminMessage):
    """Check that the storage belongs to this cluster. The sequence number is -1."""

    code = 3
    requires = require_all(ADMINISTER, scope=Scope.ANY)
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class SetAvailable(AdminMessage):
    """Take partitions offline, or bring them online again."""

    code = 4
    requires = require_all(ADMINISTER)
    partitions: Int32s
    is_available: Bool


@value(frozen=True, slots=True)
class SetAssigned(AdminMessage):
    """Assign partitions to the storage, or unassign them and optionally delete their files."""

    code = 6
    requires = require_all(ADMINISTER)
    partitions: Int32s
    is_assigned: Bool
    deletes_files: Bool


@value(frozen=True, slots=True)
class RecordListRequest(AdminMessage):
    """Read up to `count_max` records, starting with ID `first`."""

    code = 7
    requires = require_all(ADMINISTER, READ)
    partition_id: Int32
    first: Int64
    count_max: Int32


@value(frozen=True, slots=True)
class RecordListResponse(AdminMessage):
    """The requested records that exist; possibly none."""

    code = 8
    requires = ANSWER
    partition_id: Int32
    records: Records


@value(frozen=True, slots=True)
class SessionInfoRequest(AdminMessage):
    """Request the session and the low-water marks in a partition's control file entry."""

    code = 9
    requires = require_all(ADMINISTER)
    partition_id: Int32


@value(frozen=True, slots=True)
class SessionInfoResponse(AdminMessage):
    """The last session and the low-water marks of a partition in the control file.

    `local_low_water_mark` is the end of the log at the time when the marks were set.
    """

    code = 10
    requires = ANSWER
    partition_id: Int32
    last_session: Int64
    low_water_mark: Int64
    local_low_water_mark: Int64


@value(frozen=True, slots=True)
class MetricsRequest(AdminMessage):
    """Request the metrics of the storage."""

    code = 11
    requires = require_all(ADMINISTER, scope=Scope.ALL)


@value(frozen=True, slots=True)
class MetricsResponse(AdminMessage):
    """The storage's gauges as JSON, with the structure and names of 0.13.

    The field is not a `Text`, because the JSON may exceed the maximum length of a `Text`.
    """

    code = 12
    requires = ANSWER
    json: Blob


@value(frozen=True, slots=True)
class HeldRequest(AdminMessage):
    """Request the list of the partitions that are assigned to the storage."""

    code = 13
    requires = require_all(ADMINISTER, scope=Scope.ANY)


@value(frozen=True, slots=True)
class HeldResponse(AdminMessage):
    """The partitions that are assigned to the storage, each with its availability."""

    code = 14
    requires = ANSWER
    available: Int32BoolMap


# ---------------------------------------------------------------------------------------------
# A 1


@value(frozen=True, slots=True)
class AdminRejected(AdminMessage):
    """The request failed. `error_code` is the code of the error in `errors.py`."""

    code = 64
    requires = ANSWER
    since = 1
    error_code: Int32
    text: Text


@value(frozen=True, slots=True)
class StorageRequest(AdminMessage):
    """Request the identity of the storage."""

    code = 65
    requires = require_all(ADMINISTER, scope=Scope.ANY)
    since = 1


@value(frozen=True, slots=True)
class StorageResponse(AdminMessage):
    """The identity of the storage, and the list of its partitions."""

    code = 66
    requires = ANSWER
    since = 1
    storage_id: Raw16
    cluster_key: Raw16
    partition_count: Int32
    address: Text
    held: Int32s


@value(frozen=True, slots=True)
class ReplicaRequest(AdminMessage):
    """Request the state of one partition of the storage."""

    code = 67
    requires = require_all(ADMINISTER)
    since = 1
    partition_id: Int32


@value(frozen=True, slots=True)
class ReplicaResponse(AdminMessage):
    """The state of one partition of the storage.

    `reason` states why the partition's log cannot be used; it is empty for a usable log. If there
    is a reason, all later fields are empty. `low_water_mark` is the confirmed low-water mark.
    `damaged` contains pairs (first ID, last ID) of damaged ranges.
    """

    code = 68
    requires = ANSWER
    since = 1
    partition_id: Int32
    is_held: Bool
    is_available: Bool
    is_served: Bool
    reason: Text
    is_suspect: Bool
    promised: Int64
    last_session: Int64
    low_water_mark: Int64
    synced_max: Int64
    chain: Raw16
    damaged: PackedInt64s


@value(frozen=True, slots=True)
class RemovePartition(AdminMessage):
    """Remove a partition; with `is_forced`, even if the last session depends on this replica."""

    code = 69
    requires = require_all(ADMINISTER)
    since = 1
    partition_id: Int32
    deletes_files: Bool
    is_forced: Bool


@value(frozen=True, slots=True)
class MarkSuspect(AdminMessage):
    """Mark a replica as suspect until a session has repaired it up to its low-water mark."""

    code = 70
    requires = require_all(ADMINISTER)
    since = 1
    partition_id: Int32
    is_forced: Bool


@value(frozen=True, slots=True)
class ReSeed(AdminMessage):
    """Delete a replica's log.

    The replica restarts empty and suspect; other replicas supply its log.
    """

    code = 71
    requires = require_all(ADMINISTER)
    since = 1
    partition_id: Int32
    is_forced: Bool


@value(frozen=True, slots=True)
class CopyRequest(AdminMessage):
    """Read whole batches, starting with ID `first`, at most up to the confirmed low-water mark."""

    code = 72
    requires = require_all(ADMINISTER, READ)
    since = 1
    partition_id: Int32
    first: Int64
    bytes_max: Int32


@value(frozen=True, slots=True)
class Copy(AdminMessage):
    """Whole batches of a log.

    The message is an answer or a request. As an answer to `CopyRequest`, it is empty if `first` is
    above the confirmed low-water mark. As a request, it appends the batches to the log of a replica
    that is offline.
    """

    code = 73
    requires = require_all(ADMINISTER, REPLICATE)
    since = 1
    partition_id: Int32
    first: Int64
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32
    chain_before: Raw16
    lineage: Lineage


@value(frozen=True, slots=True)
class Copied(AdminMessage):
    """The log is synced to disk up to this ID. Answers message 73."""

    code = 74
    requires = ANSWER
    since = 1
    partition_id: Int32
    synced_max: Int64


@value(frozen=True, slots=True)
class ScrubRequest(AdminMessage):
    """Request the progress of a partition's scrub. With `begins`, first start a new scrub pass."""

    code = 76
    requires = require_all(ADMINISTER)
    since = 1
    partition_id: Int32
    begins: Bool


@value(frozen=True, slots=True)
class ScrubResponse(AdminMessage):
    """The progress of a partition's scrub. Answers message 76.

    The current scrub pass has read the records below `next_id`, `read_bytes` bytes in total.
    `finished_age_ms` is the time since the last completed pass; -1 if none was completed. `error`
    is the reason why the last pass was not completed.
    """

    code = 77
    requires = ANSWER
    since = 1
    partition_id: Int32
    is_running: Bool
    next_id: Int64
    last_id: Int64
    read_bytes: Int64
    passes_count: Int64
    finished_age_ms: Int64
    error: TextOrNull


# ---------------------------------------------------------------------------------------------
# A 2


@value(frozen=True, slots=True)
class AuthenticateForAdmin(AdminMessage):
    """Like `Authenticate` of protocol L. The sequence number is -1. `Done` answers this message."""

    code = 78
    requires = CREDENTIAL
    since = 2
    token: Raw32 = field(repr=False)
