"""Unit tests of `waltz_core.replication.replica_repair`: the repair of a replica, step by step."""

import zlib
from dataclasses import replace

import pytest

from tests.unit.replication.model_storage import Entry, ModelStorage, make_batch
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BadFormat, ChecksumMismatch, DataLoss, RemoteProtocolError
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED, LineageEntry, next_chain
from waltz_core.replication.replica_repair import (
    AppendCopy,
    FetchCopy,
    FetchOwnLineage,
    FetchSourceLineage,
    OverwriteDamage,
    RepairGoal,
    ReplicaRepair,
    ReplicaReset,
    SetMark,
    Truncation,
    verify_batches,
    verify_records,
)
from waltz_core.wire import messages as wire


def storage(*batches, mark=-1, window=2):
    """Return a storage in session 9 whose log has these batches: (session, payloads)."""
    model = ModelStorage("s", lineage_max=window, range_batches_max=window)
    model.disk.promised = 9
    for session, payloads in batches:
        batch = make_batch(model.last + 1, payloads, 0)
        chain = next_chain(model.chain, batch.first, batch.last, session, batch.record_crcs)
        line = LineageEntry(batch.first, batch.last, session, 0, chain)
        fields = (batch.first, batch.lengths, batch.records, batch.records_crc, model.chain)
        model.handle(wire.AppendRaw(9, 1, 0, *fields, (line,)))
    model.disk.confirmed = mark
    return model


def prepared(replica):
    return replica.handle(wire.Prepare(9, 1, 0, bytes(16), bytes(16), bytes(16), 1))


def repair_of(replica):
    return ReplicaRepair(prepared(replica))


def available(_first, _last):
    return True


def unavailable(_first, _last):
    return False


def run_repair(repair, replica, source, goal, *, has_source=available):
    """Carry out the steps until the repair is complete; return the steps."""
    steps = []
    while (step := repair.next_step(goal, has_source=has_source)) is not None:
        steps.append(step)
        assert len(steps) < 100
        perform_step(repair, replica, source, step)
    return steps


def perform_step(repair, replica, source, step):
    prefix = (9, 1, 0)
    match step:
        case FetchOwnLineage(first, last):
            repair.on_own_lineage(
                accepted(replica.handle(wire.LineageRequest(*prefix, *step))),
                first=first,
                last=last,
            )
        case FetchSourceLineage(first, last):
            answer = accepted(source.handle(wire.LineageRequest(*prefix, *step)))
            repair.on_source_lineage(answer, first=first, last=last)
        case Truncation():
            answer = accepted(replica.handle(wire.Truncate(*prefix, *step)))
            repair.on_log_truncated(answer.synced_max, answer.chain, step)
        case ReplicaReset():
            accepted(replica.handle(wire.ResetLog(*prefix, *step)))
            repair.on_log_reset(step)
        case FetchCopy(first, last, whole):
            request = wire.RangeRaw(*prefix, first, last, 99999, 0, whole, False)
            repair.on_copy_fetched(accepted(source.handle(request)), step)
        case AppendCopy(answer, _):
            fields = (answer.first, answer.lengths, answer.records, answer.records_crc)
            accepted(
                replica.handle(
                    wire.AppendRaw(*prefix, *fields, answer.chain_before, answer.lineage)
                )
            )
            repair.on_copy_appended(step)
        case OverwriteDamage(answer):
            fields = (answer.first, answer.lengths, answer.records, answer.records_crc)
            accepted(replica.handle(wire.Repair(*prefix, *fields)))
            repair.on_damage_overwritten(step)
        case SetMark():
            accepted(replica.handle(wire.SetLowWaterMark(*prefix, *step)))
            repair.on_mark_written()


def accepted(answer):
    assert not isinstance(answer, wire.Nack), answer
    return answer


def kinds(steps):
    return [type(step).__name__ for step in steps]


OLD = [(1, [1, 2]), (1, [3]), (2, [4, 5, 6])]  # IDs 0..5


