"""Unit tests of `waltz_core.replication.mark_proofs`: requests, and which answers are accepted."""

from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.mark_proofs import MarkProofs
from waltz_core.replication.session_events import MarkProofFailed, MarkProved
from waltz_core.wire import messages

NAMES = ("a:1", "b:1", "c:1")


class Replica:
    """Records the requests."""

    def __init__(self, unanswered_count=0):
        self.requests = []
        self.unanswered_count = unanswered_count

    def send_request(self, kind, *, now_ms, correlation_id):
        self.requests.append((kind, now_ms, correlation_id))


def new_proofs():
    outbox = []
    return MarkProofs(NAMES, outbox=outbox, limits=SessionLimits(proof_ms_max=100)), outbox


def test_a_quorum_proves_the_mark_that_was_committed_when_the_proof_was_requested():
    proofs, outbox = new_proofs()
    engaged = [Replica(), Replica()]
    proofs.begin(7, 40, engaged, 1_000)
    assert [each.requests for each in engaged] == [[(messages.Heartbeat, 1_000, 7)]] * 2
    proofs.on_confirmed(7, "a:1")
    proofs.on_confirmed(7, "a:1")
    assert outbox == []
    proofs.on_confirmed(7, "c:1")
    assert outbox == [MarkProved(7, 40)]
    proofs.on_confirmed(7, "b:1")
    assert outbox == [MarkProved(7, 40)]


def test_a_hanging_replica_receives_no_requests_until_it_answers():
    proofs, _ = new_proofs()
    hanging = Replica(SessionLimits().lag_count_max)
    proofs.begin(7, 40, [hanging], 1_000)
    assert hanging.requests == []
    hanging.unanswered_count -= 1
    proofs.begin(8, 40, [hanging], 1_000)
    assert len(hanging.requests) == 1


def test_a_proof_that_times_out_is_reported_once():
    proofs, outbox = new_proofs()
    proofs.begin(7, 40, [], 1_000)
    proofs.begin(8, 41, [], 1_050)
    assert list(proofs.deadlines()) == [1_100, 1_150]
    proofs.fail_overdue(1_099)
    assert outbox == []
    proofs.fail_overdue(1_100)
    assert outbox == [MarkProofFailed(7)]
    proofs.fail_all()
    proofs.fail_all()
    assert outbox == [MarkProofFailed(7), MarkProofFailed(8)]
    assert list(proofs.deadlines()) == []
