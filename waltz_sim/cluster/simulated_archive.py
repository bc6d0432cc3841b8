"""A simulated object store, and the uploads of simulated storages into it.

It replaces `archive/store.py` and `archive/upload.py`, which block. Here every request needs
virtual time. A request may fail, may be carried out without an answer, or may be carried out much
later, even after its sender has died.

An object is not a Parquet file, because the encoding of a Parquet file takes longer than all other
work of a schedule. The guarantees do not depend on this format. An object has the records of its
batches, and their lineage. Manifests have the same bytes as in production.

Rules:
    1. A write is carried out at once, late, or never. Only an answer without an error shows that it
       was carried out.
    2. No file is overwritten (AR 2 of decision 047), and no file is lost unless it is deleted. A
       fault may change or lose a file, until an operator restores the file.
    3. An upload takes the same steps as `archive/upload.py`: it reads the present manifest, writes
       the object, and reads it back. Then it writes the new manifest, and reads it back.
    4. A process has at most one upload. If the process dies, the requests that it has sent may
       still take effect.
    5. A garbage collection runs the production code. It lists the files at one moment, perhaps
       late. Each file is deleted later, even after the process has died.
    6. An expiry does the same as `archive/upload.py`, in the same order.
    7. Replaced manifests and expired objects are kept for a shorter time than in production. A fast
       clock (`_fast_clock_ms`) measures the age of these files.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from waltz_core.archive.file_names import (
    FileOrigin,
    manifest_name,
    manifests_folder,
    object_name,
    objects_folder,
)
from waltz_core.archive.garbage_collection import (
    REPLACED_GRACE_MS,
    GarbageCollectionJob,
    GarbageCollectionOutcome,
    collect_garbage,
)
from waltz_core.archive.manifest import EXPIRY_GRACE_MS, Manifest, ObjectEntry
from waltz_core.archive.manifest_jobs import (
    ExpiryJob,
    ExpiryOutcome,
    ManifestAfterExpiry,
    NewManifest,
    UploadJob,
    UploadOutcome,
)
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import (
    ArchiveUnavailable,
    BadFormat,
    BeforeLogStart,
    ChecksumMismatch,
    ObjectMissing,
    WaltzError,
)
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import RangeRead
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Chain,
    LineageEntry,
    TransactionId,
)
from waltz_core.storage.service.archive_reads import ArchiveQuery, answer_from_archive
from waltz_core.storage.service.work import WorkOutcome
from waltz_core.wire.messages import SetArchived

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_storages import SimStorage

REQUEST_US: Final = (300, 6_000)
TIMEOUT_US: Final = 100_000
LATE_US_MAX: Final = 600_000
LOST_READS_SHARE: Final = 0.1
SHORT_GRACE_MS: Final = 300
SHORT_EXPIRY_GRACE_MS: Final = 400


class StoredFile(NamedTuple):
    """A file: its bytes. An object also has its batches, record ends, and the chain before it."""

    data: bytes
    batches: tuple[LineageEntry, ...] = ()
    ends: tuple[int, ...] = ()
    chain_before: Chain = GENESIS_CHAIN


class _Read(NamedTuple):
    name: str


class _Write(NamedTuple):
    name: str
    file: StoredFile


_Request: TypeAlias = _Read | _Write
_Result = TypeVar("_Result", NewManifest, ManifestAfterExpiry)


class SimArchive:
    """The object store of one world; see the module's rules."""

    grace_ms: Final = SHORT_GRACE_MS
    expiry_grace_ms: Final = SHORT_EXPIRY_GRACE_MS

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.stream("archive")
        self._chance = self._rng.random
        self._late_collection_rng = cluster.world.stream("late collections")
        self.files: dict[str, StoredFile] = {}
        self.original_files: dict[
            str, StoredFile
        ] = {}  # as written, before a fault changed or lost it
        self.written_ms: dict[str, int] = {}
        # Faults.
        self.is_unavailable = False
        self.rejected_share = 0.0  # the share of requests that are rejected
        self.lost_answer_share = 0.0
        self.corrupted_share = 0.0  # the share of writes that store other bytes
        self.extra_delay_us = 0

    # ---- requests

    def upload(
        self, storage: "SimStorage", job: UploadJob, on_done: Callable[[UploadOutcome], None]
    ) -> None:
        """Carry out an upload; `on_done` receives the outcome if the process lives (rule 4)."""
        self._run_steps(storage, _upload_steps(self._cluster.key, job), on_done)

    def expire(
        self, storage: "SimStorage", job: ExpiryJob, on_done: Callable[[ExpiryOutcome], None]
    ) -> None:
        """Write the manifest of an expiry; `on_done` is called as for an upload."""
        self._run_steps(storage, self._expiry_steps(storage, job), on_done)

    def _run_steps(
        self,
        storage: "SimStorage",
        steps: Generator[_Request, StoredFile, _Result],
        on_done: Callable[[_Result | WaltzError], None],
    ) -> None:
        incarnation = storage.incarnation

        def advance(answer: StoredFile | WaltzError | None) -> None:
            if storage.incarnation != incarnation:
                return
            if answer is not None:
                storage.on_archive_progressed()
            try:
                if isinstance(answer, WaltzError):
                    request = steps.throw(answer)
                else:
                    request = next(steps) if answer is None else steps.send(answer)
            except StopIteration as ended:
                on_done(ended.value)
            except WaltzError as error:
                on_done(error)
            else:
                self._send_request(storage, request, advance)

        storage.call_after_us(0, lambda: advance(None))

    def _send_request(
        self,
        storage: "SimStorage",
        request: _Request,
        on_answer: Callable[[StoredFile | WaltzError | None], None],
    ) -> None:
        delay_us, incarnation = (
            self._rng.randint(*REQUEST_US) + self.extra_delay_us,
            storage.incarnation,
        )
        # An attempt begins with reads. If reads failed as often as writes, few attempts would reach
        # a write.
        share = 1.0 if isinstance(request, _Write) else LOST_READS_SHARE
        is_lost = self._chance() < self.lost_answer_share * share
        if is_lost:
            self._cluster.checks.count("archive answer lost")
            error = ArchiveUnavailable(f"archive: {request.name}: no answer")
            storage.call_after_us(delay_us + TIMEOUT_US, partial(on_answer, error))
            roll = self._chance()
            if roll < 0.1:
                return
            if roll < 0.9:
                delay_us += self._rng.randrange(LATE_US_MAX)

        def apply() -> None:
            is_over = storage.incarnation != incarnation
            result = self._apply_request(request)
            if isinstance(request, _Write) and isinstance(result, StoredFile):
                if is_over:
                    self._cluster.checks.count("archive write after its sender died")
                elif is_lost and delay_us > TIMEOUT_US + self.extra_delay_us:
                    self._cluster.checks.count("archive write after its answer")
            if not is_lost and not is_over:
                storage.call_after_us(self._rng.randint(*REQUEST_US), partial(on_answer, result))

        self._world.call_after_us(delay_us, apply)

    def _apply_request(self, request: _Request) -> StoredFile | WaltzError:
        if self.is_unavailable or self._chance() < self.rejected_share:
            return ArchiveUnavailable(f"archive: {request.name}: rejected")
        if isinstance(request, _Read):
            return self.files.get(request.name) or ObjectMissing(f"archive: no {request.name}")
        self._cluster.checks.on_archive_file_written(
            request.name, is_known=request.name in self.files
        )
        self.files[request.name] = request.file
        self.written_ms[request.name] = self._world.now_ms
        if self._chance() < self.corrupted_share:
            self.files[request.name] = self._with_flipped_bit(request.file)
        return request.file

    # ---- expiry and collection

    def _fast_clock_ms(self, ms: int) -> int:
        """Convert a time of the world to the fast clock of rule 7."""
        return ms * EXPIRY_GRACE_MS // SHORT_EXPIRY_GRACE_MS

    def _expiry_steps(
        self, storage: "SimStorage", job: ExpiryJob
    ) -> Generator[_Request, StoredFile, ManifestAfterExpiry]:
        """Yield the requests of an expiry (rule 6); raises what `archive.upload.expire` raises."""
        recorded, cluster_key = job.recorded_manifest, self._cluster.key
        head = _check_crc((yield _Read(recorded.name)), recorded.name, recorded.file_crc)
        present = Manifest.from_bytes(head.data, recorded.name)
        recorded.check_matches(present, cluster_key)
        before_ms, wall_ms = job.before_ms, storage.wall_ms
        if job.retention_ms:
            before_ms = max(before_ms, wall_ms - job.retention_ms)
        first = _first_unexpired(present, job.before, before_ms)
        new_manifest = present.with_expiry(first, self._fast_clock_ms(self._world.now_ms))
        if (new_manifest.first, new_manifest.newest_objects) == (
            present.first,
            present.newest_objects,
        ):
            return ManifestAfterExpiry(first, "", 0)
        origin = FileOrigin(job.session_id, job.nonce, job.attempt)
        folder = manifests_folder(cluster_key, job.partition_id)
        name, data = manifest_name(folder, new_manifest.version, origin), new_manifest.to_bytes()
        self._cluster.checks.on_archive_expiry(name, wall_ms)
        yield _Write(name, StoredFile(data))
        _check_crc((yield _Read(name)), name, crc32(data))
        return ManifestAfterExpiry(first, name, crc32(data))

    def collect_garbage(
        self,
        storage: "SimStorage",
        job: GarbageCollectionJob,
        on_done: Callable[[GarbageCollectionOutcome], None],
    ) -> None:
        """Carry out a garbage collection (rule 5); `on_done` receives the outcome."""

        def begin() -> None:
            if self.is_unavailable or self._chance() < self.rejected_share:
                on_done(ArchiveUnavailable("archive: a collection was rejected"))
                return
            store = cast("ArchiveStore", _ListedStore(self))
            now_ms = self._fast_clock_ms(self._world.now_ms)
            try:
                found = collect_garbage(store, self._cluster.key, job, now_ms=now_ms)
            except WaltzError as error:
                on_done(error)
                return
            storage.call_after_us(
                self._rng.randint(*REQUEST_US) + self.extra_delay_us, partial(on_done, found)
            )

        late_us = 0
        if self.lost_answer_share and self._late_collection_rng.random() < self.lost_answer_share:
            late_us = self._late_collection_rng.randrange(LATE_US_MAX)
        storage.call_after_us(self._rng.randint(*REQUEST_US) + self.extra_delay_us + late_us, begin)

    def modified_ms(self, name: str) -> int:
        """Return the time on the fast clock at which a file was written, for its age (rule 7)."""
        now_ms = self._world.now_ms
        age_ms = (now_ms - self.written_ms[name]) * REPLACED_GRACE_MS // SHORT_GRACE_MS
        return self._fast_clock_ms(now_ms) - age_ms

    def delete_later(self, name: str) -> None:
        """Delete a file, perhaps much later."""

        def delete() -> None:
            if self.files.pop(name, None) is not None:
                self.original_files.pop(name, None)
                self.written_ms.pop(name, None)
                self._cluster.checks.on_archive_file_deleted(name)

        late_us = self._rng.randrange(LATE_US_MAX) if self._chance() < self.lost_answer_share else 0
        self._world.call_after_us(
            self._rng.randint(*REQUEST_US) + self.extra_delay_us + late_us, delete
        )

    # ---- faults

    def corrupt_file(self, name: str) -> None:
        """Flip a bit of a stored file."""
        self.original_files.setdefault(name, self.files[name])
        self.files[name] = self._with_flipped_bit(self.files[name])

    def lose_file(self, name: str) -> None:
        """Lose a stored file."""
        self.original_files.setdefault(name, self.files.pop(name))

    def _with_flipped_bit(self, file: StoredFile) -> StoredFile:
        data = bytearray(file.data)
        data[self._rng.randrange(len(data))] ^= 1
        return file._replace(data=bytes(data))

    def repair(self) -> None:
        """End all faults, and restore all files."""
        self.is_unavailable, self.extra_delay_us = False, 0
        self.rejected_share = self.lost_answer_share = self.corrupted_share = 0.0
        self.restore_files()

    def restore_files(self) -> None:
        """Restore the files that faults have changed or lost (rule 2)."""
        self.files.update(self.original_files)
        self.original_files.clear()

    # ---- reading

    def listed_objects(self, mark: ArchivedMark | None) -> list[ObjectEntry]:
        """Return the available objects in the manifest of a mark, damaged or not."""
        name = "" if mark is None else mark.manifest
        file = self.original_files.get(name) or self.files.get(name)
        if file is None:
            return []
        found = Manifest.from_bytes(file.data, name)
        return [entry for entry in found.newest_objects if entry.last >= found.first]

    def is_damaged(self, entry: ObjectEntry) -> bool:
        """Whether an object is missing, or differs from what was written."""
        file = self.files.get(entry.name)
        return file is None or crc32(file.data) != entry.file_crc

    def read_later(
        self, storage: "SimStorage", read: ArchiveQuery, on_done: Callable[[WorkOutcome], None]
    ) -> None:
        """Answer a read from the archive, unless the process dies before."""

        def answer() -> None:
            if self.is_unavailable or self._chance() < self.rejected_share:
                on_done(ArchiveUnavailable("archive: a read was rejected"))
                return
            found = answer_from_archive(_SimArchiveReader(self, read.mark), read)
            if not isinstance(found, WaltzError):
                self._cluster.checks.count("read from the archive")
            on_done(found)

        storage.call_after_us(self._rng.randint(*REQUEST_US) + self.extra_delay_us, answer)

    def verified_objects(
        self, mark: SetArchived, first: TransactionId, last: TransactionId
    ) -> list[tuple[ObjectEntry, StoredFile]]:
        """Return the objects with the IDs first..last that the manifest of a mark lists.

        Raises:
            BeforeLogStart: `first` has expired.
            ObjectMissing, ChecksumMismatch, BadFormat: a file is missing or changed.
        """
        head = self._verified_file(mark.manifest, mark.manifest_crc)
        found = Manifest.from_bytes(head.data, mark.manifest)
        if first < found.first:
            raise BeforeLogStart(f"archive: {first} has expired", found.first)
        return [
            (entry, self._verified_file(entry.name, entry.file_crc))
            for entry in found.newest_objects
            if first <= entry.last and entry.first <= last
        ]

    def _verified_file(self, name: str, expected: int) -> StoredFile:
        file = self.files.get(name)
        if file is None:
            raise ObjectMissing(f"archive: no {name}")
        return _check_crc(file, name, expected)


