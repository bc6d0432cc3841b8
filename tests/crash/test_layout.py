"""Waltz 0.13 and this version can read each other's files, also after crashes.

`layout.py` replaces Waltz 0.13; it was written from the description of the files.
"""

import json
import uuid
from pathlib import Path
from random import Random

import pytest

from tests.crash import layout
from tests.crash.matrix import Matrix, crash_points, open_directory, second_losses
from tests.crash.scenarios import (
    KEY,
    PARTITIONS,
    ROOT,
    SCENARIOS,
    STARTS,
    Acknowledged,
    AcknowledgedLog,
    History,
    appends,
    checkpoints,
    first_start,
    restart,
    roll_over,
    sessions_and_marks,
    truncate,
)
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_sim.world.crash import DiskState, KeepAll, KeepNone, KeepRandom, RecordingDisk
from waltz_sim.world.simulated_disk import Contents, SimDisk

GOLDEN = Path(__file__).parents[1] / "golden" / "disk"
# If no fault has occurred, the durable files also equal a directory of Waltz 0.13.
PLAIN = (first_start, appends, checkpoints, roll_over, sessions_and_marks, restart)


def disk_state_of(changes):
    disk_state = DiskState()
    for change in changes:
        disk_state.apply_change(change)
    return disk_state


FROM_0 = [each for each in SCENARIOS if each not in STARTS]


@pytest.mark.parametrize("scenario", FROM_0, ids=lambda one: one.__name__)
def test_after_a_clean_shutdown_waltz_0_13_finds_every_byte(scenario):
    recorded = scenario()
    recorded.close()
    files = disk_state_of(recorded.disk.changes).contents_after_crash(KeepNone()).files
    control, logs = layout.read_directory(files, ROOT)
    assert control.key == KEY
    assert len(control.partitions) == PARTITIONS
    assert logs == {number: list(one.records) for number, one in recorded.histories.items()}
    for path, content in files.items():
        if path.suffix == ".seg":
            partition, first = int(path.parent.name), int(path.stem)
            count = (len(files[path.with_suffix(".idx")]) - 128) // 8
            run = recorded.histories[partition].records[first : first + count]
            expected = layout.segment(KEY, partition, first, run)
            assert content[128:] == expected[0][128:]
            assert files[path.with_suffix(".idx")][128:] == expected[1][128:]


@pytest.mark.parametrize("scenario", [*PLAIN, truncate], ids=lambda one: one.__name__)
def test_waltz_0_13_reads_exactly_the_records_that_this_version_recovers_after_a_crash(scenario):
    recorded, read = scenario(), 0
    for position, disk_state, _ in crash_points(recorded.disk.changes, recorded.begin):
        disk = RecordingDisk.after_power_loss(
            disk_state.contents_after_crash(KeepRandom(Random(position)))
        )
        found, engine = open_directory(disk)
        engine.abandon()
        _, logs = layout.read_directory(disk.inner.files(), ROOT)
        assert logs == {number: list(log.records) for number, log in found.logs}
        read += sum(map(len, logs.values()))
    assert read > 30


@pytest.mark.parametrize("scenario", PLAIN, ids=lambda one: one.__name__)
def test_after_a_crash_waltz_0_13_finds_all_acknowledged_records(scenario):
    recorded, found = scenario(), 0
    for position, disk_state, acknowledged in crash_points(recorded.disk.changes, recorded.begin):
        if not acknowledged.logs or any(not log.markers for log in acknowledged.logs.values()):
            continue
        for keep in (KeepAll(), KeepNone(), KeepRandom(Random(position))):
            _, logs = layout.read_directory(disk_state.contents_after_crash(keep).files, ROOT)
            for partition, log in acknowledged.logs.items():
                (history,) = log.histories[-1:]
                records = logs[partition]
                assert len(records) > history.acked
                assert records == list(history.records[: len(records)])
                found += 1
    assert found > 100


# ---- this version reads files of Waltz 0.13


def golden(name, index=0):
    return bytes.fromhex(json.loads((GOLDEN / name).read_text())[index]["hex"])


def captured_directory():
    """Return the captured directory of a 0.13 storage; one partition has records."""
    name = "0" * 19
    return {
        ROOT / "waltz-storage.ctl": golden("control_file.json"),
        ROOT / "0" / f"{name}.seg": golden("segment_file.json"),
        ROOT / "0" / f"{name}.idx": golden("index_file.json"),
    }


