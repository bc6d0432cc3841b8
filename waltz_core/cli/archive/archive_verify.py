"""`waltz-core archive verify`: read and verify every file of the archive that is listed.

It needs ZooKeeper and the archive, and neither servers nor storages, except to find the archive's
URL. It changes nothing, and can be interrupted: it prints where to continue.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias, TypeVar

import click

from waltz_core.archive.archive_check import ArchiveCheck, RecordedArchive, WrongFile
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import shared_options as options
from waltz_core.cli.archive.archive_status import archive_url, url_of_storages
from waltz_core.cli.archive.store_calls import call_store
from waltz_core.cli.changing import connected
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.verbs import verb
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.errors import BadConfig, ObjectMissing, WaltzError
from waltz_core.records.record import PartitionId, TransactionId

ResultT = TypeVar("ResultT")
Show: TypeAlias = Callable[[str], None]
# Who can repair a file: nothing else has its bytes.
ACTION: Final = (
    "restore the file from a copy or an earlier version in the object store, then verify again; "
    "until then do not lower local_retention_bytes and local_retention_ms"
)


@verb
@options.connect
@archive_url
@click.option("--partition", type=int, metavar="P", help="only this partition [default: all]")
@click.option("--first", type=int, default=0, metavar="ID", help="the first ID [default: 0]")
@click.option("--last", type=int, metavar="ID", help="the last ID [default: the last archived one]")
@options.as_json
async def verify(
    *,
    connect: str,
    archive: str | None,
    partition: int | None,
    first: int,
    last: int | None,
    as_json: bool,
) -> int:
    if first < 0 or (last is not None and last < first):
        raise BadConfig(f"--first, --last: expected a range of IDs, found {first}..{last}")
    async with connected(connect) as coordinator:
        cluster = await coordinator.read_cluster()
        count = cluster.params.partition_count
        if partition is not None and not 0 <= partition < count:
            raise BadConfig(f"--partition: expected 0 to {count - 1}, found {partition}")
        url = archive or await url_of_storages(coordinator)
        store = await call_store(url, lambda: ArchiveStore(url), lambda: ("opening it", 0))
        shown: dict[int, dict[str, object]] = {}
        for number in range(count) if partition is None else (partition,):
            check = ArchiveCheck(
                store,
                cluster.store.cluster_key.bytes,
                PartitionId(number),
                first=TransactionId(first),
                last=None if last is None else TransactionId(last),
            )
            show = print_error if as_json else print_result
            shown[number] = await _verify(coordinator, PartitionId(number), check, show)
    wrong = any(each["problems"] for each in shown.values())
    if as_json:
        print_json({"passed": not wrong, "archive": url, "partitions": shown})
    else:
        print_result("failed" if wrong else "passed")
    return 1 if wrong else 0


verify.details = (
    "It reads all objects as a whole: the record checksums, the chain, the pages' checksums, and "
    "whether they join the chain in ZooKeeper. It changes nothing. Exit code 0: all files are "
    "right; 1: a file is missing or corrupt, or the archive cannot be read."
)


async def recorded_archive(
    coordinator: Coordinator, partition_id: PartitionId
) -> RecordedArchive | None:
    """Return what ZooKeeper records of a partition's archive; None if nothing is archived."""
    marker = (await coordinator.read_partition(partition_id)).marker
    mark = None if marker is None else marker.archived
    if mark is None:
        return None
    return RecordedArchive(mark.first, mark.last, mark.chain, mark.manifest, mark.manifest_crc)


async def _verify(
    coordinator: Coordinator, partition_id: PartitionId, check: ArchiveCheck, show: Show
) -> dict[str, object]:
    """Verify one partition, and show its problems as they are found; return the summary."""
    recorded = await recorded_archive(coordinator, partition_id)
    if recorded is None:
        show(f"partition {partition_id}: nothing is archived")
        return {"last": None, "objects": 0, "bytes": 0, "problems": []}
    try:
        with ProgressLine() as line:
            await _Check(coordinator, partition_id, check, show).run(recorded, line)
    except BaseException as error:
        check.stop()
        if isinstance(error, WaltzError | asyncio.CancelledError):
            print_error(
                f"partition {partition_id}: IDs before {check.next_id} are verified; continue with "
                f"--partition {partition_id} --first {check.next_id}"
            )
        raise
    files = "1 wrong file" if len(check.found) == 1 else f"{len(check.found)} wrong files"
    show(
        f"partition {partition_id}: {check.object_count} objects with {check.byte_count} bytes, up "
        f"to ID {check.next_id - 1}: {files}"
    )
    return {
        "last": check.next_id - 1,
        "objects": check.object_count,
        "bytes": check.byte_count,
        "problems": [{**each._asdict(), "action": ACTION} for each in check.found],
    }


class _Check(NamedTuple):
    """The check of a partition, in calls that block."""

    coordinator: Coordinator
    partition_id: PartitionId
    check: ArchiveCheck
    show: Show

    async def run(self, recorded: RecordedArchive, line: ProgressLine) -> None:
        """Check file after file; follow a manifest that is replaced (rule 4 of the check)."""
        check, is_begun, shown = self.check, False, 0
        while True:
            try:
                if not is_begun:
                    await self._call(partial(check.begin, recorded))
                    is_begun = True
                is_going_on = await self._call(check.check_next)
            except ObjectMissing as error:
                now = await recorded_archive(self.coordinator, self.partition_id)
                if now is not None and now.manifest != recorded.manifest:
                    recorded, is_begun = now, False
                    continue
                if not is_begun:
                    check.note_missing_manifest(recorded, error)
                else:
                    check.note_missing(error)
                is_going_on = is_begun
            for each in check.found[shown:]:
                self._show_problem(each)
            shown = len(check.found)
            if not is_going_on:
                return
            done, whole = check.next_id, recorded.last + 1
            line.show(done, whole, f"IDs of partition {self.partition_id} are verified")

    async def _call(self, call: Callable[[], ResultT]) -> ResultT:
        return await call_store(self.check.store_url, call, lambda: self.check.activity)

    def _show_problem(self, wrong: WrongFile) -> None:
        self.show(
            f"partition {self.partition_id}, IDs {wrong.first}..{wrong.last}: {wrong.name}: "
            f"{wrong.problem}. Hint: {ACTION}."
        )
