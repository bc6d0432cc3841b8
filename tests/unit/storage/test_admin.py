"""The storage's answers to administration requests; the test performs the admin tasks."""

import asyncio
import json
import zlib
from unittest.mock import Mock

import pytest

from tests.storage_owner import encode_records
from waltz_core import errors
from waltz_core.errors import CoordinatorUnavailable, DiskFailed, error_from_code
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, ReqId
from waltz_core.storage.files.format import FLAG_ASSIGNED, FLAG_AVAILABLE, IdRange, PartitionInfo
from waltz_core.storage.process.admin_port import AdminPort
from waltz_core.storage.service import admin_tasks
from waltz_core.storage.service.admin import (
    WAITING_REQUESTS_MAX,
    AdminDisconnected,
    AdminRequest,
    AdminService,
    AdminTaskDone,
    RunAdminTask,
    SendAdminResponse,
)
from waltz_core.storage.service.admin_tasks import (
    ArchiveState,
    Assign,
    DiskStatus,
    FindArchiveState,
    FindDiskStatus,
    FindHeldPartitions,
    FindZooKeeperState,
    HeldPartition,
    InspectReplica,
    LogStatus,
    PutCopy,
    ReadRange,
    ReplicaStatus,
    Unassign,
    ZooKeeperState,
)
from waltz_core.storage.service.service import StorageIdentity
from waltz_core.wire import admin_messages as wire
from waltz_core.wire.messages import RangeBytes, RangeForm

KEY = b"the cluster key."
INFO = PartitionInfo(6, 40, 39, FLAG_ASSIGNED | FLAG_AVAILABLE, 9)
LOG = LogStatus(
    is_suspect=False,
    promised=7,
    last_session=6,
    low_water_mark=40,
    synced_max=52,
    chain=b"c" * 16,
    damaged=(IdRange(3, 4),),
)
FACTS = ReplicaStatus(True, True, True, INFO, LOG)
OFFLINE = FACTS._replace(is_available=False, is_served=False)
NOT_ENGAGED = ZooKeeperState(False, False, 8, ("b:1", "c:1"), 3)
ASSIGNED = NOT_ENGAGED._replace(is_assigned=True)
ENGAGED = ZooKeeperState(False, True, 7, ("a:1", "b:1", "c:1"), 3)
ONLY_REPLICA = ZooKeeperState(True, True, 7, ("a:1",), 1)


class Terminal:
    """The machine for administration requests, and the results of its tasks."""

    def __init__(self, **answers):
        self.machine = AdminService(StorageIdentity(KEY, 4, b"the storage's id"), address="a:1")
        self.answers = {"InspectReplica": FACTS, "FindZooKeeperState": NOT_ENGAGED} | answers
        self.admin_tasks = []
        self.answered = []
        self.reports = []
        self.open = []  # effects `RunAdminTask` that were not carried out yet

    def post(self, message, *, version=1, connection=1):
        self.perform(self.machine.step(AdminRequest(connection, version, message), 0))

    def perform(self, effects):
        for effect in effects:
            match effect:
                case RunAdminTask():
                    self.open.append(effect)
                case SendAdminResponse():
                    self.answered.append((effect.connection, effect.message))
                case Report():
                    self.reports.append(effect)

    def carry_out(self, *values):
        run = self.open.pop(0)
        self.admin_tasks.append(run.task)
        value = values[0] if values else self.answers.get(type(run.task).__name__)
        if callable(value):
            value = value(run.task)
        self.perform(self.machine.step(AdminTaskDone(run.task_id, value), 0))
        return run.task

    def ask(self, message, **options):
        """Post a message, carry out its tasks, and return the answer."""
        self.post(message, **options)
        while self.open:
            self.carry_out()
        ((_, answer),) = self.answered
        self.answered.clear()
        assert answer.sequence == message.sequence
        return answer

    @property
    def changes(self):
        questions = (
            InspectReplica,
            FindHeldPartitions,
            FindDiskStatus,
            FindArchiveState,
            FindZooKeeperState,
            ReadRange,
        )
        return [task for task in self.admin_tasks if not isinstance(task, questions)]


