"""What an error says about the rows of an append: in the log, not in the log, or nobody knows.

A wrong entry here turns a refusal into a duplicate or a doubt into a loss, so the whole table
stands in one place.

Rules:
    1. A refusal counts as final only for errors that the server gives before anything was stored,
       or after the next session has settled what was.
    2. Whatever is not in the table leaves the rows in doubt: they are settled by reading the log.
"""

from waltz_core import errors
from waltz_core.client.stream.monitor import BatchOutcome, Parcel, Pending
from waltz_core.records.record import PartitionId
from waltz_core.wire.messages import Reason

_REASONS: dict[int, Reason] = {
    errors.LockFailed.code: Reason.LOCK,
    errors.SessionLost.code: Reason.LOST,
    errors.ClientAhead.code: Reason.AHEAD,
    errors.NotMounted.code: Reason.NOT_MOUNTED,
    errors.NotOwned.code: Reason.NOT_MOUNTED,
    errors.GenerationMismatch.code: Reason.GENERATION,
    errors.NoSpace.code: Reason.NO_SPACE,
    errors.TooLarge.code: Reason.TOO_LARGE,
    errors.Overloaded.code: Reason.OVERLOADED,
}

# What passes: the rows may be sent again as they are.
TRANSIENT = (
    Reason.LOST,
    Reason.NOT_MOUNTED,
    Reason.GENERATION,
    Reason.NO_SPACE,
    Reason.OVERLOADED,
)
# After these the partition has to be mounted again before anything else is sent.
_REMOUNT = (Reason.NOT_MOUNTED, Reason.GENERATION)


def reason_of(error: errors.WaltzError) -> Reason | None:
    """Return why rows are not in the log, None when the error does not settle it (rule 2)."""
    return _REASONS.get(error.code)


def remount_reason(outcome: BatchOutcome) -> Reason | None:
    """Return why the partition has to be mounted again, None when it need not."""
    if not outcome.has_refusals:
        return None
    found = outcome.reasons.tobytes()
    return next((reason for reason in _REMOUNT if reason in found), None)


def is_order_lost(parcel: Parcel, outcome: BatchOutcome) -> bool:
    """Whether what was appended behind this parcel must not go before it is sent again."""
    if not parcel.keeps_order or not outcome.has_refusals:
        return False
    found = outcome.reasons.tobytes()
    return any(reason in found for reason in TRANSIENT)


def is_mount_again(error: errors.WaltzError) -> bool:
    """Whether a refused mount may succeed later, here or elsewhere."""
    return error.retriable or isinstance(error, errors.GenerationMismatch)


def not_sent(partition_id: PartitionId, timeout_ms: int, trouble: str) -> errors.Unreachable:
    """Return the error of a parcel that never left: a definite no."""
    return errors.Unreachable(
        f"partition {partition_id}: not sent within {timeout_ms} ms ({trouble}); "
        "it is not in the log"
    )


def unknown(pending: Pending, when: str, trouble: str) -> errors.OutcomeUnknown:
    """Return the error of a parcel that nobody can settle any more."""
    return errors.OutcomeUnknown(
        f"partition {pending.req_id.partition_id}: the outcome of {pending.parcel.row_count} rows "
        f"from request {tuple(pending.req_id)} on could not be settled {when} ({trouble}); "
        f"if they are in the log, then after transaction {pending.mark_before}"
    )
