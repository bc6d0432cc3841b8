"""`waltz-core archive status`: show the archived transactions of partitions, and the lag."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import click

from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.manifest import ObjectEntry
from waltz_core.archive.pins import pins_of
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import shared_options as options
from waltz_core.cli.archive.store_calls import call_store
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_error, print_json, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BadConfig, WaltzError
from waltz_core.ops.facts import ClusterFacts, PartitionFacts
from waltz_core.records.record import TransactionId

ResultT = TypeVar("ResultT")
# Seconds to wait for an answer of a server or storage.
ANSWER_TIMEOUT_S: Final = 10.0
# The size of the cache for manifests and their pages. It is small, because the command reads each
# manifest and page once.
MANIFEST_CACHE_BYTES: Final = 16 * 1024 * 1024
COLUMN_TITLES: Final = (
    "partition",
    "first available",
    "archived",
    "high-water mark",
    "lag",
    "lag bytes",
    "lag s",
    "objects",
    "bytes",
)

archive_option = click.option(
    "--archive",
    metavar="URL",
    help="the URL of the archive, as in `archive_url` [default: the archive of the storages]",
)


@subcommand
@options.connect_option
@archive_option
@click.option(
    "--objects",
    is_flag=True,
    help="with --json: also list all objects, with their URLs and transaction IDs",
)
@options.json_option
async def status(*, connect: str, archive: str | None, objects: bool, as_json: bool) -> int:
    """Show the archived transactions and the lag of each partition."""
    if objects and not as_json:
        raise BadConfig("--objects requires --json")
    async with open_command_session(connect) as coordinator:
        key = (await coordinator.read_cluster()).store.cluster_key
        facts = await _query_cluster(coordinator)
    url = archive or archive_url_in(facts)
    rows, errors = await _partition_rows(facts, url, lists_objects=objects)
    pinning_clusters: list[str] = []
    if url and not errors:
        pinning_clusters = await _call_store(
            url,
            "reading the pins of restored clusters",
            lambda: pins_of(ArchiveStore(url), key.bytes),
        )
    if as_json:
        print_json(
            {"archive": url or None, "partitions": rows, "pins": pinning_clusters, "errors": errors}
        )
    else:
        cells = [
            [row[each.replace(" ", "_").replace("-", "_")] for each in COLUMN_TITLES]
            for row in rows
        ]
        print_table(
            COLUMN_TITLES, [["-" if cell is None else cell for cell in row] for row in cells]
        )
        print_error(f"archive: {url or 'no storage reports one'}")
        for each in pinning_clusters:
            print_error(
                f"no objects are deleted from the archive, because the restored cluster {each} "
                "may use them"
            )
        for each in errors:
            print_error(each)
    return 1 if errors else 0


status.help_details = (
    "The command reads ZooKeeper, the high-water marks of the servers, and the manifests in "
    "the archive. For each partition it prints the lag: the number of committed transactions "
    "that are not archived, their approximate size, and the age of the oldest of them in "
    "seconds. --json also has the chain hash and the manifest. The exit code is 1 if a "
    "process or the archive could not be queried."
)


async def _query_cluster(coordinator: Coordinator) -> ClusterFacts:
    """Query all processes of the cluster, as the doctor does."""
    from waltz_core.administration.cluster_probes import query_cluster  # noqa: PLC0415 - loads Arrow

    with ProgressLine() as line:
        return await query_cluster(coordinator, timeout_s=ANSWER_TIMEOUT_S, on_progress=line.show)


def archive_url_in(facts: ClusterFacts) -> str:
    """Return the URL that the storages report, or ""; raises BadConfig if their URLs differ."""
    urls = {
        storage.archive.url for storage in facts.storages.values() if storage.archive is not None
    }
    if len(urls) > 1:
        raise BadConfig(
            f"the storages have different settings archive_url: {', '.join(sorted(urls))}. "
            "Hint: choose one with --archive URL."
        )
    return next(iter(urls), "")


async def query_archive_url(coordinator: Coordinator) -> str:
    """Query the storages for the archive's URL; raises BadConfig if none reports one."""
    url = archive_url_in(await _query_cluster(coordinator))
    if not url:
        raise BadConfig(
            "no storage that answers has the setting archive_url. Hint: use --archive URL."
        )
    return url


async def _partition_rows(
    facts: ClusterFacts, url: str, *, lists_objects: bool
) -> tuple[list[dict[str, object]], list[str]]:
    """Return a row for each partition, and the texts of all errors."""
    errors = [
        f"server {each.address} does not answer: {each.failure}"
        for each in facts.servers.values()
        if each.failure
    ]
    errors += [
        f"storage {each.address} does not answer: {each.admin_failure or each.failure}"
        for each in facts.storages.values()
        if each.admin_failure or each.failure
    ]
    if not url and any(each.archived_mark for each in facts.partitions.values()):
        errors.append("no storage reports its setting archive_url. Hint: use --archive URL.")
    try:
        store = await _call_store(url, "opening it", lambda: ArchiveStore(url)) if url else None
    except WaltzError as error:
        store = None
        errors.append(str(error))
    rows = []
    for number, partition in facts.partitions.items():
        mark = partition.archived_mark
        row: dict[str, object] = {"partition": int(number), **_mark_cells(partition, mark)}
        try:
            entries = None if store is None or mark is None else await _read_objects(store, mark)
        except WaltzError as error:
            entries = None
            errors.append(f"partition {number}: {error}")
        row["objects"] = None if entries is None else len(entries)
        row["bytes"] = None if entries is None else sum(each.file_bytes for each in entries)
        if lists_objects:
            row["files"] = [_object_json(url, each, mark) for each in entries or ()]
        rows.append(row)
    return rows, errors


def _mark_cells(partition: PartitionFacts, mark: ArchivedMark | None) -> dict[str, object]:
    return {
        "first_available": None if mark is None else mark.first,
        "archived": None if mark is None else mark.last,
        "chain": None if mark is None else mark.chain.hex(),
        "commit_time_ms": None if mark is None else mark.stamp_ms or None,
        "high_water_mark": partition.high_water_mark,
        "lag": partition.unarchived_count,
        "lag_bytes": partition.unarchived_bytes,
        "lag_s": partition.oldest_unarchived_age_s,
        "manifest": None if mark is None else mark.manifest,
    }


async def _call_store(url: str, activity_text: str, call: Callable[[], ResultT]) -> ResultT:
    return await call_store(url, call, lambda: (activity_text, 0))


async def _read_objects(store: ArchiveStore, mark: ArchivedMark) -> Sequence[ObjectEntry]:
    """Return the objects that the manifest of a partition lists.

    Raises:
        The errors of `ArchiveReader.manifest`.
    """
    cache = ArchiveCache(MANIFEST_CACHE_BYTES)
    reader = ArchiveReader(store, mark.manifest, mark.manifest_crc, cache)
    try:
        return await _call_store(
            store.url,
            f"reading manifest {mark.manifest} and its pages",
            lambda: reader.objects_between(TransactionId(0), mark.last),
        )
    finally:
        cache.close()


def _object_json(url: str, entry: ObjectEntry, mark: ArchivedMark | None) -> dict[str, object]:
    """Describe an object for JSON; only its IDs `first` to `last` are available."""
    assert mark is not None
    return {
        "name": entry.name,
        "url": f"{url.partition('?')[0].rstrip('/')}/{entry.name}",
        "first": max(entry.first, mark.first),
        "last": entry.last,
        "bytes": entry.file_bytes,
        "commit_ms_min": entry.commit_ms_min,
        "commit_ms_max": entry.commit_ms_max,
    }