def error_text(answer, error):
    assert isinstance(answer, wire.AdminRejected), answer
    assert error_from_code(answer.error_code, "").__class__ is error
    return answer.text


# ---- version 0


def test_a_cluster_check_with_another_key_or_partition_count_is_rejected():
    assert Terminal().ask(wire.CheckCluster(-1, KEY, 4)) == wire.Done(-1)
    for other in (wire.CheckCluster(-1, KEY, 5), wire.CheckCluster(-1, bytes(16), 4)):
        text = error_text(Terminal().ask(other), errors.ClusterKeyMismatch)
        assert f"expected cluster key {KEY.hex()} with 4 partitions" in text
        as_0_13 = Terminal().ask(other, version=0)
        assert as_0_13 == wire.AdminFailure(-1, f"ClusterKeyMismatch: {text}", ())


def test_partitions_are_assigned_and_set_available_one_by_one():
    terminal = Terminal()
    assert terminal.ask(wire.SetAssigned(3, (2, 1, 2), True, False), version=0) == wire.Done(3)
    assert terminal.ask(wire.SetAvailable(4, (1, 3), False), version=0) == wire.Done(4)
    assert terminal.ask(wire.SetAssigned(5, (), False, True), version=0) == wire.Done(5)
    assert terminal.changes == [
        Assign(2),
        Assign(1),
        admin_tasks.SetAvailableTask(1, False),
        admin_tasks.SetAvailableTask(3, False),
    ]


def test_a_request_for_several_partitions_stops_at_the_first_error():
    terminal = Terminal(
        SetAvailableTask=lambda task: DiskFailed("no") if task.partition_id == 2 else None
    )
    answer = terminal.ask(wire.SetAvailable(4, (0, 1, 2, 3), True))
    assert error_text(answer, DiskFailed) == "no. Partitions already done: [0, 1]"
    assert [change.partition_id for change in terminal.changes] == [0, 1, 2]
    assert error_text(terminal.ask(wire.SetAvailable(4, (2, 3), True)), DiskFailed) == "no"


def test_a_storage_reports_its_partitions_and_the_marks_of_a_replica():
    held = (HeldPartition(0, INFO, 52, True), HeldPartition(3, INFO._replace(flags=4), -1, False))
    terminal = Terminal(FindHeldPartitions=held)
    assert terminal.ask(wire.SessionInfoRequest(1, 2)) == wire.SessionInfoResponse(1, 2, 6, 40, 39)
    assert terminal.ask(wire.HeldRequest(2)) == wire.HeldResponse(2, ((0, True), (3, False)))
    absent = Terminal(InspectReplica=FACTS._replace(is_held=False))
    assert "this storage does not have" in error_text(
        absent.ask(wire.SessionInfoRequest(1, 2)), errors.BadRequest
    )


@pytest.mark.parametrize("disk_error", [None, "statvfs: input/output error"])
def test_the_gauges_have_the_names_and_format_of_waltz_0_13(disk_error):
    free_bytes = None if disk_error else 5_000
    disk_status = DiskStatus(free_bytes, 64, True, 1_700_000_000_000, disk_error)
    terminal = Terminal(
        FindHeldPartitions=(HeldPartition(3, INFO, 52, True),),
        FindDiskStatus=disk_status,
        FindArchiveState=ArchiveState("file:///archive", 500, 2, "no route", False, "object 8"),
    )
    answered = json.loads(terminal.ask(wire.MetricsRequest(1), version=0).json)
    lists = ("metrics", "ids", "gauges", "counters", "histograms", "meters", "timers")
    assert set(answered) == set(lists)
    values = {name: gauge["value"] for name, gauge in answered["gauges"].items()}
    room = {"disk-error": disk_error} if disk_error else {"free-bytes": 5_000}
    assert values == {f"waltz-storage.{name}": value for name, value in room.items()} | {
        "waltz-storage.waltz-storage-num-partitions": 1,
        "waltz-storage.waltz-storage-partition-ids": [3],
        "waltz-storage.reserved-bytes": 64,
        "waltz-storage.is-full": True,
        "waltz-storage.clock-ms": 1_700_000_000_000,
        "waltz-storage.archive": {
            "url": "file:///archive",
            "age_ms": 500,
            "failure_count": 2,
            "error": "no route",
            "is_damaged": False,
            "read_damage": "object 8",
        },
        "waltz-storage.partition-3.session-id": 6,
        "waltz-storage.partition-3.low-water-mark": 40,
        "waltz-storage.partition-3.local-low-water-mark": 39,
        "waltz-storage.partition-3.flags": 5,
        "waltz-storage.partition-3.sequence-number": 9,
        "waltz-storage.partition-3.max-transaction-id": 52,
    }


