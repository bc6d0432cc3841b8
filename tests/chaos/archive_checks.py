"""Compares the archive that a round of chaos leaves with the log that clients read.

Rules:
    1. The objects of the recorded manifests have the bytes of the log from ID 0 on, without gaps.
       Each storage has the records from its oldest segment on. Together, objects and storages have
       the whole log.
    2. After a garbage collection, each file is listed by a recorded manifest, or is a manifest that
       was replaced less than the grace period ago. The round makes older files old enough for the
       collection: it moves their times back by `AGED_BY_MS`.
    3. The size of local logs is limited. The limit is the sum of the retention, one segment of each
       partition, and the records appended since the last store sessions began. A new store session
       confirms which segments may be removed.
    4. All storages have removed segments of each partition. So the round has tested reads from the
       archive: the archive answered the reads from ID 0.
"""

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import time_ns

from tests.chaos.cluster import RETENTION_BYTES, SEGMENT_BYTES, ChaosCluster, LocalLog
from tests.chaos.history import Log
from tests.chaos.object_store import FOLDER
from waltz_core.archive.file_names import manifest_version_of
from waltz_core.archive.garbage_collection import REPLACED_GRACE_MS
from waltz_core.archive.manifest import Manifest, ObjectEntry, decode_page
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore, ListedFile
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.records.record import PartitionId

AGED_BY_MS = 2 * REPLACED_GRACE_MS
EVENT_PATTERNS = {
    "archived ranges": re.compile(r" archive\.manifest_recorded "),
    "failed uploads": re.compile(r" storage\.archive_failed "),
    "failed attempts": re.compile(r" archive\.failed "),
    "removed segments": re.compile(r" storage\.segment_removed "),
    "collected files": re.compile(r" storage\.garbage_collected .*?\bfiles=(\d+)"),
}


class SavedArchive:
    """A copy of all files, and the objects that the recorded manifests list."""

    def __init__(self, store: ArchiveStore, marks: Mapping[int, ArchivedMark]) -> None:
        self.store = store
        self.marks = marks
        self.files = store.list_files("")
        self.objects = {each: list[ObjectEntry]() for each in marks}
        self.listed: set[str] = set()
        for partition, mark in marks.items():
            head = Manifest.from_bytes(store.read(mark.manifest), mark.manifest)
            pages = [decode_page(page, store.read(page.name)) for page in head.pages]
            self.objects[partition] += [entry for page in pages for entry in page.entries]
            self.objects[partition] += head.newest_objects
            self.listed |= {mark.manifest, *(page.name for page in head.pages)}
            self.listed |= {each.name for each in self.objects[partition]}

    def orphans(self, now_ms: int) -> list[str]:
        """Return the files that rule 2 does not permit."""
        written_ms: dict[tuple[str, int], int] = {}
        for each in self.files:
            if (version := manifest_version_of(each.name)) is not None:
                folder_and_version = each.name.rpartition("/")[0], version
                written_ms[folder_and_version] = max(
                    each.modified_ms, written_ms.get(folder_and_version, 0)
                )

        def was_replaced_recently(each: ListedFile) -> bool:
            version = manifest_version_of(each.name)
            if version is None:
                return False
            replaced_ms = written_ms.get((each.name.rpartition("/")[0], version + 1), 0)
            return now_ms - replaced_ms < REPLACED_GRACE_MS

        return [
            file.name
            for file in self.files
            if file.name not in self.listed and not was_replaced_recently(file)
        ]

    def differences(self, log: Log) -> list[str]:
        """Return where the objects differ from the log (rule 1)."""
        wrong = []
        for partition, entries in self.objects.items():
            expected, offsets = log.records[partition], log.offsets[partition]
            following = 0
            for entry in entries:
                if entry.first != following:
                    wrong.append(f"{entry.name} begins at {entry.first}, expected {following}")
                following = entry.last + 1
                if following >= len(offsets):
                    wrong.append(f"{entry.name} ends above the log, at {entry.last}")
                elif self._records(entry) != expected[offsets[entry.first] : offsets[following]]:
                    wrong.append(f"{entry.name} has other records than the log")
            last = self.marks[partition].last
            if following != last + 1:
                wrong.append(
                    f"the objects of partition {partition} end at {following - 1}, expected {last}"
                )
        return wrong

    def _records(self, entry: ObjectEntry) -> bytes:
        with self.store.open(entry.name) as source:
            opened = ArchiveObject(source, entry.name)
            chains = [batch.chain for batch in opened.verify()]
            assert chains[-1] == entry.chain, entry.name
            return b"".join(
                bytes(opened.read_row_group(number).records) for number in range(opened.group_count)
            )


def recorded_marks(cluster: ChaosCluster) -> dict[int, ArchivedMark]:
    """Return the archived mark in ZooKeeper of each partition that has one."""

    async def read() -> dict[int, ArchivedMark]:
        found = {}
        async with open_session(cluster.connect) as coordinator:
            for partition in range(cluster.cluster_size.partitions):
                marker = (await coordinator.read_partition(PartitionId(partition))).marker
                if marker is not None and marker.archived is not None:
                    found[partition] = marker.archived
        return found

    with cluster.operator.enter():
        return asyncio.run(read())


def is_archived(cluster: ChaosCluster, lasts: Mapping[int, int]) -> bool:
    """Return whether the archive has each partition up to the given ID."""
    marks = recorded_marks(cluster)
    return all(
        partition in marks and marks[partition].last >= last for partition, last in lasts.items()
    )


def copy_archive(cluster: ChaosCluster, directory: Path) -> SavedArchive:
    """Copy the archive; raises ObjectMissing if a manifest was replaced meanwhile."""
    shutil.rmtree(directory, ignore_errors=True)
    marks = recorded_marks(cluster)
    cluster.send_bucket_command(f"save {directory.absolute()}")
    return SavedArchive(ArchiveStore(f"file://{directory.absolute()}/{FOLDER}"), marks)


def local_differences(local_logs: Iterable[tuple[str, dict[int, LocalLog]]], log: Log) -> list[str]:
    """Return the storages whose logs differ from the log that clients read (rules 1, 3 and 4)."""
    wrong = []
    for name, logs in local_logs:
        kept_bytes = 0
        for partition, (first, records) in logs.items():
            offset = log.offsets[partition][first]
            if records != log.records[partition][offset:]:
                wrong.append(f"{name} has other records in partition {partition} from {first} on")
            if first == 0:
                wrong.append(f"{name} has removed nothing of partition {partition}")
            kept_bytes += len(records)
        limit = RETENTION_BYTES + sum(
            SEGMENT_BYTES + len(log.records[each]) - log.offsets[each][log.sessions[each][-1]]
            for each in logs
        )
        if kept_bytes > limit:
            wrong.append(f"{name} keeps {kept_bytes} bytes of records, expected {limit} at most")
    return wrong


def count_events(cluster: ChaosCluster) -> Counter[str]:
    """Return for each of `EVENT_PATTERNS` how often it was logged, or how many files it deleted."""
    counts: Counter[str] = Counter()
    for name in (*cluster.cluster_size.names("server"), *cluster.cluster_size.names("storage")):
        text = cluster.log_path(name).read_text(encoding="utf-8", errors="replace")
        for event_name, event in EVENT_PATTERNS.items():
            counts[event_name] += sum(
                int(match_[1]) if event.groups else 1 for match_ in event.finditer(text)
            )
    return counts


def now_ms() -> int:
    """Return the time of the store's clock."""
    return time_ns() // 1_000_000