def open_directory_of_0_13(files, key, partitions):
    disk = SimDisk(is_traced=False)
    directories = frozenset(parent for path in files for parent in path.parents)
    disk.replace_contents(Contents(files, directories))
    settings = LogSettings(key, 1_000_000, lambda: 5)
    return StorageEngine.open(
        disk, ROOT, settings, partition_count=partitions, new_storage_id=b"N" * 16
    )


def records_of(log):
    if log.max_id == BEFORE_FIRST:
        return b""
    return log.read_range(0, log.max_id, 1 << 20, whole_batches=False).records


def test_after_any_crash_of_0_13_the_intact_records_are_served():
    files = captured_directory()
    seg, idx = (next(path for path in files if path.suffix == one) for one in (".seg", ".idx"))
    data, index = files[seg], files[idx]
    key = uuid.UUID("0e6bfd32-bdc6-4ce1-87fb-950915c99d24").bytes
    whole = set()
    for size in range(layout.HEADER_BYTES, len(data) + 1):
        rng = Random(size)
        index_entry_count = rng.randint(0, 9)
        torn = dict(files)
        torn[seg] = data[:size] + rng.choice((b"", bytes(rng.randint(1, 90)), rng.randbytes(30)))
        torn[idx] = index[: 128 + 8 * index_entry_count] + rng.choice(
            (b"", bytes(16), index[128:133])
        )
        engine = open_directory_of_0_13(torn, key, 4)
        log = engine.logs[0]
        records = layout.read_segment(
            data[:size], index[:128], key=key, partition=0, first=0, local_low_water_mark=-1
        )
        assert records_of(log) == b"".join(records)
        assert (log.suspect, log.damaged) == (False, ())
        assert sorted(engine.logs) == [0, 1, 2, 3]
        whole.add(len(records))
        engine.close()
    assert whole == set(range(10))


def original_directory(*, counts, mark, torn):
    """Return a directory of a 0.13 storage after a crash: several segments, the last one torn."""
    structures = [layout.Structure(3, mark, mark, 5, 4)]
    structures += [layout.Structure(-1, -1, -1, 1, 0)] * (PARTITIONS - 1)
    files = {ROOT / "waltz-storage.ctl": layout.control(KEY, structures)}
    first, every = 0, []
    for count in counts:
        rng = Random(first)
        records = [
            layout.record(number, rng.randbytes(rng.randint(0, 300)))
            for number in range(first, first + count)
        ]
        seg, idx = layout.segment(KEY, 0, first, records)
        files[ROOT / "0" / f"{first:019d}.seg"] = seg
        files[ROOT / "0" / f"{first:019d}.idx"] = idx
        first += count
        every += records
    last = max(path for path in files if path.suffix == ".seg")
    files[last] = files[last][: 128 if torn is None else len(files[last]) - torn]
    return Contents(files, frozenset({ROOT / "0", *(ROOT / "0").parents})), every


@pytest.mark.parametrize(("mark", "torn"), [(-1, 0), (5, 3), (11, 60), (-1, None), (5, None)])
def test_a_power_loss_while_a_0_13_directory_is_first_opened_loses_no_record_or_mark(mark, torn):
    contents, records = original_directory(counts=(4, 6, 9), mark=mark, torn=torn)
    found, engine = open_directory(RecordingDisk.after_power_loss(contents))
    engine.abandon()
    log = dict(found.logs)[0]
    assert log.records == tuple(records[: len(log.records)])
    assert len(log.records) >= {None: 10, 0: 19}.get(torn, 17)
    assert log.marks[:2] == (3, mark)
    history = History(log.records, log.entries, log.last)
    acknowledged = Acknowledged(
        assigned=(0,),
        sure=(0,),
        logs={0: AcknowledgedLog((history,), (log.promise,), (log.marks,), (log.info,), (), ())},
    )
    matrix = Matrix("adopting")
    for number in range(3):
        key, again = matrix.check_result(acknowledged, contents, "as it was")
        matrix.name = f"adopting {number}"
        second_losses(matrix, {key: (acknowledged, contents, again, "as it was")})
    assert matrix.counts["second survivals"] > 40
