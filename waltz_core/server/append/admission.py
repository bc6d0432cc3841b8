"""Checks an append when it leaves its lane: mount, generation, size, checksum, format.

These checks come before the validation of locks. The checks implement rules 1 and 4 of
`pipeline.py`: when a client mounts again, the appends of its older mount are rejected.
"""

from waltz_core.errors import WaltzError
from waltz_core.records.record import TRANSACTION_BYTES_MAX, Generation
from waltz_core.server.append.completions import Completions
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import AppendOutcome
from waltz_core.server.locking.pending_appends import PendingAppend, PendingBatch, PendingSingle
from waltz_core.server.locking.validation import decode_batch, verify_data
from waltz_core.server.partition_events import PartitionLimits
from waltz_core.wire.messages import RowOutcomeCode


class Admission:
    """Admits an append to validation, or rejects it with the reason."""

    def __init__(self, limits: PartitionLimits, mounts: Mounts, completions: Completions) -> None:
        self._limits = limits
        self._mounts = mounts
        self._completions = completions
        self.generation = Generation(-1)  # the generation of the open session

    def invalid_mount_code(self, pending: PendingAppend) -> RowOutcomeCode | None:
        """Return why an append's mount or generation is no longer valid; None if they are valid."""
        req_id = pending.req_id
        if not self._mounts.is_ready(req_id.client_id, pending.connection):
            return RowOutcomeCode.NOT_MOUNTED
        if pending.mount != self._mounts.mount_number(req_id.client_id, pending.connection):
            return RowOutcomeCode.NOT_MOUNTED
        if req_id.generation != self.generation:
            return RowOutcomeCode.GENERATION
        return None

    def try_admit(self, pending: PendingSingle, out: list[AppendOutcome]) -> bool:
        """Check a single append. If the append may not be validated, answer it and return False."""
        message = pending.message
        reason = self.invalid_mount_code(pending)
        if reason is None and len(message.data) > TRANSACTION_BYTES_MAX:
            reason = RowOutcomeCode.TOO_LARGE
        if reason is not None:
            self.reject(pending, reason, out)
            return False
        try:
            verify_data(message)
        except WaltzError as error:
            self._completions.answer_error(pending, error, out)
            return False
        return True

    def try_decode(self, pending: PendingBatch, out: list[AppendOutcome]) -> bool:
        """Decode a batch, unless it was decoded; answer an invalid batch and return False."""
        if pending.message is not None:
            try:
                pending.open(decode_batch(pending.message, self._limits))
            except WaltzError as error:
                pending.message = None
                self._completions.answer_error(pending, error, out)
                return False
        return True

    def reject(
        self, pending: PendingAppend, reason: RowOutcomeCode, out: list[AppendOutcome]
    ) -> None:
        """Reject and answer an append: all rows that have not been validated."""
        if isinstance(pending, PendingBatch) and not self.try_decode(pending, out):
            return
        pending.reject(reason)
        self._completions.answer_final(pending, out)