def range_of(first, count, data=b"data"):
    records, _, lengths = encode_records(first, count, data)
    entry = LineageEntry(first, first + count - 1, 6, 5, b"d" * 16)
    crc = zlib.crc32(records)
    fields = (first, count, RangeForm.WHOLE, lengths, records, crc, b"b" * 16, (entry,))
    return RangeBytes(-1, 1, 2, *fields)


def test_records_are_listed_as_waltz_0_13_lists_them():
    terminal = Terminal(
        ReadRange=lambda each: range_of(each.first, each.last - each.first + 1, b"hello")
    )
    answer = terminal.ask(wire.RecordListRequest(1, 2, 50, 20), version=0)
    assert terminal.admin_tasks[-1] == ReadRange(2, 50, 52, 8 * 1024 * 1024)
    assert [record.transaction_id for record in answer.records] == [50, 51, 52]
    assert answer.records[1] == (51, ReqId(1, 1, 0, 51), 7, b"hello")
    for first, count in ((53, 20), (-1, 20), (50, 0), (50, -4)):
        assert terminal.ask(wire.RecordListRequest(1, 2, first, count)).records == ()
    terminal.ask(wire.RecordListRequest(1, 2, 50, 1))
    assert terminal.admin_tasks[-1] == ReadRange(2, 50, 50, 8 * 1024 * 1024)


# ---- removal, suspicion, starting again (rule 2)


def test_a_replica_outside_the_session_can_be_removed():
    terminal = Terminal()
    assert terminal.ask(wire.RemovePartition(1, 2, True, False)) == wire.Done(1)
    assert terminal.admin_tasks == [InspectReplica(2), FindZooKeeperState(2), Unassign(2, True)]
    terminal = Terminal()
    assert terminal.ask(wire.SetAssigned(1, (2,), False, False), version=0) == wire.Done(1)
    assert terminal.changes == [Unassign(2, False)]


IN_SESSION = (
    "count in store session 7 (replicas a:1, b:1, c:1; without it, 2 are left, still a quorum)"
)


@pytest.mark.parametrize(
    ("state", "forced", "text"),
    [
        (ASSIGNED, False, "because ZooKeeper assigns it to this storage"),
        (ASSIGNED, True, "because ZooKeeper assigns it to this storage"),
        (ENGAGED, False, IN_SESSION),
        (ENGAGED, True, None),
    ],
)
def test_removing_a_replica_of_the_session_requires_force(state, forced, text):
    terminal = Terminal(FindZooKeeperState=state)
    answer = terminal.ask(wire.RemovePartition(1, 2, True, forced))
    if text is None:
        assert answer == wire.Done(1)
        assert terminal.changes == [Unassign(2, True)]
    else:
        assert text in error_text(answer, errors.BadRequest)
        answer = terminal.ask(wire.SetAssigned(1, (2,), False, True), version=0)
        assert isinstance(answer, wire.AdminFailure)
        assert terminal.changes == []


