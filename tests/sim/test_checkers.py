"""Each checker fails when it receives an event that must never happen."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from waltz_core.archive.manifest import Manifest
from waltz_core.client.stream import stream_events as client_events
from waltz_core.client.stream.outcome_tracker import BatchOutcome
from waltz_core.cluster.znodes.model import UNRESOLVED, MarkerState, PartitionMarker, ReplicaState
from waltz_core.errors import ClientAheadOfLog, DataLoss, DiskFailed, LockFailed, Unreachable
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, NO_SESSION, LineageEntry, ReplicaId, ReqId
from waltz_core.replication import session_events
from waltz_core.server.locking.lock_table import LockTable
from waltz_core.server.partition_events import SendToClient, error_answer
from waltz_core.storage.service.work import LaneRequest, Work, WorkResult
from waltz_core.wire import messages as m
from waltz_sim.cluster.simulated_archive import StoredFile
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.guarantees.history import BatchNode, HistoryRow, Violation, data_of_record, make_data
from waltz_sim.guarantees.ledger import CheckedTransaction, Ledger, RowKind
from waltz_sim.guarantees.limit_guarantees import CLAIMS_PER_S_MAX, DIALS_PER_S_MAX
from waltz_sim.guarantees.replica_guarantees import segments_of
from waltz_sim.guarantees.required_states import REQUIRED_STATES, missing_states
from waltz_sim.schedule import Schedule, Setup

BUSY_MS = 90
QUESTION = ReqId(1, 0, 0, -(1 << 30) - 5)


class World:
    """A cluster that has run for a while without faults, and helpers that report events."""

    def __init__(self, *, is_over: bool = False, **setup) -> None:
        chosen = {"replicas": 3, "spare_storages": 0, "servers": 2, "clients": 2, "think_ms": 4}
        self.cluster = SimCluster(Schedule(7, Setup(**{**chosen, **setup})))
        self.cluster.start_clients()
        self.cluster.world.run(BUSY_MS * US_PER_MS)
        if is_over:
            self.cluster.run_until_recovered()
        self.checks = self.cluster.checks
        self.history = self.checks.history
        self.sessions = self.checks.sessions
        self.coordinator = self.cluster.coordinator
        self.owner = self.cluster.owner
        self.session = self.coordinator.metadata.session_id
        self.nonce = self.coordinator.marker.nonce
        self.storage = next(iter(self.cluster.storages.values()))
        self.client = self.cluster.clients[0]
        self.link = next(iter(self.client.links.values()))
        assert self.history.last > 10
        assert len(self.sessions.opened_sessions) == 1

    def report_answer(self, message) -> None:
        """Report that the owner sends a message to the first client."""
        self.checks.on_sent_to_client(self.owner, SendToClient(self.link.number, message, 0))

    def report_effects(self, *effects, server=None) -> None:
        """Report effects of the owner's store."""
        self.checks.on_store_stepped(server or self.owner, self.owner.store.store, effects)

    def report_request(self, kind, *fields, session=None, replica="storage0:1") -> None:
        session = self.session if session is None else session
        message = kind(session, 1, 0, *fields)
        effect = session_events.SendToReplica(session, ReplicaId(replica), message)
        self.checks.on_sent_to_replica(self.owner, effect)

    def report_claim(self) -> int:
        """Report that the next session is claimed; return its ID."""
        metadata = self.coordinator.metadata
        session = metadata.session_id + 1
        after = replace(metadata, session_id=session)
        self.report_write(after, bytes(15) + bytes((session,)), server=self.owner.name)
        self.coordinator.metadata = after
        return session

    def report_write(self, after, nonce=None, server=None) -> None:
        """Report a successful write to ZooKeeper."""
        before = self.coordinator.metadata
        archived = self.coordinator.marker.archived
        marker = PartitionMarker(MarkerState.OPEN, after.session_id, nonce or self.nonce, archived)
        self.coordinator.metadata_version += 1
        self.checks.on_metadata_written(server or self.owner.name, before, after, marker)

    def report_work(self, kind, *fields, outcome=None, session=None) -> None:
        """Report that a storage has done a piece of work, with an invented result."""
        session = self.session if session is None else session
        request = LaneRequest(1, kind(session, 1, 0, *fields))
        work = Work(self.storage.log, (request,), self.storage.engine.storage_id)
        outcome = m.SuccessResponse(session, 1, 0) if outcome is None else outcome
        before = self.checks.before_work(self.storage, work)
        self.checks.on_work_done(self.storage, work, WorkResult(outcomes=[outcome]), before)

    def report_prepared(self, session, replica, synced_max, **other) -> None:
        """Report that the owner has received a replica's answer to the fencing."""
        fields = {
            "storage_id": self.cluster.storages[replica].engine.storage_id,
            "last_session": self.session,
            "low_water_mark": -1,
            "mark_confirmed": True,
            "synced_max": synced_max,
            "chain": bytes(16),
            "suspect": False,
            "damaged": b"",
        }
        answer = m.Prepared(session, 1, 0, **{**fields, **other})
        self.checks.on_replica_response(session, replica, answer)

    def report_promises(self, session, *replicas) -> None:
        """Report that the disks of these replicas have promised the session."""
        for replica in replicas:
            self.sessions.on_slot_written(replica, session, self.session)

    def last_operation(self):
        return self.history.operations[self.history.log[-1].number]


@pytest.fixture
def world():
    return World()


def fails(rule):
    return pytest.raises(Violation, match=f"^{rule}:")


REPLICAS = ("storage0:1", "storage1:1", "storage2:1")

# ---------------------------------------------------------------------------------------------
# 1, 2, 8: acknowledgements


def test_the_fork_checker_detects_two_chains_at_one_committed_id(world):
    with fails("Fork"):
        world.checks.outcomes.on_log_exposed(world.history.last, bytes(16))


def test_the_fork_checker_detects_a_log_that_lacks_committed_batches(world):
    history, last = world.history, world.history.last + 1
    rows = (*history.log, HistoryRow((9, 9), 9))
    node = BatchNode(GENESIS_CHAIN, 0, last, 0, rows, bytes(4 * len(rows)), b"", ())
    history.nodes[node.chain] = node
    with fails("Fork"):
        world.checks.outcomes.on_log_exposed(node.last, node.chain)


def test_the_stamp_mono_checker_detects_a_commit_stamp_that_decreases(world):
    history, last = world.history, world.history.last + 1
    before, rows = history.chains[history.last], (HistoryRow((9, 9), 9),)
    node = BatchNode(before, last, last, 0, rows, bytes(4), b"", (0,), history.stamp_ms - 1)
    history.nodes[node.chain] = node
    with fails("StampMono"):
        history.extend_log(node.last, node.chain)
    assert history.stamp_ms > 0


