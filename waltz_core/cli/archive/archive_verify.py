"""`waltz-core archive verify`: verify every file of the archive that a manifest lists.

Without `--repair`, the command changes nothing. It needs ZooKeeper and the archive, but no servers.
It queries storages only for the URL of the archive. An interrupted command prints the options with
which a new run continues.

With `--repair`, the command requests the repair of each missing or corrupt object from the owner of
the partition. A storage then writes the object again from its log. The command repeats the request
until the repair has ended, even if the partition moves to another server meanwhile.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from secrets import randbits
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import click

from waltz_core.archive.archive_check import ArchiveCheck, BadArchiveFile, RecordedArchive
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import shared_options as options
from waltz_core.cli.archive.archive_status import archive_option, query_archive_url
from waltz_core.cli.archive.store_calls import call_store
from waltz_core.cli.change_commands import audit_change, open_command_session
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import AsyncWaltzClient
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.errors import BadConfig, ObjectMissing, WaltzError
from waltz_core.records.record import PartitionId, TransactionId

ResultT = TypeVar("ResultT")
ShowText: TypeAlias = Callable[[str], None]
# The action for a manifest file, or for an object that no storage can write again.
RESTORE_ACTION: Final = (
    "restore the file from a copy or an earlier version in the object store, then verify "
    "again; until then, do not lower local_retention_bytes and local_retention_ms"
)
# The action for an object, if the command has not requested a repair.
REPAIR_ACTION: Final = (
    "add --repair to write the file again from a storage that still has its transactions; "
    "otherwise restore the file from a copy or an earlier version in the object store"
)
RETRY_INTERVAL_S: Final = 0.2


@subcommand
@options.connect_option
@archive_option
@click.option("--partition", type=int, metavar="P", help="the partition [default: all]")
@click.option(
    "--first",
    type=int,
    default=0,
    metavar="ID",
    help="the ID of the first transaction to verify [default: 0]",
)
@click.option(
    "--last",
    type=int,
    metavar="ID",
    help="the ID of the last transaction to verify [default: the last archived one]",
)
@click.option(
    "--repair",
    is_flag=True,
    help="write missing and corrupt objects again from the logs of storages; the servers must run",
)
@options.json_option
async def verify(  # noqa: PLR0913 - one for each option
    *,
    connect: str,
    archive: str | None,
    partition: int | None,
    first: int,
    last: int | None,
    repair: bool,
    as_json: bool,
) -> int:
    """Read and verify the archive of the chosen partitions, and repair it with `--repair`."""
    if first < 0 or (last is not None and last < first):
        options_text = f"--first {first}" if last is None else f"--first {first} and --last {last}"
        raise BadConfig(f"expected 0 <= --first <= --last, found {options_text}")
    async with open_command_session(connect) as coordinator:
        cluster = await coordinator.read_cluster()
        count = cluster.params.partition_count
        if partition is not None and not 0 <= partition < count:
            raise BadConfig(
                f"--partition: expected a partition in 0..{count - 1}, found {partition}"
            )
        url = archive or await query_archive_url(coordinator)
        store = await call_store(url, lambda: ArchiveStore(url), lambda: ("opening it", 0))
        print_line = print_error if as_json else print_result
        results: dict[int, dict[str, Any]] = {}
        for number in range(count) if partition is None else (partition,):
            check = ArchiveCheck(
                store,
                cluster.store.cluster_key.bytes,
                PartitionId(number),
                first=TransactionId(first),
                last=None if last is None else TransactionId(last),
            )
            results[number] = await _verify_partition(
                coordinator, PartitionId(number), check, print_line, repairs=repair
            )
        if repair and any(result["problems"] for result in results.values()):
            async with audit_change(coordinator), AsyncWaltzClient.connect(connect) as client:
                for number, row in results.items():
                    for problem in row["problems"]:
                        await _repair_object(client, PartitionId(number), problem, print_line)
    has_problem = any(
        not problem["is_repaired"] for result in results.values() for problem in result["problems"]
    )
    is_range = first > 0 or last is not None
    is_range_absent = is_range and all(result["last"] is None for result in results.values())
    has_passed = not (has_problem or is_range_absent)
    if as_json:
        print_json({"passed": has_passed, "archive": url, "partitions": results})
    else:
        print_result("passed" if has_passed else "failed")
    return 0 if has_passed else 1


verify.help_details = (
    "The command reads every object completely. It verifies the checksums of records and "
    "Parquet pages, and the chain hash through all objects up to the hash that ZooKeeper "
    "records. With --repair, a storage that still has all transactions of a missing or "
    "corrupt object writes the object again; without --repair, nothing is changed. The exit code "
    "is 0 if all files are correct or were replaced. It is 1 if a file is missing or "
    "corrupt, if the given range is not in the archive any more, or if the archive cannot be "
    "read."
)


async def read_recorded_archive(
    coordinator: Coordinator, partition_id: PartitionId
) -> RecordedArchive | None:
    """Return a partition's archived mark in ZooKeeper; None if nothing is archived."""
    marker = (await coordinator.read_partition(partition_id)).marker
    mark = None if marker is None else marker.archived
    if mark is None:
        return None
    return RecordedArchive(mark.first, mark.last, mark.chain, mark.manifest, mark.manifest_crc)


