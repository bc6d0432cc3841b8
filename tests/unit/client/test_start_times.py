"""The search for the first transaction at or after a time."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.client.read.start_times import async_last_id_before_time, last_id_before_time


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 51))
def test_the_first_transaction_at_or_after_a_time_is_found_in_few_steps(stamps, since_ms):
    stamps.sort()
    requests = []
    first = last_id_before_time(
        lambda at: requests.append(at) or stamps[at], len(stamps) - 1, since_ms
    )
    assert first == sum(stamp < since_ms for stamp in stamps) - 1
    assert len(requests) <= 6


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=200),
    st.integers(1, 51),
)
def test_records_without_a_stamp_are_not_skipped(written, since_ms):
    times = sorted(time for time, _ in written)
    stamps = [time * is_stamped for time, (_, is_stamped) in zip(times, written, strict=True)]
    requests = []
    first = last_id_before_time(
        lambda at: requests.append(at) or stamps[at], len(stamps) - 1, since_ms
    )
    assert all(time < since_ms for time in times[: first + 1])
    assert len(requests) <= 32 + 2 * 8


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(2, 5001))
def test_a_start_time_is_exact_in_a_log_that_begins_with_records_of_0_13(
    unstamped, stamped, since_ms
):
    stamps = [0] * unstamped + list(range(1, stamped + 1))
    first = last_id_before_time(stamps.__getitem__, len(stamps) - 1, since_ms)
    assert first == unstamped + min(stamped, since_ms - 1) - 1


def test_a_log_without_stamps_is_read_completely():
    requests = []
    assert last_id_before_time(lambda at: requests.append(at) or 0, 10**9, 1) == -1
    assert len(requests) < 100


@given(st.lists(st.integers(0, 50), max_size=100), st.integers(1, 51), st.integers(-1, 5))
def test_the_asyncio_search_reads_the_same_transactions_as_the_blocking_search(
    stamps, since_ms, older
):
    stamps.sort()
    requests, awaited = [], []
    mark = len(stamps) - 1

    async def stamp_ms_of(at):
        awaited.append(at)
        await asyncio.sleep(0)
        return stamps[at]

    first = last_id_before_time(lambda at: requests.append(at) or stamps[at], mark, since_ms, older)
    assert asyncio.run(async_last_id_before_time(stamp_ms_of, mark, since_ms, older)) == first
    assert awaited == requests