@pytest.mark.parametrize(
    ("own", "decided", "expected"),
    [
        (OLD, OLD, ["SetMark"]),
        ([], [], ["SetMark"]),
        ([], OLD, ["FetchCopy", "AppendCopy", "FetchCopy", "AppendCopy", "SetMark"]),
        (OLD[:2], OLD, ["FetchSourceLineage", "FetchCopy", "AppendCopy", "SetMark"]),
    ],
    ids=["equal", "empty", "stretches of whole batches", "a prefix is not cut"],
)
def test_a_log_is_filled_up_to_the_mark(own, decided, expected):
    replica, source = storage(*own), storage(*decided)
    steps = run_repair(
        repair_of(replica),
        replica,
        source if decided else None,
        RepairGoal(source.last, source.chain),
    )
    assert kinds(steps) == expected
    assert replica.payloads() == source.payloads()
    assert replica.disk.provisional == (9, source.last)


def test_a_longer_log_is_truncated_to_the_mark_and_not_below():
    replica, source = storage(*OLD, (3, [7])), storage(*OLD)
    steps = run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert steps[:3] == [
        FetchOwnLineage(5, 5),
        FetchOwnLineage(6, 6),
        Truncation(5, 5, source.chain),
    ]
    assert kinds(steps[3:]) == ["SetMark"]


def test_truncation_waits_until_the_newest_batch_is_known():
    replica, source = storage(*OLD, (2, [7]), (8, [9])), storage(*OLD)
    repair = repair_of(replica)
    goal = RepairGoal(5, source.chain)
    while not isinstance(step := repair.next_step(goal, has_source=available), Truncation):
        assert step.last in (5, 7)
        perform_step(repair, replica, source, step)
    assert repair.newest_session == 8


def test_a_batch_that_contains_the_mark_is_truncated_and_gives_the_goal_its_chain():
    target = storage(*OLD)
    repair = repair_of(target)
    steps = run_repair(repair, target, None, RepairGoal(4, None))
    assert kinds(steps) == ["FetchOwnLineage", "FetchOwnLineage", "Truncation"]
    assert steps[2].base == 2
    assert (repair.last, repair.chain) == (4, target.chain)
    goal = RepairGoal(4, target.chain)
    follower = storage(*OLD)
    assert kinds(run_repair(repair_of(follower), follower, target, goal)) == [
        "FetchOwnLineage",
        "FetchOwnLineage",
        "Truncation",
        "SetMark",
    ]
    assert follower.chain == target.chain


def test_a_diverged_log_is_truncated_at_the_fork_and_filled_up():
    tail = [(2, [10 + n]) for n in range(9)]
    other = [(3, [30 + n]) for n in range(7)]
    replica, source = storage(*OLD[:2], *other, window=2), storage(*OLD[:2], *tail, window=3)
    steps = run_repair(repair_of(replica), replica, source, RepairGoal(11, source.chain))
    cuts = [step for step in steps if isinstance(step, Truncation)]
    assert cuts == [Truncation(2, 2, storage(*OLD[:2]).chain)]
    assert replica.payloads() == source.payloads()
    assert replica.chain == source.chain


def test_reconstructed_batches_of_a_source_truncate_no_replica():
    replica = storage((1, [0]), (1, [1, 2]), (1, [3]))
    source = storage((1, [0]), (RECONSTRUCTED, [1]), (RECONSTRUCTED, [2]), (1, [3]), (1, [4]))
    with pytest.raises(ChecksumMismatch, match="the source replica has lost the batches of"):
        run_repair(repair_of(replica), replica, source, RepairGoal(4, source.chain))
    assert replica.payloads() == [0, 1, 2, 3]
    # In the other direction, the reconstructed batches are truncated.
    steps = run_repair(repair_of(source), source, replica, RepairGoal(3, replica.chain))
    assert "Truncation" in kinds(steps)
    assert (source.payloads(), source.chain) == ([0, 1, 2, 3], replica.chain)


def test_reconstructed_batches_of_a_source_are_not_copied():
    replica, source = storage((1, [0])), storage((1, [0]), (RECONSTRUCTED, [1, 2]))
    with pytest.raises(
        ChecksumMismatch,
        match=r"the source replica has lost the batches of "
        r"transactions 1\.\.2",
    ):
        run_repair(repair_of(replica), replica, source, RepairGoal(2, source.chain))
    assert replica.payloads() == [0]


