"""Mutants of the client. Each mutant breaks one rule."""

from tests.sim.switches import Patches, do_nothing, replaced, switch
from waltz_core.client.stream import append_errors, partition_stream
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.client.stream.outbox import WaitingSubmission
from waltz_core.client.stream.outcome_tracker import OutcomeTracker
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.errors import OutcomeUnknown
from waltz_core.wire.messages import RowOutcomeCode


@switch
def doubt_settled_as_failed() -> Patches:
    """After a mount, a client reports appends in doubt as failed without checking the log."""
    yield replaced(OutcomeTracker, "unresolved_range", do_nothing)


@switch
def unknown_outcome_is_a_rejection() -> Patches:
    """A client treats an unknown outcome as a rejection."""
    original = append_errors.outcome_code_of

    def reason_of(error):
        return RowOutcomeCode.LOST if isinstance(error, OutcomeUnknown) else original(error)

    yield replaced(append_errors, "outcome_code_of", reason_of)


@switch
def broken_link_is_a_rejection() -> Patches:
    """A client treats appends as not sent if their connection breaks."""
    original = PartitionStream._leave_link

    def _leave_link(self, reason, now_ms, out):
        for pending in list(self._tracker):
            self._tracker.remove(pending)
            error = append_errors.not_sent_error(self._partition_id, 0, reason, 0)
            out.append(partition_stream.SubmissionRejected(pending.submission.token, error))
        original(self, reason, now_ms, out)

    yield replaced(PartitionStream, "_leave_link", _leave_link)


@switch
def sequence_numbers_used_again() -> Patches:
    """After each mount a client restarts its sequence numbers."""
    original = PartitionStream._on_mount_succeeded

    def _mounted(self, message, now_ms, out):
        if not len(self._tracker):
            self.next_sequence = 1
            self._tracker._last_sequence = 0
        original(self, message, now_ms, out)

    yield replaced(PartitionStream, "_on_mount_succeeded", _mounted)


@switch
def appends_sent_again_on_a_new_link() -> Patches:
    """After a mount, a client sends appends in doubt again, with new sequence numbers."""
    original = PartitionStream._on_mount_succeeded

    def _mounted(self, message, now_ms, out):
        for pending in list(self._tracker):
            self._tracker.remove(pending)
            self._outbox._waiting.appendleft(
                WaitingSubmission(pending.submission, pending.deadline_ms)
            )
        original(self, message, now_ms, out)

    yield replaced(PartitionStream, "_on_mount_succeeded", _mounted)


@switch
def avoided_link_mounted_again() -> Patches:
    """A client mounts again on a link on which an append was never answered."""
    original = PartitionStream._open_link

    def _open_link(self, out):
        original(self, out)
        self._avoided_links.clear()
        out[-1] = partition_stream.OpenLink(self.attempt, ())

    yield replaced(PartitionStream, "_open_link", _open_link)


@switch
def log_mark_claimed_while_unsubscribed() -> Patches:
    """After an unsubscription, a context claims the log's mark although its view is older."""
    is_subscribed = property(lambda self: self._applier is not None)
    mark = property(
        lambda self: self.stream.high_water_mark if self._applier is None else self._applied_mark
    )
    yield replaced(ClientPartition, "has_view", is_subscribed)
    yield replaced(ClientPartition, "mark", mark)