def committed(world):
    """Return a commit that was already reported."""
    last = world.history.last
    return session_events.TransactionsCommitted(world.session, last, world.history.chains[last])


def test_the_ack_quorum_checker_detects_a_commit_without_a_quorum(world):
    world.report_effects(committed(world))
    world.sessions.on_log_truncated("storage0:1", -1)
    world.sessions.on_log_truncated("storage1:1", -1)
    with fails("AckQuorum"):
        world.report_effects(committed(world))


def test_the_engaged_only_checker_detects_a_commit_without_answers_of_a_quorum(world):
    for name in REPLICAS[:2]:
        world.sessions._answered_last[world.session, name] = -1
    with fails("EngagedOnly"):
        world.report_effects(committed(world))


def test_the_engaged_only_checker_detects_a_commit_with_too_few_engaged_replicas(world):
    del world.sessions.ever_engaged[world.session]["storage0:1"]
    del world.sessions.ever_engaged[world.session]["storage1:1"]
    with fails("AckQuorum"):
        world.report_effects(committed(world))


def test_the_engaged_only_checker_detects_a_replica_that_is_engaged_before_the_write_to_zookeeper(
    world,
):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    for replica in REPLICAS:
        world.report_prepared(session, replica, 1_000)
    with fails("EngagedOnly"):
        world.report_request(m.Engage, 1_000, session=session)


# ---------------------------------------------------------------------------------------------
# 3, 4: promises


@pytest.mark.parametrize(("field", "back"), [("promised", 1), ("last_session", 1)])
def test_the_promise_mono_checker_detects_a_promise_that_decreases(world, field, back):
    name = world.storage.name
    world.checks.replicas._check_durable_values(name, world.storage.log)
    before = world.checks.replicas.durable_values[name]
    ahead = before._replace(**{field: getattr(before, field) + back})
    world.checks.replicas.durable_values[name] = ahead
    with fails("PromiseMono"):
        world.checks.on_log_opened(world.storage, world.storage.log)


def test_after_a_restart_synced_data_exists_or_the_replica_is_suspect(world):
    log = world.storage.log
    world.checks.replicas.answered_last[world.storage.name] = log.synced_max + 1
    with fails("PromiseMono"):
        world.checks.on_log_opened(world.storage, log)
    world.checks.on_disk_rolled_back(world.storage)
    world.checks.on_log_opened(world.storage, log)


def entry(world, session=None, chain=bytes(16)):
    first = world.history.last + 1
    return LineageEntry(first, first, world.session if session is None else session, 0, chain)


def append(world, one):
    return m.AppendRaw, one.first, b"\0\0\0\x28", bytes(40), 0, bytes(16), (one,)


def test_the_single_writer_checker_detects_two_owners_on_disks(world):
    claim = world.sessions.claims[world.session]
    world.sessions.claims[world.session] = claim._replace(nonce=b"another")
    with fails("SingleWriter"):
        world.report_work(*append(world, entry(world)))


def test_the_meta_shape_checker_detects_states_written_by_another_server(world):
    with fails("MetaShape"):
        world.report_write(world.coordinator.metadata, server="server9")


def test_the_single_writer_checker_detects_a_request_of_an_unclaimed_session(world):
    with fails("SingleWriter"):
        world.report_request(m.SetLowWaterMark, 1_000, bytes(16), session=world.session + 1)


# ---------------------------------------------------------------------------------------------
# 5, 6: decisions


def test_the_fence_first_checker_detects_a_decision_before_the_fencing(world):
    session = world.report_claim()
    world.report_promises(session, "storage0:1")
    world.report_prepared(session, "storage0:1", 1_000)
    world.report_prepared(session, "storage1:1", 1_000)
    with fails("FenceFirst"):
        world.report_request(m.SetLowWaterMark, 1_000, bytes(16), session=session)


def test_the_decision_covers_checker_detects_a_decision_without_a_known_quorum(world):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    world.report_prepared(session, "storage0:1", 1_000)
    with fails("DecisionCovers"):
        world.report_request(m.Truncate, 1_000, -1, bytes(16), session=session)


@pytest.mark.parametrize(
    "reason",
    [
        {"suspect": True},
        {"last_session": NO_SESSION},
        {"storage_id": b"0" * 16},
        {"damaged": np.array([0, 3], dtype=">i8").tobytes()},
    ],
)
def test_the_decision_covers_checker_ignores_untrusted_replicas(world, reason):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    world.report_prepared(session, "storage0:1", 1_000)
    world.report_prepared(session, "storage1:1", 1_000, **reason)
    with fails("DecisionCovers"):
        world.report_request(m.SetLowWaterMark, 1_000, bytes(16), session=session)


def test_the_decision_covers_the_records_that_an_unknown_replica_may_have(world):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    # If the third replica is unknown, a record on one known replica may be on two replicas.
    world.report_prepared(session, "storage0:1", 2_000)
    world.report_prepared(session, "storage1:1", 1_000)
    with fails("DecisionCovers"):
        world.report_request(m.SetLowWaterMark, 1_000, bytes(16), session=session)
    assert world.sessions.decided_marks[session].mark_min == 2_000
    assert world.sessions.decided_marks[session].unknown_count == 1


def test_the_decision_covers_checker_detects_a_mark_below_the_log(world):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    for replica in REPLICAS:
        world.report_prepared(session, replica, world.history.last - 1)
    with fails("DecisionCovers"):
        world.report_request(m.SetLowWaterMark, world.history.last - 1, bytes(16), session=session)


def test_the_decision_covers_checker_detects_a_changed_decision(world):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    for replica in REPLICAS:
        world.report_prepared(session, replica, 1_000)
    world.report_request(m.SetLowWaterMark, 1_000, bytes(16), session=session)
    with fails("DecisionCovers"):
        world.report_request(m.SetLowWaterMark, 1_001, bytes(16), session=session)


# ---------------------------------------------------------------------------------------------
# 7: nothing before the second compare-and-set


def test_the_gate_cas2_checker_detects_an_early_append_on_a_disk(world):
    session = world.report_claim()
    world.storage.log._files.slots.slot = replace(
        world.storage.log.slot, nonce=world.sessions.claims[session].nonce
    )
    with fails("GateCAS2"):
        world.report_work(*append(world, entry(world, session)), session=session)


def test_the_gate_cas2_checker_detects_an_early_append_to_a_replica(world):
    session = world.report_claim()
    world.report_promises(session, *REPLICAS)
    for replica in REPLICAS:
        world.report_prepared(session, replica, 1_000)
    with fails("GateCAS2"):
        world.report_request(*append(world, entry(world, session)), session=session)