def test_a_copy_with_a_chain_other_than_the_decided_one_is_repeated():
    replica = storage((1, [0]), window=1)
    source = storage((1, [0]), (-1, [1]), (1, [2]), window=1)
    target = storage((1, [0]), (1, [1]), (1, [2]), window=1)
    repair, goal = repair_of(replica), RepairGoal(2, target.chain)
    with pytest.raises(ChecksumMismatch, match="after the last of these records does not match"):
        run_repair(repair, replica, source, goal)
    assert replica.payloads() == [0, 1]
    repair.restart()
    run_repair(repair, replica, target, goal)
    assert (replica.payloads(), replica.chain) == ([0, 1, 2], target.chain)


def test_a_log_is_not_truncated_if_a_second_source_contains_it():
    """The first source had another end of its log, or had lost batches."""
    replica = storage((1, [0]), (1, [1, 2]), (1, [3]))
    first, target = (
        storage((1, [0]), (2, [7, 8, 9])),
        storage((1, [0]), (1, [1, 2]), (1, [3]), (1, [4])),
    )
    repair, goal = repair_of(replica), RepairGoal(4, target.chain)
    steps = []
    for source in (first, replica, target, target, target, target):
        steps.append(repair.next_step(goal, has_source=available))
        perform_step(repair, replica, source, steps[-1])
    assert kinds(steps) == [
        "FetchSourceLineage",
        "FetchOwnLineage",
        "FetchSourceLineage",
        *kinds(steps)[3:],
    ]
    assert "Truncation" not in kinds(steps)
    assert replica.payloads() == [0, 1, 2, 3, 4]


def test_a_log_is_not_truncated_below_its_own_confirmed_mark():
    replica, source = storage((7, [50]), (7, [51]), mark=0), storage(*OLD)
    with pytest.raises(DataLoss, match="low-water mark 0"):
        run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert replica.last == 1


def test_a_log_without_a_common_batch_or_a_confirmed_mark_is_emptied():
    replica, source = storage((7, [50]), (7, [51])), storage(*OLD)
    replica.disk.provisional = (7, 1)
    run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert replica.payloads() == source.payloads()


def test_a_new_goal_discards_the_comparison_with_the_old_one():
    replica, source = storage(*OLD[:1]), storage(*OLD)
    repair = repair_of(replica)
    step = repair.next_step(RepairGoal(5, source.chain), has_source=available)
    perform_step(repair, replica, source, step)
    assert isinstance(
        repair.next_step(RepairGoal(5, source.chain), has_source=available), FetchCopy
    )
    other = storage((4, [1, 2]), (4, [60, 61, 62, 63]))
    run_repair(repair, replica, other, RepairGoal(5, other.chain))
    assert replica.payloads() == other.payloads()


# ---------------------------------------------------------------------------------------------
# damage


def test_damage_is_repaired_before_the_mark_is_set():
    replica, source = storage(*OLD), storage(*OLD)
    replica.disk.damaged = {1, 2, 4}
    steps = run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert kinds(steps) == ["FetchCopy", "OverwriteDamage"] * 3 + ["SetMark"]
    assert not replica.disk.damaged


def test_damage_above_the_old_mark_waits_for_a_replica_that_can_repair_it():
    replica, source = storage(*OLD, mark=3), storage(*OLD)
    replica.disk.damaged = {4}
    repair = repair_of(replica)
    assert repair.next_step(RepairGoal(5, source.chain), has_source=unavailable) is None
    step = repair.next_step(RepairGoal(5, source.chain), has_source=available)
    assert step == FetchCopy(4, 4, needs_whole_batches=False)


def test_irreparable_damage_does_not_hold_up_other_repairs():
    replica, source = storage(*OLD, mark=3), storage(*OLD)
    replica.disk.damaged = {1, 4}
    repair = repair_of(replica)
    steps = run_repair(
        repair, replica, source, RepairGoal(5, source.chain), has_source=lambda first, _: first == 4
    )
    assert kinds(steps) == ["FetchCopy", "OverwriteDamage", "SetMark"]
    assert replica.disk.damaged == {1}


def test_records_for_an_obsolete_repair_are_not_appended():
    replica, source = storage(*OLD[:2], mark=2), storage(*OLD)
    replica.disk.damaged = {1}
    repair, goal = repair_of(replica), RepairGoal(5, source.chain)
    while not isinstance(step := repair.next_step(goal, has_source=available), FetchCopy):
        perform_step(repair, replica, source, step)
    perform_step(repair, replica, source, step)
    assert repair.next_step(goal, has_source=unavailable) == FetchCopy(
        3, 5, needs_whole_batches=True
    )


