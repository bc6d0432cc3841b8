"""Storages that omit or delay one sync, and the crashes that detect this.

A sync is identified by its site: the calls that lead to it. If a sync is omitted, or executed after
the next sync, some crash test must fail. If no test fails, the sync is not needed, or the matrix
does not test the purpose of the sync.
"""

from collections import defaultdict
from random import Random

from tests.crash.matrix import (
    Violation,
    crash_points,
    open_and_append,
    power_losses,
    restart_and_append,
)
from tests.crash.scenarios import SCENARIOS, first_start, site
from waltz_sim.world.crash import (
    KeepNone,
    KeepRandom,
    RecordingDisk,
    sync_positions,
    with_delayed_sync,
    without_change,
)

KILLS_OF_A_SCENARIO = 12
LOSSES_OF_A_SCENARIO = 12
TRIES = 12
MUTATIONS = {"forgotten": without_change, "made late": with_delayed_sync}


def recorded_runs(matrix):
    """Yield every scenario, and its continuations after some kills and losses of power."""
    for make in SCENARIOS:
        scenario = make()
        changes = scenario.disk.changes
        yield make.__name__, changes, scenario.begin
        rng = Random(make.__name__)
        every = [
            (position, acknowledged)
            for position, _, acknowledged in crash_points(changes, scenario.begin)
        ]
        kills = every if make is first_start else rng.sample(every, KILLS_OF_A_SCENARIO)
        for position, acknowledged in kills:
            after = restart_and_append(
                matrix, changes[:position], acknowledged, f"killed after change {position}"
            )
            yield f"{make.__name__} killed after {position}", after.disk.changes, position + 1
        lost = rng.sample(range(len(every)), LOSSES_OF_A_SCENARIO)
        for number, (position, disk_state, acknowledged) in enumerate(
            crash_points(changes, scenario.begin)
        ):
            if number in lost:
                disk = RecordingDisk.after_power_loss(
                    disk_state.contents_after_crash(KeepRandom(rng)), site
                )
                begin = len(disk.changes) + 1
                where = f"{make.__name__} without power after {position}"
                yield where, open_and_append(matrix, disk, acknowledged, where).disk.changes, begin


def occurrences(matrix):
    """Return the recorded syncs of each site: (site, mutation) -> runs and positions."""
    found = defaultdict(list)
    for name, changes, begin in recorded_runs(matrix):
        for position in sync_positions(changes):
            if position >= begin and changes[position].site:
                for mutation in MUTATIONS:
                    found[changes[position].site, mutation].append((name, changes, position))
    return found


def first_violation(matrix, mutation, syncs, *, is_thorough=True):
    """Return the first violation that a mutation causes in some run; None if there is none."""
    rng = Random(mutation)
    quick = rng.sample(syncs, min(TRIES, len(syncs)))
    # A loss of all unsynced changes shows missing acknowledged data. Other violations need more
    # tries.
    passes = [(syncs, (KeepNone(),)), (quick, None)] if is_thorough else [(quick, (KeepNone(),))]
    for tries, keeps in passes:
        for name, changes, position in tries:
            mutated = MUTATIONS[mutation](changes, position)
            if mutated is None:
                continue
            try:
                matrix.name = name
                power_losses(
                    matrix, mutated, position, keeps=keeps, only_acknowledged=keeps is not None
                )
            except Violation as error:
                return str(error)
    return None


# ---------------------------------------------------------------------------------------------
# Mutations that no crash detects. Each key is the end of a site, and its value is the reason. The
# number in a key is the number of the sync or write within its function.

