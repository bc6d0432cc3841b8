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
    "storage_engine.open > file_system.create_durably#4": "the control file is made next, in the "
    "same directory",
    "control_file._create > file_system.create_durably#4": "`StorageEngine.open` syncs the same "
    "directory next",
    "storage_engine.open#1": "only after two kills in a row are both names not durable yet",
    "log_recovery.open_log > file_system.make_with_parents#1": "`StorageEngine.open` has synced "
    "that directory",
    "segment.copy_index > file_system.create_durably#4": "the new segment's names are synced next",
    "segments.continue_in_new_file > segment.create > file_system.create_durably#3": "the old "
    "files of an empty segment are as good as the new ones",
    "log_recovery.open_log#2": "the second slot has the same content; this one prevents that a "
    "directory that is being changed is marked clean where syncs are not trusted",
    "segments.continue_in_new_file > segment.sync#1": "nothing trusts it; it is for 0.13, which "
    "does not cut where the next segment begins (test_layout.py)",
    "segments.continue_in_new_file > segment.sync#2": "as the line before",
    "disk_space.fill_reserve#1": "rebuilt at each start; a sync takes the space where it is only "
    "promised until then",
    "disk_space.release_reserve#1": "it makes space usable: a file system may free it only when "
    "the removal is durable",
    "log_recovery._recover > segment.recover#1": "a segment that is not the last changes by rot "
    "only",
    "log_recovery._recover > segment.recover#2": "as the line before",
    "truncation.carry_out > segment.sync#1": "records whose entry was cut are no part of the "
    "log, and the entries are synced",
    "truncation.carry_out > segment.sync_index#1": "an index that is too long is cut by the "
    "next opening",
    "reading._note_damage#1": "the next read finds it again",
    "log_files.begin_after#1": "the second write has the same slot; two are for a slot that rots",
    "log_files.begin_after#2": "as the line before",
    "partition_log.remove_oldest > log_files.mark_acked#2": "the slot with the new start has the "
    "marker, too",
    "segments.begin_after > segment.remove#1": "the opening removes it again",
    "segments.begin_after > segments._add > segment.create > file_system.create_durably#3": "the "
    "opening makes the segment of a reset again",
    "segments.begin_after > segments._add > segment.create > file_system.create_durably#4": "as "
    "the line before",
    "repair > log_files.mark_acked#2": "for what is lost "
    "next to a hole: this disk gives all that was synced (test_partition_log.py has another)",
    "segments.fill > segment.fill#6": "an index that is wrong is repaired by the next read",
}
# Necessary syncs that may be executed after the next sync, because both syncs precede the next
# acknowledgement.
ANY_ORDER = {
    "file_system.make_with_parents#1": "names of different directories",
    "file_system.make_with_parents#2": "names of different directories",
    "storage_engine.open > control_file.open#2": "the control file and names",
    "control_file.set_flags#1": "a flag whose directory is not there yet, and the other way round",
    "storage_engine.assign_new#0": "as the line before",
    "storage_engine.assign_new > control_file.set_flags_of#1": "as the line before",
    "log_recovery.open_log#1": "names, and a slot in a file that had its name before",
    "segment.create > file_system.create_durably#2": "what is in the files; each before its own "
    "rename",
    "segment.create > file_system.create_durably#4": "names, and unacknowledged records",
    "log_recovery._create_log > file_system.create_durably#2": "what is in the files; each before "
    "its own rename",
    "log_recovery._create_log > file_system.create_durably#4": "names, and an unacknowledged "
    "promise",
    "segment.write_again#4": "records, index and batches: acknowledged when all are synced",
    "segment.write_again#5": "as the line before",
    "segment.write_again#6": "batches, and a slot that confirms no more than was acknowledged",
    "log_files.sync > segment.sync#1": "records and batches count together only",
    "log_files.sync > segment.sync#2": "batches and the slot that marks them, at a clean end",
    "log_files._roll > segment.sync#1": "records and batches count together only",
    "log_files._roll > segment.sync#2": "batches, and an index that can be repaired",
    "log_files._roll#3": "the marker moves on; names of the new segment",
    "partition_log._confirm#1": "a mark that was acknowledged, and unacknowledged records",
    "segments.truncate > segment.remove#1": "names of one directory, the newest segment "
    "first; one sync after two removals finds them in any order, and the intent removes the rest",
    "log_recovery._remove > segment.remove#1": "as at the cut",
    "truncation.carry_out > segment.sync#2": "batches and the index",
    "segments.fill > segment.fill#5": "records of a hole, whose damage is still noted",
}


def reason(site, mutation):
    """Return the listed reason why no crash detects a mutation; None if it is not listed."""
    listed = NOT_NEEDED if mutation == "forgotten" else NOT_NEEDED | ANY_ORDER
    return next((why for end, why in listed.items() if site.endswith(end)), None)