def test_the_gate_cas2_checker_detects_a_session_that_opens_before_the_second_compare_and_set(
    world,
):
    session = world.report_claim()
    opened = session_events.SessionOpened(session, 1, 1_000, bytes(16), follows_own_session=False)
    with fails("GateCAS2"):
        world.report_effects(opened)


def test_the_gate_cas2_checker_detects_a_batch_without_an_open_session(world):
    with fails("GateCAS2"):
        world.checks.on_batch_submitted(
            world.owner, session_events.SubmitToSession(world.session + 1, None)
        )


def outcome(reason=m.RowOutcomeCode.LOST, *, conflict=-1, transaction_id=-1):
    ids, conflicts = (np.array([one], dtype=">i8").tobytes() for one in (transaction_id, conflict))
    return m.AppendResult(QUESTION, 0, ids, bytes((reason,)), conflicts)


@pytest.mark.parametrize(
    "message",
    [
        outcome(m.RowOutcomeCode.COMMITTED, transaction_id=1),
        outcome(m.RowOutcomeCode.LOST),
        outcome(m.RowOutcomeCode.LOCK, conflict=1),
        m.Mounted(QUESTION, 0, 1, 1, 1, 1),
        m.MountResponse(QUESTION, 0),
        m.FlushResponse(QUESTION, 1),
        m.HighWaterMarkResponse(QUESTION, 1),
        m.ReplicasResponse(QUESTION, 0, 1, (), bytes(16), 1),
        m.LockFailure(QUESTION, 1),
        error_answer(1, QUESTION, 0, ClientAheadOfLog("ahead")).message,
        error_answer(1, QUESTION, 0, LockFailed("locked")).message,
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_gate_cas2_checker_detects_an_answer_without_an_open_session(world, message):
    world.report_effects(session_events.SessionClosed(world.session, "over"))
    world.checks.on_server_stepped(world.owner)
    with fails("GateCAS2"):
        world.report_answer(message)


def test_the_gate_cas2_checker_accepts_rejections_that_need_no_session(world):
    world.report_effects(session_events.SessionClosed(world.session, "over"))
    world.checks.on_server_stepped(world.owner)
    mark = world.history.last
    world.report_answer(replace(outcome(m.RowOutcomeCode.NOT_MOUNTED), high_water_mark=mark))
    world.report_answer(replace(outcome(m.RowOutcomeCode.OVERLOADED), high_water_mark=mark))
    with fails("GateCAS2"):
        world.report_answer(replace(outcome(m.RowOutcomeCode.AHEAD), high_water_mark=mark))


def test_the_gate_cas2_checker_detects_an_answer_that_names_a_session_that_is_not_open(world):
    with fails("GateCAS2"):
        world.report_answer(m.Mounted(QUESTION, world.session + 1, 1, 1, 1, 1))


# ---------------------------------------------------------------------------------------------
# 9, 10, 22, 23, 24: data on disks


def test_the_no_cut_committed_checker_detects_a_truncation_of_committed_records(world):
    with fails("NoCutCommitted"):
        world.report_work(m.Truncate, 5, -1, bytes(16))


def test_the_no_cut_committed_checker_detects_a_truncation_that_is_completed_when_the_log_opens(
    world,
):
    log = world.storage.log
    world.report_work(m.Truncate, 5, -1, bytes(16), outcome=DiskFailed("half of it"))
    world.checks.on_log_opened(world.storage, log)
    with fails("NoCutCommitted"):
        world.checks.on_log_opened(
            world.storage,
            SimpleNamespace(max_id=5, slot=log.slot, promised=log.promised, is_broken=False),
        )


def test_the_no_cut_committed_checker_accepts_a_truncation_that_was_requested_before_the_commit(
    world,
):
    """The lost records were never acknowledged, because they were truncated before."""
    log, later = world.storage.log, world.history.log[6:]
    del world.history.log[6:]
    world.report_work(m.Truncate, 5, -1, bytes(16), outcome=DiskFailed("half of it"))
    world.history.log.extend(later)
    cut = SimpleNamespace(max_id=5, slot=log.slot, synced_max=5, suspect=True, damaged=())
    cut.is_broken, cut.promised = False, log.promised
    world.checks.on_log_opened(world.storage, cut)
    assert world.checks.replicas.answered_last[world.storage.name] == 5


def test_the_no_cut_committed_checker_detects_a_truncation_below_the_mark(world):
    log = world.storage.log
    log._files.slots.slot = replace(log.slot, low_water_mark=5)
    with fails("NoCutCommitted"):
        world.report_work(m.Truncate, 4, -1, bytes(16))


def test_the_no_cut_committed_checker_detects_a_request_to_truncate_below_the_mark(world):
    with fails("NoCutCommitted"):
        world.report_work(m.Truncate, 4, -1, bytes(16), outcome=DataLoss("below"))


def test_the_lwm_full_checker_detects_a_mark_above_the_synced_log(world):
    with fails("LwmFull"):
        world.report_work(m.SetLowWaterMark, 1, bytes(16))


def test_the_identity_checker_detects_a_write_to_another_storage(world):
    world.coordinator.storage_ids[world.storage.replica] = b"another"
    with fails("Identity"):
        world.report_work(m.SetLowWaterMark, world.storage.log.synced_max, bytes(16))


def test_the_identity_checker_detects_an_answer_with_another_storage_id(world):
    outcome = m.Prepared(0, 1, 0, bytes(16), 0, -1, True, -1, bytes(16), False, b"")
    with fails("Identity"):
        world.report_work(m.Prepare, bytes(16), bytes(16), bytes(16), 1, outcome=outcome)


def test_the_log_matching_checker_detects_two_chains_of_one_session(world):
    one = entry(world)
    world.checks.replicas._chain_of_batch[one.last, one.session_id] = b"another"
    with fails("LogMatching"):
        world.report_work(*append(world, one))


def test_the_log_matching_checker_detects_records_that_were_never_written(world):
    with fails("LogMatching"):
        world.checks.outcomes.on_log_exposed(world.history.last + 1, bytes(16))


def test_the_log_matching_checker_detects_a_record_that_differs_from_its_request(world):
    record = world.history.records[-1]
    operation = world.last_operation()
    assert data_of_record(record) == operation.data
    operation.data += b"other"
    with fails("LogMatching"):
        world.checks.outcomes._check_new_row(world.history.last)


def rot(world):
    """Flip a bit of the first record."""
    path = segments_of(world.storage)[0]
    world.storage.disk.flip_bits(path, 128 + 30)


def test_the_fixed_checker_detects_a_corrupt_record_at_the_end_of_a_run():
    world = World(is_over=True)
    rot(world)
    with fails("Fixed"):
        world.checks.check_final_state()


def test_the_fixed_checker_detects_a_corrupt_record_during_a_run(world):
    log = world.storage.log
    log._files.slots.slot = replace(log.slot, low_water_mark=5)
    world.checks.replicas.check_log_state(world.storage, log)
    rot(world)
    with fails("Fixed"):
        world.checks.replicas.check_log_state(world.storage, log)
    world.checks.on_disk_corrupted(world.storage)
    world.checks.replicas.check_log_state(world.storage, log)


# ---------------------------------------------------------------------------------------------
# 11, 12, 13, 14, 15: results that applications receive


class SessionSettled:
    """An outcome that the first client receives for a new operation of the workload."""

    def __init__(self, world, *, reason, transaction_id=-1, conflict=-1, mark=0):
        workload = world.cluster.workload
        self.submission = workload.create_submission(world.client, [((1,), (), ())], 0)
        (self.operation,) = workload.operations_of(self.submission.token)
        self.effect = client_events.SubmissionSettled(
            self.submission.token,
            BatchOutcome(
                mark,
                np.array([transaction_id]),
                np.array([reason], np.uint8),
                np.array([conflict]),
            ),
        )


def test_the_outcome_truth_checker_detects_a_false_commit(world):
    outcome = SessionSettled(world, reason=m.RowOutcomeCode.COMMITTED, transaction_id=1)
    with fails("OutcomeTruth"):
        world.checks.on_submission_settled(world.client, outcome.effect)


def test_the_outcome_truth_checker_detects_a_false_loss(world):
    outcome = SessionSettled(world, reason=m.RowOutcomeCode.LOST)
    outcome.operation.transaction_id = 3
    with fails("OutcomeTruth"):
        world.checks.on_submission_settled(world.client, outcome.effect)


def test_the_outcome_truth_checker_detects_a_false_failure(world):
    operation = world.last_operation()
    operation.outcome = "no"
    with fails("OutcomeTruth"):
        world.checks.outcomes._check_new_row(world.history.last)


def test_the_outcome_truth_checker_detects_a_false_report_of_a_mark_ahead_of_the_log(world):
    outcome = SessionSettled(world, reason=m.RowOutcomeCode.AHEAD)
    with fails("OutcomeTruth"):
        world.checks.on_submission_settled(world.client, outcome.effect)
    outcome = SessionSettled(world, reason=m.RowOutcomeCode.AHEAD)
    outcome.operation.mark = world.history.last + 1
    world.checks.on_submission_settled(world.client, outcome.effect)


def test_the_outcome_truth_checker_detects_a_false_rejection(world):
    outcome = SessionSettled(world, reason=m.RowOutcomeCode.LOST)
    outcome.operation.transaction_id = 3
    effect = client_events.SubmissionRejected(outcome.submission.token, Unreachable("never sent"))
    with fails("OutcomeTruth"):
        world.checks.on_submission_rejected(world.client, effect)


def test_a_lock_rejection_names_a_committed_transaction(world):
    settled = SessionSettled(world, reason=m.RowOutcomeCode.LOCK, conflict=world.history.last + 1)
    with fails("OutcomeTruth"):
        world.checks.on_submission_settled(world.client, settled.effect)
    with fails("OutcomeTruth"):
        answer = outcome(m.RowOutcomeCode.LOCK, conflict=world.history.last + 1)
        world.report_answer(replace(answer, high_water_mark=world.history.last))


def test_the_at_most_once_checker_detects_a_request_id_that_is_in_the_log_twice(world):
    node = world.history.nodes[world.history.chains[world.history.last]]
    with fails("AtMostOnce"):
        world.history._append_batch(node)


def test_the_at_most_once_checker_detects_an_operation_that_is_in_the_log_twice(world):
    operation = world.last_operation()
    operation.transaction_id = 1
    with fails("AtMostOnce"):
        world.checks.outcomes._check_new_row(world.history.last)


def feed_rows(world, first, count, *, skip=0):
    headers = b"".join(record[8:28] for record in world.history.records[first + skip :][:count])
    return client_events.FeedAdvanced(first, count, headers)


def test_the_dense_checker_detects_a_gap_in_a_feed(world):
    world.client.fed_last = 3
    world.checks.on_feed_received(world.client, feed_rows(world, 4, 2))
    with fails("Dense"):
        world.checks.on_feed_received(world.client, feed_rows(world, 5, 2))


def test_the_client_prefix_checker_detects_wrong_headers_in_a_feed(world):
    world.client.fed_last = 3
    with fails("ClientPrefix"):
        world.checks.on_feed_received(world.client, feed_rows(world, 4, 2, skip=1))


def test_the_hwm_mono_checker_detects_a_wrong_mark_of_a_client(world):
    world.checks.on_client_mark_moved(world.client, world.history.last)
    with fails("HwmMono"):
        world.checks.on_client_mark_moved(world.client, world.history.last - 1)
    with fails("HwmMono"):
        world.checks.on_client_mark_moved(world.client, world.history.last + 1)


def test_the_hwm_mono_checker_detects_a_wrong_mark_on_a_connection(world):
    world.report_answer(m.HighWaterMarkResponse(QUESTION, world.history.last))
    with fails("HwmMono"):
        world.report_answer(m.HighWaterMarkResponse(QUESTION, world.history.last - 1))
    with fails("HwmMono"):
        world.report_answer(m.HighWaterMarkResponse(QUESTION, world.history.last + 1))


# ---------------------------------------------------------------------------------------------
# stale marks, flushes


def test_a_mark_of_a_non_linearizable_read_is_no_older_than_mark_staleness_ms_max(world):
    last = world.history.last
    world.checks.responses._marks.clear()
    world.report_answer(m.HighWaterMarkResponse(QUESTION, last - 5))
    world.checks.responses.on_acknowledged(last)
    timer_ms = world.cluster.limits.high_water_mark_staleness_ms_max
    world.cluster.world.now_us += (timer_ms + 2) * US_PER_MS
    with fails("StaleMark"):
        world.report_answer(m.HighWaterMarkResponse(QUESTION, last - 5))


def test_the_stale_mark_checker_detects_a_linearizable_mark_below_an_acknowledged_id(world):
    last = world.history.last
    world.checks.responses.on_acknowledged(last)
    request = m.ReplicasRequest(QUESTION, linearizable=True)
    for mark, is_stale in ((last, False), (last - 1, True)):
        world.checks.on_client_sent(world.client, world.link, request)
        outcome = m.ReplicasResponse(QUESTION, world.session, mark, (), bytes(16), 1)
        if is_stale:
            with fails("StaleMark"):
                world.checks.on_client_received(world.client, world.link, outcome)
        else:
            world.checks.on_client_received(world.client, world.link, outcome)


def test_the_flush_checker_detects_a_flush_answered_before_an_earlier_append(world):
    append_id = ReqId(1, 0, 0, 77_777)
    request = m.AppendRequest(append_id, 0, (), (), (), 7, b"", 0)
    world.checks.on_client_sent(world.client, world.link, request)
    world.checks.on_client_sent(world.client, world.link, m.FlushRequest(QUESTION))
    with fails("Flush"):
        world.checks.on_client_received(world.client, world.link, m.FlushResponse(QUESTION, 1))


@pytest.mark.parametrize("loss", [m.RowOutcomeCode.LOST, m.RowOutcomeCode.NO_SPACE])
def test_the_overtaken_checker_detects_a_commit_after_a_lost_row_of_the_same_mount(world, loss):
    mark = world.history.last
    behind = replace(
        outcome(m.RowOutcomeCode.COMMITTED, transaction_id=mark),
        req_id=QUESTION._replace(sequence=QUESTION.sequence + 1),
        high_water_mark=mark,
    )
    world.report_answer(replace(outcome(loss), high_water_mark=mark))
    with fails("Overtaken"):
        world.report_answer(behind)
    world.report_answer(m.Mounted(QUESTION, world.session, mark, 1, 1, 1))
    world.report_answer(behind)


# ---------------------------------------------------------------------------------------------
# 16, 17, 18, 19: locks


def test_the_not_ahead_checker_detects_a_mark_above_the_log_at_admission(world):
    node = next(reversed(world.history.nodes.values()))
    world.history.operations[node.rows[0].number].mark = world.history.last + 1
    with fails("NotAhead"):
        world.checks.outcomes.on_batch_submitted(node.chain)


def test_the_not_ahead_checker_detects_a_committed_row_with_a_mark_at_or_above_its_id(world):
    operation = world.last_operation()
    operation.mark, operation.write_locks, operation.read_locks = world.history.last, (), ()
    with fails("NotAhead"):
        world.checks.outcomes._check_new_row(world.history.last)


def test_the_lock_serial_checker_detects_a_committed_conflict(world):
    operation = world.last_operation()
    world.checks.locks._writers[99] = [world.history.last - 1]
    operation.mark, operation.read_locks = world.history.last - 2, (99,)
    with fails("LockSerial"):
        world.checks.outcomes._check_new_row(world.history.last)


def follower_behind_a_writer(world):
    """The last row depends on the row before it, although its author had not applied this row."""
    history = world.history
    node = history.nodes[history.chains[history.last]]
    operation = world.last_operation()
    writer = history.operations[history.log[-2].number]
    operation.mark, operation.state_mark = history.last - 1, history.last - 2
    operation.session_id, operation.read_locks = node.session_id, (99,)
    writer.append_locks = (99,)
    return node.chain, operation, (history.last - 1, history.log[-2].key)


def test_the_followed_checker_detects_a_predecessor_that_the_client_did_not_get(world):
    chain, operation, outcome = follower_behind_a_writer(world)
    with fails("Followed"):
        world.checks.outcomes._check_dependent_append(operation, chain, world.history.last)
    operation.predecessors = (outcome,)
    world.checks.outcomes._check_dependent_append(operation, chain, world.history.last)


def test_the_followed_checker_detects_a_wrong_predecessor(world):
    chain, operation, (position, _) = follower_behind_a_writer(world)
    operation.predecessors = ((position, (9, 9)),)
    with fails("Followed"):
        world.checks.outcomes._check_dependent_append(operation, chain, world.history.last)


def checked(ledger, number, mark, *things):
    return make_data(number, 8) + ledger.encode_body(CheckedTransaction(*things), mark)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((RowKind.TRANSFER, 0, 1), (RowKind.TRANSFER, 1, 2)),
        ((RowKind.PUSH, 3, 3), (RowKind.PUSH, 3, 3)),
        ((RowKind.GUARD, 0, 1), (RowKind.GUARD, 1, 0)),
    ],
)
def test_the_serializable_checker_detects_a_transaction_that_has_not_seen_an_earlier_transaction(
    first, second
):
    """Two transfers computed at one mark: the second has not seen the first."""
    ledger = Ledger()
    one, other = checked(ledger, 5, -1, *first), checked(ledger, 6, -1, *second)
    ledger.replay(0, one)
    with fails("Serializable"):
        ledger.replay(1, other)
    ledger.replay(1, checked(ledger, 6, 0, *second))
    ledger.check_final_state()
    assert ledger.checked_count == 2


