"""`waltz-core backup`: save a consistent state of all partitions while the cluster runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial

import click

from waltz_core.administration.change_run import time_limit
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import shared_options as options
from waltz_core.cli.archive.archive_status import archive_option, query_archive_url
from waltz_core.cli.backup.backup_files import BackupLocation
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import AsyncWaltzClient
from waltz_core.cluster.change.backup import Backup, PartitionBackup, merge_writes
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import EMPTY_METADATA, ArchivedMark
from waltz_core.errors import ObjectMissing
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId

POLL_INTERVAL_S = 0.5
READ_ATTEMPTS_MAX = 5
# Storages archive the end of a log only after `archive_age_ms`, 10 minutes by default.
ARCHIVE_TIMEOUT_S = 3_600.0
TIMEOUT_HINT = (
    "No backup was written. Hint: check the settings `archive_interval_ms` of the servers and "
    "`archive_url` of the storages. Transactions that do not fill an object are archived only "
    "after `archive_age_ms`, a setting of the storages."
)

RequestMarks = Callable[[], Awaitable[Mapping[int, TransactionId]]]


@subcommand
@archive_option
@click.option(
    "--output", required=True, metavar="FILE", help="the path or the URL of the file to create"
)
@options.connect_option
@options.json_option
@options.timeout_option(
    "maximum seconds to wait until the archive has all transactions", default_s=ARCHIVE_TIMEOUT_S
)
async def backup(
    *, archive: str | None, output: str, connect: str, as_json: bool, timeout_s: float
) -> int:
    """Write a backup of the cluster to a new file."""
    location = BackupLocation.parse(output)
    await asyncio.to_thread(location.check_absent)
    with ProgressLine() as line:
        async with (
            open_command_session(connect) as coordinator,
            AsyncWaltzClient.connect(connect) as client,
            time_limit(timeout_s, lambda: line.wait_reason or "ZooKeeper", hint=TIMEOUT_HINT),
        ):
            store = ArchiveStore(archive or await query_archive_url(coordinator))
            backup_content = await take_backup(
                coordinator,
                lambda: client.high_water_marks(linearizable=True),
                store,
                line,
                now_ms=time.time_ns() // 1_000_000,
            )
        size_bytes = await asyncio.to_thread(location.write, backup_content)
    if as_json:
        print_json(
            {
                "cluster_key": str(backup_content.cluster_key),
                "output": output,
                "bytes": size_bytes,
                "partitions": backup_content.marks,
                "writes": sorted(backup_content.writes),
            }
        )
    else:
        taken_text = datetime.fromtimestamp(backup_content.taken_ms / 1000, UTC).isoformat(
            timespec="seconds"
        )
        print_result(
            f"wrote the backup of {len(backup_content.partitions)} partitions of "
            f"{backup_content.name} as of "
            f"{taken_text} to {output}, {size_bytes} bytes"
        )
    return 0


async def take_backup(
    coordinator: Coordinator,
    request_marks: RequestMarks,
    store: ArchiveStore,
    line: ProgressLine,
    *,
    now_ms: int,
) -> Backup:
    """Read the state of the cluster in the order of `backup.py`, and wait for the archive.

    Raises:
        ObjectMissing, ArchiveUnavailable, BadFormat, ChecksumMismatch: a manifest cannot be read.
    """
    cluster = await coordinator.read_cluster()
    line.show(0, 1, "waiting for the high-water marks of the partitions")
    first = await coordinator.writes.read_all()
    marks = await request_marks()
    writes = merge_writes(first, await coordinator.writes.read_all())
    client_id = await coordinator.last_client_id()
    issued_client_id = await coordinator.issued_ids.read_last_id()
    numbers = [PartitionId(number) for number in range(cluster.params.partition_count)]
    views = [await coordinator.read_partition(partition_number) for partition_number in numbers]
    partitions: list[PartitionBackup] = []
    for number, view in zip(numbers, views, strict=True):
        manifest = None
        if marks[number] != BEFORE_FIRST:
            show_progress = partial(line.show, len(partitions), len(numbers))
            manifest = await _read_manifest_with_mark(
                coordinator, store, number, marks[number], show_progress
            )
        metadata = view.metadata or EMPTY_METADATA
        partitions.append(
            PartitionBackup(marks[number], metadata.session_id, metadata.generation, manifest)
        )
    backup_content = Backup(
        cluster.params.name,
        cluster.store.cluster_key,
        now_ms,
        client_id,
        tuple(partitions),
        writes,
        await coordinator.read_restore_sources(),
        await coordinator.permissions.read(),
        issued_client_id,
    )
    backup_content.check()
    return backup_content


async def _read_manifest_with_mark(
    coordinator: Coordinator,
    store: ArchiveStore,
    partition_id: PartitionId,
    mark: TransactionId,
    show: Callable[[str], None],
) -> SavedManifest:
    """Return the manifest of a partition that contains `mark`; wait until it exists."""
    missing: ObjectMissing | None = None
    name = ""
    for _ in range(READ_ATTEMPTS_MAX):
        archived = await _wait_until_archived(coordinator, partition_id, mark, show)
        if archived.manifest == name and missing is not None:
            raise missing
        name = archived.manifest
        try:
            return await asyncio.to_thread(SavedManifest.read, store, name, archived.manifest_crc)
        except ObjectMissing as error:
            missing = error
    assert missing is not None
    raise missing


async def _wait_until_archived(
    coordinator: Coordinator,
    partition_id: PartitionId,
    mark: TransactionId,
    show: Callable[[str], None],
) -> ArchivedMark:
    """Wait until the archived mark of a partition has reached `mark`; return the archived mark."""
    while True:
        marker = (await coordinator.read_partition(partition_id)).marker
        archived = None if marker is None else marker.archived
        if archived is not None and archived.last >= mark:
            return archived
        archived_mark = BEFORE_FIRST if archived is None else archived.last
        show(
            f"waiting until partition {partition_id} is archived up to transaction {mark}; "
            f"archived mark: {archived_mark}"
        )
        await asyncio.sleep(POLL_INTERVAL_S)