def test_a_log_that_is_needed_is_discarded_only_with_force():
    terminal = Terminal(FindZooKeeperState=ASSIGNED)
    assert terminal.ask(wire.ReSeed(1, 2, False)) == wire.Done(1)
    assert terminal.changes == [admin_tasks.ReSeedTask(2)]
    bare = ENGAGED._replace(engaged=("a:1", "b:1"))
    terminal = Terminal(FindZooKeeperState=bare)
    text = error_text(terminal.ask(wire.ReSeed(1, 2, False)), errors.BadRequest)
    assert "without it, 1 are left, less than the quorum of 2)" in text
    assert "offline first" in text
    assert terminal.changes == []
    assert terminal.ask(wire.ReSeed(1, 2, True)) == wire.Done(1)
    assert terminal.changes == [admin_tasks.ReSeedTask(2)]


def test_the_only_replica_in_sync_is_not_marked_as_suspect_without_force():
    terminal = Terminal(FindZooKeeperState=ENGAGED)
    assert terminal.ask(wire.MarkSuspect(1, 2, False)) == wire.Done(1)
    assert terminal.changes == [admin_tasks.MarkSuspectTask(2)]
    terminal = Terminal(FindZooKeeperState=ONLY_REPLICA)
    assert "the only one in sync" in error_text(
        terminal.ask(wire.MarkSuspect(1, 2, False)), errors.BadRequest
    )
    assert terminal.changes == []
    assert terminal.ask(wire.MarkSuspect(1, 2, True)) == wire.Done(1)


@pytest.mark.parametrize(
    "message", [wire.RemovePartition(1, 2, True, False), wire.ReSeed(1, 2, False)]
)
def test_no_replica_is_deleted_while_zookeeper_is_unavailable(message):
    terminal = Terminal(FindZooKeeperState=CoordinatorUnavailable("ZooKeeper is away"))
    assert error_text(terminal.ask(message), CoordinatorUnavailable) == "ZooKeeper is away"
    assert terminal.changes == []


def test_an_absent_replica_cannot_be_removed():
    terminal = Terminal(InspectReplica=FACTS._replace(is_held=False))
    error_text(terminal.ask(wire.RemovePartition(1, 2, True, True)), errors.BadRequest)
    assert terminal.changes == []


# ---- reports of a storage, and copying (rule 3)


def test_a_storage_and_a_replica_are_reported():
    terminal = Terminal(FindHeldPartitions=(HeldPartition(3, INFO, 52, True),))
    answer = terminal.ask(wire.StorageRequest(1))
    assert answer == wire.StorageResponse(1, b"the storage's id", KEY, 4, "a:1", (3,))
    answered = terminal.ask(wire.ReplicaRequest(2, 2))
    assert answered.is_held
    assert answered.is_available
    assert answered.is_served
    assert answered.reason == ""
    assert (answered.promised, answered.last_session, answered.low_water_mark) == (7, 6, 40)
    assert (answered.synced_max, answered.chain, answered.is_suspect) == (52, b"c" * 16, False)
    assert answered.damaged == bytes(7) + b"\3" + bytes(7) + b"\4"
    broken = ReplicaStatus(True, True, False, INFO, None, "no control slot is valid")
    answered = Terminal(InspectReplica=broken).ask(wire.ReplicaRequest(2, 2))
    assert answered.reason == "no control slot is valid"
    assert (answered.synced_max, answered.damaged) == (-1, b"")
    refusal = Terminal(InspectReplica=broken).ask(wire.RecordListRequest(2, 2, 0, 1))
    assert "no control slot is valid" in error_text(refusal, errors.BadRequest)


def test_a_copy_returns_only_records_up_to_the_confirmed_mark():
    terminal = Terminal(ReadRange=lambda each: range_of(each.first, 11))
    copy = terminal.ask(wire.CopyRequest(1, 2, 30, 1 << 30))
    assert terminal.admin_tasks[-1] == ReadRange(2, 30, 40, 8 * 1024 * 1024, whole_batches=True)
    assert (copy.first, copy.chain_before, copy.lineage[0].last) == (30, b"b" * 16, 40)
    assert copy.records_crc == zlib.crc32(copy.records)
    nothing = terminal.ask(wire.CopyRequest(1, 2, 41, 1 << 30))
    assert (nothing.first, nothing.lineage, bytes(nothing.records)) == (41, (), b"")
    error_text(terminal.ask(wire.CopyRequest(1, 2, -1, 1)), errors.BadRequest)


