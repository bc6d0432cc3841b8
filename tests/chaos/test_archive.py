"""A short round of chaos with an archive, and its checkers against corrupt archives."""

import os
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from tests.archived_log import (
    CLUSTER_KEY,
    FIRST_COMMIT_MS,
    PARTITION_ID,
    ArchivedLog,
    write_archive,
)
from tests.chaos import archive_checks
from tests.chaos.cluster import RETENTION_BYTES, ClusterSize, LocalLog
from tests.chaos.history import Log
from tests.chaos.round import run_round
from tests.chaos.schedule import Fault, Schedule
from waltz_core.archive.store import ArchiveStore
from waltz_core.cluster.znodes.model import ArchivedMark

FOLDER = f"{UUID(bytes=CLUSTER_KEY)}/{PARTITION_ID}"
NONCE = "ab" * 16


@pytest.mark.fault
@pytest.mark.slow
def test_nothing_is_lost_when_storages_a_server_and_the_object_store_are_killed(tmp_path):
    faults = (
        Fault(0.5, 1.5, "kill", ("storage-1",)),
        Fault(1.0, 1.5, "kill", ("store-1",)),
        Fault(3.0, 1.0, "kill", ("server-1",)),
        Fault(3.5, 1.0, "kill", ("storage-2", "store-1")),
    )
    lines = []
    cluster_size = ClusterSize(clients=2, partitions=2, stores=1)
    outcome = run_round(Schedule(0, cluster_size, faults), tmp_path, lines.append)
    assert outcome.wrong == [], lines
    counts = outcome.counts
    assert (counts["killed: storage"], counts["killed: store"], counts["killed: server"]) == (
        2,
        2,
        1,
    )
    assert counts["objects"] == counts["verified objects"] >= cluster_size.partitions
    assert counts["removed segments"] >= cluster_size.storages * cluster_size.partitions
    # Manifests that were replaced before the end are collected.
    assert counts["collected files"] >= cluster_size.partitions
    assert counts["committed"] > 0


@pytest.fixture
def log(tmp_path) -> ArchivedLog:
    return write_archive(ArchiveStore(f"file://{tmp_path}"), folder=FOLDER, page_entries=2)


def saved(directory: Path, log: ArchivedLog) -> archive_checks.SavedArchive:
    end = log.lineage[-1]
    mark = ArchivedMark(end.last, end.chain, FIRST_COMMIT_MS, 0, log.crc, log.name)
    return archive_checks.SavedArchive(ArchiveStore(f"file://{directory}"), {PARTITION_ID: mark})


def read_by_clients(log: ArchivedLog) -> Log:
    offsets = np.cumsum([0, *map(len, log.records)]).tolist()
    return Log(
        sessions={PARTITION_ID: [0]},
        records={PARTITION_ID: bytearray(b"".join(log.records))},
        offsets={PARTITION_ID: offsets},
    )


def test_a_correct_archive_has_no_orphans_and_no_differences(tmp_path, log):
    found = saved(tmp_path, log)
    assert len(found.objects[PARTITION_ID]) == 4
    assert found.orphans(archive_checks.now_ms()) == []
    assert found.differences(read_by_clients(log)) == []


@pytest.mark.parametrize(
    "name",
    [
        f"objects/0-9-1-{NONCE}-1.parquet",
        f"objects/0-9-1-{NONCE}-1.parquet.tmp",
        f"manifests/7-1-{NONCE}-1-page.json",
        f"manifests/7-1-{NONCE}-1.json.tmp",
        f"manifests/7-1-{NONCE}-1.json",  # nothing has replaced it
        "objects/something",
    ],
)
def test_a_file_in_no_manifest_is_an_orphan(tmp_path, log, name):
    (tmp_path / FOLDER / name).write_bytes(b"")
    assert saved(tmp_path, log).orphans(archive_checks.now_ms()) == [f"{FOLDER}/{name}"]


def test_a_manifest_that_was_replaced_within_the_grace_period_is_no_orphan(tmp_path, log):
    names = [f"{FOLDER}/manifests/{version}-1-{NONCE}-1.json" for version in (6, 7)]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = saved(tmp_path, log)
    found.listed.add(names[1])
    assert found.orphans(archive_checks.now_ms()) == []
    assert found.orphans(archive_checks.now_ms() + archive_checks.AGED_BY_MS) == names[:1]
    aged_s = (archive_checks.now_ms() - archive_checks.AGED_BY_MS) / 1000
    os.utime(tmp_path / names[0], (aged_s, aged_s))  # only the age of its successor matters
    assert saved(tmp_path, log).orphans(archive_checks.now_ms()) == names[1:]


def test_objects_that_differ_from_the_log_or_leave_a_gap_are_detected(tmp_path, log):
    found, expected = saved(tmp_path, log), read_by_clients(log)
    expected.records[PARTITION_ID][-1] ^= 1
    last = found.objects[PARTITION_ID][-1].name
    assert found.differences(expected) == [f"{last} has other records than the log"]
    del found.objects[PARTITION_ID][1]
    assert any("expected 51" in difference for difference in found.differences(expected))
    del found.objects[PARTITION_ID][-1]
    assert any("end at" in difference for difference in found.differences(expected))


def test_local_logs_with_wrong_records_or_over_the_retention_limit_are_detected(log):
    expected = read_by_clients(log)
    offset = expected.offsets[PARTITION_ID][10]
    right = bytes(expected.records[PARTITION_ID][offset:])

    def differences(first: int, records: bytes) -> list[str]:
        logs = {PARTITION_ID: LocalLog(first, records)}
        return archive_checks.local_differences([("storage-1", logs)], expected)

    assert differences(10, right) == []
    assert "has other records in partition 3 from 10 on" in differences(10, right[:-1])[0]
    assert "has other records in partition 3 from 9 on" in differences(9, right)[0]
    everything = bytes(expected.records[PARTITION_ID])
    assert "has removed nothing" in differences(0, everything)[0]
    expected.records[PARTITION_ID] += bytes(2 * RETENTION_BYTES)
    expected.sessions[PARTITION_ID] = [0, 50]
    expected.offsets[PARTITION_ID][50] = len(expected.records[PARTITION_ID])
    remaining_records = bytes(expected.records[PARTITION_ID][offset:])
    assert "keeps" in differences(10, remaining_records)[0]
