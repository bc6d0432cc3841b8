"""Checks every file of a partition's archive: manifest, pages and objects. All calls block.

Rules (docs/decisions/047):
    1. Each file is read once, completely. Its size and CRC-32 must match the manifest, because no
       other check covers statistics and headers. An object is copied to a temporary file, so that
       the check needs memory for one row group, not for the complete object.
    2. All records of an object are rebuilt (`ArchiveObject.verify`). Each object must begin with
       the chain hash at the end of the preceding object. The last object must end with the chain
       hash that ZooKeeper records.
    3. A wrong file is a finding, and the check continues with the next file. If a page cannot be
       read, the chain hash before the next object is not known, and is not checked.
    4. During the check, another manifest may replace this manifest, and files of the old manifest
       may be deleted. So after ObjectMissing, the caller reads ZooKeeper again. If ZooKeeper
       records another manifest, the caller calls `begin` with it. Otherwise the file is lost, and
       the caller calls `note_missing_file`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, Final, NamedTuple

from waltz_core.archive.file_names import writer_cluster_key
from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry, PageEntry
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import BadFormat, ChecksumMismatch, ObjectMissing
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, Chain, PartitionId, TransactionId

_COPY_BYTES: Final = 4 * 1024 * 1024


class RecordedArchive(NamedTuple):
    """The archive as ZooKeeper records it: IDs first..last, chain hash at `last`, and manifest."""

    first: TransactionId
    last: TransactionId
    chain: Chain
    manifest: str
    manifest_crc: int


class BadArchiveFile(NamedTuple):
    """A file that is missing or corrupt, and the IDs that it contains.

    `problem` is the error with expected and found values. `is_object` states that the file is an
    object, not a file of the manifest.
    """

    name: str
    first: TransactionId
    last: TransactionId
    problem: str
    is_object: bool = False


class ArchiveCheck:
    """A check of IDs first..last in the archive of one partition.

    `last` is None if the check ends where the archive ends. `next_id` is the first ID that is not
    yet checked.
    """

    def __init__(
        self,
        store: ArchiveStore,
        cluster_key: bytes,
        partition_id: PartitionId,
        *,
        first: TransactionId,
        last: TransactionId | None = None,
    ) -> None:
        """The caller must call `begin` first.

        If `last` is None, the check ends with the archive.
        """
        self.next_id = first
        self.last = last
        self.bad_files: list[BadArchiveFile] = []
        self.object_count = 0
        self.byte_count = 0
        self._store = store
        self._identity = (cluster_key, partition_id)
        self._pages: deque[PageEntry] = deque()
        self._entries: deque[ObjectEntry] = deque()
        self._newest_objects: tuple[ObjectEntry, ...] = ()
        self._chain: Chain | None = None  # before the next object; None if it is not known
        self._is_stopped = False
        self._current_read = ""
        self._read_call_count = 0

    @property
    def archive_url(self) -> str:
        """The URL of the archive."""
        return self._store.url

    @property
    def read_progress(self) -> tuple[str, int]:
        """The file that is being read (empty if none), and the number of reads since the start."""
        return self._current_read, self._read_call_count

    def _read(self, name: str) -> bytes:
        with self._track_call(name):
            return self._store.read(name)

    @contextmanager
    def _track_call(self, name: str) -> Iterator[None]:
        self._current_read, self._read_call_count = f"reading {name}", self._read_call_count + 1
        try:
            yield
        finally:
            self._current_read = ""

    def stop(self) -> None:
        """Make the check on another thread stop soon."""
        self._is_stopped = True

    def begin(self, recorded_archive: RecordedArchive) -> None:
        """Read the manifest that ZooKeeper records, and continue with its objects.

        Raises:
            ObjectMissing: a file does not exist (rule 4).
            ArchiveUnavailable: the store does not answer.
        """
        self._pages, self._entries, self._newest_objects = deque(), deque(), ()
        name = recorded_archive.manifest
        try:
            data = self._read(name)
            _expect("CRC-32", f"{recorded_archive.manifest_crc:08x}", f"{crc32(data):08x}")
            manifest = Manifest.from_bytes(data, name)
            self._check_manifest(manifest, recorded_archive)
        except (BadFormat, ChecksumMismatch) as error:
            self._add_bad_file(name, recorded_archive.first, recorded_archive.last, error)
            return
        if self.next_id < manifest.first:
            self.next_id, self._chain = manifest.first, None
        self._pages.extend(
            page_entry for page_entry in manifest.pages if self._is_in_range(page_entry)
        )
        self._newest_objects = manifest.newest_objects

    def _check_manifest(self, manifest: Manifest, recorded_archive: RecordedArchive) -> None:
        expected_values = (
            *self._identity,
            recorded_archive.first,
            recorded_archive.last,
            recorded_archive.chain,
        )
        found_values = (
            manifest.cluster_key,
            manifest.partition_id,
            manifest.first,
            manifest.last,
            manifest.chain,
        )
        names = ("cluster key", "partition", "first ID", "last ID", "chain")
        for name, expected_value, found_value in zip(
            names, expected_values, found_values, strict=True
        ):
            _expect(
                f"the {name} (recorded in ZooKeeper)",
                _format_value(expected_value),
                _format_value(found_value),
            )
        if manifest.newest_objects:
            last_chain = manifest.newest_objects[-1].chain
            _expect(
                f"the chain hash at transaction {manifest.last}",
                _format_value(manifest.chain),
                _format_value(last_chain),
            )

    def check_next_file(self) -> bool:
        """Check the next file of the archive; return False if all are checked.

        Raises:
            ObjectMissing: a file does not exist (rule 4).
            ArchiveUnavailable: the store does not answer.
        """
        if self._entries:
            self._check_object(self._entries[0])
            return True
        if self._pages:
            self._check_page(self._pages[0])
            return True
        self._add_objects(self._newest_objects)
        self._newest_objects = ()
        return bool(self._entries)

    def note_missing_file(self, error: ObjectMissing) -> None:
        """Note that the file of the last call is missing, and skip it (rule 4)."""
        if self._entries:
            entry = self._entries[0]
            self._add_bad_object(entry, error)
            self._finish_object(entry)
        elif self._pages:
            self._skip_page(self._pages[0], error)

    def note_missing_manifest(
        self, recorded_archive: RecordedArchive, error: ObjectMissing
    ) -> None:
        """Note that the manifest of `begin` is missing: no object can be checked (rule 4)."""
        self._add_bad_file(
            recorded_archive.manifest, recorded_archive.first, recorded_archive.last, error
        )

    def _is_in_range(self, entry: PageEntry | ObjectEntry) -> bool:
        is_reached = self.last is None or entry.first <= self.last
        return is_reached and entry.last >= self.next_id

    def _add_objects(self, entries: Iterable[ObjectEntry]) -> None:
        """Queue the objects of a page, or the newest objects, that must be checked."""
        for entry in entries:
            if self._is_in_range(entry):
                self._entries.append(entry)
            elif not self._entries:
                self._chain = entry.chain

    def _add_bad_file(
        self, name: str, first: TransactionId, last: TransactionId, problem: object
    ) -> None:
        self.bad_files.append(BadArchiveFile(name, first, last, str(problem)))

    # --- pages of the manifest

    def _check_page(self, page_entry: PageEntry) -> None:
        try:
            data = self._read(page_entry.name)
            _expect("CRC-32", f"{page_entry.file_crc:08x}", f"{crc32(data):08x}")
            entries = ManifestPage.from_bytes(data, page_entry.name).entries
            bounds = (entries[0].first, entries[-1].last) if entries else None
            _expect("IDs", (page_entry.first, page_entry.last), bounds)
            for previous, following in pairwise(entries):
                _expect(
                    "the first transaction ID after the previous object",
                    previous.last + 1,
                    following.first,
                )
        except (BadFormat, ChecksumMismatch) as error:
            self._skip_page(page_entry, error)
            return
        self._pages.popleft()
        self._add_objects(entries)

    def _skip_page(self, page_entry: PageEntry, error: Exception) -> None:
        self._add_bad_file(page_entry.name, page_entry.first, page_entry.last, error)
        self._pages.popleft()
        self.next_id, self._chain = TransactionId(page_entry.last + 1), None  # rule 3

    # --- objects

    def _check_object(self, entry: ObjectEntry) -> None:
        with TemporaryFile() as copy:
            size, crc = self._copy_object(entry.name, copy)
            problems = list(self._object_problems(entry, size, crc, copy))
        if self._is_stopped:
            return
        if problems:
            self._add_bad_object(entry, "; ".join(problems))
        self.object_count += 1
        self.byte_count += size
        self._finish_object(entry)

    def _add_bad_object(self, entry: ObjectEntry, problem: object) -> None:
        self.bad_files.append(BadArchiveFile(*entry[:3], str(problem), is_object=True))

    def _finish_object(self, entry: ObjectEntry) -> None:
        self._entries.popleft()
        self.next_id, self._chain = TransactionId(entry.last + 1), entry.chain

    def _copy_object(self, name: str, target: IO[bytes]) -> tuple[int, int]:
        """Copy an object to a local file; return its size and CRC-32."""
        size = crc = 0
        with self._track_call(name), self._store.open(name) as source:
            while not self._is_stopped and (data := source.read(_COPY_BYTES)):
                self._read_call_count += 1
                target.write(data)
                size, crc = size + len(data), crc32(data, crc)
        target.seek(0)
        return size, crc

    def _object_problems(
        self, entry: ObjectEntry, size: int, crc: int, copy: IO[bytes]
    ) -> Iterator[str]:
        """Yield all errors of an object: first those of its bytes, then those of its content."""
        if size != entry.file_bytes:
            yield f"expected a file of {entry.file_bytes} bytes, found {size}"
        elif crc != entry.file_crc:
            yield f"expected a file with CRC-32 {entry.file_crc:08x}, found {crc:08x}"
        try:
            self._check_content(ArchiveObject(copy, entry.name), entry)
        except (BadFormat, ChecksumMismatch) as error:
            yield str(error).removeprefix(f"archived object {entry.name}: ")

    def _check_content(self, archive_object: ArchiveObject, entry: ObjectEntry) -> None:
        """Rebuild the records, and compare the object with the manifest (rule 2)."""
        metadata = archive_object.metadata
        _expect("the first transaction ID", entry.first, metadata.first)
        writer = writer_cluster_key(entry.name) or self._identity[0]
        _expect("cluster key", writer.hex(), metadata.cluster_key.hex())
        _expect("partition", self._identity[1], metadata.partition_id)
        chain_before = self._chain if entry.first else GENESIS_CHAIN
        if chain_before is not None:
            _expect(
                f"the chain hash before transaction {entry.first}",
                _format_value(chain_before),
                _format_value(metadata.chain_before),
            )
        chain, stamps = None, (0, 0)
        for batch in archive_object.verify():
            if self._is_stopped:
                return
            if batch.last <= entry.last and batch.stamp_ms:
                stamps = (
                    min(stamps[0] or batch.stamp_ms, batch.stamp_ms),
                    max(stamps[1], batch.stamp_ms),
                )
            if batch.last == entry.last:
                chain = batch.chain
        _expect(
            f"the chain hash at transaction {entry.last}",
            _format_value(entry.chain),
            _format_value(chain),
        )
        _expect("commit times", (entry.commit_ms_min, entry.commit_ms_max), stamps)


def _expect(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise ChecksumMismatch(f"expected {expected} as {what}, found {found}")


def _format_value(found: object) -> object:
    return found.hex() if isinstance(found, bytes) else found
