"""Tells of an outage that goes on: soon after it began, and then now and then.

A feed lives through any outage by trying again, and a person must hear of it without a line for
every try. Stream, catch-up and applier each see another part of it.
"""

import asyncio
import logging

from waltz_core.records.record import PartitionId

_log = logging.getLogger(__name__)

# A server that moves is away for some seconds; that is nobody's business.
QUIET_S = 10.0
AGAIN_S = 60.0


class Outage:
    """One part of a partition's feed; `what` says which, in the log.

    `quiet_s` is how long an outage may last before it is told of: 0 where whoever reports it has
    tried for long already.
    """

    def __init__(self, partition_id: PartitionId, what: str, *, quiet_s: float = 0.0) -> None:
        self._partition_id = partition_id
        self._what = what
        self._quiet_s = quiet_s
        self._since_s: float | None = None
        self._told_s: float | None = None

    def goes_on(self, reason: object) -> None:
        """Another try has failed."""
        now_s = asyncio.get_running_loop().time()
        if self._since_s is None:
            self._since_s = now_s
        lasts_s = now_s - self._since_s
        if lasts_s < self._quiet_s:
            return
        if self._told_s is not None and now_s - self._told_s < AGAIN_S:
            return
        self._told_s = now_s
        _log.warning(
            "feed.waits partition=%d for=%s since_s=%.0f reason=%s",
            self._partition_id,
            self._what,
            lasts_s,
            reason,
        )

    def is_over(self) -> None:
        """It works again, or has worked all the time."""
        if self._told_s is not None:
            _log.info("feed.goes_on partition=%d with=%s", self._partition_id, self._what)
        self._since_s = self._told_s = None