class _ListedFile(NamedTuple):
    name: str
    byte_count: int
    modified_ms: int


class _ListedStore:
    """The store as a garbage collection sees it; see `ArchiveStore`."""

    def __init__(self, archive: SimArchive) -> None:
        self._archive = archive

    def list_files(self, folder: str) -> list[_ListedFile]:
        """Return the files in a folder, sorted by name."""
        return [
            _ListedFile(name, len(file.data), self._archive.modified_ms(name))
            for name, file in sorted(self._archive.files.items())
            if name.startswith(f"{folder}/")
        ]

    def list_names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, sorted."""
        return [file.name for file in self.list_files(folder)]

    def read(self, name: str) -> bytes:
        """Return the bytes of a file; raise ObjectMissing if there is none."""
        file = self._archive.files.get(name)
        if file is None:
            raise ObjectMissing(f"archive: no {name}")
        return file.data

    def delete(self, name: str) -> None:
        """Delete a file, perhaps much later."""
        self._archive.delete_later(name)


class _SimArchiveReader:
    """Reads the archive through a manifest, as `archive.reader.ArchiveReader` does."""

    def __init__(self, archive: SimArchive, mark: SetArchived) -> None:
        self._archive = archive
        self._mark = mark

    def read_range(self, first: TransactionId, last: TransactionId, bytes_max: int) -> RangeRead:
        """Return records of one object; raises the same errors as `SimArchive.verified_objects`."""
        entry, file = self._archive.verified_objects(self._mark, first, first)[0]
        starts, at = (0, *file.ends), first - entry.first
        stop = min(last, entry.last) - entry.first + 1
        while stop > at + 1 and starts[stop] - starts[at] > bytes_max:
            stop -= 1
        end = TransactionId(entry.first + stop - 1)
        chain_before, batches = _overlapping_batches(file.chain_before, file.batches, first, end)
        sizes = [end - start for start, end in pairwise(starts[at : stop + 1])]
        lengths = np.array(sizes, dtype=np.int64)
        return RangeRead(
            first, lengths, file.data[starts[at] : starts[stop]], batches, chain_before
        )

    def lineage(
        self, first: TransactionId, last: TransactionId, entries_max: int
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the chain before the batches that overlap first..last, and these batches.

        Raises the same errors as `SimArchive.verified_objects`.
        """
        objects = self._archive.verified_objects(self._mark, first, last)
        batches = [batch for _, file in objects for batch in file.batches]
        chain_before, found = _overlapping_batches(objects[0][1].chain_before, batches, first, last)
        assert len(found) <= entries_max, "a simulated log is short"
        return chain_before, found


