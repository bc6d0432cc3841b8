"""S 0 at a storage's machine: who is let in, who is refused with what, and what ends whom."""

import pytest

from tests.storage_owner import Owner
from tests.unit.storage.test_service import KEY, Bench, open_request, prepare
from waltz_core.cli.main import main as command
from waltz_core.errors import DiskFailed, NoSpace, SessionFenced, UnknownPartition
from waltz_core.record import Record, ReqId
from waltz_core.storage import effects, originals, service
from waltz_core.storage.lane import GROUP_BYTES_MAX
from waltz_core.storage.work import Request
from waltz_core.wire.messages import Engage, Nack, Prepared, SuccessResponse
from waltz_core.wire.original_messages import (
    AppendRecordsRequest,
    FailureResponse,
    LastSessionInfoRequest,
    LastSessionInfoResponse,
    MaxTransactionIdRequest,
    MaxTransactionIdResponse,
    RecordListRequest,
    RecordListResponse,
    RecordRequest,
    SetLowWaterMarkRequest,
    TruncateRequest,
)

CONFLICT = "com.wepay.waltz.storage.exception.ConcurrentUpdateException: session id has changed to "
STORAGE_ERROR = "com.wepay.waltz.storage.exception.StorageException: "


class OriginalsBench(Bench):
    """As `Bench`, with a word for requests of S 0."""

    def tell(self, connection, *messages):
        for message in messages:
            self.step(Request(connection, message, is_original=True))

    def hear(self, connection, message):
        before = len(self.answers())
        self.tell(connection, message)
        self.finish()
        ((to, answer),) = self.answers()[before:]
        assert to == connection
        assert (answer.session_id, answer.sequence, answer.partition_id) == (
            message.session_id,
            message.sequence,
            message.partition_id,
        )
        return answer

    def why(self, connection, message):
        answer = self.hear(connection, message)
        assert isinstance(answer, FailureResponse), answer
        assert answer.stack == ()
        return answer.text


@pytest.fixture
def bench(tmp_path):
    made = OriginalsBench(tmp_path)
    yield made
    made.engine.abandon()


def records(first, count, data=b"data"):
    return tuple(Record(one, ReqId(1, 1, 0, one), 7, data) for one in range(first, first + count))


def append(session, first, count=1, sequence=9, data=b"data"):
    return AppendRecordsRequest(session, sequence, 0, records(first, count, data), False)


def info(session, partition=0, *, offline=False):
    return LastSessionInfoRequest(session, 1, partition, offline)


def test_another_cluster_is_refused_in_the_originals_words(bench):
    for wrong, text in (
        ({"key": bytes(16)}, "Provided cluster key is inconsistent with key in control file."),
        ({"count": 5}, "Provided number of partitions is inconsistent with the total number of "),
    ):
        answer = bench.hear(1, open_request(**wrong))
        assert answer.text.startswith(STORAGE_ERROR + text)
    assert bench.hear(1, open_request(KEY)) == SuccessResponse(-1, -1, -1)
    assert [each.name for each in bench.only(service.Report)].count("original_opened") == 1


def test_a_higher_session_is_promised_before_it_is_answered(bench):
    bench.tell(1, info(4))
    assert bench.log.promised == -1
    assert bench.answers() == []
    bench.finish()
    assert bench.answers(1) == [LastSessionInfoResponse(4, 1, 0, -1, -1, -1)]
    assert (bench.log.promised, bench.log.slot.nonce) == (4, bytes(16))


def test_a_lower_session_and_one_of_an_owner_of_ours_are_refused(bench):
    bench.hear(1, info(4))
    assert bench.why(1, info(3)) == f"{CONFLICT}4, but request context contains 3"
    bench.owned(6, connection=2)
    for session in (5, 6):
        assert bench.why(1, info(session)) == f"{CONFLICT}6, but request context contains {session}"
    assert "expected one soon after" in bench.why(1, info(7 + (1 << 32)))


def test_it_ends_a_session_of_s_1_whose_connection_is_closed(bench):
    owner = bench.owned(4, connection=2)
    bench.send(2, owner.append())
    bench.send(2, owner.append())
    bench.tell(1, MaxTransactionIdRequest(5, 1, 0, False))
    (closed,) = bench.only(effects.CloseConnection)
    assert closed.connection == 2
    bench.finish()
    assert isinstance(bench.answers(2)[-2], Nack)
    assert bench.answers(1) == [MaxTransactionIdResponse(5, 1, 0, 0)]
    assert isinstance(bench.ask(2, owner.make(Engage, -1)), Nack)


def test_a_session_of_s_1_ends_it_and_leaves_its_connection(bench):
    bench.hear(1, info(4))
    bench.tell(1, append(4, 0), append(4, 1), append(4, 2))
    bench.send(2, prepare(Owner(5)))
    bench.finish()
    texts = [each.text for each in bench.answers(1) if isinstance(each, FailureResponse)]
    assert texts == [f"{CONFLICT}5, but request context contains 4"] * 2
    (prepared,) = bench.answers(2)
    assert isinstance(prepared, Prepared)
    assert prepared.synced_max == 0
    assert bench.only(effects.CloseConnection) == []