def test_the_serializable_checker_detects_broken_invariants_in_any_order():
    ledger = Ledger()
    ledger.replay(0, checked(ledger, 5, -1, RowKind.TRANSFER, 0, 1))
    ledger.check_final_state()
    ledger._versions_of(RowKind.TRANSFER, 0).values[-1] += 1
    with fails("Serializable"):
        ledger.check_final_state()
    ledger = Ledger()
    ledger.replay(0, checked(ledger, 5, -1, RowKind.GUARD, 0, 1))
    ledger._versions_of(RowKind.GUARD, 1).values[-1] = 0
    with fails("Serializable"):
        ledger.check_final_state()


def test_the_serializable_checker_replays_the_transactions_of_a_disk():
    world = World(is_over=True)
    data_read = list(world.checks.replicas.data_on_disk(world.storage))
    assert data_read == [data_of_record(record) for record in world.history.records]
    assert world.checks.counts["checked transactions"] > 10


def written_lock(world):
    return next(
        lock for lock, ids in world.checks.locks._writers.items() if ids[-1] <= world.history.last
    )


def test_the_lock_bound_checker_detects_a_lock_entry_below_its_last_writer(world):
    lock = written_lock(world)
    world.checks.locks.check_lock(world.owner, lock)
    world.owner.partition.pipeline._lock_table = LockTable(1009, -1)
    with fails("LockBound"):
        world.checks.locks.check_lock(world.owner, lock)


