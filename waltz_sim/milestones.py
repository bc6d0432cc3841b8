"""Milestones: the events of a world that a scenario lists, as short lines.

The lines depend neither on times nor on randomness, nor on the order in which equal machines
answer. If they did, a scenario would change with every change of the code. This module defines
which events are milestones, and their texts.

Rules:
    1. Milestones are visible from outside the machines: actions of replicas, contents of ZooKeeper,
       effects of the store, outcomes for applications, and reports of machines.
    2. The actions of single replicas between two milestones of the partition are listed together,
       in the order of the replicas' names. The order in which they occurred does not matter.
    3. Storages are called A to E, and servers S to U. IDs that depend on timing get names: h1 is
       the first such ID in the scenario. The same ID always has the same name.
    4. A log with the IDs 0 to 9 is written as "0..9", and an empty log as "nothing".
    5. If a line occurs again within the same session and the same step, it is not listed again,
       because a rejected machine retries forever.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from waltz_core.client.stream import stream_events as client_events
from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.errors import OutcomeUnknown, WaltzError
from waltz_core.machine import Report
from waltz_core.records.record import NO_SESSION, ReplicaId
from waltz_core.replication import session_events
from waltz_core.wire.messages import (
    AppendRaw,
    AppendResult,
    Prepare,
    Repair,
    RowOutcomeCode,
    SetLowWaterMark,
    Truncate,
)
from waltz_sim.cluster.checkers import Checks
from waltz_sim.world.network import NEAR

if TYPE_CHECKING:
    from waltz_core.replication.partition_store import PartitionStore
    from waltz_core.server.partition_events import SendToClient
    from waltz_core.storage.service.work import Work, WorkResult
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.guarantees.replica_guarantees import LogStateBeforeWork

_NAME_PATTERN: Final = re.compile(r"storage(\d):1|server(\d)")
_CHAIN_PATTERN: Final = re.compile(r"\b[0-9a-f]{32}\b")
# Actions of single replicas (rule 2), each with the word before its IDs.
_WORD_BEFORE_IDS: Final = {
    "fenced": "with",
    "truncated": "to",
    "copied": "",
    "repaired": "",
    "marked": "at",
}
_METADATA_PREFIX: Final = "ZooKeeper has"
# Reports that are milestones. All other reports have consequences that are milestones.
_TEXT_BY_REPORT: Final[dict[str, str]] = {
    "replica.untrusted": "{replica} is not trusted",
    "replica.rejected": "{replica} is rejected: {reason}",
    "replica.source_unusable": "{replica} cannot supply records to {target}: {reason}",
    "replica.repair_rejected": "{replica} rejects the repair: {reason}",
    "session.abandoned": "session {session} is abandoned: {reason}",
    "coordinator.unavailable": "ZooKeeper does not answer",
    "partition.open_failed": "rejected: {reason}",
    "partition.data_loss": "stopped: {reason}",
}


def use_scenario_names(text: str) -> str:
    """Replace the names of storages and servers in a text by their scenario names (rule 3)."""

    def name(found: re.Match[str]) -> str:
        storage, server = found.groups()
        return "ABCDE"[int(storage)] if storage is not None else "STU"[int(server)]

    return _CHAIN_PATTERN.sub("...", _NAME_PATTERN.sub(name, text))


class MilestoneRecorder(Checks):
    """The checkers of a world, which also record the milestones as lines."""

    def __init__(self, cluster: "SimCluster") -> None:
        super().__init__(cluster)
        self.lines: list[str] = []
        self.last_added_us = 0  # when the last milestone or outcome of an application occurred
        # Called when a milestone occurs, for example with "copied C". The line of the milestone may
        # be added later.
        self.on_milestone: Callable[[str], None] = lambda _: None
        self.names_ids = False  # rule 3
        self._ids: dict[int, str] = {}
        self._keys_added_once: dict[object, None] = {}  # rule 5
        self._replica_actions: dict[str, list[tuple[str, int, int]]] = {}  # by replica
        self._outcomes: dict[str, list[int]] = {}

    # ---- lines

    def take_lines(self) -> list[str]:
        """Return the lines of all milestones since the last call."""
        self._add_replica_actions()
        if not self.names_ids:
            self._add_outcomes()
        lines, self.lines = self.lines, []
        self._keys_added_once.clear()
        return lines

    def add_milestone(self, text: str) -> None:
        """Record a milestone of the partition."""
        line = use_scenario_names(text)
        if self._is_new(line):
            self._add_replica_actions()
            self.lines.append(line)
        self.on_milestone(line)

    def _add_records(self, verb: str, replica: str, first: int, last: int) -> None:
        """Record an action of one replica on the IDs first..last (rule 2)."""
        name = use_scenario_names(replica)
        if self._is_new((verb, name, first, last)):
            actions = self._replica_actions.setdefault(name, [])
            if actions and actions[-1][0] == verb and actions[-1][2] + 1 == first > 0:
                first = actions.pop()[1]
            actions.append((verb, first, last))
        self.on_milestone(f"{verb} {name}")

    def _is_new(self, key: object) -> bool:
        """Return whether a line is new in this session and this step; remember it (rule 5)."""
        if key in self._keys_added_once:
            return False
        self._keys_added_once[key] = None
        self.last_added_us = self.world.now_us
        return True

    def _add_replica_actions(self) -> None:
        collected, self._replica_actions = self._replica_actions, {}
        by_deeds: dict[str, list[str]] = {}
        for name, actions in sorted(collected.items()):
            parts = [
                f"{verb} {_WORD_BEFORE_IDS[verb]} {self.format_ids(*ids)}" for verb, *ids in actions
            ]
            text = ", ".join(" ".join(part.split()) for part in parts)
            by_deeds.setdefault(text, []).append(name)
        self.lines += [f"{' '.join(names)}: {text}" for text, names in by_deeds.items()]

    def format_ids(self, first: int, last: int) -> str:
        """Format the IDs first..last (rules 3 and 4)."""
        if last < first:
            return "nothing"
        if first == last:
            return self._format_id(first)
        return f"{self._format_id(first)}..{self._format_id(last)}"

    def _format_id(self, number: int) -> str:
        if not self.names_ids or number == 0:
            return self._ids.get(number, str(number))
        return self._ids.setdefault(number, f"h{len(self._ids) + 1}")

    def _add_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, {}
        for outcome, ids in sorted(outcomes.items()):
            if outcome == "in the log":
                spans = _group_ids(sorted(ids))
                self.lines.append(
                    f"reported: {', '.join(self.format_ids(*ids) for ids in spans)} {outcome}"
                )
            else:
                self.lines.append(f"reported: {len(ids)} {outcome}")

    def add_write_outcomes(self, *, is_complete: bool) -> None:
        """Record the outcomes of continuous writes in one line."""
        outcomes, self._outcomes = self._outcomes, {}
        bad = sorted(outcome for outcome in outcomes if outcome not in {"in the log", "LOST"})
        if bad or not is_complete:
            self.add_milestone(f"reported: {', '.join(bad) or 'nothing'} for some rows")
        else:
            self.add_milestone("reported: all rows are in the log, each once")

    # ---- replicas

    def on_work_done(
        self,
        storage: "SimStorage",
        work: "Work",
        result: "WorkResult",
        before: "LogStateBeforeWork",
    ) -> None:
        """Record actions of a replica; the appends of an engaged replica are no milestones."""
        super().on_work_done(storage, work, result, before)
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            if isinstance(outcome, WaltzError):
                continue
            match request.message:
                case Prepare():
                    self._add_records("fenced", storage.name, 0, work.log.synced_max)
                case Truncate(last_to_keep=last):
                    self._add_records("truncated", storage.name, 0, last)
                case Repair(first=first, lengths=lengths):
                    self._add_records(
                        "repaired", storage.name, first, first + len(lengths) // 4 - 1
                    )
                case SetLowWaterMark(mark=mark):
                    self._add_records("marked", storage.name, 0, mark)
                case AppendRaw() as message if not self._is_engaged(storage.name, message):
                    lineage = message.lineage
                    self._add_records("copied", storage.name, lineage[0].first, lineage[-1].last)
                case _:
                    pass

    def _is_engaged(self, name: str, message: AppendRaw) -> bool:
        metadata = self.cluster.coordinator.metadata
        state = None if metadata is None else metadata.states.get(ReplicaId(name))
        return state is not None and state[1] == UNRESOLVED and state[0] == message.session_id

    def on_storage_open_failed(self, storage: "SimStorage", error: WaltzError) -> None:
        """Record that a storage does not open."""
        super().on_storage_open_failed(storage, error)
        self.add_milestone(f"{storage.name} does not open: {error}")

    # ---- ZooKeeper

    def on_metadata_written(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """Record a change of the replica states; `on_report` records the claim of a session."""
        super().on_metadata_written(server, before, after, marker)
        if after.session_id != before.session_id:
            return
        session = after.session_id
        already = [name for name, state in before.states.items() if state == (session, UNRESOLVED)]
        now = [name for name, state in after.states.items() if state == (session, UNRESOLVED)]
        if already:
            joined = [use_scenario_names(name) for name in now if name not in already]
            self.add_milestone(
                f"{_METADATA_PREFIX} {' '.join(sorted(joined))} in session {session}, too"
            )
            return
        parts = [f"{' '.join(sorted(map(use_scenario_names, now)))} in session {session}"]
        parts += [
            self._format_closed_replica(use_scenario_names(name), state)
            for name, state in sorted(after.states.items())
            if name not in now
        ]
        self.add_milestone(f"{_METADATA_PREFIX} {', '.join(parts)}")

    def _format_closed_replica(self, name: str, state: ReplicaState) -> str:
        last = state.closing_high_water_mark
        if state.session_id == NO_SESSION:
            return f"{name} new with {self.format_ids(0, last)} to copy"
        return f"{name} left behind in session {state.session_id} with {self.format_ids(0, last)}"

    # ---- servers

    def on_report(self, name: str, report: Report) -> None:
        """Record the reports that are milestones."""
        super().on_report(name, report)
        fields = dict(report.fields)
        match report.name:
            case "session.claimed":
                self._keys_added_once.clear()
                origin = str(fields["origin"])
                how_claimed = "" if origin == "RECORDED" else f", the partition is {origin.lower()}"
                self.add_milestone(f"{name} claims session {fields['session']}{how_claimed}")
            case "recovery.decided":
                mark = fields["mark"]
                assert isinstance(mark, int)
                untrusted = self._format_untrusted_replicas(fields["untrusted"])
                self.add_milestone(f"decided: {self.format_ids(0, mark)} {untrusted}")
            case "recovery.waiting":
                self.add_milestone(
                    f"undecidable {self._format_untrusted_replicas(fields['untrusted'])}"
                )
            case known if known in _TEXT_BY_REPORT:
                self.add_milestone(_TEXT_BY_REPORT[known].format(**fields))
            case _:
                pass

    def _format_untrusted_replicas(self, unknown: object) -> str:
        assert isinstance(unknown, tuple)
        names = sorted(map(use_scenario_names, unknown))
        return f"without {' '.join(names)}" if names else "by all"

    def on_store_stepped(
        self, server: "SimServer", store: "PartitionStore", effects: Sequence[session_events.Effect]
    ) -> None:
        """Record the effects of the store that are milestones."""
        super().on_store_stepped(server, store, effects)
        for effect in effects:
            match effect:
                case session_events.SessionOpened(session_id=session, high_water_mark=mark):
                    self.add_milestone(
                        f"{server.name} opens session {session} with {self.format_ids(0, mark)}"
                    )
                case session_events.SessionClosed(session_id=session, reason=reason):
                    self.add_milestone(f"session {session} ends: {reason}")
                case session_events.SessionSettled():
                    self._add_settled_session(store, effect)
                case session_events.OwnershipReleased(reason=reason):
                    self.add_milestone(f"{server.name} releases the partition: {reason}")
                case _:
                    pass

    def _add_settled_session(
        self, store: "PartitionStore", effect: session_events.SessionSettled
    ) -> None:
        assert store.session is not None
        range_in_doubt = store.session.claim.in_doubt
        if range_in_doubt is None:
            return
        first, last = range_in_doubt.committed + 1, range_in_doubt.last
        committed_ids = self.format_ids(first, min(effect.committed_last, last))
        self.add_milestone(f"in doubt: {self.format_ids(first, last)}; in the log: {committed_ids}")

    def on_sent_to_client(self, server: "SimServer", answer: "SendToClient") -> None:
        """Record an outcome that is sent to an abandoned link."""
        super().on_sent_to_client(server, answer)
        link, message = self.cluster.network.links.get(answer.connection), answer.message
        if link is None or link.is_open[NEAR] or not isinstance(message, AppendResult):
            return
        reported = {_outcome_text(reason) for reason in bytes(message.reasons)}
        self.add_milestone(
            f"{server.name} reports over the abandoned link: {', '.join(sorted(reported))}"
        )

    # ---- applications

    def on_submission_settled(
        self, client: "SimClient", effect: client_events.SubmissionSettled
    ) -> None:
        """Record the outcome of each row that an application has received."""
        super().on_submission_settled(client, effect)
        outcome = effect.outcome
        ids, reasons = outcome.transaction_ids.tolist(), outcome.reasons.tolist()
        for number, reason in zip(ids, reasons, strict=True):
            outcome_text = _outcome_text(reason)
            self._outcomes.setdefault(outcome_text, []).append(number)

    def on_submission_rejected(
        self, client: "SimClient", effect: client_events.SubmissionRejected
    ) -> None:
        """Record the rows of a rejected submission as unknown or not sent."""
        super().on_submission_rejected(client, effect)
        outcome_text = "unknown" if isinstance(effect.error, OutcomeUnknown) else "not sent"
        count = len(self.cluster.workload.operations_of(effect.token))
        self._outcomes.setdefault(outcome_text, []).extend([-1] * count)


def _outcome_text(reason: int) -> str:
    return "in the log" if reason == RowOutcomeCode.COMMITTED else RowOutcomeCode(reason).name


def _group_ids(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Group sorted IDs into ranges (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and runs[-1][1] + 1 == number:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
