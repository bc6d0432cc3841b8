"""Checks of the archive: its objects, the archived mark, and the starts of logs.

The rules of the archive are those of docs/decisions/047. Records are compared with the reference
history. The checks use the content of a file as it was written, because a fault may have changed
the file later.

Rules:
    1. Each transaction up to the recorded archived mark is in an object that the recorded manifest
       lists. Files are never overwritten. So the check runs only when ZooKeeper records a mark,
       when the start of a log rises, and at the end of the run.
    2. A fault that replaces ZooKeeper's data may replace a mark by an older mark. From then on,
       only two things are checked: the content of files, and that no file is deleted that a log
       needs.
    3. An object may be missing from the manifest and from the store only when the grace period
       after a recorded expiry is over. The time of an expiry is the time at which the storage
       computed the manifest of the expiry.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from waltz_core.archive.file_names import writer_cluster_key
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.cluster.znodes.model import ArchivedMark, PartitionMarker
from waltz_core.errors import BeforeLogStart, WaltzError
from waltz_core.records.checksum import crc32
from waltz_core.records.record import BEFORE_FIRST, ReqId, SessionId, TransactionId
from waltz_core.replication.session_events import SessionSettled
from waltz_core.wire.messages import (
    ClientMessage,
    ErrorResponse,
    RangeRequest,
    ResetLog,
    TransactionDataRequest,
)
from waltz_sim.guarantees.replica_guarantees import data_of_records

if TYPE_CHECKING:
    from waltz_core.replication.session_events import Effect
    from waltz_core.storage.log.partition_log import PartitionLog
    from waltz_core.storage.service.work import Work, WorkResult
    from waltz_sim.cluster.simulated_archive import StoredFile
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.session_guarantees import SessionGuarantees

_FIRST_ID: Final = TransactionId(0)


class ArchiveGuarantees:
    """Checks the archive of one partition (rules 28 to 32)."""

    def __init__(self, state: "CheckerState", sessions: "SessionGuarantees") -> None:
        self._state = state
        self._sessions = sessions
        self._recorded_mark: ArchivedMark | None = None
        self._log_starts: dict[str, int] = {}
        self._settled_sessions: dict[tuple[str, SessionId], None] = {}
        # Objects whose records equal those of the history.
        self._verified_objects: dict[str, None] = {}
        # The objects in the last manifest before a fault of rule 2.
        self._listed_objects: dict[str, ObjectEntry] = {}
        self._deleted_files: dict[str, None] = {}
        self._replaced_ms: dict[str, int] = {}  # manifest -> when the next manifest was written
        # Expiry (rule 3): the requested ID; for each manifest, the time of its computation (on the
        # world's clock and on the storage's clock); each first available ID with its time.
        self._expiry_requested_id = TransactionId(0)
        self._computed_ms: dict[str, tuple[int, int]] = {}
        self._expired_ids: list[tuple[TransactionId, int]] = []
        self._read_requests: dict[ReqId, int] = {}  # request of a client -> the first requested ID

    def on_partition_restored(self, mark: ArchivedMark) -> None:
        """Record that the partition begins with a restored log, archived up to this mark."""
        self._recorded_mark, self._state.archived_last = mark, mark.last
        self._expired_ids.append((mark.first, -self._state.cluster.archive.expiry_grace_ms))
        self._check_content(mark)

    # ---- the store

    def on_file_written(self, name: str, *, is_known: bool) -> None:
        """28. Archived: no file is overwritten (AR 2), and none is of another cluster (AR 17)."""
        if is_known:
            self._state.fail("Archived", f"file {name} is written twice")
        self._check_cluster_key(name)

    def _check_cluster_key(self, name: str) -> None:
        if writer_cluster_key(name) != self._state.cluster.key:
            self._state.fail("Archived", f"file {name} belongs to another cluster")

    def on_file_deleted(self, name: str) -> None:
        """28. Archived: no file is deleted that the recorded manifest lists (AR 16)."""
        self._state.count("archive file deleted")
        self._deleted_files[name] = None
        self._check_cluster_key(name)
        archive, now_ms = self._state.cluster.archive, self._state.world.now_ms
        replaced_ms = self._replaced_ms.get(name)
        if replaced_ms is not None and now_ms - replaced_ms < archive.grace_ms:
            self._state.fail(
                "Archived", f"manifest {name} is deleted before the end of its grace period"
            )
        if self._recorded_mark is None:
            return
        if not self._sessions.is_rewritten:
            self._check_content(self._recorded_mark)
        elif name in self._listed_objects:
            self._check_object_unneeded(self._listed_objects[name], self._recorded_mark)

    def _check_object_unneeded(self, entry: ObjectEntry, recorded: ArchivedMark) -> None:
        """28. Archived: after a rollback of ZooKeeper, files that logs need are kept (AR 16)."""
        for replica in self._state.cluster.replicas:
            start = self._log_starts.get(replica, BEFORE_FIRST)
            if max(entry.first - 1, recorded.last) < start and entry.last >= self._expired_below():
                self._state.fail(
                    "Archived",
                    f"object {entry.name} is deleted, but the log of {replica} begins after "
                    f"transaction {start}",
                )

    # ---- expiry

    def on_expiry_requested(self, before: TransactionId) -> None:
        """Record that an operator lets objects below an ID expire."""
        self._expiry_requested_id = max(self._expiry_requested_id, before)

    def on_expiry(self, name: str, wall_ms: int) -> None:
        """Record that a storage has computed the manifest of an expiry, and writes it now."""
        self._computed_ms[name] = self._state.world.now_ms, wall_ms

    def _expired_below(self) -> TransactionId:
        """Return the ID below which objects may be missing (rule 3)."""
        end_ms = self._state.world.now_ms - self._state.cluster.archive.expiry_grace_ms
        return max(
            [first for first, at_ms in self._expired_ids if at_ms <= end_ms], default=_FIRST_ID
        )

    def _check_expiry(self, server: str, before: ArchivedMark, after: ArchivedMark) -> None:
        """32. Expired: only whole objects expire, by an operator or the retention (AR 7)."""
        self._state.count("archived objects expired")
        last = TransactionId(after.first - 1)
        ends = [entry.last for entry, _ in self._listed_files(before)]
        if after._replace(first=before.first, manifest="", manifest_crc=0) != before._replace(
            manifest="", manifest_crc=0
        ):
            self._state.fail("Expired", f"{server} changes the mark {before} to {after}")
        now_ms, wall_ms = self._computed_ms[after.manifest]
        history, retention_ms = self._state.history, self._state.cluster.setup.archive_retention_ms
        stamp_ms = history.nodes[history.chains[last]].stamp_ms
        is_old = retention_ms > 0 and stamp_ms < wall_ms - retention_ms
        if last not in ends or not (after.first <= self._expiry_requested_id or is_old):
            self._state.fail(
                "Expired",
                f"{server} expires transactions up to {last}, but an expiry was requested only "
                f"below {self._expiry_requested_id}",
            )
        self._expired_ids.append((after.first, now_ms))

    def on_read_rejected(self, wanted: int, first_available: int) -> None:
        """32. Expired: a read fails only below a recorded first available ID (AR 15)."""
        self._state.count("read below the first available ID")
        if first_available <= wanted or all(
            first_available != each for each, _ in self._expired_ids
        ):
            self._state.fail(
                "Expired",
                f"a read of transaction {wanted} fails; the error has the first available ID "
                f"{first_available}",
            )

    def on_client_sent(self, message: ClientMessage) -> None:
        """Record that a client requests records."""
        if isinstance(message, RangeRequest):
            self._read_requests[message.req_id] = message.first
        elif isinstance(message, TransactionDataRequest):
            self._read_requests[message.req_id] = message.transaction_id

    def on_client_received(self, message: ClientMessage) -> None:
        """Check an error that a client receives for a read below the first available ID."""
        wanted = self._read_requests.pop(message.req_id, None)
        is_error = isinstance(message, ErrorResponse) and message.error_code == BeforeLogStart.code
        if wanted is not None and is_error:
            assert isinstance(message, ErrorResponse)
            self.on_read_rejected(wanted, message.first_available)

    # ---- the archived mark

    def on_store_effect(self, server: str, effect: "Effect") -> None:
        """Record that a session is settled."""
        if isinstance(effect, SessionSettled):
            self._settled_sessions[server, effect.session_id] = None

    def on_metadata_written(self, server: str, marker: PartitionMarker) -> None:
        """28. Archived, 29. ArchiveMono: check a marker in ZooKeeper (AR 1, AR 4, AR 5, AR 7)."""
        before, after = self._recorded_mark, marker.archived
        self._recorded_mark = after
        self._state.archived_last = BEFORE_FIRST if after is None else after.last
        if after is None or after == before:
            if before is not None and after is None and not self._sessions.is_rewritten:
                self._state.fail("ArchiveMono", f"{server} removes the archived mark {before.last}")
            return
        self._state.count("archived")
        if before is not None:
            written_ms = self._state.cluster.archive.written_ms
            before_ms, after_ms = (written_ms.get(each.manifest, 0) for each in (before, after))
            if before_ms <= after_ms:  # else ZooKeeper was rolled back (rule 2)
                self._replaced_ms[before.manifest] = after_ms
        if not self._sessions.is_rewritten:
            self._check_order(server, marker.session_id, before, after)
        elif before is not None and before.first < after.first:
            self._expired_ids.append((after.first, self._computed_ms[after.manifest][0]))
        self._check_content(after)

    def _check_order(
        self, server: str, session_id: SessionId, before: ArchivedMark | None, after: ArchivedMark
    ) -> None:
        first = _FIRST_ID if before is None else before.first
        if after.first < first or (before is not None and after.last < before.last):
            self._state.fail("ArchiveMono", f"{server} changes the mark {before} to {after}")
        if after.first > first:
            self._check_expiry(server, before or after, after)
        if (server, session_id) not in self._settled_sessions:
            self._state.fail(
                "ArchiveMono",
                f"{server} archives in session {session_id}, which is not settled yet",
            )
        if after.last > self._state.history.last:
            self._state.fail(
                "ArchiveMono",
                f"transaction {after.last} is archived, but the log ends at "
                f"{self._state.history.last}",
            )

    def _check_content(self, mark: ArchivedMark) -> None:
        """Check that objects have all records of the history up to an archived mark (rule 1)."""
        if self._sessions.is_rewritten and mark.manifest in self._deleted_files:
            return  # rule 2
        listed = list(self._listed_files(mark))
        end = TransactionId(mark.last if not listed else listed[0][0].first - 1)
        if end >= self._expired_below():
            self._state.fail(
                "Archived", f"manifest {mark.manifest} lists no objects up to transaction {end}"
            )
        for entry, file in listed:
            if entry.first != end + 1:
                self._state.fail(
                    "Archived",
                    f"manifest {mark.manifest} lists an object that begins at transaction "
                    f"{entry.first}, expected {end + 1}",
                )
            end = entry.last
            if entry.name not in self._verified_objects and file is not None:
                self._check_object(entry, file)
                self._verified_objects[entry.name] = None
        if not self._sessions.is_rewritten:
            self._listed_objects = {entry.name: entry for entry, _ in listed}
        if end != mark.last or self._state.history.chains.get(end) != mark.chain:
            self._state.fail(
                "Archived",
                f"ZooKeeper records the archived mark {mark.last}, but manifest {mark.manifest} "
                f"ends at {end}",
            )

    def _listed_files(
        self, mark: ArchivedMark
    ) -> "Iterator[tuple[ObjectEntry, StoredFile | None]]":
        """Yield each object in a mark's manifest with its file, or with None if it may be gone."""
        archive = self._state.cluster.archive
        files = {**archive.files, **archive.original_files}
        manifest = files.get(mark.manifest)
        if manifest is None or crc32(manifest.data) != mark.manifest_crc:
            self._state.fail(
                "Archived", f"ZooKeeper records manifest {mark.manifest}, which is not durable"
            )
        found = Manifest.from_bytes(manifest.data, mark.manifest)
        if found.first != mark.first:
            self._state.fail(
                "Archived",
                f"manifest {mark.manifest} begins at transaction {found.first}, but ZooKeeper "
                f"records {mark}",
            )
        for entry in found.newest_objects:
            file = files.get(entry.name)
            is_gone = self._sessions.is_rewritten and entry.name in self._deleted_files  # rule 2
            if file is None and not is_gone and entry.last >= self._expired_below():
                self._state.fail(
                    "Archived",
                    f"manifest {mark.manifest} lists object {entry.name}, which is not durable",
                )
            yield entry, file

    def _check_object(self, entry: ObjectEntry, file: "StoredFile") -> None:
        """28. Archived: an object has the records and batches of the log (AR 4)."""
        history, size = self._state.history, file.ends[entry.last - entry.first]
        batches = [each for each in file.batches if each.first <= entry.last]
        if file.data[:size] != b"".join(history.records[entry.first : entry.last + 1]):
            self._state.fail("Archived", f"object {entry.name} has other records than the log")
        next_id = entry.first
        for batch in batches:
            if batch.first != next_id or history.chains.get(batch.last) != batch.chain:
                self._state.fail(
                    "Archived", f"object {entry.name} has {batch}, which is not in the log"
                )
            next_id = TransactionId(batch.last + 1)
        if next_id != entry.last + 1 or batches[-1].chain != entry.chain:
            self._state.fail(
                "Archived", f"object {entry.name} ends at {next_id - 1}, or has a wrong chain there"
            )

    # ---- logs

    def on_log_opened(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """Check the start of a log that was opened."""
        self._log_starts.pop(storage.name, None)
        self._check_start(storage, log)

    def on_work_done(self, storage: "SimStorage", work: "Work", result: "WorkResult") -> None:
        """31. NoTrustedReset: a replica is reset only if no session needs it (AR 12)."""
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            message = request.message
            if isinstance(message, ResetLog) and not isinstance(outcome, WaltzError):
                self._state.count("replica reset")
                session_id = SessionId(message.session_id)
                if self._sessions.is_trusted(session_id, storage.name):
                    self._state.fail(
                        "NoTrustedReset",
                        f"{storage.name} is reset in session {session_id}, which needs its log",
                    )
        self._check_start(storage, work.log)

    def _check_start(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """30. StartBound: records below a log's start are archived and confirmed (AR 10, AR 12)."""
        start = log.start
        if self._log_starts.get(storage.name, BEFORE_FIRST) == start.transaction_id:
            return
        self._log_starts[storage.name] = start.transaction_id
        if self._sessions.is_rewritten:
            return
        recorded, at = self._recorded_mark, start.transaction_id
        if recorded is None or at > recorded.last or at > log.slot.low_water_mark:
            self._state.fail(
                "StartBound",
                f"the log of {storage.name} begins after {at}, but its low-water mark is "
                f"{log.slot.low_water_mark}, and ZooKeeper records {recorded} as archived",
            )
        if start.chain != self._state.history.chains.get(at):
            self._state.fail(
                "StartBound", f"the log of {storage.name} has a wrong chain at its start, {at}"
            )
        self._check_content(recorded)

    # ---- the end

    def archived_data_before(self, first: int) -> Iterator[bytes]:
        """Yield the data of transactions before an ID, from objects, or the history if expired."""
        if first == 0:
            return
        recorded = self._recorded_mark
        assert recorded is not None
        self._verified_objects.clear()
        self._check_content(recorded)
        for record in self._state.history.records[: min(first, recorded.first)]:
            yield from data_of_records(record, 0)
        for entry, file in self._listed_files(recorded):
            found = () if file is None else data_of_records(file.data, 0)
            for position, each in enumerate(found, entry.first):
                if recorded.first <= position < first and position <= entry.last:
                    yield each