def _overlapping_batches(
    chain: Chain, batches: Sequence[LineageEntry], first: TransactionId, last: TransactionId
) -> tuple[Chain, tuple[LineageEntry, ...]]:
    """Return the chain before the batches that overlap first..last, and these batches."""
    found = []
    for batch in batches:
        if batch.last < first:
            chain = batch.chain
        elif batch.first <= last:
            found.append(batch)
    return chain, tuple(found)


def _upload_steps(
    cluster_key: bytes, job: UploadJob
) -> Generator[_Request, StoredFile, NewManifest]:
    """Yield the requests of an upload (rule 3); raises what `archive.upload.upload` raises."""
    present = Manifest(
        cluster_key, job.partition_id, 0, TransactionId(0), BEFORE_FIRST, GENESIS_CHAIN
    )
    if job.manifest:
        found = _check_crc((yield _Read(job.manifest)), job.manifest, job.manifest_crc)
        present = Manifest.from_bytes(found.data, job.manifest)
    job.recorded_manifest.check_matches(present, cluster_key)
    old = None if job.replaced_object is None else _replaced_entry(present.newest_objects, job)
    if old is not None and job.replaced_object is not None and old.name != job.replaced_object.name:
        return NewManifest(present.last, present.chain, job.end.stamp_ms, "", 0)
    origin = FileOrigin(job.session_id, job.nonce, job.attempt)
    entry, file = build_object(cluster_key, job)
    yield _Write(entry.name, file)
    _check_crc((yield _Read(entry.name)), entry.name, entry.file_crc)
    if old is None:
        present = present.with_object(entry)
    else:
        changed = (entry if each is old else each for each in present.newest_objects)
        present = present.with_newest_objects(tuple(changed))
    data = present.to_bytes()
    folder = manifests_folder(cluster_key, job.partition_id)
    name = manifest_name(folder, present.version, origin)
    yield _Write(name, StoredFile(data))
    _check_crc((yield _Read(name)), name, crc32(data))
    new_manifest = Manifest.from_bytes(data, name)
    return NewManifest(new_manifest.last, new_manifest.chain, job.end.stamp_ms, name, crc32(data))


