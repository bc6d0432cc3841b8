"""Proofs of the high-water mark: how requests share them, and how long they are valid."""

from waltz_core.records.record import BEFORE_FIRST, ClientId, Generation, PartitionId, ReqId
from waltz_core.replication.session_events import ProveMark
from waltz_core.server.partition.linearizable_requests import LinearizableRequests, assumed_id_of
from waltz_core.wire import messages


def test_requests_that_arrive_during_a_proof_share_the_next_proof() -> None:
    proofs: LinearizableRequests[str] = LinearizableRequests(1000)
    assert proofs.wait_for_proof("a", 10) == [ProveMark(1)]
    assert proofs.wait_for_proof("b", 11) == []
    assert proofs.wait_for_proof("c", 12) == []
    assert proofs.on_proof_succeeded(1, 20) == (["a"], [ProveMark(2)])
    assert proofs.on_proof_succeeded(2, 30) == (["b", "c"], [])


def test_the_next_proof_begins_even_if_all_requests_of_the_current_one_were_dropped() -> None:
    proofs: LinearizableRequests[str] = LinearizableRequests(1000)
    proofs.wait_for_proof("a", 10)
    proofs.wait_for_proof("b", 11)
    proofs.wait_for_proof("c", 12)
    proofs.drop(lambda each: each in "ab")
    assert proofs.on_proof_succeeded(1, 20) == ([], [ProveMark(2)])
    assert proofs.on_proof_failed(2, 30) == (["c"], [])


def test_an_answer_to_an_unknown_proof_is_ignored() -> None:
    proofs: LinearizableRequests[str] = LinearizableRequests(1000)
    assert proofs.on_proof_succeeded(7, 0) == ((), [])
    assert proofs.on_proof_failed(0, 0) == ((), [])
    assert proofs.wait_for_proof("a", 10) == [ProveMark(1)]
    assert proofs.on_proof_failed(2, 20) == ((), [])
    assert proofs.on_proof_failed(1, 20) == (["a"], [])


def test_freshness_starts_when_the_proof_is_requested() -> None:
    proofs: LinearizableRequests[str] = LinearizableRequests(1000)
    assert not proofs.is_proof_fresh(0)
    proofs.wait_for_proof("a", 10)
    proofs.on_proof_succeeded(1, 900)
    assert proofs.is_proof_fresh(1010)
    assert not proofs.is_proof_fresh(1011)
    proofs.note_confirmation(5)
    assert proofs.is_proof_fresh(1010)
    proofs.note_confirmation(500)
    assert proofs.is_proof_fresh(1500)


def test_the_end_of_a_session_returns_all_requests_and_invalidates_its_proofs() -> None:
    proofs: LinearizableRequests[str] = LinearizableRequests(1000)
    proofs.note_confirmation(0)
    proofs.wait_for_proof("a", 10)
    proofs.wait_for_proof("b", 10)
    assert proofs.reset() == ["a", "b"]
    assert not proofs.is_proof_fresh(10)
    assert proofs.wait_for_proof("c", 20) == [ProveMark(2)]
    assert proofs.on_proof_succeeded(1, 30) == ((), [])
    assert proofs.on_proof_failed(1, 30) == ((), [])
    assert not proofs.is_proof_fresh(30)
    assert proofs.on_proof_succeeded(2, 30) == (["c"], [])


def test_assumed_id_of_returns_the_highest_id_that_a_request_assumes_to_exist() -> None:
    req_id = ReqId(ClientId(1), Generation(1), PartitionId(0), 1)
    requests = [
        messages.MountRequest(req_id, 5, 1),
        messages.MountWriter(req_id, 1, 5, wants_feed=True),
        messages.FeedRequest(req_id, 5),
        messages.RangeRequest(req_id, 5, 9, 100, 0, ()),
        messages.TransactionDataRequest(req_id, 5),
    ]
    assert [assumed_id_of(message) for message in requests] == [5] * 5
    assert assumed_id_of(messages.HighWaterMarkRequest(req_id)) == BEFORE_FIRST
