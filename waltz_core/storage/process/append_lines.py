"""The DEBUG log line of each append that a storage has synced to its disk."""

import logging

from waltz_core.storage.service.work import Work, WorkResult
from waltz_core.wire.append_ids import request_ids_text
from waltz_core.wire.messages import Appended, AppendRaw

_log = logging.getLogger(__name__)


def log_synced_appends(work: Work, result: WorkResult) -> None:
    """Log the appends of a piece of work, with the request IDs that clients and servers log."""
    if not work.is_append or not _log.isEnabledFor(logging.DEBUG):
        return
    for request, answer in zip(work.requests, result.outcomes, strict=False):
        append = request.message
        if isinstance(append, AppendRaw) and isinstance(answer, Appended):
            _log.debug(
                "storage.append_synced partition=%d first=%d last=%d sync_ms=%.1f requests=%s",
                append.partition_id,
                append.first,
                append.lineage[-1].last,
                1_000 * (result.sync_s or 0),
                request_ids_text(append),
            )
