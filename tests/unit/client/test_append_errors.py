"""For each kind of error, the outcomes of the rows of an append."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.client.scenarios import submission
from waltz_core import errors
from waltz_core.client.stream import append_errors
from waltz_core.client.stream.outcome_tracker import BatchOutcome
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.wire.messages import RowOutcomeCode

DEFINITE_FAILURES = {
    errors.LockFailed,
    errors.SessionLost,
    errors.ClientAheadOfLog,
    errors.NotMounted,
    errors.NotOwned,
    errors.GenerationMismatch,
    errors.NoSpace,
    errors.TooLarge,
    errors.Overloaded,
}


@pytest.mark.parametrize("code", sorted(errors.ERROR_CLASSES_BY_CODE))
def test_only_errors_before_submission_are_definite_failures(code):
    kind = errors.ERROR_CLASSES_BY_CODE[code]
    assert (append_errors.outcome_code_of(kind("x")) is not None) is (kind in DEFINITE_FAILURES)


def test_mounts_are_retried_unless_the_error_is_permanent():
    assert append_errors.is_mount_retriable(errors.NotOwned("x"))
    assert append_errors.is_mount_retriable(errors.GenerationMismatch("x"))
    for kind in (errors.ClientAheadOfLog, errors.ConnectionSuperseded, errors.UnknownPartition):
        assert not append_errors.is_mount_retriable(kind("x"))


@pytest.mark.parametrize("reason", RowOutcomeCode)
def test_a_transient_rejection_breaks_the_order_of_ordered_appends(reason):
    one = replace(submission(1), keeps_order=True)
    outcome = BatchOutcome(
        0, np.array([0]), np.array([reason], dtype=np.uint8), np.array([BEFORE_FIRST])
    )
    order_keeping_codes = (
        RowOutcomeCode.COMMITTED,
        RowOutcomeCode.LOCK,
        RowOutcomeCode.AHEAD,
        RowOutcomeCode.TOO_LARGE,
    )
    assert append_errors.is_order_lost(one, outcome) is (reason not in order_keeping_codes)
    assert not append_errors.is_order_lost(submission(1), outcome)