def test_the_reserve_held_checker_detects_entries_above_the_last_assigned_id(world):
    world.checks.locks.check_table(world.owner)
    world.owner.partition.pipeline._lock_table.reset(world.history.last + 1_000)
    with fails("ReserveHeld"):
        world.checks.locks.check_table(world.owner)
    with fails("ReserveHeld"):
        world.checks.locks.check_lock(world.owner, written_lock(world))


# ---------------------------------------------------------------------------------------------
# 20: metadata in ZooKeeper


def changed(world, **states):
    """Return the metadata in ZooKeeper, with other states of some storages."""
    metadata = world.coordinator.metadata
    now = {**metadata.states}
    for number, state in states.items():
        now[ReplicaId(f"storage{number[1:]}:1")] = state
    return replace(metadata, states=now)


def test_the_meta_shape_checker_detects_a_wrong_claim(world):
    metadata = world.coordinator.metadata
    for session, nonce in ((metadata.session_id + 2, b"1"), (metadata.session_id + 1, world.nonce)):
        with fails("MetaShape"):
            world.report_write(replace(metadata, session_id=session), nonce)
    with fails("MetaShape"):
        world.report_write(replace(changed(world, s0=ReplicaState(0, 3)), session_id=1), b"2")


def test_the_meta_shape_checker_detects_a_wrong_version(world):
    world.coordinator.metadata_version += 1
    with fails("MetaShape"):
        world.report_write(world.coordinator.metadata)