def test_a_copy_is_accepted_only_while_the_partition_is_offline():
    entry = LineageEntry(53, 53, 6, 5, bytes(16))
    copy = wire.Copy(1, 2, 53, b"", b"", 0, GENESIS_CHAIN, (entry,))
    terminal = Terminal(PutCopy=53)
    assert "must be offline while it" in error_text(terminal.ask(copy), errors.BadRequest)
    assert terminal.changes == []
    terminal = Terminal(PutCopy=53, InspectReplica=OFFLINE)
    assert terminal.ask(copy) == wire.Copied(1, 2, 53)
    assert terminal.changes == [PutCopy(copy)]


# ---- turns


def test_changes_run_one_at_a_time_and_queries_do_not_wait_for_them():
    terminal = Terminal()
    terminal.post(wire.SetAvailable(1, (0,), False))
    terminal.post(wire.SetAvailable(2, (1,), False), connection=2)
    terminal.post(wire.MarkSuspect(3, 2, True))
    terminal.post(wire.SessionInfoRequest(4, 2))
    assert [type(run.task) for run in terminal.open] == [
        admin_tasks.SetAvailableTask,
        InspectReplica,
    ]
    terminal.open.reverse()
    terminal.carry_out()
    assert terminal.answered == [(1, wire.SessionInfoResponse(4, 2, 6, 40, 39))]
    terminal.carry_out(DiskFailed("no"))  # the waiting request continues
    assert terminal.carry_out() == admin_tasks.SetAvailableTask(1, False)
    assert terminal.carry_out() == admin_tasks.MarkSuspectTask(2)
    assert [(sender, answer.sequence) for sender, answer in terminal.answered[1:]] == [
        (1, 1),
        (2, 2),
        (1, 3),
    ]
    assert terminal.open == []


def test_after_a_disconnect_a_request_ends_with_its_current_task():
    terminal = Terminal()
    terminal.post(wire.SetAvailable(1, (0, 1, 2), False))
    terminal.post(wire.MarkSuspect(2, 2, True))
    terminal.post(wire.MarkSuspect(3, 3, True), connection=2)
    terminal.post(wire.RemovePartition(4, 1, True, False))
    terminal.carry_out()
    terminal.perform(terminal.machine.step(AdminDisconnected(1), 0))
    assert [type(run.task) for run in terminal.open] == [
        admin_tasks.SetAvailableTask
    ]  # the task is running
    while terminal.open:
        terminal.carry_out()
    done = [
        admin_tasks.SetAvailableTask(0, False),
        admin_tasks.SetAvailableTask(1, False),
        admin_tasks.MarkSuspectTask(3),
    ]
    assert terminal.changes == done
    assert (2, wire.Done(3)) in terminal.answered
    errors_found = [dict(report.fields).get("error") for report in terminal.reports]
    dropped = "the connection was closed before the request was done"
    assert errors_found == [
        dropped,
        dropped,
        f"{dropped}. Partitions already done: [0, 1]",
        None,
    ]


def admin_port(run_exclusively, tasks, failures):
    return AdminPort(
        Mock(),
        Mock(run_exclusively=run_exclusively, address="a:1"),
        StorageIdentity(KEY, 4, b"the storage's id"),
        post=Mock(),
        report=Mock(),
        in_thread=Mock(),
        tasks=tasks,
        on_failure=failures.append,
        scrub_states=Mock(),
        archive_state=Mock(),
    )


