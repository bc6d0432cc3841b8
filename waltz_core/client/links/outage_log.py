"""Logs an outage that continues: soon after it began, then once in `LOG_INTERVAL_S` seconds.

A feed tries again until the outage ends. An operator must see the outage, without a log line for
every attempt. The stream, the catch-up and the applier of a feed each report an outage separately.
"""

import asyncio
import logging

from waltz_core.records.record import PartitionId

_log = logging.getLogger(__name__)

# A moving partition has no server for some seconds; such a short outage is not logged.
LOG_AFTER_S = 10.0
LOG_INTERVAL_S = 60.0


class OutageLog:
    """The outages of one part of a partition's feed; `operation` names this part in log lines.

    An outage is logged only after `log_after_s` seconds. 0 is for a caller that has already tried
    for a long time.
    """

    def __init__(
        self, partition_id: PartitionId, operation: str, *, log_after_s: float = 0.0
    ) -> None:
        self._partition_id = partition_id
        self._operation = operation
        self._log_after_s = log_after_s
        self._since_s: float | None = None
        self._logged_s: float | None = None

    def note_failure(self, reason: object) -> None:
        """Note that another attempt has failed; log the outage if a log line is due."""
        now_s = asyncio.get_running_loop().time()
        if self._since_s is None:
            self._since_s = now_s
        lasts_s = now_s - self._since_s
        if lasts_s < self._log_after_s:
            return
        if self._logged_s is not None and now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        _log.warning(
            "feed.waiting partition=%d for=%s waited_s=%.0f reason=%s",
            self._partition_id,
            self._operation,
            lasts_s,
            reason,
        )

    def note_success(self) -> None:
        """Note that an attempt has succeeded; log the end of an outage that was logged."""
        if self._logged_s is not None:
            _log.info(
                "feed.resumed partition=%d waited_for=%s", self._partition_id, self._operation
            )
        self._since_s = self._logged_s = None
