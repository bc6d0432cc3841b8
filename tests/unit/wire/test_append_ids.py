"""The IDs of appends in log lines."""

from dataclasses import replace

import numpy as np
import pytest

from waltz_core.records.record import (
    RECORD_PREFIX,
    Chain,
    ClientId,
    Generation,
    LineageEntry,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.wire.append_ids import (
    RUNS_IN_LINE_MAX,
    RUNS_MAX,
    SlowAppends,
    committed_ids_text,
    request_ids_text,
)
from waltz_core.wire.messages import AppendRaw, AppendResult


def req_id(sequence: int, client_id: int = 17) -> ReqId:
    return ReqId(ClientId(client_id), Generation(3), PartitionId(0), sequence)


def append_of(*req_ids: ReqId) -> AppendRaw:
    """Return an append with one record for each request ID; only the record prefixes are valid."""
    records = [RECORD_PREFIX.pack(index, each.to_bytes(), 0, 0, 0) + b"crc!" for index, each in
               enumerate(req_ids)]  # fmt: skip
    lengths = np.array([len(record) for record in records], dtype=">i4").tobytes()
    return AppendRaw(1, 2, 0, 0, lengths, b"".join(records), 0, bytes(16), ())


@pytest.mark.parametrize(
    ("req_ids", "text"),
    [
        ([req_id(40)], "17.3.0.40"),
        ([req_id(40), req_id(41), req_id(42)], "17.3.0.40..42"),
        ([req_id(40), req_id(42), req_id(43)], "17.3.0.40,17.3.0.42..43"),
        ([req_id(40), req_id(41, client_id=18)], "17.3.0.40,18.3.0.41"),
    ],
)
def test_consecutive_request_ids_of_a_client_are_one_run(req_ids: list[ReqId], text: str):
    assert request_ids_text(append_of(*req_ids)) == text
    assert str(req_ids[0]) == text.partition(",")[0].partition("..")[0]


def test_only_the_first_runs_are_listed():
    many = [req_id(2 * number) for number in range(RUNS_MAX)]
    assert request_ids_text(append_of(*many)).count(",") == RUNS_MAX - 1
    more = request_ids_text(append_of(*many, req_id(100), req_id(200)))
    assert more == request_ids_text(append_of(*many)) + ",..."


def test_slow_appends_are_listed_in_one_line_up_to_a_limit():
    slow = SlowAppends()
    for number in range(RUNS_IN_LINE_MAX):
        row = append_of(req_id(2 * number))
        entry = LineageEntry(
            TransactionId(number), TransactionId(number), SessionId(1), 0, Chain(bytes(16))
        )
        slow.add(replace(row, first=number, lineage=(entry,)), 300 - number)
    fields = dict(slow.fields())
    assert (fields["count"], fields["took_ms"]) == (RUNS_IN_LINE_MAX, 300)
    assert (fields["first"], fields["last"]) == (0, RUNS_IN_LINE_MAX - 1)
    runs = str(fields["requests"]).split(",")
    assert runs == [f"17.3.0.{2 * number}" for number in range(RUNS_IN_LINE_MAX)]
    many = [req_id(2 * number) for number in range(RUNS_IN_LINE_MAX)]
    slow.add(replace(append_of(*many), lineage=(entry,)), 1)
    assert str(dict(slow.fields())["requests"]).split(",") == [*runs, "..."]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([100, 101, 102], "100..102"),
        ([100, -1, 101], "100..101"),
        ([100, -1, 104], "100,104"),
        ([-1, -1], "-"),
        ([2 * offset for offset in range(RUNS_MAX + 5)], "0,2,4,6,8,10,12,14,..."),
    ],
)
def test_committed_rows_are_described_by_transaction_ids(ids: list[int], text: str):
    packed = np.array(ids, dtype=">i8").tobytes()
    result = AppendResult(req_id(1), 0, packed, bytes(len(ids)), bytes(8 * len(ids)))
    assert committed_ids_text(result) == text
