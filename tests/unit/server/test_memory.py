"""The store in memory: appends are committed with consecutive IDs and chained."""

from waltz_core.records.batches import decode_append, encode_append, encode_records
from waltz_core.records.record import (
    BEFORE_FIRST,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.replication import session_events as replication
from waltz_core.server.process.log_in_memory import MEMORY_REPLICA, MemoryLog, MemoryStore

REQ_ID = ReqId(ClientId(7), Generation(1), PartitionId(0), 5)


def batch_of(first: int, *rows: bytes) -> replication.Batch:
    none: list[list[int]] = [[] for _ in rows]
    payload = encode_append(
        list(range(len(rows))), list(rows), write_locks=none, read_locks=none, append_locks=none
    )
    decoded = decode_append(payload, rows_max=100, bytes_max=1 << 20)
    part = encode_records(decoded, None, TransactionId(first), REQ_ID)
    return replication.Batch(*part, stamp_ms=1_700_000_000_000)


def open_store() -> MemoryStore:
    store = MemoryStore(MemoryLog())
    session, settled = store.step(replication.TakeOwnership(Generation(1), (MEMORY_REPLICA,)), 0)
    assert session.high_water_mark == settled.committed_last == BEFORE_FIRST
    return store


def test_a_batch_is_committed_in_the_step_that_submits_it():
    store = open_store()
    (first,) = store.step(replication.SubmitToSession(SessionId(0), batch_of(0, b"a", b"b")), 0)
    (second,) = store.step(replication.SubmitToSession(SessionId(0), batch_of(2, b"c")), 0)
    assert (first.last, second.last) == (1, 2)
    assert first.chain != second.chain == store.log.chain
    assert [transaction.data for transaction in store.log.transactions()] == [b"a", b"b", b"c"]
    assert [transaction.header for transaction in store.log.transactions()] == [0, 1, 0]
    assert [transaction.req_id.sequence for transaction in store.log.transactions()] == [5, 6, 5]


def test_a_later_owner_finds_the_commits_of_an_earlier_owner():
    store = open_store()
    store.step(replication.SubmitToSession(SessionId(0), batch_of(0, b"a")), 0)
    session, _ = store.step(replication.TakeOwnership(Generation(2), (MEMORY_REPLICA,)), 0)
    assert (session.session_id, session.high_water_mark, session.generation) == (1, 0, 2)
    assert session.chain == store.log.chain