def test_a_completed_overwrite_is_subtracted_from_the_newest_known_damage():
    replica, source = storage(*OLD, mark=5), storage(*OLD)
    repair = repair_of(replica)
    repair.on_damage_found([(1, 4)])
    fetch = repair.overwrite_step((1, 4))
    perform_step(repair, replica, source, fetch)
    fill = repair.overwrite_step((1, 4))
    assert (fill.fetched_range.first, fill.fetched_range.count) == (1, 2)
    repair.on_damage_found([(0, 0), (2, 7)])
    # The fetched records do not begin where the damage begins now, so they are fetched again.
    assert repair.overwrite_step((2, 7)) == FetchCopy(2, 7, needs_whole_batches=False)
    repair.on_damage_overwritten(fill)
    assert repair.damaged == [(0, 0), (3, 7)]
    repair.on_damage_found([(0, 5)])
    repair.on_damage_overwritten(fill)
    assert repair.damaged == [(0, 0), (3, 5)]


def test_damage_reported_during_a_rejected_overwrite_is_kept():
    replica, source = storage(*OLD, mark=5), storage(*OLD)
    repair = repair_of(replica)
    repair.on_damage_found([(1, 2), (4, 4)])
    perform_step(repair, replica, source, repair.overwrite_step((1, 2)))
    fill = repair.overwrite_step((1, 2))
    repair.on_overwrite_rejected(fill)
    assert repair.damaged == [(4, 4)]
    repair.on_damage_found([(0, 2), (4, 4)])
    repair.on_overwrite_rejected(fill)
    assert repair.damaged == [(0, 2), (4, 4)]


def test_truncated_damage_is_forgotten():
    replica, source = storage(*OLD, (3, [7])), storage(*OLD)
    replica.disk.damaged = {6}
    steps = run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert "OverwriteDamage" not in kinds(steps)


def test_damage_above_the_point_of_truncation_is_not_requested_from_a_source():
    replica, source = storage(*OLD, (3, [7])), storage(*OLD)
    replica.disk.damaged = {5}
    repair = repair_of(replica)
    repair.on_damage_found([(5, 6)])  # a storage reports adjacent records as one range
    steps = run_repair(
        repair, replica, source, RepairGoal(5, source.chain), has_source=lambda _, last: last <= 5
    )
    assert kinds(steps)[-3:] == ["FetchCopy", "OverwriteDamage", "SetMark"]
    assert not replica.disk.damaged


# ---------------------------------------------------------------------------------------------
# untrusted answers


def range_of(source, first, last):
    return source.handle(wire.RangeRaw(9, 1, 0, first, last, 99999, 0, True, False))


def changed(answer, **fields):
    return replace(answer, **fields)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"first": 1}, RemoteProtocolError),
        ({"count": 9}, RemoteProtocolError),
        ({"count": 0}, RemoteProtocolError),
        ({"lengths": b"\0\0\0\1"}, BadFormat),
        ({"lengths": b"\0\0\0"}, BadFormat),
        ({"records_crc": 1}, ChecksumMismatch),
    ],
)
def test_a_range_that_differs_from_the_requested_one_is_rejected(fields, error):
    answer = range_of(storage(*OLD), 0, 2)
    verify_records(answer, first=0, last=2)
    with pytest.raises(error):
        verify_records(changed(answer, **fields), first=0, last=2)


def test_every_flipped_byte_is_detected():
    answer = range_of(storage(*OLD), 0, 1)
    records = bytes(answer.records)
    for index in range(len(records)):
        flipped = bytearray(records)
        flipped[index] ^= 1
        with pytest.raises((ChecksumMismatch, BadFormat)):
            verify_records(changed(answer, records=bytes(flipped)), first=0, last=1)


def test_corruption_that_the_source_has_missed_is_detected_by_the_record_crc():
    """The source computes the checksum of a range when it reads; record checksums are older."""
    answer = range_of(storage(*OLD), 0, 1)
    data = bytearray(answer.records)
    data[-5] ^= 1  # the last byte before the record's CRC
    rotten = changed(answer, records=bytes(data), records_crc=zlib.crc32(data))
    with pytest.raises(ChecksumMismatch, match="record 1 does not match"):
        verify_records(rotten, first=0, last=1)


