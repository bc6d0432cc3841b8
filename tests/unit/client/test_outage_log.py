"""The times at which a client logs an outage, and the errors that it retries meanwhile."""

import asyncio
import logging

import pytest

from waltz_core import errors
from waltz_core.client.links.outage_log import LOG_INTERVAL_S, OutageLog
from waltz_core.client.model.callbacks import AsyncCallbacks, Callbacks, PoisonPolicy
from waltz_core.records.record import PartitionId


def logged_times(
    caplog: pytest.LogCaptureFixture, *, log_after_s: float, failures_s: list[float | None]
) -> list[float]:
    """Return the times of the log lines; None in `failures_s` is a success."""
    logged: list[float] = []

    async def scenario() -> None:
        now = [0.0]
        asyncio.get_running_loop().time = lambda: now[0]  # type: ignore[method-assign]
        each = OutageLog(PartitionId(3), "server", log_after_s=log_after_s)
        for at_s in failures_s:
            caplog.clear()
            if at_s is None:
                each.note_success()
                continue
            now[0] = at_s
            each.note_failure("no answer")
            if "feed.waiting partition=3 for=server" in caplog.text:
                logged.append(at_s)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    return logged


def test_a_short_outage_is_not_logged_and_a_long_one_at_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[float | None] = [
        float(at_s) for at_s in range(5, 5 + int(2 * LOG_INTERVAL_S) + 20, 2)
    ]
    assert logged_times(caplog, log_after_s=10, failures_s=tries) == [15, 75, 135]
    assert logged_times(caplog, log_after_s=0, failures_s=tries) == [5, 65, 125]


def test_the_duration_of_an_outage_is_measured_from_its_first_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert logged_times(caplog, log_after_s=10, failures_s=[0, 9, None, 11, 20, None, 21]) == []
    assert logged_times(caplog, log_after_s=0, failures_s=[0, 1, None, 2, 3]) == [0, 2]


@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (errors.Unreachable(""), PoisonPolicy.RETRY),
        (errors.CoordinatorUnavailable(""), PoisonPolicy.RETRY),
        (errors.OutcomeUnknown(""), PoisonPolicy.STOP),
        (errors.DataLoss(""), PoisonPolicy.STOP),
        (ValueError(""), PoisonPolicy.STOP),
    ],
)
def test_temporary_errors_are_retried_unless_the_application_forbids_it(
    error: Exception, policy: PoisonPolicy
) -> None:
    class OnThreads(Callbacks):
        def apply_transaction(self, transaction: object) -> None:
            raise NotImplementedError

    class OnTheLoop(AsyncCallbacks):
        async def apply_transaction(self, transaction: object) -> None:
            raise NotImplementedError

    assert OnThreads().uncaught_exception(0, 7, error) is policy
    assert asyncio.run(OnTheLoop().uncaught_exception(0, 7, error)) is policy