def test_the_meta_shape_checker_detects_a_wrong_state_of_an_engaged_replica(world):
    closed = ReplicaState(world.session, world.history.last)
    with fails("MetaShape"):
        world.report_write(changed(world, s0=closed, s1=closed))
    with fails("MetaShape"):
        world.report_write(changed(world, s0=closed))
    with fails("MetaShape"):
        world.report_write(changed(world, s0=ReplicaState(world.session - 1, UNRESOLVED)))


def test_the_meta_shape_checker_detects_a_wrong_state_of_a_closed_replica(world):
    with fails("MetaShape"):
        world.report_write(changed(world, s9=ReplicaState(NO_SESSION, world.history.last - 1)))


def test_the_engaged_only_checker_detects_an_engaged_replica_without_a_mark_on_its_disk(world):
    world.sessions._last_session["storage0:1"] = NO_SESSION
    with fails("EngagedOnly"):
        world.report_write(world.coordinator.metadata)


# ---------------------------------------------------------------------------------------------
# 21: no corrupt data is served


def raw_range(world, form, records):
    log = world.storage.log
    chain, entries = log.lineage(0, log.max_id)
    lengths = b"" if form else b"\0"
    count = log.max_id + 1
    return m.RangeBytes(0, 1, 0, 0, count, form, lengths, records, 0, chain, entries)


@pytest.mark.parametrize("form", [m.RangeForm.WHOLE, m.RangeForm.HEADERS])
def test_the_no_rot_served_checker_detects_wrong_records_of_a_storage(world, form):
    size = 28 if form else None
    nodes = [
        world.history.batch_at(entry.chain, entry.last)
        for entry in world.storage.log.lineage(0, world.storage.log.max_id)[1]
    ]
    starts = [zip((0, *node.ends), node.ends, strict=False) for node in nodes]
    good = b"".join(
        node.records[at:end][:size]
        for node, ends in zip(nodes, starts, strict=True)
        for at, end in ends
    )
    world.report_work(m.RangeRaw, 0, 9, 9, form, False, True, outcome=raw_range(world, form, good))
    bad = raw_range(world, form, good[:20] + b"?" + good[21:])
    with fails("NoRotServed"):
        world.report_work(m.RangeRaw, 0, 9, 9, form, False, True, outcome=bad)
    with fails("NoRotServed"):
        bad = raw_range(world, form, good + b"?")
        world.report_work(m.RangeRaw, 0, 9, 9, form, False, True, outcome=bad)


def test_the_no_rot_served_checker_finds_a_batch_that_was_never_written(world):
    outcome = m.LineageResponse(0, 1, 0, bytes(16), (entry(world),))
    with fails("NoRotServed"):
        world.report_work(m.LineageRequest, 0, 1, outcome=outcome)
    outcome = m.RangeBytes(0, 1, 0, 0, 1, 0, b"", b"", 0, bytes(16), (entry(world),))
    with fails("NoRotServed"):
        world.report_work(m.RangeRaw, 0, 9, 9, 0, False, True, outcome=outcome)


@pytest.mark.parametrize("form", [m.RangeForm.WHOLE, m.RangeForm.HEADERS])
def test_the_no_rot_served_checker_detects_wrong_records_of_a_server(world, form):
    size = 28 if form else None
    good = b"".join(record[:size] for record in world.history.records[2:4])
    mark = world.history.last

    def outcome(records):
        return m.RangeData(QUESTION, 2, 2, 4, form, b"", records, world.session, mark, ())

    world.report_answer(outcome(good))
    for bad in (good[:9] + b"?" + good[10:], good + b"?", b"\x7f" + good[1:]):
        with fails("NoRotServed"):
            world.report_answer(outcome(bad))


def test_the_no_rot_served_checker_detects_wrong_headers_and_chains_in_the_feed(world):
    good = b"".join(record[8:28] for record in world.history.records[2:4])
    last = world.history.last

    def outcome(headers, chain_at=-1, chain=bytes(16)):
        return m.FeedBatch(QUESTION, 2, 2, headers, world.session, chain_at, chain)

    world.report_answer(outcome(good, last, world.history.chains[last]))
    with fails("NoRotServed"):
        world.report_answer(outcome(good[:-1] + b"?"))
    with fails("NoRotServed"):
        world.report_answer(outcome(good, last))


def test_the_no_rot_served_checker_detects_wrong_data_of_a_single_transaction(world):
    good = data_of_record(world.history.records[3])
    world.report_answer(m.TransactionDataResponse(QUESTION, 3, (good, None)))
    world.report_answer(m.TransactionDataResponse(QUESTION, 3, (None, "not there")))
    with fails("NoRotServed"):
        world.report_answer(m.TransactionDataResponse(QUESTION, 3, (good + b"?", None)))


# ---------------------------------------------------------------------------------------------
# 25, 26, 27: the end of a run, bounds, and required states


def test_the_converged_checker_detects_a_replica_whose_log_ends_too_early():
    world = World(is_over=True)
    world.history.log.append(world.history.log[-1])
    with fails("Converged"):
        world.checks.check_final_state()


def test_the_converged_checker_detects_a_suspect_replica():
    world = World(is_over=True)
    log = world.storage.log
    log._files.slots.slot = replace(log.slot, suspect=True)
    with fails("Converged"):
        world.checks.check_final_state()


def test_the_converged_checker_detects_an_append_without_an_outcome():
    world = World(is_over=True)
    world.checks.check_final_state()
    world.last_operation().outcome = ""
    with fails("Converged"):
        world.checks.check_final_state()


def test_the_converged_checker_detects_a_feed_that_is_not_at_its_end():
    world = World(is_over=True)
    world.checks.on_client_subscribed(world.client)
    world.client.fed_last = world.history.last - 1
    assert not world.checks.outcomes.have_all_feeds_ended()
    with fails("Converged"):
        world.checks.check_final_state()


def test_the_converged_checker_detects_a_stream_that_has_ended(world):
    with fails("ClientStopped"):
        world.checks.on_client_stopped(world.client, ClientAheadOfLog("the log is gone"))


