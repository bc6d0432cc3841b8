"""Every message of surface A: a storage and whoever administers it.

It is a table like `messages.py`, of a port that no transaction passes through. Version 0 is that of
Waltz 0.13, byte for byte (docs/design/wire-format.md 3.2); version 1 is version 0 and what our
rules need besides. The rules are those of `messages.py`.

Prefix: type (1 byte), sequence (8). An answer echoes its request's sequence. The original's type 5
means nothing.
"""

from typing import Annotated

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
    Records,
    Surface,
    Text,
    TextOrNull,
)

# (class, method, file or None, line) of each frame
Stack = Annotated[tuple[tuple[str, str, str | None, int], ...], FieldKind.STACK]


@value(frozen=True, slots=True)
class AdminMessage(Message):
    """A message between a storage and its administration."""

    surface = Surface.ADMIN
    sequence: Int64


# ---------------------------------------------------------------------------------------------
# A 0: the original's


@value(frozen=True, slots=True)
class Done(AdminMessage):
    """What was asked for is done, durably; answers 3, 4 and 6, and of ours 69, 70 and 71."""

    code = 1


@value(frozen=True, slots=True)
class AdminFailure(AdminMessage):
    """What was asked for is not done, and why; ours sends it to peers of version 0 only."""

    code = 2
    text: TextOrNull
    stack: Stack


@value(frozen=True, slots=True)
class CheckCluster(AdminMessage):
    """Check that the storage is of this cluster; the sequence is -1."""

    code = 3
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class SetAvailable(AdminMessage):
    """Take partitions offline, or online again."""

    code = 4
    partitions: Int32s
    is_available: Bool


@value(frozen=True, slots=True)
class SetAssigned(AdminMessage):
    """Begin to hold partitions, or hold them no longer and maybe delete their files."""

    code = 6
    partitions: Int32s
    is_assigned: Bool
    deletes_files: Bool


@value(frozen=True, slots=True)
class RecordListRequest(AdminMessage):
    """Read records from `first` on."""

    code = 7
    partition_id: Int32
    first: Int64
    count_max: Int32


@value(frozen=True, slots=True)
class RecordListResponse(AdminMessage):
    """What there is of them, maybe nothing."""

    code = 8
    partition_id: Int32
    records: Records


@value(frozen=True, slots=True)
class SessionInfoRequest(AdminMessage):
    """Ask for the marks in the control file."""

    code = 9
    partition_id: Int32


@value(frozen=True, slots=True)
class SessionInfoResponse(AdminMessage):
    """The marks in the control file: up to the local one the log was whole when it was set."""

    code = 10
    partition_id: Int32
    last_session: Int64
    low_water_mark: Int64
    local_low_water_mark: Int64


@value(frozen=True, slots=True)
class MetricsRequest(AdminMessage):
    """Ask for the gauges."""

    code = 11


@value(frozen=True, slots=True)
class MetricsResponse(AdminMessage):
    """The gauges as JSON, in the original's form and under its names; longer than a text may be."""

    code = 12
    json: Blob


@value(frozen=True, slots=True)
class HeldRequest(AdminMessage):
    """Ask which partitions the storage holds."""

    code = 13


@value(frozen=True, slots=True)
class HeldResponse(AdminMessage):
    """Each partition that is held, and whether it is available."""

    code = 14
    available: Int32BoolMap


# ---------------------------------------------------------------------------------------------
# A 1: what our rules need besides


@value(frozen=True, slots=True)
class AdminRefused(AdminMessage):
    """What was asked for is not done; the code is that of `errors.py`."""

    code = 64
    since = 1
    error_code: Int32
    text: Text


@value(frozen=True, slots=True)
class StorageRequest(AdminMessage):
    """Ask which storage this is."""

    code = 65
    since = 1


@value(frozen=True, slots=True)
class StorageResponse(AdminMessage):
    """Which storage this is, and which partitions it holds."""

    code = 66
    since = 1
    storage_id: Raw16
    cluster_key: Raw16
    partition_count: Int32
    address: Text
    held: Int32s


@value(frozen=True, slots=True)
class ReplicaRequest(AdminMessage):
    """Ask how one partition stands here."""

    code = 67
    since = 1
    partition_id: Int32


@value(frozen=True, slots=True)
class ReplicaResponse(AdminMessage):
    """How one partition stands here.

    `why_not` says why its log cannot be used, and is empty when it can; what follows then is
    nothing. `low_water_mark` is the confirmed one. `damaged` holds pairs first, last of ids.
    """

    code = 68
    since = 1
    partition_id: Int32
    is_held: Bool
    is_available: Bool
    is_served: Bool
    why_not: Text
    is_suspect: Bool
    promised: Int64
    last_session: Int64
    low_water_mark: Int64
    synced_max: Int64
    chain: Raw16
    damaged: PackedInt64s


@value(frozen=True, slots=True)
class RemovePartition(AdminMessage):
    """Hold a partition no longer; `is_forced`: though the last session counts on this replica."""

    code = 69
    since = 1
    partition_id: Int32
    deletes_files: Bool
    is_forced: Bool


@value(frozen=True, slots=True)
class MarkSuspect(AdminMessage):
    """Believe a replica no longer, until a session has brought it up to its mark."""

    code = 70
    since = 1
    partition_id: Int32
    is_forced: Bool


@value(frozen=True, slots=True)
class ReSeed(AdminMessage):
    """Throw a replica's log away: it begins empty and suspect, and is copied from the others."""

    code = 71
    since = 1
    partition_id: Int32
    is_forced: Bool


@value(frozen=True, slots=True)
class CopyRequest(AdminMessage):
    """Read whole batches from `first` on, up to the confirmed low-water mark and no further."""

    code = 72
    since = 1
    partition_id: Int32
    first: Int64
    bytes_max: Int32


@value(frozen=True, slots=True)
class Copy(AdminMessage):
    """Whole batches of a log; as an answer to 72 empty when `first` is above the mark.

    As a request: put them behind the log of a replica that is offline.
    """

    code = 73
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
    """Everything up to this id is on disk, synced; answers 73 as a request."""

    code = 74
    since = 1
    partition_id: Int32
    synced_max: Int64


@value(frozen=True, slots=True)
class ScrubRequest(AdminMessage):
    """Tell how far a partition's records were read again; `begins`: have it done anew first."""

    code = 76
    since = 1
    partition_id: Int32
    begins: Bool


@value(frozen=True, slots=True)
class ScrubResponse(AdminMessage):
    """Up to `next_id` they were read in this pass; answers 76.

    `read_bytes` are those of this pass, `finished_age_ms` is the time since the last pass that came
    to its end, -1 for none; `error` is why the last one did not.
    """

    code = 77
    since = 1
    partition_id: Int32
    is_running: Bool
    next_id: Int64
    last_id: Int64
    read_bytes: Int64
    passes_count: Int64
    finished_age_ms: Int64
    error: TextOrNull
