"""Appends sent one by one are encoded like the same rows in a batch."""

import zlib

from waltz_core.records.batches import decode_append, encode_append, encode_records
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId, TransactionId
from waltz_core.server.locking.pending_appends import FlushGroup, PendingSingle
from waltz_core.server.locking.single_records import encode_singles
from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import AppendRequest

DATA = [b"", b"one", bytes(1000), b"four" * 77]


def pending(row: int, first: int, sequence: int) -> PendingSingle:
    data = DATA[row]
    req_id = ReqId(ClientId(5), Generation(2), PartitionId(1), sequence + row)
    message = AppendRequest(req_id, -1, (), (), (), row - 2, data, zlib.crc32(data))
    single = PendingSingle(ConnectionId(1), 100, message, FlushGroup(), 0)
    single.transaction_id = first + row
    return single


def test_rows_encoded_one_by_one_have_the_bytes_of_a_batch() -> None:
    none: list[list[int]] = [[] for _ in DATA]
    payload = encode_append(
        [row - 2 for row in range(len(DATA))],
        DATA,
        write_locks=none,
        read_locks=none,
        append_locks=none,
    )
    rows = decode_append(payload, rows_max=100, bytes_max=1 << 20)
    req_id = ReqId(ClientId(5), Generation(2), PartitionId(1), 40)
    expected = encode_records(rows, None, TransactionId(70), req_id)
    found = encode_singles([pending(row, 70, 40) for row in range(len(DATA))])
    assert bytes(found.records) == bytes(expected.records)
    assert found._replace(records=expected.records) == expected