# Syncs that may be omitted.
NOT_NEEDED = {
    "storage_engine.open > file_system.create_durably#4": "the control file is created next, which "
    "syncs the same directory",
    "control_file._create > file_system.create_durably#4": "`StorageEngine.open` syncs the same "
    "directory next",
    "storage_engine.open#1": "needed only after two kills in a row: only then are both names not "
    "durable yet",
    "log_recovery.open_log > file_system.make_directory_with_parents#1": "`StorageEngine.open` "
    "has already synced this directory",
    "segment.copy_index > file_system.create_durably#4": "the new segment's names are synced next",
    "segments.continue_in_new_file > segment.create > file_system.create_durably#3": "the old "
    "files of an empty segment are as good as the new ones",
    "log_recovery.open_log#2": "the second write of the slot has the same content. On a disk whose "
    "syncs are not trusted, this sync prevents that a directory is marked clean while it is "
    "changed",
    "segments.continue_in_new_file > segment.sync#1": "Waltz does not trust this sync. It is for "
    "Waltz 0.13, which does not truncate a file where the next segment begins (test_layout.py)",
    "segments.continue_in_new_file > segment.sync#2": "same as above",
    "disk_space.fill_reserve#1": "the reserve is filled again at each start; the sync allocates "
    "space that the file system has only promised",
    "disk_space.release_reserve#1": "the sync makes the space usable: a file system may free it "
    "only when the removal is durable",
    "log_recovery._recover > segment.recover#1": "a segment that is not the last changes only by "
    "corruption",
    "log_recovery._recover > segment.recover#2": "same as above",
    "truncation.carry_out > segment.sync#1": "records whose batch entry was removed are not part "
    "of the log, and the entries are synced",
    "truncation.carry_out > segment.sync_index#1": "the next opening truncates an index that is "
    "too long",
    "reading._note_damage#1": "the next read finds the damage again",
    "log_files.begin_after#1": "the slot is written twice with the same content, in case one of "
    "the copies is corrupt",
    "log_files.begin_after#2": "same as above",
    "partition_log.remove_oldest > log_files.mark_acked#2": "the slot with the new start has the "
    "marker, too",
    "segments.begin_after > segment.remove#1": "the next opening removes the segment again",
    "segments.begin_after > segments._add > segment.create > file_system.create_durably#3": "after "
    "a reset, the next opening creates the segment again",
    "segments.begin_after > segments._add > segment.create > file_system.create_durably#4": "same "
    "as above",
    "repair > log_files.mark_acked#2": "needed for records that a repair discards next to damaged "
    "ones; the disk of this test keeps all synced records (test_partition_log.py has another "
    "disk)",
    "segments.fill > segment.fill#6": "the next read repairs a wrong index",
}
# Necessary syncs that may be executed after the next sync, because both syncs precede the next
# acknowledgement. The values state what the two syncs make durable.
ANY_ORDER = {
    "file_system.make_directory_with_parents#1": "names of different directories",
    "file_system.make_directory_with_parents#2": "names of different directories",
    "storage_engine.open > control_file.open#2": "the control file and names",
    "control_file.set_flags#1": "the flag and the directory of a partition: a crash may leave one "
    "without the other",
    "storage_engine.assign_new#0": "same as above",
    "storage_engine.assign_new > control_file.set_flags_of#1": "same as above",
    "log_recovery.open_log#1": "names, and a slot in a file whose name is not new",
    "segment.create > file_system.create_durably#2": "the contents of two files, each before the "
    "rename of its own file",
    "segment.create > file_system.create_durably#4": "names, and unacknowledged records",
    "log_recovery._create_log > file_system.create_durably#2": "the contents of two files, each "
    "before the rename of its own file",
    "log_recovery._create_log > file_system.create_durably#4": "names, and an unacknowledged "
    "promise",
    "segment.write_again#4": "records, index and batches, which are acknowledged when all are "
    "synced",
    "segment.write_again#5": "same as above",
    "segment.write_again#6": "batches, and a slot that confirms no more than was acknowledged",
    "log_files.sync > segment.sync#1": "records and batches, which count only together",
    "log_files.sync > segment.sync#2": "batches, and the slot with their marker, at a clean end",
    "log_files._roll > segment.sync#1": "records and batches, which count only together",
    "log_files._roll > segment.sync#2": "batches, and an index that can be repaired",
    "log_files._roll#3": "a later marker, and the names of the new segment",
    "partition_log._confirm#1": "a mark that was acknowledged, and unacknowledged records",
    "segments.truncate > segment.remove#1": "names in one directory, the newest segment first; "
    "after two removals, one sync makes the names durable in any order, and the truncation intent "
    "removes the rest",
    "log_recovery._remove > segment.remove#1": "same as above",
    "truncation.carry_out > segment.sync#2": "batches and the index",
    "segments.fill > segment.fill#5": "repaired records, whose damage is still listed",
}


def reason(site, mutation):
    """Return the listed reason why no crash detects a mutation; None if it is not listed."""
    listed = NOT_NEEDED if mutation == "forgotten" else NOT_NEEDED | ANY_ORDER
    return next((why for end, why in listed.items() if site.endswith(end)), None)
