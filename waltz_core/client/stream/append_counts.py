"""Counts of the appends of one partition of a client, for its metrics.

Rules:
    1. The counts only increase. The client's loop changes the counts; any thread may read them.
    2. Most clients export no metrics, so counting must be cheap: the rows of a submission are
       counted together, with the time of the first row.
"""

from bisect import bisect_left

from waltz_core import errors
from waltz_core.wire.messages import RowOutcomeCode

# Equal to SECONDS_BUCKETS of the metrics. To import the metrics costs more than a short Spark task.
LATENCY_BUCKETS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class AppendCounts:
    """Counts of committed, rejected and repeated transactions, and the times to commit."""

    __slots__ = ("bucket_counts", "committed", "latency_s_sum", "rejected", "retried")

    def __init__(self) -> None:
        self.committed = 0
        self.retried = 0
        self.rejected: dict[str, int] = {}
        self.bucket_counts = [0] * (len(LATENCY_BUCKETS_S) + 1)  # the last one has no limit
        self.latency_s_sum = 0.0

    def count_outcomes(self, reasons: bytes, took_s: float) -> None:
        """Count outcomes; `reasons` has a `RowOutcomeCode` for each row."""
        committed = reasons.count(RowOutcomeCode.COMMITTED)
        if committed:
            self.committed += committed
            self.latency_s_sum += committed * took_s
            self.bucket_counts[bisect_left(LATENCY_BUCKETS_S, took_s)] += committed
        if committed < len(reasons):
            for code in set(reasons) - {int(RowOutcomeCode.COMMITTED)}:
                self._count_rejected(RowOutcomeCode(code).name.lower(), reasons.count(code))

    def count_error(self, error: errors.WaltzError, row_count: int) -> None:
        """Count rows that have ended with an error instead of an outcome."""
        match error:
            case errors.OutcomeUnknown():
                self._count_rejected("unknown", row_count)
            case errors.TooLarge():
                self._count_rejected("too_large", row_count)
            case _:
                self._count_rejected("failed", row_count)

    def add(self, other: "AppendCounts") -> None:
        """Add the counts of another client."""
        self.committed += other.committed
        self.retried += other.retried
        self.latency_s_sum += other.latency_s_sum
        for reason, row_count in dict(other.rejected).items():
            self._count_rejected(reason, row_count)
        pairs = zip(self.bucket_counts, other.bucket_counts, strict=True)
        self.bucket_counts = [own_count + other_count for own_count, other_count in pairs]

    def _count_rejected(self, reason: str, row_count: int) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + row_count
