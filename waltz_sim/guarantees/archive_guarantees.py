"""Checks of the archive: its objects, the archived mark, and the starts of logs.

The rules are those of docs/decisions/047. Records are compared with the reference history; the
content of a file is what was written, since a fault may have changed it later.

Rules:
    1. Each transaction up to the recorded archived mark is in an object that the recorded manifest
       lists. Files are never overwritten, so this is checked when ZooKeeper records a mark, when a
       log's start rises, and at the end.
    2. A fault that replaces ZooKeeper's data may replace a mark by an older one. From then on only
       the content of files is checked.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.cluster.nodes.model import ArchivedMark, PartitionMarker
from waltz_core.errors import WaltzError
from waltz_core.records.checksum import crc32
from waltz_core.records.record import BEFORE_FIRST, LineageEntry, SessionId, TransactionId
from waltz_core.replication.session_events import SessionSettled
from waltz_core.wire.messages import ResetLog
from waltz_sim.guarantees.replica_guarantees import data_in

if TYPE_CHECKING:
    from waltz_core.replication.session_events import Effect
    from waltz_core.storage.log.partition_log import PartitionLog
    from waltz_core.storage.service.work import Work, WorkResult
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.guarantees.evidence import Evidence
    from waltz_sim.guarantees.sessions import Sessions


class ArchiveGuarantees:
    """Checks the archive of one partition."""

    def __init__(self, evidence: "Evidence", sessions: "Sessions") -> None:
        self._facts = evidence
        self._sessions = sessions
        self._recorded: ArchivedMark | None = None
        self._starts: dict[str, int] = {}
        self._settled: dict[tuple[str, SessionId], None] = {}
        self._verified: dict[str, None] = {}  # objects with the records of the history

    # ---- the store

    def written(self, name: str, *, is_known: bool) -> None:
        """28. Archived: no file is overwritten (AR 2)."""
        if is_known:
            self._facts.fail("Archived", f"{name} is written twice")

    def deleted(self, name: str) -> None:
        """28. Archived: no file is deleted that the recorded manifest lists (AR 16)."""
        self._facts.count("archive file deleted")
        if self._recorded is not None and not self._sessions.is_rewritten:
            self._check_content(self._recorded)

    # ---- the archived mark

    def stepped(self, server: str, effect: "Effect") -> None:
        """Record which sessions are settled."""
        if isinstance(effect, SessionSettled):
            self._settled[server, effect.session_id] = None

    def wrote(self, server: str, marker: PartitionMarker) -> None:
        """28. Archived, 29. ArchiveMono: ZooKeeper has a marker (AR 1, AR 4, AR 5, AR 7)."""
        before, after = self._recorded, marker.archived
        self._recorded = after
        if after is None or after == before:
            if before is not None and after is None and not self._sessions.is_rewritten:
                self._facts.fail("ArchiveMono", f"{server} removes the mark {before.last}")
            return
        self._facts.count("archived")
        if not self._sessions.is_rewritten:
            self._check_order(server, marker.session_id, before, after)
        self._check_content(after)

    def _check_order(
        self, server: str, session_id: SessionId, before: ArchivedMark | None, after: ArchivedMark
    ) -> None:
        if before is not None and (after.last < before.last or after.first < before.first):
            self._facts.fail("ArchiveMono", f"{server} writes {after} after {before}")
        if (server, session_id) not in self._settled:
            self._facts.fail("ArchiveMono", f"{session_id} of {server} archives, not settled")
        if after.last > self._facts.history.last:
            self._facts.fail(
                "ArchiveMono", f"{after.last} is archived, the log ends {self._facts.history.last}"
            )

    def _check_content(self, mark: ArchivedMark) -> None:
        """Rule 1."""
        end = BEFORE_FIRST
        for entry, data, batches in self._objects(mark):
            if entry.first != end + 1:
                self._facts.fail("Archived", f"{mark.manifest} lists {entry.first} after {end}")
            end = entry.last
            if entry.name not in self._verified:
                self._check_object(entry, data, batches)
                self._verified[entry.name] = None
        if end != mark.last or self._facts.history.chains.get(end) != mark.chain:
            self._facts.fail("Archived", f"{mark.last} is recorded, {mark.manifest} ends at {end}")

    def _objects(
        self, mark: ArchivedMark
    ) -> Iterator[tuple[ObjectEntry, bytes, tuple[LineageEntry, ...]]]:
        archive = self._facts.cluster.archive
        files = {**archive.files, **archive.spoiled}
        manifest = files.get(mark.manifest)
        if manifest is None or crc32(manifest.data) != mark.manifest_crc:
            self._facts.fail("Archived", f"{mark.last} is recorded, {mark.manifest} is not durable")
        for entry in Manifest.from_bytes(manifest.data, mark.manifest).newest:
            file = files.get(entry.name)
            if file is None:
                self._facts.fail("Archived", f"{mark.manifest} lists {entry.name}, not durable")
            yield entry, file.data, file.batches

    def _check_object(
        self, entry: ObjectEntry, data: bytes, batches: tuple[LineageEntry, ...]
    ) -> None:
        """28. Archived: the records and batches are those of the log (AR 4)."""
        history = self._facts.history
        if data != b"".join(history.records[entry.first : entry.last + 1]):
            self._facts.fail("Archived", f"{entry.name} has other records than the log")
        next_id = entry.first
        for batch in batches:
            if batch.first != next_id or history.chains.get(batch.last) != batch.chain:
                self._facts.fail("Archived", f"{entry.name} has {batch}, not of the log")
            next_id = TransactionId(batch.last + 1)
        if next_id != entry.last + 1 or batches[-1].chain != entry.chain:
            self._facts.fail("Archived", f"{entry.name} ends at {next_id - 1}")

    # ---- logs

    def opened(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """Check a log that was opened."""
        self._starts.pop(storage.name, None)
        self._check_start(storage, log)

    def worked(self, storage: "SimStorage", work: "Work", result: "WorkResult") -> None:
        """31. NoTrustedReset: no session needs a replica that is reset (AR 12)."""
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            message = request.message
            if isinstance(message, ResetLog) and not isinstance(outcome, WaltzError):
                self._facts.count("replica reset")
                session_id = SessionId(message.session_id)
                if self._sessions.is_trusted(session_id, storage.name):
                    self._facts.fail("NoTrustedReset", f"{storage.name} is reset in {session_id}")
        self._check_start(storage, work.log)

    def _check_start(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """30. StartBound: records below the start are archived and confirmed (AR 10, AR 12)."""
        start = log.start
        if self._starts.get(storage.name, BEFORE_FIRST) == start.transaction_id:
            return
        self._starts[storage.name] = start.transaction_id
        if self._sessions.is_rewritten:
            return
        recorded, at = self._recorded, start.transaction_id
        if recorded is None or at > recorded.last or at > log.slot.low_water_mark:
            self._facts.fail(
                "StartBound",
                f"{storage.name} begins after {at}, its mark is {log.slot.low_water_mark}, "
                f"archived is {recorded}",
            )
        if start.chain != self._facts.history.chains.get(at):
            self._facts.fail("StartBound", f"{storage.name} has another chain at its start {at}")
        self._check_content(recorded)

    # ---- the end

    def data_before(self, first: int) -> Iterator[bytes]:
        """Yield the data of the transactions before an ID, from the objects."""
        if first == 0:
            return
        assert self._recorded is not None
        self._verified.clear()
        self._check_content(self._recorded)
        for entry, data, _ in self._objects(self._recorded):
            for position, each in enumerate(data_in(data, 0), entry.first):
                if position < first:
                    yield each