async def _verify_partition(
    coordinator: Coordinator,
    partition_id: PartitionId,
    check: ArchiveCheck,
    show: ShowText,
    *,
    repairs: bool = False,
) -> dict[str, Any]:
    """Verify the archive of one partition; show each problem when it is found."""
    recorded_archive = await read_recorded_archive(coordinator, partition_id)
    missing, is_empty = _unarchived_note(check, recorded_archive)
    if missing:
        show(f"partition {partition_id}: {missing}")
    if recorded_archive is None or is_empty:
        return {"last": None, "objects": 0, "bytes": 0, "problems": []}
    try:
        with ProgressLine() as line:
            await _PartitionCheck(coordinator, partition_id, check, show, repairs).run(
                recorded_archive, line
            )
    except BaseException as error:
        check.stop()
        if isinstance(error, WaltzError | asyncio.CancelledError):
            print_error(
                f"partition {partition_id}: all transactions before {check.next_id} are "
                f"verified; to continue, use --partition {partition_id} --first "
                f"{check.next_id}"
            )
        raise
    files = "1 wrong file" if len(check.bad_files) == 1 else f"{len(check.bad_files)} wrong files"
    show(
        f"partition {partition_id}: {check.object_count} objects with {check.byte_count} "
        f"bytes, up to transaction {check.next_id - 1}: {files}"
    )
    return {
        "last": check.next_id - 1,
        "objects": check.object_count,
        "bytes": check.byte_count,
        "problems": [
            {
                **bad_file._asdict(),
                "is_repaired": False,
                "action": _action_text(bad_file, repairs=repairs),
            }
            for bad_file in check.bad_files
        ],
    }


def _unarchived_note(
    check: ArchiveCheck, recorded_archive: RecordedArchive | None
) -> tuple[str, bool]:
    """Return a text about requested transactions that the archive lacks, and whether it lacks all.

    The text is empty if the whole range is archived. Without a range, the manifest is checked even
    if all of its objects have expired.
    """
    if recorded_archive is None:
        return "no transaction is archived", True
    first, available = check.next_id, recorded_archive.first
    last = recorded_archive.last if check.last is None else check.last
    if first > recorded_archive.last:
        return (
            (
                f"transactions from {first} on are not archived; the last archived one is "
                f"{recorded_archive.last}"
            ),
            True,
        )
    if first >= available:
        return "", False
    expired = f"{first}..{min(last, available - 1)}"
    is_empty = last < available and (first > 0 or check.last is not None)
    return f"transactions {expired} have expired; the first available one is {available}", is_empty


def _action_text(bad_file: BadArchiveFile, *, repairs: bool) -> str:
    return REPAIR_ACTION if bad_file.is_object and not repairs else RESTORE_ACTION


async def _repair_object(
    client: AsyncWaltzClient, partition_id: PartitionId, problem: dict[str, Any], show: ShowText
) -> None:
    """Request the repair of an object; print the outcome, and add it to `problem`."""
    file_text = f"partition {partition_id}, file {problem['name']}"
    if not problem["is_object"]:
        show(
            f"{file_text}: not repaired, because storages cannot write this kind of file again. "
            "Hint: "
            f"{RESTORE_ACTION}."
        )
        return
    object_fields = (problem["name"], problem["first"], problem["last"])
    # This number identifies this attempt, because the owner may still have the outcome of an
    # earlier command.
    token = randbits(63)
    while True:
        answer = await client.requests.replace_object(partition_id, *object_fields, token=token)
        if answer.is_ended:
            break
        await asyncio.sleep(RETRY_INTERVAL_S)  # the owner does not report the end of the task
    if answer.is_replaced:
        problem.update(is_repaired=True, repaired_by=answer.storage, action="")
        done = (
            f"repaired by storage {answer.storage}"
            if answer.storage
            else "an earlier command has already replaced the object"
        )
        show(f"{file_text}: {done}")
        return
    problem["failures"] = list(answer.failures)
    show(
        f"{file_text}: not repaired, because no storage has written transactions "
        f"{problem['first']}..{problem['last']} again: {'; '.join(answer.failures)}. Hint: "
        f"{RESTORE_ACTION}."
    )


class _PartitionCheck(NamedTuple):
    """Checks the archive of one partition; the blocking calls run in a thread."""

    coordinator: Coordinator
    partition_id: PartitionId
    check: ArchiveCheck
    show: ShowText
    is_repair_requested: bool

    async def run(self, recorded_archive: RecordedArchive, line: ProgressLine) -> None:
        """Check all files; if the manifest is replaced meanwhile, continue with the newer one."""
        check, is_begun, shown_count = self.check, False, 0
        while True:
            try:
                if not is_begun:
                    await self._call_store(partial(check.begin, recorded_archive))
                    is_begun = True
                is_continued = await self._call_store(check.check_next_file)
            except ObjectMissing as error:
                newer = await read_recorded_archive(self.coordinator, self.partition_id)
                if newer is not None and newer.manifest != recorded_archive.manifest:
                    recorded_archive, is_begun = newer, False
                    continue
                if not is_begun:
                    check.note_missing_manifest(recorded_archive, error)
                else:
                    check.note_missing_file(error)
                is_continued = is_begun
            for bad_file in check.bad_files[shown_count:]:
                self._show_problem(bad_file)
            shown_count = len(check.bad_files)
            if not is_continued:
                return
            done, total = check.next_id, recorded_archive.last + 1
            line.show(done, total, f"transactions of partition {self.partition_id} verified")

    async def _call_store(self, call: Callable[[], ResultT]) -> ResultT:
        return await call_store(self.check.archive_url, call, lambda: self.check.read_progress)

    def _show_problem(self, bad_file: BadArchiveFile) -> None:
        range_text = (
            f"partition {self.partition_id}, transactions {bad_file.first}..{bad_file.last}"
        )
        hint = (
            "" if self.is_repair_requested else f" Hint: {_action_text(bad_file, repairs=False)}."
        )
        self.show(f"{range_text}, file {bad_file.name}: {bad_file.problem}.{hint}")
