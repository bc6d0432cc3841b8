"""Pauses between retries."""

from random import Random

from waltz_core.client.stream.backoff import Backoff


def test_pauses_double_with_jitter_up_to_a_limit_and_start_over():
    backoff = Backoff(interval_ms_min=10, interval_ms_max=70, random=Random(1))
    for _ in range(2):
        pauses = [backoff.note_failure() for _ in range(40)]
        assert pauses[0] == 0
        for pause, whole in zip(pauses[1:], [10, 20, 40, *[70] * 36], strict=True):
            assert whole // 2 <= pause <= whole
        assert len(set(pauses[4:])) > 5
        backoff.reset()
    assert backoff.stable_ms == 70