def _replaced_entry(entries: Sequence[ObjectEntry], job: UploadJob) -> ObjectEntry:
    """Return the entry of the object that a job replaces; raise BadFormat if there is none."""
    bounds = job.first, job.end.last, job.end.chain
    old = next((entry for entry in entries if entry[1:4] == bounds), None)
    if old is None:
        raise BadFormat(f"{job.manifest}: expected an object with {bounds}, found none")
    return old


def build_object(cluster_key: bytes, job: UploadJob) -> tuple[ObjectEntry, StoredFile]:
    """Return the object that a job writes: its entry in a manifest, and its file."""
    ends, end = [], 0
    for run in job.runs:
        for length in run.lengths.tolist():
            end += length
            ends.append(end)
    data = b"".join(bytes(run.records) for run in job.runs)
    assert end == len(data)
    batches = tuple(batch for run in job.runs for batch in run.batches)
    origin = FileOrigin(job.session_id, job.nonce, job.attempt)
    folder = objects_folder(cluster_key, job.partition_id)
    name = object_name(folder, job.first, job.end.last, origin)
    stamps = [batch.stamp_ms for batch in batches if batch.stamp_ms]
    times = min(stamps, default=0), max(stamps, default=0)
    bounds = job.first, job.end.last, job.end.chain
    entry = ObjectEntry(name, *bounds, len(data), crc32(data), len(data), *times)
    return entry, StoredFile(data, batches, tuple(ends), job.chain_before)


def _first_unexpired(present: Manifest, before: int, before_ms: int) -> TransactionId:
    """Return the first ID after the newest object that has expired."""
    expired = [
        entry.last
        for entry in present.newest_objects
        if entry.last < before or 0 < entry.commit_ms_max < before_ms
    ]
    return TransactionId(max([present.first - 1, *expired]) + 1)


def _check_crc(file: StoredFile, name: str, expected: int) -> StoredFile:
    found = crc32(file.data)
    if found != expected:
        raise ChecksumMismatch(f"archive: {name}: expected CRC {expected:08x}, found {found:08x}")
    return file