@pytest.mark.parametrize(("access", "done"), [(None, [0, 1, 2]), (object(), [0])])
def test_without_access_control_the_requests_of_a_closed_connection_continue(access, done):
    """As in Waltz 0.13; a revocation closes only connections with access control."""

    async def run():
        started_partitions, tasks_may_end = [], asyncio.Event()

        async def run_exclusively(partition_id, _call):
            started_partitions.append(partition_id)
            await tasks_may_end.wait()

        failures = []
        async with asyncio.TaskGroup() as tasks:
            port = admin_port(run_exclusively, tasks, failures)
            link = Mock(
                version=1, access=access, filter_permitted=list, audit_request=lambda _: None
            )
            port._accept(link)
            received, closed = link.start.call_args.args
            received([wire.SetAvailable(1, (0, 1), False), wire.MarkSuspect(2, 2, True)])
            closed("revoked")
            tasks_may_end.set()
        assert started_partitions == done
        assert failures == []

    asyncio.run(run())


def test_a_shutdown_writes_the_outcome_of_audited_requests():
    async def run():
        tasks_may_end = asyncio.Event()

        async def run_exclusively(_partition_id, _call):
            await tasks_may_end.wait()

        audited, failures = Mock(), []
        async with asyncio.TaskGroup() as tasks:
            port = admin_port(run_exclusively, tasks, failures)
            link = Mock(
                version=1, is_closed=False, filter_permitted=list, audit_request=lambda _: audited
            )
            port._accept(link)
            received, _ = link.start.call_args.args
            received([wire.MarkSuspect(2, 2, True)])
            audited.begin.call_args.args[0](None)  # the line of the request is written
            await asyncio.sleep(0)
            audited.end.assert_not_called()
            port.stop()
            tasks_may_end.set()
        audited.end.assert_called_once_with(
            "unknown", "the storage was shut down before it answered"
        )
        assert failures == []

    asyncio.run(run())


def test_a_request_in_its_last_task_completes_after_its_connection_closes():
    terminal = Terminal()
    terminal.post(wire.MarkSuspect(1, 2, True))
    terminal.post(wire.SessionInfoRequest(2, 2))
    terminal.perform(terminal.machine.step(AdminDisconnected(1), 0))
    terminal.carry_out()
    terminal.carry_out()
    assert [report.name for report in terminal.reports] == ["storage.admin_request_completed"]
    terminal.answered.clear()
    assert terminal.ask(wire.MarkSuspect(3, 2, True), connection=2) == wire.Done(3)
    assert terminal.changes == [admin_tasks.MarkSuspectTask(2), admin_tasks.MarkSuspectTask(2)]


def test_waiting_requests_are_limited():
    terminal = Terminal()
    for sequence in range(WAITING_REQUESTS_MAX + 3):
        terminal.post(wire.MarkSuspect(sequence, 2, True))
    assert [answer.sequence for _, answer in terminal.answered] == [
        WAITING_REQUESTS_MAX + number for number in range(3)
    ]
    error_text(terminal.answered[0][1], errors.Overloaded)
    for _ in range(WAITING_REQUESTS_MAX):
        terminal.carry_out()
    assert terminal.open == []
    assert len(terminal.answered) == WAITING_REQUESTS_MAX + 3


def test_an_unexpected_message_is_rejected_without_closing_the_connection():
    terminal = Terminal()
    for message in (wire.Done(1), wire.AdminRejected(1, 5, "x"), wire.Copied(1, 2, 3)):
        assert "does not accept" in error_text(terminal.ask(message), errors.BadRequest)
    assert terminal.machine.step(Wakeup(), 5) == []
    assert terminal.machine.wake_at_ms is None
    assert terminal.ask(wire.MarkSuspect(9, 2, True)) == wire.Done(9)


def test_changes_and_rejections_are_reported():
    terminal = Terminal()
    terminal.ask(wire.MarkSuspect(1, 2, True))
    terminal.ask(wire.CheckCluster(-1, KEY, 5))
    assert [report.name for report in terminal.reports] == [
        "storage.admin_request_completed",
        "storage.admin_request_rejected",
    ]
    assert dict(terminal.reports[0].fields) == {"request": "MarkSuspect", "partition": 2}