def test_the_bounded_checker_detects_too_many_tries(world):
    for _ in range(DIALS_PER_S_MAX - 1):
        world.checks.on_dial("one", "another")
    world.cluster.world.now_us += 500 * US_PER_MS
    world.checks.on_dial("one", "another")
    with fails("Bounded"):
        world.checks.on_dial("one", "another")
    world.cluster.world.now_us += 600 * US_PER_MS
    world.checks.on_dial("one", "another")
    with fails("Bounded"):
        for _ in range(CLAIMS_PER_S_MAX + 1):
            world.report_effects(session_events.ReadMetadata(1))


def test_the_bounded_checker_detects_too_much_lag(world):
    one = entry(world, NO_SESSION)
    limit = world.cluster.store_limits.lag_bytes_max
    with fails("Bounded"):
        for sequence in range(100):
            records = bytes(limit // 2)
            message = m.AppendRaw(
                world.session, 9_000 + sequence, 0, 0, b"", records, 0, bytes(16), (one,)
            )
            effect = session_events.SendToReplica(world.session, REPLICAS[0], message)
            world.checks.on_sent_to_replica(world.owner, effect)


@pytest.mark.parametrize(
    "field", ["queue_bytes_max", "in_flight_bytes_max", "concurrent_fetches_max"]
)
def test_the_bounded_checker_detects_too_large_queues(world, field):
    limits = {"queue_bytes_max": 1, "in_flight_bytes_max": 1 << 20, "concurrent_fetches_max": 2}
    world.cluster.limits = SimpleNamespace(**{**limits, field: -10})
    with fails("Bounded"):
        world.checks.limits.on_server_stepped(world.owner)


def test_the_bounded_checker_detects_a_too_large_queue_of_a_storage(world):
    world.storage.service.queue_limits.owner_bytes = 1 << 20
    with fails("Bounded"):
        world.report_work(m.Heartbeat)


# ---------------------------------------------------------------------------------------------
# 28 to 31: the archive


@pytest.fixture
def archived():
    """A world with archived transactions, and with logs that begin above 0."""
    sizes = {"archive_object_bytes": 1, "local_retention_bytes": 1, "segment_bytes_max": 300}
    world = World(archive_interval_ms=10, checkpoint_interval_count=20, **sizes)
    counts = world.checks.counts

    def is_settled():
        session = world.coordinator.marker.session_id
        return (world.owner.name, session) in world.checks.archive._settled_sessions

    assert world.cluster.world.run(
        2_000 * US_PER_MS,
        until=lambda: counts["storage.segment_removed"] and counts["archived"] > 2 and is_settled(),
    )
    world.session = world.coordinator.metadata.session_id
    return world


def report_archived_mark(world, **fields):
    """Report that ZooKeeper has another archived mark."""
    marker = world.coordinator.marker
    after = replace(marker, archived=marker.archived._replace(**fields))
    world.checks.archive.on_metadata_written(world.owner.name, after)


def test_the_archived_checker_needs_the_recorded_manifest(archived):
    with fails("Archived"):
        report_archived_mark(archived, manifest="another")
    with fails("Archived"):
        report_archived_mark(archived, manifest_crc=1)


def test_the_archived_checker_needs_all_objects_of_the_manifest(archived):
    files = archived.cluster.archive.files
    del files[next(name for name in files if "/objects/0-" in name)]
    with fails("Archived"):
        report_archived_mark(archived, stamp_ms=1)


def test_the_archived_checker_compares_the_mark_with_the_end_of_the_objects(archived):
    with fails("Archived"):
        report_archived_mark(archived, last=archived.coordinator.marker.archived.last + 1)


def test_the_archived_checker_compares_records_and_batches_with_the_log(archived):
    archive, checks = archived.cluster.archive, archived.checks.archive
    name = next(name for name in archive.files if "/objects/0-" in name)
    file = archive.files[name]
    checks._verified_objects.clear()
    archive.files[name] = file._replace(data=file.data[:-1] + b"?")
    with fails("Archived"):
        report_archived_mark(archived, stamp_ms=1)
    archive.files[name] = file._replace(batches=file.batches[:-1])
    with fails("Archived"):
        report_archived_mark(archived, stamp_ms=2)
    archive.files[name] = file
    report_archived_mark(archived, stamp_ms=3)


def test_the_archived_checker_accepts_an_object_that_a_fault_has_corrupted(archived):
    archive = archived.cluster.archive
    archived.checks.archive._verified_objects.clear()
    archive.corrupt_file(next(name for name in archive.files if "/objects/0-" in name))
    report_archived_mark(archived, stamp_ms=1)
    assert archive.original_files


def test_nothing_in_the_archive_is_overwritten(archived):
    name = next(iter(archived.cluster.archive.files))
    with fails("Archived"):
        archived.checks.on_archive_file_written(name, is_known=True)


@pytest.mark.parametrize("fields", [{"last": 0}, {"first": -1}])
def test_the_archive_mono_checker_detects_an_archived_mark_that_decreases(archived, fields):
    with fails("ArchiveMono"):
        report_archived_mark(archived, **fields)


def test_the_archive_mono_checker_detects_a_removed_archived_mark(archived):
    with fails("ArchiveMono"):
        archived.checks.archive.on_metadata_written(
            archived.owner.name, replace(archived.coordinator.marker, archived=None)
        )


def test_the_archive_mono_checker_detects_an_archived_mark_of_an_unsettled_session(archived):
    archived.checks.archive._settled_sessions.clear()
    with fails("ArchiveMono"):
        report_archived_mark(archived, stamp_ms=1)


def test_the_archive_mono_checker_detects_an_archived_mark_above_the_log(archived):
    with fails("ArchiveMono"):
        report_archived_mark(archived, last=archived.history.last + 1)


@pytest.mark.parametrize("bound", ["recorded", "confirmed", "chain"])
def test_the_start_bound_checker_detects_a_log_that_begins_above_the_archived_mark(archived, bound):
    storage = next(
        each for each in archived.cluster.storages.values() if each.log.start.transaction_id >= 0
    )
    checks, log = archived.checks.archive, storage.log
    checks.on_log_opened(storage, log)
    opened_log = SimpleNamespace(start=log.start, slot=log.slot)
    if bound == "recorded":
        checks._recorded_mark = None
    elif bound == "confirmed":
        opened_log.slot = replace(log.slot, low_water_mark=log.start.transaction_id - 1)
    else:
        opened_log.start = log.start._replace(chain=bytes(16))
    with fails("StartBound"):
        checks.on_log_opened(storage, opened_log)


def test_no_engaged_replica_is_reset(archived):
    with fails("NoTrustedReset"):
        archived.report_work(m.ResetLog, 1_000, bytes(16))


def test_no_trusted_replica_is_reset_before_the_session_opens(archived):
    session = archived.report_claim()
    archived.report_promises(session, *REPLICAS)
    mark = archived.history.last
    archived.report_prepared(session, archived.storage.name, mark, last_session=session)
    with fails("NoTrustedReset"):
        archived.report_work(m.ResetLog, mark, bytes(16), session=session)


def test_an_untrusted_replica_may_be_reset(archived):
    session = archived.report_claim()
    archived.report_promises(session, *REPLICAS)
    mark = archived.history.last
    archived.report_prepared(
        session, archived.storage.name, mark, last_session=session, suspect=True
    )
    archived.report_work(m.ResetLog, mark, bytes(16), session=session)
    assert archived.checks.counts["replica reset"] == 1


# 32: expiry


@pytest.fixture
def expiring():
    """A world with at least three objects in its archive, which may expire."""
    sizes = {"archive_object_bytes": 1, "archive_interval_ms": 10, "checkpoint_interval_count": 20}
    world = World(expires=True, **sizes)
    counts, settled = world.checks.counts, world.checks.archive._settled_sessions

    def is_ready():
        session = world.coordinator.metadata.session_id
        return counts["archived"] > 3 and (world.owner.name, session) in settled

    assert world.cluster.world.run(10_000 * US_PER_MS, until=is_ready)
    return world


def report_expiry(world, first, requested):
    """Report that ZooKeeper has a manifest with a higher first available ID; return its mark."""
    checks, archive = world.checks.archive, world.cluster.archive
    recorded = world.coordinator.marker.archived
    present = Manifest.from_bytes(archive.files[recorded.manifest].data, recorded.manifest)
    manifest_data = replace(present, first=first).to_bytes()
    name = f"{recorded.manifest}-{first}"
    archive.files[name], archive.written_ms[name] = StoredFile(manifest_data), 0
    checks.on_expiry_requested(requested)
    world.checks.on_archive_expiry(name, world.owner.wall_ms)
    after = recorded._replace(first=first, manifest=name, manifest_crc=crc32(manifest_data))
    checks.on_metadata_written(world.owner.name, replace(world.coordinator.marker, archived=after))
    return present


def first_end(world):
    recorded = world.coordinator.marker.archived
    data = world.cluster.archive.files[recorded.manifest].data
    return Manifest.from_bytes(data, recorded.manifest).newest_objects[0].last + 1


def test_only_the_requested_transactions_expire(expiring):
    first = first_end(expiring)
    with fails("Expired"):
        report_expiry(expiring, first, first - 1)
    expiring.checks.archive._recorded_mark = expiring.coordinator.marker.archived
    report_expiry(expiring, first, first)
    assert [each for each, _ in expiring.checks.archive._expired_ids] == [first]


def test_only_whole_objects_expire(expiring):
    last = expiring.coordinator.marker.archived.last
    ends = {first_end(expiring) - 1}
    with fails("Expired"):
        report_expiry(
            expiring, next(number for number in range(1, last) if number - 1 not in ends), last + 1
        )


def test_expired_objects_stay_for_the_grace_period(expiring):
    first = first_end(expiring)
    present = report_expiry(expiring, first, first)
    name = present.newest_objects[0].name
    del expiring.cluster.archive.files[name]
    with fails("Archived"):
        expiring.checks.on_archive_file_deleted(name)
    expiring.checks.archive._expired_ids = [(first, -expiring.cluster.archive.expiry_grace_ms)]
    expiring.checks.on_archive_file_deleted(name)
    later = present.newest_objects[1].name
    del expiring.cluster.archive.files[later]
    with fails("Archived"):
        expiring.checks.on_archive_file_deleted(later)


def test_the_expired_checker_detects_a_wrongly_rejected_read(expiring):
    first = first_end(expiring)
    report_expiry(expiring, first, first)
    checks = expiring.checks
    checks.archive.on_read_rejected(first - 1, first)
    with fails("Expired"):
        checks.archive.on_read_rejected(first, first)
    with fails("Expired"):
        checks.archive.on_read_rejected(0, first + 1)
    with fails("ClientStopped"):
        checks.on_client_stopped(expiring.client, Unreachable("gone"))


def test_a_replaced_manifest_is_not_deleted_within_the_grace_period(archived):
    checks, archive = archived.checks.archive, archived.cluster.archive
    name = next(iter(checks._replaced_ms))
    checks._replaced_ms[name] = archived.cluster.world.now_ms - archive.grace_ms
    checks.on_file_deleted(name)
    checks._replaced_ms[name] += 1
    with fails("Archived"):
        checks.on_file_deleted(name)


def test_nothing_is_written_or_deleted_for_another_cluster(archived):
    name = "00000000-0000-0000-0000-000000000000/0/objects/0-1-1-1.parquet"
    with fails("Archived"):
        archived.checks.on_archive_file_written(name, is_known=False)
    with fails("Archived"):
        archived.checks.on_archive_file_deleted(name)


def test_after_a_zookeeper_rollback_objects_with_records_removed_from_a_log_are_kept(archived):
    checks = archived.checks.archive
    name, entry = next(iter(checks._listed_objects.items()))
    archived.sessions.on_zookeeper_rewritten()
    checks.on_file_deleted(name)
    checks._recorded_mark = checks._recorded_mark._replace(last=entry.first - 1)
    checks._log_starts[REPLICAS[0]] = entry.last
    with fails("Archived"):
        checks.on_file_deleted(name)


def test_a_replica_that_no_session_has_engaged_may_lose_archived_records(world):
    checks, storage = world.checks, world.storage
    cut = SimpleNamespace(last_to_keep=-1, committed_last=world.history.last)
    slot = SimpleNamespace(low_water_mark=-1)
    log = SimpleNamespace(promised=storage.log.promised, slot=slot, synced_max=-1)
    with fails("NoCutCommitted"):
        checks.replicas._check_truncation(storage, log, cut)
    checks.archived_last = world.history.last
    with fails("NoCutCommitted"):
        checks.replicas._check_truncation(storage, log, cut)
    del world.sessions.ever_engaged[world.session][storage.name]
    checks.replicas._check_truncation(storage, log, cut)
    assert not checks.replicas._batches_on_disk[storage.name]


def test_states_that_were_never_reached_are_listed():
    counts = dict.fromkeys(REQUIRED_STATES, 1)
    assert missing_states(counts) == []
    del counts["replica joined an open session"]
    counts["NO_SPACE"] = 0
    assert missing_states(counts) == ["replica joined an open session", "NO_SPACE"]


def test_checkers_do_not_change_the_run():
    """A run is the same whether a checker reads the replicas' records or not."""
    plain, checked = World(), World()
    checked.checks.replicas.check_log_state(checked.storage, checked.storage.log)
    checked.checks.locks.check_table(checked.owner)
    for each in (plain, checked):
        each.cluster.world.run(50 * US_PER_MS)
    assert plain.cluster.world.fingerprint == checked.cluster.world.fingerprint