def test_batches_must_continue_the_chain():
    source = storage(*OLD)
    answer = range_of(source, 0, 2)
    assert verify_batches(answer, GENESIS_CHAIN) == storage(*OLD[:2]).chain
    with pytest.raises(ChecksumMismatch, match="expected chain hash"):
        verify_batches(answer, b"x" * 16)


def test_batches_must_cover_the_records():
    answer = range_of(storage(*OLD), 0, 2)
    for lineage in (answer.lineage[:1], answer.lineage[1:], (), answer.lineage * 2):
        with pytest.raises(BadFormat):
            verify_batches(changed(answer, lineage=lineage), GENESIS_CHAIN)


def test_a_batch_of_another_session_has_another_chain():
    answer = range_of(storage(*OLD), 0, 1)
    forged = (answer.lineage[0]._replace(session_id=8),)
    with pytest.raises(ChecksumMismatch, match="the chain hash does not match"):
        verify_batches(changed(answer, lineage=forged), GENESIS_CHAIN)


def test_a_lineage_that_does_not_cover_the_requested_ids_is_rejected():
    replica, source = storage(*OLD[:2]), storage(*OLD)
    repair = repair_of(replica)
    step = repair.next_step(RepairGoal(5, source.chain), has_source=available)
    for lineage in ((), (LineageEntry(0, 1, 1, 0, bytes(16)),)):
        answer = wire.LineageResponse(9, 1, 0, bytes(16), lineage)
        with pytest.raises(RemoteProtocolError):
            repair.on_source_lineage(answer, first=step.first, last=step.last)
        with pytest.raises(RemoteProtocolError):
            repair.on_own_lineage(answer, first=step.first, last=step.last)


def lose_batches(replica, first, last):
    """Replace the batches of some IDs of a replica by one reconstructed batch."""
    entries = replica.disk.entries
    lost = [entry for entry in entries if first <= entry.lineage.first <= last]
    index = entries.index(lost[0])
    line = LineageEntry(first, last, RECONSTRUCTED, 0, b"made-up chain...")
    entries[index : index + len(lost)] = [
        Entry(line, tuple(record for each in lost for record in each.records))
    ]


@pytest.mark.parametrize("mark", [-1, 2])
def test_a_tail_with_lost_batches_is_truncated_to_the_last_intact_batch_and_copied(mark):
    replica, source = storage(*OLD, (3, [7]), mark=mark), storage(*OLD)
    lose_batches(replica, 3, 5)
    steps = run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert [step.last_to_keep for step in steps if isinstance(step, Truncation)] == [5, 2]
    assert replica.payloads() == source.payloads()
    assert replica.chain == source.chain


def test_lost_batches_are_not_truncated_if_the_mark_is_within_them():
    replica, source = storage(*OLD, (3, [7]), mark=4), storage(*OLD)
    lose_batches(replica, 3, 5)
    repair = repair_of(replica)
    with pytest.raises(
        DataLoss, match=r"up to transaction 5, even batches below .* 4\. Hint: restart"
    ):
        run_repair(repair, replica, source, RepairGoal(5, source.chain))
    assert replica.last == 5


def test_a_diverged_batch_is_not_truncated_if_the_mark_is_within_it():
    replica, source = storage(*OLD[:2], (3, [7, 8, 9]), mark=4), storage(*OLD)
    with pytest.raises(DataLoss, match="no batch end in common"):
        run_repair(repair_of(replica), replica, source, RepairGoal(5, source.chain))
    assert replica.last == 5


def test_a_truncation_to_an_id_other_than_the_requested_id_is_rejected():
    replica, source = storage(*OLD, (3, [7])), storage(*OLD)
    repair = repair_of(replica)
    while not isinstance(
        step := repair.next_step(RepairGoal(5, source.chain), has_source=available), Truncation
    ):
        perform_step(repair, replica, source, step)
    with pytest.raises(RemoteProtocolError, match="expected a log that ends at transaction 5"):
        repair.on_log_truncated(4, bytes(16), step)


# ---- sources whose log begins above 0 (rule 7)