def test_any_connection_may_ask_in_the_session(bench):
    bench.hear(1, info(4))
    assert isinstance(bench.hear(2, append(4, 0, 3)), SuccessResponse)
    found = bench.hear(3, RecordListRequest(4, 1, 0, 0, 10))
    assert found == RecordListResponse(4, 1, 0, records(0, 3))


def test_requests_of_a_partition_are_answered_in_their_order(bench):
    bench.hear(1, info(4))
    asked = [append(4, 0, 2, 10), RecordRequest(4, 11, 0, 1), append(4, 2, 1, 12)]
    asked += [RecordListRequest(4, 13, 0, 0, 9), TruncateRequest(4, 14, 0, 1, False)]
    bench.tell(1, *asked)
    bench.finish()
    assert [each.sequence for each in bench.answers(1)][1:] == [10, 11, 12, 13, 14]


def test_all_appends_that_wait_are_synced_once(bench):
    bench.hear(1, append(0, 0))
    bench.tell(1, *(append(0, 1 + each) for each in range(5)))
    before = bench.log.sync_count
    assert bench.finish() == 2
    assert bench.log.sync_count == before + 2
    assert all(isinstance(each, SuccessResponse) for each in bench.answers(1))


def test_a_group_is_no_larger_than_it_may_be(bench):
    bench.hear(1, append(0, 0))
    data = bytes(GROUP_BYTES_MAX // 4)
    bench.tell(1, *(append(0, 1 + each, data=data) for each in range(6)))
    assert bench.finish() > 2
    assert bench.log.max_id == 6


def test_what_is_not_assigned_is_not_what_is_not_available(tmp_path):
    made = OriginalsBench(tmp_path)
    assert made.why(1, info(0, 3)) == "java.lang.Exception: Partition:3 is not assigned."
    assert made.why(1, info(0, 77)) == "java.lang.Exception: Partition:77 is not assigned."
    made.service = service.StorageService(
        service.Identity(KEY, 4, bytes(16)), queue_bytes_max=1, is_held=made.engine.is_held
    )
    assert made.why(1, info(0)) == (
        f"{STORAGE_ERROR}read and write for partition=0 have been disabled on storage node"
    )
    assert "offline recovery is not served here" in made.why(1, info(0, offline=True))
    made.engine.abandon()


@pytest.mark.parametrize(
    "message",
    [
        info(0, offline=True),
        MaxTransactionIdRequest(0, 1, 0, True),
        SetLowWaterMarkRequest(0, 1, 0, 5, True),
        TruncateRequest(0, 1, 0, 5, True),
        AppendRecordsRequest(0, 1, 0, (), True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_offline_recovery_needs_a_partition_that_is_offline(bench, message):
    assert bench.why(1, message) == (
        f"{STORAGE_ERROR}cannot run offline recovery while partition is online"
    )
    assert bench.log.promised == -1


def test_a_failed_disk_leaves_the_session_and_a_later_one_goes_on(bench):
    bench.hear(1, append(0, 0, 2))
    bench.disk.next_errors["sync"] = DiskFailed("the disk")
    assert "StorageException" in bench.why(1, append(0, 2))
    assert "a write failed" in bench.why(1, append(0, 2))
    assert bench.hear(1, MaxTransactionIdRequest(1, 1, 0, False)).transaction_id == 1
    assert isinstance(bench.hear(1, append(1, 2)), SuccessResponse)
    found = bench.hear(1, RecordListRequest(1, 1, 0, 0, 10))
    assert found.records == records(0, 3)


def test_a_full_disk_is_told_and_reads_go_on(bench):
    bench.hear(1, append(0, 0, 2))
    bench.disk.next_errors["pwrite"] = NoSpace("full")
    assert "StorageException: full" in bench.why(1, append(0, 2))
    assert bench.hear(1, RecordListRequest(0, 1, 0, 0, 10)).records == records(0, 2)
    assert isinstance(bench.hear(1, append(0, 2)), SuccessResponse)


def test_texts_are_those_of_java_exceptions():
    message = info(4)
    for error, text in (
        (SessionFenced("later"), f"{CONFLICT}7, but request context contains 4"),
        (UnknownPartition("none"), "java.lang.Exception: Partition:0 is not assigned."),
        (NoSpace("x" * 5_000), STORAGE_ERROR + "x" * 1_000),
    ):
        assert originals.failure(message, error, 7) == FailureResponse(4, 1, 0, text, ())
    assert originals.failure(open_request(), NoSpace("no"), 7).partition_id == -1


def test_a_mark_that_an_original_has_set_above_the_log_is_no_fault_of_the_files(tmp_path, capsys):
    bench = OriginalsBench(tmp_path)
    bench.hear(1, append(0, 0, 3))
    bench.hear(1, SetLowWaterMarkRequest(1, 1, 0, 20, False))
    bench.owned(2, connection=2, engaged=False)
    bench.engine.close()
    assert command(["disk", "verify", str(tmp_path)]) == 0, capsys.readouterr().out
