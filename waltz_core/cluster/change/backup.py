"""The file of a cluster's backup: the state of all partitions at one consistent point.

The file contains all data from ZooKeeper that a restored cluster needs, and the manifests of the
archive. The transactions themselves are in the archive. The first line of the file is the CRC-32 of
the rest, which is JSON. A manifest has the same format.

Rules (docs/decisions/055):
    1. A backup reads, in this order: the exactly-once writes, the high-water marks, the writes
       again, the ID counters and the sessions. Because the writes are read before the marks, all
       rows of a finished write have IDs up to the marks. Because the writes, the ID counters and
       the sessions are read after the marks, the backup contains all IDs, attempts and sessions
       that occur in the log up to the marks.
    2. The backup records a write as done only if it was done at the first reading (`merge_writes`).
    3. When the backup is complete, the archive contains each partition up to its mark. The archive
       may also contain later transactions.
    4. The file contains the permissions, in the format of their node, if the cluster has
       permissions. Files of earlier versions contain neither permissions nor the last client ID
       that servers have issued.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from waltz_core import errors
from waltz_core.access.client_ids import BEFORE_FIRST_ISSUED_ID
from waltz_core.access.permissions import Permissions
from waltz_core.archive.manifest import FORMAT_VERSION, decode_with_crc, encode_with_crc
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.cluster.write_registry import TaskState, WriteState, WriteWithTasks
from waltz_core.cluster.znodes.access_node import decode_permissions, encode_permissions
from waltz_core.cluster.znodes.model import INT32_MAX
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
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
    """The part of a backup for one partition; the log is empty if there is no manifest."""

    high_water_mark: TransactionId
    session_id: SessionId
    generation: Generation
    manifest: SavedManifest | None


@dataclass(frozen=True, slots=True)
class Backup:
    """The content of a backup; see the module's rules.

    `taken_ms` is only shown to users. `client_id` is the last client ID that a client has allocated
    itself. `issued_client_id` is the last client ID that a server has issued.
    """

    name: str
    cluster_key: UUID
    taken_ms: int
    client_id: ClientId
    partitions: tuple[PartitionBackup, ...]
    writes: Mapping[str, WriteWithTasks] = field(default_factory=dict)
    restore_sources: RestoreSources = NO_RESTORE_SOURCES
    permissions: Permissions | None = None
    issued_client_id: ClientId = BEFORE_FIRST_ISSUED_ID

    @property
    def marks(self) -> dict[PartitionId, TransactionId]:
        """The high-water marks by partition."""
        return {
            PartitionId(number): partition.high_water_mark
            for number, partition in enumerate(self.partitions)
        }

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        access = (
            {}
            if self.permissions is None
            else {"access": encode_permissions(self.permissions).decode()}
        )
        return encode_with_crc(
            {
                "format": FORMAT_VERSION,
                "cluster": self.name,
                "cluster_key": str(self.cluster_key),
                "taken_ms": self.taken_ms,
                "client_id": self.client_id,
                "issued_client_id": self.issued_client_id,
                "partitions": [_partition_to_json(each) for each in self.partitions],
                "writes": {name: _write_to_json(each) for name, each in self.writes.items()},
                "restored_from": self.restore_sources.to_bytes().decode(),
                **access,  # rule 4
            }
        )

    @staticmethod
    def from_bytes(data: bytes, name: str) -> "Backup":
        """Decode and check the bytes of a file, and each manifest in it.

        Raises:
            BadFormat, ChecksumMismatch: the file is damaged; the message names it.
        """
        values = decode_with_crc(data, f"backup {name}")
        try:
            backup = Backup(
                _field_of_type(str, values, "cluster"),
                UUID(_field_of_type(str, values, "cluster_key")),
                _whole_number(values, "taken_ms"),
                ClientId(_whole_number(values, "client_id", maximum=INT32_MAX)),
                tuple(
                    _partition_from_json(each)
                    for each in _field_of_type(list, values, "partitions")
                ),
                {
                    key: _write_from_json(each)
                    for key, each in _field_of_type(dict, values, "writes").items()
                },
                RestoreSources.from_bytes(_field_of_type(str, values, "restored_from").encode()),
                decode_permissions(_field_of_type(str, values, "access").encode())
                if "access" in values
                else None,
                _issued_client_id(values),
            )
            backup.check()
        except errors.ChecksumMismatch as error:
            raise errors.ChecksumMismatch(f"backup {name} cannot be decoded: {error}") from error
        except (errors.BadFormat, ValueError) as error:
            raise errors.BadFormat(f"backup {name}: {error}") from error
        return backup

    def check(self) -> None:
        """Raise BadFormat or ChecksumMismatch unless each manifest reaches its mark (rule 3)."""
        if not self.partitions:
            raise errors.BadFormat("expected a backup of at least 1 partition, found 0")
        for number, partition in enumerate(self.partitions):
            if partition.manifest is None:
                if partition.high_water_mark != BEFORE_FIRST:
                    raise errors.BadFormat(
                        f"expected a manifest of partition {number} with transactions up to "
                        f"{partition.high_water_mark}, found none"
                    )
                continue
            partition.manifest.entries()
            manifest = partition.manifest.manifest
            manifest_identity = (manifest.cluster_key, manifest.partition_id)
            if (
                manifest_identity != (self.cluster_key.bytes, number)
                or manifest.last < partition.high_water_mark
            ):
                raise errors.BadFormat(
                    f"expected a manifest of partition {number} of cluster {self.cluster_key} "
                    f"with transactions up to {partition.high_water_mark} or more, found one of "
                    f"partition {manifest.partition_id} of cluster "
                    f"{UUID(bytes=manifest.cluster_key)} up to {manifest.last}"
                )


def merge_writes(
    first: Mapping[str, WriteWithTasks], second: Mapping[str, WriteWithTasks]
) -> dict[str, WriteWithTasks]:
    """Return the writes of a backup from both readings of the registry (rules 1 and 2)."""
    merged = dict(first)
    for name, second_write in second.items():
        before = first.get(name)
        if before is None:
            merged[name] = WriteWithTasks(_as_unfinished(second_write.state), second_write.tasks)
        elif not (before.state.is_done and second_write.state.is_done):
            state = before.state if second_write.state.is_done else second_write.state
            merged[name] = WriteWithTasks(
                _as_unfinished(state), {**before.tasks, **second_write.tasks}
            )
    return merged


def _as_unfinished(state: WriteState) -> WriteState:
    # An empty summary means that the write is being removed.
    return state if state.summary == {} else replace(state, summary=None)


def _partition_to_json(partition: PartitionBackup) -> dict[str, Any]:
    manifest = None
    if partition.manifest is not None:
        manifest = {
            "name": partition.manifest.name,
            "crc": partition.manifest.file_crc,
            "head": partition.manifest.head.decode(),
            "pages": [page.decode() for page in partition.manifest.pages],
        }
    return {
        "mark": partition.high_water_mark,
        "session": partition.session_id,
        "generation": partition.generation,
        "manifest": manifest,
    }


def _partition_from_json(values: object) -> PartitionBackup:
    if not isinstance(values, dict):
        raise errors.BadFormat(f"expected the fields of a partition, found {values!r:.80}")
    manifest = None
    if values.get("manifest") is not None:
        files = _field_of_type(dict, values, "manifest")
        pages = _field_of_type(list, files, "pages")
        manifest = SavedManifest(
            _field_of_type(str, files, "name"),
            _whole_number(files, "crc"),
            _field_of_type(str, files, "head").encode(),
            tuple(_field_of_type(str, {"page": page}, "page").encode() for page in pages),
        )
    return PartitionBackup(
        TransactionId(_whole_number(values, "mark")),
        SessionId(_whole_number(values, "session")),
        Generation(_whole_number(values, "generation", maximum=INT32_MAX, minimum=-INT32_MAX - 1)),
        manifest,
    )


def _write_to_json(write: WriteWithTasks) -> dict[str, Any]:
    return {
        "state": write.state.to_bytes().decode(),
        "tasks": {str(number): task.to_bytes().decode() for number, task in write.tasks.items()},
    }


def _write_from_json(values: object) -> WriteWithTasks:
    if not isinstance(values, dict):
        raise errors.BadFormat(
            f"expected the fields of an exactly-once write, found {values!r:.80}"
        )
    state = WriteState.from_bytes(_field_of_type(str, values, "state").encode())
    tasks_json = _field_of_type(dict, values, "tasks")
    tasks = {
        int(number): TaskState.from_bytes(_field_of_type(str, tasks_json, number).encode())
        for number in tasks_json
    }
    return WriteWithTasks(state, tasks)


def _field_of_type(kind: type, values: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - checked here
    value = values.get(key)
    if not isinstance(value, kind):
        raise errors.BadFormat(f"expected field {key} of type {kind.__name__}, found {value!r:.80}")
    return value


def _issued_client_id(values: dict[str, Any]) -> ClientId:
    if "issued_client_id" not in values:  # rule 4
        return BEFORE_FIRST_ISSUED_ID
    return ClientId(
        _whole_number(values, "issued_client_id", minimum=BEFORE_FIRST_ISSUED_ID, maximum=INT32_MAX)
    )


def _whole_number(
    values: dict[str, Any], key: str, *, maximum: int = (1 << 63) - 1, minimum: int = -1
) -> int:
    number = _field_of_type(int, values, key)
    if isinstance(number, bool) or not minimum <= number <= maximum:
        raise errors.BadFormat(f"expected field {key} in {minimum}..{maximum}, found {number!r}")
    return int(number)
