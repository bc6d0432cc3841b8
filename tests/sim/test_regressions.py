"""Regression tests: shortened schedules of seeds that found defects which no scenario shows."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from waltz_core.errors import SessionFenced
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.replication.session_recovery import Recovery
from waltz_core.storage.files import record_search
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import log_recovery
from waltz_core.storage.log.log_files import LogFiles
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service import service
from waltz_core.storage.service.service_effects import CloseConnection
from waltz_sim.run import run
from waltz_sim.schedule import Schedule

pytestmark = pytest.mark.sim
SCHEDULES_FOLDER = Path(__file__).parent / "regressions"


def test_an_older_log_does_not_replace_the_log_of_a_session_missing_in_zookeeper(monkeypatch):
    """The rows that the session reported as lost are on a replica outside the session. They
    stay lost."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "510002228.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    monkeypatch.setattr(Recovery, "exclusion_reason", lambda _self, _answer: None)
    assert run(schedule).rule == "OutcomeTruth"


def test_records_of_a_session_missing_in_zookeeper_survive_a_mark_of_a_later_session(monkeypatch):
    """ZooKeeper was rolled back to a state without one replica. Meanwhile the other replica got
    a mark from a session that never opened."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "530014798.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    write = PartitionLog._write_mark
    with monkeypatch.context() as patch:
        patch.setattr(
            PartitionLog,
            "_write_mark",
            lambda self, slot, *mark: write(self, replace(slot, engaged=-1), *mark),
        )
        assert run(schedule).rule == "OutcomeTruth"
    monkeypatch.setattr(Recovery, "exclusion_reason", lambda _self, _answer: None)
    assert run(schedule).rule == "OutcomeTruth"


def test_misplaced_good_records_do_not_prevent_a_repair(monkeypatch):
    """A misdirected page of later records left a gap too small for the correct records."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "520000203.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good

    def first_found(self, hole, offset, size):
        data = self._file.pread(size - offset - 1, offset + 1)
        for at in record_search._candidate_offsets(data, hole, len(data)):
            (found,) = struct.unpack_from(">q", data, at)
            position = offset + 1 + at
            if record_search.scan(self._file, position, found, size=size, stop_id=found + 1)[
                0
            ].size:
                return (found, position) if found <= self._last else None
        return None

    monkeypatch.setattr(record_search.HoleSearch, "record_after", first_found)
    assert run(schedule).rule == "Converged"


def test_a_lost_sector_in_an_older_segment_does_not_keep_a_log_closed(monkeypatch):
    """The sector was in the last record of an older segment; another replica had been replaced."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "560002262.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    monkeypatch.setattr(
        record_search.PartlyReadableFile, "pread", lambda self, *where: self._file.pread(*where)
    )
    assert run(schedule).rule == "Converged"


def test_records_are_repaired_although_their_batch_is_corrupt_too(monkeypatch):
    """A storage first accepts the records, and then rebuilds the entry of their batch from them.

    Usually a storage checks records against this entry before it accepts them.
    """
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "1001913.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    monkeypatch.setattr(Segments, "rebuild_lost_batch", lambda *_: False)
    assert run(schedule).rule == "Converged"


def test_a_corrupt_batch_above_the_marker_is_not_truncated_if_the_log_continues(monkeypatch):
    """After a failed sync, a storage truncated records that two replicas had acknowledged."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "610000134.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    recover = log_recovery._LogOpening.recover_records

    def by_the_last_file_alone(self, segments):
        self._older_batches_end = BEFORE_FIRST
        recover(self, segments)

    monkeypatch.setattr(log_recovery._LogOpening, "recover_records", by_the_last_file_alone)
    assert run(schedule).rule == "DecisionCovers"


def test_a_request_that_its_owner_repeats_after_a_disk_stall_is_not_rejected(monkeypatch):
    """The storage read a closed link's messages last, and rejected the owner's later request
    as a request of another owner. The partition halted permanently."""
    schedule = Schedule.from_json((SCHEDULES_FOLDER / "8803332.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    monkeypatch.setattr(service, "ConnectionSuperseded", SessionFenced)
    admit = service.StorageService._admit_prepare

    def admit_as_the_latest(self, request, message):
        lane = self._lanes[message.partition_id]
        owner = lane.owner
        if owner is None or owner <= request.connection:
            admit(self, request, message)
            return
        lane.owner = None
        admit(self, request, message)
        self._effects.append(CloseConnection(owner, "another one has come"))

    monkeypatch.setattr(service.StorageService, "_admit_prepare", admit_as_the_latest)
    assert run(schedule).rule == "Converged"


def test_a_storages_queue_may_hold_a_read_of_each_session():
    schedule = Schedule.from_json(
        (SCHEDULES_FOLDER / "1795815712392.json").read_text(encoding="utf-8")
    )
    assert run(schedule).is_good


@pytest.mark.parametrize("seed", [77000331, 77000490, 1795815718683])
def test_an_operator_completes_the_decision_of_a_command_that_died(seed):
    """Also if ZooKeeper was rolled back to before the first session, or if faults had not ended.

    In the last schedule, the command writes after the cluster has recovered. Then no operator would
    run the command again, so it does not die.
    """
    schedule = Schedule.from_json((SCHEDULES_FOLDER / f"{seed}.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good


def test_a_truncation_reports_the_chain_that_it_has_written(monkeypatch):
    """A read failed after the truncation, and the log kept the chain of the longer log."""
    schedule = Schedule.from_json(
        (SCHEDULES_FOLDER / "1795815724074.json").read_text(encoding="utf-8")
    )
    assert run(schedule).is_good
    truncate = LogFiles.truncate

    def read_again(self, last_to_keep):
        before = self.chain
        truncate(self, last_to_keep)
        after = self.chain
        self.chain = self.synced_chain = before
        assert self.segments.chain == after
        self.chain = self.synced_chain = after

    monkeypatch.setattr(LogFiles, "truncate", read_again)
    assert run(schedule).rule == "NoCutCommitted"
