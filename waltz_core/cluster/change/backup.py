"""A backup of a cluster: one consistent point of all partitions, as a file.

The file has all data from ZooKeeper that a restored cluster needs, and the manifests of the
archive. The transactions themselves are in the archive. The file is JSON after a line with its
CRC-32, like a manifest.

Rules (docs/decisions/055):
    1. The exactly-once writes are read first, then the high-water marks, then the writes again, the
       IDs and the sessions. So rows of a write that is done have IDs up to the marks, and all IDs,
       attempts and sessions in the log up to the marks are known.
    2. A write is done in the backup only if it was done at the first reading (`merged_writes`).
    3. The archive reaches each mark when the backup is complete; it may have more transactions.
    4. The last client ID that servers have issued is missing in the file of an earlier version,
       which had no such IDs. The permissions are in the file as the node has them. A file of a
       cluster without permissions has none, like one of an earlier version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from waltz_core import errors
from waltz_core.access.client_ids import NONE_ISSUED
from waltz_core.access.permissions import Permissions
from waltz_core.archive.manifest import FORMAT, frame_json, unframe_json
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.cluster.write_registry import BegunWrite, TaskState, WriteState
from waltz_core.cluster.znodes.access_node import decode, encode
from waltz_core.cluster.znodes.model import INT32_MAX
from waltz_core.cluster.znodes.restored_from import NOT_RESTORED, RestoredFrom
from waltz_core.records.record import (
    BEFORE_FIRST,
    ClientId,
    Generation,
    PartitionId,
    SessionId,
    TransactionId,
)


@dataclass(frozen=True, slots=True)
class PartitionBackup:
    """A partition up to its high-water mark; a partition without a manifest has no transactions."""

    mark: TransactionId
    session_id: SessionId
    generation: Generation
    manifest: SavedManifest | None


@dataclass(frozen=True, slots=True)
class Backup:
    """The content of a backup; see the module's rules. `taken_ms` is information for people.

    `client_id` is the last ID that a client has allocated, `issued_client_id` the last one that a
    server has issued.
    """

    name: str
    cluster_key: UUID
    taken_ms: int
    client_id: ClientId
    partitions: tuple[PartitionBackup, ...]
    writes: Mapping[str, BegunWrite] = field(default_factory=dict)
    restored_from: RestoredFrom = NOT_RESTORED
    access: Permissions | None = None
    issued_client_id: ClientId = NONE_ISSUED

    @property
    def marks(self) -> dict[PartitionId, TransactionId]:
        """The high-water marks by partition."""
        return {PartitionId(number): each.mark for number, each in enumerate(self.partitions)}

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        access = {} if self.access is None else {"access": encode(self.access).decode()}
        return frame_json(
            {
                "format": FORMAT,
                "cluster": self.name,
                "cluster_key": str(self.cluster_key),
                "taken_ms": self.taken_ms,
                "client_id": self.client_id,
                "issued_client_id": self.issued_client_id,
                "partitions": [_partition_to_json(each) for each in self.partitions],
                "writes": {name: _write_to_json(each) for name, each in self.writes.items()},
                "restored_from": self.restored_from.to_bytes().decode(),
                **access,  # rule 4
            }
        )

    @staticmethod
    def from_bytes(data: bytes, name: str) -> "Backup":
        """Decode and check the bytes of a file, and each manifest in it.

        Raises:
            BadFormat, ChecksumMismatch: the file is damaged; the message names it.
        """
        values = unframe_json(data, f"backup {name}")
        try:
            found = Backup(
                _of(str, values, "cluster"),
                UUID(_of(str, values, "cluster_key")),
                _whole_number(values, "taken_ms"),
                ClientId(_whole_number(values, "client_id", maximum=INT32_MAX)),
                tuple(_partition_from_json(each) for each in _of(list, values, "partitions")),
                {key: _write_from_json(each) for key, each in _of(dict, values, "writes").items()},
                RestoredFrom.from_bytes(_of(str, values, "restored_from").encode()),
                decode(_of(str, values, "access").encode()) if "access" in values else None,
                _issued_client_id(values),
            )
            found.check()
        except errors.ChecksumMismatch as error:
            raise errors.ChecksumMismatch(f"backup {name} cannot be decoded: {error}") from error
        except (errors.BadFormat, ValueError) as error:
            raise errors.BadFormat(f"backup {name}: {error}") from error
        return found

    def check(self) -> None:
        """Raise BadFormat or ChecksumMismatch unless each manifest reaches its mark (rule 3)."""
        if not self.partitions:
            raise errors.BadFormat("expected a backup of at least 1 partition, found 0")
        for number, each in enumerate(self.partitions):
            if each.manifest is None:
                if each.mark != BEFORE_FIRST:
                    raise errors.BadFormat(
                        f"expected a manifest of partition {number} with transactions up to "
                        f"{each.mark}, found none"
                    )
                continue
            each.manifest.entries()
            manifest = each.manifest.manifest
            found = (manifest.cluster_key, manifest.partition_id)
            if found != (self.cluster_key.bytes, number) or manifest.last < each.mark:
                raise errors.BadFormat(
                    f"expected a manifest of partition {number} of cluster {self.cluster_key} "
                    f"with transactions up to {each.mark} or more, found one of partition "
                    f"{manifest.partition_id} of cluster {UUID(bytes=manifest.cluster_key)} up "
                    f"to {manifest.last}"
                )


def merged_writes(
    first: Mapping[str, BegunWrite], second: Mapping[str, BegunWrite]
) -> dict[str, BegunWrite]:
    """Return the writes of a backup from both readings of the registry (rules 1 and 2)."""
    merged = dict(first)
    for name, found in second.items():
        before = first.get(name)
        if before is None:
            merged[name] = BegunWrite(_not_done(found.state), found.tasks)
        elif not (before.state.is_done and found.state.is_done):
            state = before.state if found.state.is_done else found.state
            merged[name] = BegunWrite(_not_done(state), {**before.tasks, **found.tasks})
    return merged


def _not_done(state: WriteState) -> WriteState:
    # An empty summary means that the write is being removed.
    return state if state.summary == {} else replace(state, summary=None)


def _partition_to_json(each: PartitionBackup) -> dict[str, Any]:
    manifest = None
    if each.manifest is not None:
        manifest = {
            "name": each.manifest.name,
            "crc": each.manifest.file_crc,
            "head": each.manifest.head.decode(),
            "pages": [page.decode() for page in each.manifest.pages],
        }
    return {
        "mark": each.mark,
        "session": each.session_id,
        "generation": each.generation,
        "manifest": manifest,
    }


def _partition_from_json(values: object) -> PartitionBackup:
    if not isinstance(values, dict):
        raise errors.BadFormat(f"expected the fields of a partition, found {values!r:.80}")
    manifest = None
    if values.get("manifest") is not None:
        files = _of(dict, values, "manifest")
        pages = _of(list, files, "pages")
        manifest = SavedManifest(
            _of(str, files, "name"),
            _whole_number(files, "crc"),
            _of(str, files, "head").encode(),
            tuple(_of(str, {"page": each}, "page").encode() for each in pages),
        )
    return PartitionBackup(
        TransactionId(_whole_number(values, "mark")),
        SessionId(_whole_number(values, "session")),
        Generation(_whole_number(values, "generation", maximum=INT32_MAX, minimum=-INT32_MAX - 1)),
        manifest,
    )


def _write_to_json(each: BegunWrite) -> dict[str, Any]:
    return {
        "state": each.state.to_bytes().decode(),
        "tasks": {str(number): task.to_bytes().decode() for number, task in each.tasks.items()},
    }


def _write_from_json(values: object) -> BegunWrite:
    if not isinstance(values, dict):
        raise errors.BadFormat(
            f"expected the fields of an exactly-once write, found {values!r:.80}"
        )
    state = WriteState.from_bytes(_of(str, values, "state").encode())
    found = _of(dict, values, "tasks")
    tasks = {
        int(number): TaskState.from_bytes(_of(str, found, number).encode()) for number in found
    }
    return BegunWrite(state, tasks)


def _of(kind: type, values: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - checked here
    found = values.get(key)
    if not isinstance(found, kind):
        raise errors.BadFormat(f"expected field {key} of type {kind.__name__}, found {found!r:.80}")
    return found


def _issued_client_id(values: dict[str, Any]) -> ClientId:
    if "issued_client_id" not in values:  # rule 4
        return NONE_ISSUED
    return ClientId(
        _whole_number(values, "issued_client_id", minimum=NONE_ISSUED, maximum=INT32_MAX)
    )


def _whole_number(
    values: dict[str, Any], key: str, *, maximum: int = (1 << 63) - 1, minimum: int = -1
) -> int:
    found = _of(int, values, key)
    if isinstance(found, bool) or not minimum <= found <= maximum:
        raise errors.BadFormat(f"expected field {key} in {minimum}..{maximum}, found {found!r}")
    return int(found)
