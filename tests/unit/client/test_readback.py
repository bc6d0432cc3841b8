"""What is read from the log after a mount."""

import pytest

from tests.unit.client.stories import CLIENT, PARTITION, range_data, req
from waltz_core.client.stream.monitor import Monitor
from waltz_core.client.stream.readback import ReadBack
from waltz_core.records.record import BEFORE_FIRST, RECONSTRUCTED, LineageEntry
from waltz_core.wire.messages import RangeForm

A, B = b"a" * 16, b"b" * 16


def test_an_empty_read_is_done_at_once():
    readback = ReadBack(100)
    assert readback.is_done
    readback.begin(None, None)
    assert readback.is_done
    with pytest.raises(AssertionError):
        readback.request(req(-1))


def test_the_chain_is_compared_first_and_then_the_headers_are_read():
    readback, monitor = ReadBack(100), Monitor(CLIENT, PARTITION)
    readback.begin((5, 7), (3, A))
    asked = readback.request(req(-1))
    assert (asked.first, asked.last, asked.form) == (3, 3, RangeForm.HEADERS)
    assert readback.is_requested(req(-1))
    assert not readback.is_requested(req(-2))
    answer = range_data(asked, req(1, 0, 99), mark=9, lineage=(LineageEntry(2, 3, 1, 0, A),))
    assert readback.history_loss(answer) is None
    assert readback.take(answer, monitor) is None
    asked = readback.request(req(-2))
    assert (asked.first, asked.last, asked.bytes_max) == (5, 7, 100)
    assert not readback.is_requested(req(-1))
    readback.take(range_data(asked, req(1, 0, 99), req(2, 0, 99), mark=9), monitor)
    asked = readback.request(req(-3))
    assert (asked.first, asked.last) == (7, 7)
    readback.take(range_data(asked, req(3, 0, 99), mark=9), monitor)
    assert readback.is_done


@pytest.mark.parametrize(
    ("entry", "is_other"),
    [
        (LineageEntry(2, 3, 1, 0, A), False),
        (LineageEntry(2, 3, 1, 0, B), True),
        (LineageEntry(2, 4, 1, 0, B), False),
        (LineageEntry(2, 3, RECONSTRUCTED, 0, B), False),
    ],
)
def test_another_chain_at_the_same_end_is_another_history(entry, is_other):
    readback = ReadBack(100)
    readback.begin(None, (3, A))
    answer = range_data(readback.request(req(-1)), req(1), mark=9, lineage=(entry,))
    assert (readback.history_loss(answer) is not None) is is_other
    readback.cancel()
    assert readback.is_done
    assert readback.history_loss(answer) is None


def test_an_empty_answer_is_a_fault():
    readback = ReadBack(100)
    readback.begin((0, 1), None)
    fault = readback.take(range_data(readback.request(req(-1)), mark=1), Monitor(CLIENT, PARTITION))
    assert "transactions 0..1" in fault
    assert BEFORE_FIRST == -1