LONG = [*OLD, (3, [7, 8]), (3, [9])]  # IDs 0..8


def source_with_later_start(last, *batches, archived=None):
    """Return a source whose log begins after a batch end, and the goal with the archived mark."""
    source = storage(*batches)
    ends = {entry.lineage.last: entry.lineage.chain for entry in source.disk.entries}
    mark = last if archived is None else archived
    goal = RepairGoal(source.last, source.chain, ArchivedMark(mark, ends[mark], 0, 0, 0, "m"), last)
    source.remove_up_to(last)
    return source, goal


def test_an_empty_log_begins_after_the_archived_mark_and_copies_the_rest():
    source, goal = source_with_later_start(2, *LONG, archived=5)
    replica = storage()
    steps = run_repair(repair_of(replica), replica, source, goal)
    assert steps[0] == ReplicaReset(5, goal.archived_mark.chain)
    assert kinds(steps[1:]) == ["FetchSourceLineage", "FetchCopy", "AppendCopy", "SetMark"]
    assert replica.payloads() == [7, 8, 9]
    assert not replica.disk.suspect


def test_an_empty_log_is_reset_even_if_a_source_has_the_whole_log():
    source, goal = source_with_later_start(2, *LONG, archived=5)
    replica = storage()
    steps = run_repair(repair_of(replica), replica, source, goal._replace(lowest_source_start=-1))
    assert steps[0] == ReplicaReset(5, goal.archived_mark.chain)


def test_a_log_that_ends_before_all_sources_begin_is_reset_when_its_newest_batch_is_known():
    source, goal = source_with_later_start(5, *LONG)
    replica = storage(*OLD[:2], mark=2)
    repair = repair_of(replica)
    steps = run_repair(repair, replica, source, goal)
    assert steps[:2] == [FetchOwnLineage(2, 2), ReplicaReset(5, goal.archived_mark.chain)]
    assert repair.newest_session == 1
    assert (replica.payloads(), replica.disk.start[0]) == ([7, 8, 9], 5)


def test_a_log_that_shares_a_batch_end_above_the_start_of_a_source_is_completed():
    source, goal = source_with_later_start(2, *LONG, archived=8)
    replica = storage(*OLD)
    steps = run_repair(repair_of(replica), replica, source, goal)
    assert kinds(steps) == ["FetchSourceLineage", "FetchCopy", "AppendCopy", "SetMark"]
    assert replica.payloads() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_start_of_a_source_is_a_common_batch_end():
    source, goal = source_with_later_start(5, *LONG)
    replica = storage(*OLD, (2, [70]))
    steps = run_repair(repair_of(replica), replica, source, goal)
    assert Truncation(5, 5, goal.archived_mark.chain) in steps
    assert kinds(steps)[-3:] == ["FetchCopy", "AppendCopy", "SetMark"]
    assert replica.payloads() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_log_that_differs_below_the_start_of_all_sources_is_truncated_and_reset():
    source, goal = source_with_later_start(5, *LONG)
    replica = storage(*OLD[:2], (2, [40, 50, 60]), (2, [70]), mark=2)
    steps = run_repair(repair_of(replica), replica, source, goal)
    found = kinds(steps)
    assert found.index("Truncation") < found.index("ReplicaReset")
    assert replica.payloads() == [7, 8, 9]


def test_a_log_that_differs_below_its_own_mark_is_not_reset():
    source, goal = source_with_later_start(5, *LONG)
    replica = storage(*OLD[:2], (2, [40, 50, 60]), (2, [70]), mark=6)
    with pytest.raises(DataLoss, match="no batch end in common"):
        run_repair(repair_of(replica), replica, source, goal)
    assert replica.payloads() == [1, 2, 3, 40, 50, 60, 70]


def test_a_log_is_truncated_to_its_start():
    source, goal = source_with_later_start(5, *LONG)
    replica, _ = source_with_later_start(5, *OLD, (4, [70, 80]))
    goal = RepairGoal(5, goal.archived_mark.chain, goal.archived_mark)
    steps = run_repair(repair_of(replica), replica, source, goal)
    assert Truncation(5, 5, goal.chain) in steps
    assert kinds(steps)[-1] == "SetMark"
    assert (replica.payloads(), replica.disk.start[0]) == ([], 5)
