"""`waltz-core restore`: create a cluster from a backup and the archive."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import click

from waltz_core.administration.change_run import ChangeResult
from waltz_core.archive.pins import pin_objects
from waltz_core.archive.restored_manifest import RestoredRange
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli.access.access_change import new_client_key
from waltz_core.cli.access.access_export import describe_permissions, revision_json
from waltz_core.cli.backup.backup_files import BackupLocation
from waltz_core.cli.change_commands import ChangeCommand, change_command
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change.backup import Backup, PartitionBackup
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.change.rebuilding import first_id_after_loss
from waltz_core.cluster.change.restoring import next_session_id, restored_cluster
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BadConfig, BadRequest, CoordinatorConflict, WaltzError
from waltz_core.records.record import BEFORE_FIRST, PartitionId, SessionId, TransactionId

NONCE_BYTES = 16


class RequestedEnds(NamedTuple):
    """The requested ends of the restored logs: `marks` are last IDs, `until_ms` a commit time."""

    marks: Mapping[PartitionId, TransactionId]
    until_ms: int | None

    @classmethod
    def parse(cls, marks: Sequence[str], until: str | None, backup: Backup) -> "RequestedEnds":
        """Parse options `--mark` and `--until`; raises BadConfig."""
        marks_by_partition: dict[PartitionId, TransactionId] = {}
        for text in marks:
            partition, separator, last = text.partition("=")
            is_valid = separator and partition.isdigit() and (last.isdigit() or last == "-1")
            if not is_valid or int(partition) >= len(backup.partitions):
                raise BadConfig(
                    "--mark: expected PARTITION=ID with a partition in "
                    f"0..{len(backup.partitions) - 1}, found {text!r}"
                )
            number, mark = PartitionId(int(partition)), TransactionId(int(last))
            if mark > backup.marks[number]:
                raise BadConfig(
                    f"--mark: expected a transaction ID of at most {backup.marks[number]}, "
                    f"the last one of partition {number} in the backup, found {mark}"
                )
            marks_by_partition[number] = mark
        return cls(marks_by_partition, None if until is None else _parse_until_ms(until))


def _parse_until_ms(text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise BadConfig(
            "--until: expected a time with a time zone such as 2026-11-28T10:00:00Z, found "
            f"{text!r}"
        )
    return int(time.timestamp() * 1000)


@subcommand
@click.option(
    "--backup",
    "backup_path",
    required=True,
    metavar="FILE",
    help="the path or the URL of the backup file",
)
@click.option(
    "--archive",
    required=True,
    metavar="URL",
    help="the URL of the archive of the cluster that was backed up",
)
@click.option(
    "--storage",
    multiple=True,
    required=True,
    metavar="HOST:PORT:ADMIN_PORT[:GROUP]",
    help="a storage of the new cluster, with an empty directory; repeat the option for each, as "
    "for `cluster create`",
)
@click.option(
    "--until", metavar="TIME", help="omit transactions that were committed after this time"
)
@click.option(
    "--mark",
    "marks",
    multiple=True,
    metavar="PARTITION=ID",
    help="the last transaction to restore in a partition; repeat the option for each partition",
)
@click.option(
    "--same-key",
    is_flag=True,
    help=(
        "give the new cluster the cluster key (a UUID) of the old one; only if the old cluster "
        "will never run again"
    ),
)
@click.option(
    "--without-expired",
    is_flag=True,
    help="begin the log after the transactions that have expired since the backup; without this "
    "option, a missing object is an error",
)
@change_command(may_create_cluster=True)
async def restore(command: ChangeCommand, **arguments: Any) -> ChangeResult:  # noqa: ANN401
    """Create a cluster from a backup and the archive."""
    return await _restore_cluster(command, **arguments)


async def _restore_cluster(  # noqa: PLR0913 - one for each option
    command: ChangeCommand,
    *,
    backup_path: str,
    archive: str,
    storage: tuple[str, ...],
    until: str | None,
    marks: tuple[str, ...],
    same_key: bool,
    without_expired: bool,
) -> ChangeResult:
    coordinator, store = command.coordinator, ArchiveStore(archive)
    command.report_wait("the backup")
    backup = await asyncio.to_thread(BackupLocation.parse(backup_path).read)
    limits = RequestedEnds.parse(marks, until, backup)
    key = backup.cluster_key if same_key else uuid.uuid4()  # noqa: TID251 - a new cluster's key
    storages = tuple(NewStorage.parse(text, index) for index, text in enumerate(storage))
    new = NewCluster(backup.name, len(backup.partitions), key, storages)
    await _check_no_cluster(coordinator, backup, same_key=same_key)
    ids = first_id_after_loss(int(time.time()))  # noqa: TID251
    pin_names = await asyncio.to_thread(_pin_objects, store, backup, key.bytes)
    ends: dict[PartitionId, ArchivedMark | None] = {}
    ranges: list[RestoredRange] = []
    is_creating = False
    try:
        for number, each in enumerate(backup.partitions):
            partition_id = PartitionId(number)
            command.report_wait(
                f"the archive of partition {number}", number, len(backup.partitions)
            )
            session_id = next_session_id(backup, partition_id, ids)
            restoration = _Restoration(
                store, key.bytes, session_id, limits, without_expired, ranges
            )
            ends[partition_id] = await asyncio.to_thread(
                restoration.restore_partition, partition_id, each
            )
        # The source cluster may have begun a garbage collection before the pins were written, and
        # may have deleted objects.
        for restored_range in ranges:
            await asyncio.to_thread(restored_range.check_objects_exist)
        command.report_wait("ZooKeeper")
        # Another command may have restored the backup in the meantime.
        await _check_no_cluster(coordinator, backup, same_key=same_key)
        is_creating = True
        znodes = restored_cluster(backup, key.bytes, ends, ids, new_client_key())
        await coordinator.create_restored_cluster(new, znodes)
    except WaltzError as error:
        # After an unknown outcome, the cluster may exist.
        if not is_creating or isinstance(error, CoordinatorConflict):
            # With the same key, another command may have created a cluster that depends on these
            # pins.
            written_files = [] if same_key else list(pin_names)
            written_files += [name for each in ranges for name in each.written_files]
            await asyncio.to_thread(_delete_files, store, written_files)
        raise
    return _restore_result(coordinator, backup, key, ends)


def _restore_result(
    coordinator: Coordinator,
    backup: Backup,
    key: uuid.UUID,
    ends: Mapping[PartitionId, ArchivedMark | None],
) -> ChangeResult:
    """Return the values and the summary that the command prints."""
    lines = []
    for partition_id, end in ends.items():
        mark = backup.marks[partition_id]
        range_text = "no transactions" if end is None else f"transactions {end.first}..{end.last}"
        is_complete = mark == (BEFORE_FIRST if end is None else end.last) and not (
            end and end.first
        )
        lines.append(
            f"partition {partition_id}: restored "
            f"{range_text}{'' if is_complete else f' of 0..{mark}'}"
        )
    if backup.permissions is not None:
        lines.append(
            f"restored the {describe_permissions(backup.permissions)}. Permissions that were "
            "revoked "
            "after the backup are valid again. Hint: revoke them again before the daemons start."
        )
    lines.append(
        f"restored {backup.name} at {coordinator.connect_string}: {len(ends)} partitions, cluster "
        "key "
        f"{key}. Start the storages with empty directories, then the servers"
    )
    return {
        "cluster_key": str(key),
        "partitions": {
            restored_id: None if end is None else [end.first, end.last]
            for restored_id, end in ends.items()
        },
        "access": None if backup.permissions is None else revision_json(backup.permissions),
        "summary": "\n".join(lines),
    }


async def _check_no_cluster(coordinator: Coordinator, backup: Backup, *, same_key: bool) -> None:
    """Raise BadRequest if a cluster exists at this root or, with `same_key`, with this key."""
    try:
        cluster = await coordinator.read_cluster()
    except BadConfig:
        pass
    else:
        raise BadRequest(
            f"a cluster exists already at {coordinator.connect_string}, with cluster key "
            f"{cluster.store.cluster_key}"
        )
    if not same_key:
        return
    root = await coordinator.root_of(backup.cluster_key)
    if root is not None:
        raise BadRequest(
            f"cannot restore with --same-key: the cluster at {root} in this ZooKeeper has the "
            f"key {backup.cluster_key}. Hint: restore without --same-key, or delete that "
            "cluster first."
        )


def _pin_objects(store: ArchiveStore, backup: Backup, key: bytes) -> list[str]:
    """Pin the objects that the restored cluster may use; return the names of the new pins."""
    manifests = [each.manifest for each in backup.partitions if each.manifest is not None]
    sources = {
        each.manifest.writer_cluster_key(entry) for each in manifests for entry in each.entries()
    }
    # If an object is missing, the source cluster may have written it again later, under another
    # name.
    sources |= {each.manifest.cluster_key for each in manifests}
    pin_names = [pin_objects(store, source, key) for source in sorted(sources) if source != key]
    return [name for name in pin_names if name is not None]


def _delete_files(store: ArchiveStore, names: Sequence[str]) -> None:
    """Delete files that a failed restore has written, and ignore errors.

    If the pins remained, the objects would never be deleted. Another command may have created a
    cluster with the same key. If the manifests remained, they could stop the garbage collection of
    that cluster, because they may belong to a later session than its own manifests.
    """
    for name in names:
        with suppress(WaltzError):
            store.delete(name)


class _Restoration(NamedTuple):
    """Restores the archives of partitions, one after the other; its methods block."""

    store: ArchiveStore
    cluster_key: bytes
    session_id: SessionId
    requested_ends: RequestedEnds
    may_have_expired: bool
    restored_ranges: list[RestoredRange]  # `end_of` appends its range

    def restore_partition(
        self, partition_id: PartitionId, partition_backup: PartitionBackup
    ) -> ArchivedMark | None:
        """Write a partition's manifest; return the end of its log, None if the log is empty."""
        limit = self.requested_ends.marks.get(partition_id, partition_backup.high_water_mark)
        if partition_backup.manifest is None or limit == BEFORE_FIRST:
            return None
        restored_range = RestoredRange(
            self.store, partition_backup.manifest, may_have_expired=self.may_have_expired
        )
        self.restored_ranges.append(restored_range)
        if self.requested_ends.until_ms is not None:
            limit = min(limit, restored_range.last_committed_until(self.requested_ends.until_ms))
        end = restored_range.batch_end_at(limit)
        if end is None:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        manifest = restored_range.write_manifest(self.cluster_key, self.session_id, nonce, end)
        return ArchivedMark(
            manifest.last,
            manifest.chain,
            manifest.stamp_ms,
            restored_range.first,
            manifest.file_crc,
            manifest.name,
        )
