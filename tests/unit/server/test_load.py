"""What counts how much."""

from waltz_core.server.locking.tickets import AppendCounters
from waltz_core.server.process.load import cost_of


def figures(*, rows=0, size=0):
    made = AppendCounters()
    made.committed, made.committed_bytes = rows, size
    return made


def test_bytes_rows_and_answers_count():
    assert cost_of(figures(), answers=0, answer_bytes=0) == 0
    assert cost_of(figures(size=10 * 1024), answers=0, answer_bytes=0) == 10
    assert cost_of(figures(), answers=0, answer_bytes=2048) == 2
    assert cost_of(figures(rows=8), answers=1, answer_bytes=0) == 17


def test_a_thousand_single_rows_cost_more_than_a_batch_of_a_thousand():
    batch = cost_of(figures(rows=1_000, size=512_000), answers=1, answer_bytes=0)
    singles = cost_of(figures(rows=1_000, size=512_000), answers=1_000, answer_bytes=0)
    assert singles > 20 * batch
