"""Maps each error of an append to its meaning for the rows: in the log, not in the log, or unknown.

If this table wrongly listed an error as a rejection, the client would append rows twice, or report
committed rows as failed.

Rules:
    1. Only two kinds of errors are rejections. The server returns the first kind before it has
       stored any row. It returns the second kind after the next session has settled the outcome of
       the rows.
    2. After an error that is not in the table, the rows are in doubt until the client has read the
       log.
"""

from waltz_core import errors
from waltz_core.client.stream.outcome_tracker import BatchOutcome, PendingSubmission, Submission
from waltz_core.records.record import PartitionId
from waltz_core.wire.messages import RowOutcomeCode

_OUTCOME_CODES: dict[int, RowOutcomeCode] = {
    errors.LockFailed.code: RowOutcomeCode.LOCK,
    errors.SessionLost.code: RowOutcomeCode.LOST,
    errors.ClientAheadOfLog.code: RowOutcomeCode.AHEAD,
    errors.NotMounted.code: RowOutcomeCode.NOT_MOUNTED,
    errors.NotOwned.code: RowOutcomeCode.NOT_MOUNTED,
    errors.GenerationMismatch.code: RowOutcomeCode.GENERATION,
    errors.NoSpace.code: RowOutcomeCode.NO_SPACE,
    errors.TooLarge.code: RowOutcomeCode.TOO_LARGE,
    errors.Overloaded.code: RowOutcomeCode.OVERLOADED,
}

# Transient reasons: the rows may be sent again unchanged.
TRANSIENT_OUTCOMES = (
    RowOutcomeCode.LOST,
    RowOutcomeCode.NOT_MOUNTED,
    RowOutcomeCode.GENERATION,
    RowOutcomeCode.NO_SPACE,
    RowOutcomeCode.OVERLOADED,
)
# After these reasons, the client must mount the partition again before it sends further rows.
_REMOUNT_OUTCOMES = (RowOutcomeCode.NOT_MOUNTED, RowOutcomeCode.GENERATION)


def outcome_code_of(error: errors.WaltzError) -> RowOutcomeCode | None:
    """Return why rows are not in the log; None if the error does not settle this (rule 2)."""
    return _OUTCOME_CODES.get(error.code)


def remount_reason(outcome: BatchOutcome) -> RowOutcomeCode | None:
    """Return the reason to mount the partition again; None if there is no such reason."""
    if not outcome.has_rejections:
        return None
    reason_codes = outcome.reasons.tobytes()
    return next((reason for reason in _REMOUNT_OUTCOMES if reason in reason_codes), None)


def is_order_lost(submission: Submission, outcome: BatchOutcome) -> bool:
    """Whether later submissions must wait until rows of this submission are sent again."""
    if not submission.keeps_order or not outcome.has_rejections:
        return False
    reason_codes = outcome.reasons.tobytes()
    return any(reason in reason_codes for reason in TRANSIENT_OUTCOMES)


def is_mount_retriable(error: errors.WaltzError) -> bool:
    """Whether a rejected mount may succeed later, on this or another server."""
    return error.retriable or isinstance(error, errors.GenerationMismatch)


def not_sent_error(
    partition_id: PartitionId, timeout_ms: int, failure: str, retry_after_ms: int
) -> errors.Unavailable:
    """Return the error for a submission that was never sent, so its rows are not in the log."""
    text = (
        f"partition {partition_id}: the client could not send the append within {timeout_ms} ms "
        f"({failure}); the transaction is not in the log"
    )
    return timeout_error(text, retry_after_ms)


def timeout_error(text: str, retry_after_ms: int) -> errors.Unavailable:
    """Return the error for a timeout: Overloaded if a server has requested a pause."""
    if retry_after_ms > 0:
        return errors.Overloaded(text, retry_after_ms)
    return errors.Unreachable(text)


def unknown_outcome_error(
    pending: PendingSubmission, when: str, failure: str
) -> errors.OutcomeUnknown:
    """Return the error for a submission whose outcome can no longer be determined."""
    return errors.OutcomeUnknown(
        f"partition {pending.req_id.partition_id}: the outcome of "
        f"{pending.submission.row_count} rows, from request ID {pending.req_id} on, is "
        f"unknown, because the client could not determine it {when} ({failure}). If the rows are "
        f"in the log, they are after transaction {pending.mark_when_sent}"
    )
