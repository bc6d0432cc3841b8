"""`waltz-core cluster accept-replicas | rebuild-metadata`: recover a cluster from storages' logs.

Normally a quorum of replicas determines the log of a partition. These commands instead choose the
log of one replica; `cluster/change/rebuilding.py` contains the rules. This module queries the
storages, reports to the user, and writes to ZooKeeper.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import click

from waltz_core.access.permissions import Permissions
from waltz_core.administration.change_run import ChangeResult, now_ms
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import new_client_key
from waltz_core.cli.access.access_export import describe_permissions, read_export
from waltz_core.cli.archive.archive_status import archive_option
from waltz_core.cli.change_commands import ChangeCommand, change_command, user_and_host
from waltz_core.cli.cluster.archive_recovery import (
    ArchiveRecovery,
    RecoveredLog,
    reported_archive_url,
)
from waltz_core.cli.output import print_table
from waltz_core.cli.storage.owner_connection import (
    ClaimedSession,
    ExpectedCluster,
    OwnerConnection,
    open_connections,
    reported_log,
)
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change import rebuilding
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.change.rebuilding import NO_IDS, MaximumIds, RebuildDecision, ReportedLog
from waltz_core.cluster.change.replica_steps import ReplicaPlan, fill_up_replicas
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.coordinator import Coordinator, PartitionView
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaAssignments,
)
from waltz_core.errors import (
    BadConfig,
    BadRequest,
    CoordinatorConflict,
    Damaged,
    SessionFenced,
    Unavailable,
    UnknownPartition,
    WaltzError,
)
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    ClientId,
    Generation,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.wire.messages import Nack, Prepared

ATTEMPTS_MAX = 10
POLL_INTERVAL_S = 0.2
NONCE_BYTES = 16


# --- accept-replicas


@dataclass(slots=True)
class _ReplicaAnswers:
    """The answers of one partition's replicas, in a store session that the command has claimed."""

    session: ClaimedSession
    partition_view: PartitionView
    prepared: dict[ReplicaId, Prepared]
    connections: dict[ReplicaId, OwnerConnection]
    errors: dict[ReplicaId, str]
    is_zookeeper_rolled_back: bool  # a replica has a later session than ZooKeeper

    @property
    def logs(self) -> dict[ReplicaId, ReportedLog]:
        return {replica: reported_log(answer) for replica, answer in self.prepared.items()}

    def close(self) -> None:
        for link in self.connections.values():
            link.close()


@subcommand
@options.argument(
    "partition",
    "PARTITION",
    "a partition that has no quorum of replicas with a trusted log",
    type=int,
)
@click.option(
    "--replica",
    metavar="HOST:PORT",
    help="the replica whose log to accept, by the address of its storage [default: the one with "
    "the most transactions]",
)
@archive_option
@click.option(
    "--yes", is_flag=True, help="accept the log; without --yes, only show what could be lost"
)
@change_command()
async def accept_replicas(
    command: ChangeCommand, *, partition: int, replica: str | None, archive: str | None, yes: bool
) -> ChangeResult:
    """Make one replica's log the log of a partition that has no trusted quorum."""
    coordinator = command.coordinator
    cluster = await coordinator.read_cluster()
    partition_id = PartitionId(partition)
    if not 0 <= partition_id < cluster.params.partition_count:
        raise BadConfig(
            "argument PARTITION: expected a partition in "
            f"0..{cluster.params.partition_count - 1}, found {partition_id}"
        )
    expected = ExpectedCluster(cluster.store.cluster_key.bytes, cluster.params.partition_count)
    newest = NO_SESSION
    for _ in range(ATTEMPTS_MAX):
        command.report_wait(f"the replicas of partition {partition_id}")
        try:
            answers = await _query_replicas(coordinator, partition_id, expected, newest)
            try:
                return await _choose_and_declare_log(
                    command, partition_id, answers, (replica, archive, yes)
                )
            finally:
                answers.close()
        except SessionFenced as fenced:
            newest = SessionId(max(newest, fenced.promised))
        except CoordinatorConflict:
            pass  # the partition's server has claimed a session at the same time: repeat
    raise Unavailable(
        f"partition {partition_id}: its server began a new store session during each of "
        f"{ATTEMPTS_MAX} attempts. Hint: run the command again."
    )


async def _query_replicas(
    coordinator: Coordinator,
    partition_id: PartitionId,
    expected: ExpectedCluster,
    newest: SessionId,
) -> _ReplicaAnswers:
    """Claim a session after `newest`, as an owner does, and query every replica in this session."""
    view = await coordinator.read_partition(partition_id)
    metadata, marker = view.metadata, view.marker
    if metadata is None or marker is None or not metadata.states:
        raise BadRequest(
            f"ZooKeeper records no replica of partition {partition_id}: the partition was "
            "never opened, or ZooKeeper's data was lost. Hint: if the data was lost, run "
            "`cluster rebuild-metadata`."
        )
    assigned = (await coordinator.read_replica_assignment()).replicas_of(partition_id)
    members = tuple(dict.fromkeys([*assigned, *metadata.states]))
    links, unanswered = await open_connections(members, expected)
    session_id = SessionId(max(metadata.session_id, newest) + 1)
    session = ClaimedSession(session_id, secrets.token_bytes(NONCE_BYTES))
    claimed = replace(metadata, session_id=session_id)
    marker = replace(marker, session_id=session_id, nonce=session.nonce)
    answers_by_replica: dict[ReplicaId, Prepared] = {}
    try:
        versions = await coordinator.write_partition(partition_id, claimed, marker, view.versions)
        for address, link in links.items():
            answer = (await link.prepare({partition_id: session}))[partition_id]
            if isinstance(answer, Prepared):
                answers_by_replica[address] = answer
            else:
                _check_not_fenced(address, answer, session_id)
                unanswered[address] = answer.message
    except BaseException:
        for link in links.values():
            link.close()
        raise
    after = PartitionView(claimed, versions.metadata, marker, versions.marker)
    return _ReplicaAnswers(
        session, after, answers_by_replica, links, unanswered, newest > metadata.session_id
    )


def _check_not_fenced(address: ReplicaId, answer: Nack, session_id: SessionId) -> None:
    if answer.promised >= session_id:
        raise SessionFenced(f"{address}: {answer.message}", answer.promised)


async def _choose_and_declare_log(
    command: ChangeCommand,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    requested_options: tuple[str | None, str | None, bool],
) -> ChangeResult:
    """Choose a log and show the possible losses; with `--yes`, make it the partition's log."""
    logs, (replica, archive, is_accepted) = answers.logs, requested_options
    chosen_replica = _choose_replica(replica, partition_id, logs)
    possible_losses = rebuilding.describe_missing_in_chosen(logs[chosen_replica], logs)
    possible_losses += [
        f"{each} did not answer: {reason.removeprefix(f'{each}: ')}"
        for each, reason in answers.errors.items()
    ]
    result: dict[str, object] = {
        "partition": partition_id,
        "chosen": chosen_replica,
        "replicas": {each: log.to_json() for each, log in logs.items()},
        "unanswered": answers.errors,
        "may_be_lost": possible_losses,
        "accepted": is_accepted,
    }
    if not command.as_json:
        _show_replicas(logs, answers.errors)
    for each in possible_losses:
        command.note_step(each)
    if not is_accepted:
        return {
            **result,
            "summary": f"nothing was changed. Hint: add --yes to make the log of {chosen_replica} "
            f"the log of partition {partition_id}. Records that only other replicas have are then "
            "lost.",
        }
    _check_is_needed(partition_id, answers)
    archived = await _find_archived_mark(command, partition_id, answers, (chosen_replica, archive))
    members = await _declare_chosen_log(command, partition_id, answers, chosen_replica, archived)
    return {
        **result,
        "summary": f"the log of {chosen_replica}, transactions "
        f"0..{logs[chosen_replica].last_synced_id}, is now "
        f"the log of partition {partition_id}; its replicas are {', '.join(members)}",
    }


def _check_is_needed(partition_id: PartitionId, answers: _ReplicaAnswers) -> None:
    """Raise BadRequest if the partition's server can open a session without this command."""
    metadata, marker = answers.partition_view.metadata, answers.partition_view.marker
    assert metadata is not None
    if answers.is_zookeeper_rolled_back or rebuilding.is_undecided(metadata, marker):
        return
    trusted = [
        replica
        for replica, log in answers.logs.items()
        if replica in metadata.states and not log.is_suspect and not log.is_damaged
    ]
    count = len(metadata.states)
    quorum = count // 2 + 1
    if len(trusted) >= quorum:
        raise BadRequest(
            f"nothing was changed: partition {partition_id} does not need the command, "
            f"because {len(trusted)} of {count} replicas have a trusted log "
            f"({', '.join(trusted)}), and {quorum} suffice. Hint: its server opens a store "
            "session by itself; `waltz-core doctor` reports if it cannot."
        )


def _choose_replica(
    requested_replica: str | None, partition_id: PartitionId, logs: Mapping[ReplicaId, ReportedLog]
) -> ReplicaId:
    if not logs:
        raise Unavailable(
            f"partition {partition_id}: no replica answers. Hint: start a storage with a replica."
        )
    if requested_replica is None:
        return max(logs, key=lambda each: _log_sort_key(logs[each]))
    if requested_replica not in logs:
        raise BadConfig(
            f"storage {requested_replica} did not answer as a replica of partition {partition_id}"
        )
    return ReplicaId(requested_replica)


def _log_sort_key(log: ReportedLog) -> tuple[bool, int, int, bool]:
    """Return a sort key: undamaged logs first, then logs with more data, then trusted logs."""
    return not log.is_damaged, *log.rank, not log.is_suspect


def _show_replicas(
    logs: Mapping[ReplicaId, ReportedLog], unanswered: Mapping[ReplicaId, str]
) -> None:
    rows: list[tuple[object, ...]] = [
        (
            replica,
            log.last_session,
            log.last_synced_id,
            "suspect" if log.is_suspect else "damaged" if log.is_damaged else "-",
        )
        for replica, log in logs.items()
    ]
    rows += [(replica, "-", "-", "no answer") for replica in unanswered]
    print_table(("replica", "last session", "last ID", "problem"), rows)


async def _find_archived_mark(
    command: ChangeCommand,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    replica_and_url: tuple[ReplicaId, str | None],
) -> ArchivedMark | None:
    """Return the archived mark from ZooKeeper or, during a rebuilding, from the archive."""
    marker, (chosen_replica, url) = answers.partition_view.marker, replica_and_url
    assert marker is not None
    if not rebuilding.is_undecided(answers.partition_view.metadata, marker):
        return marker.archived
    cluster_key = (await command.coordinator.read_cluster()).store.cluster_key
    recovery = await _open_archive(command, url, cluster_key)
    link = answers.connections[chosen_replica]
    log = _recovered_log(partition_id, answers.session, link, answers.prepared)
    return await recovery.find_archived_mark(log)


async def _declare_chosen_log(
    command: ChangeCommand,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    chosen_replica: ReplicaId,
    archived: ArchivedMark | None,
) -> tuple[ReplicaId, ...]:
    """Make one replica's log the log of the partition; other replicas copy missing records."""
    session_id, logs = answers.session.session_id, answers.logs
    ranked_replicas = sorted(logs, key=lambda member: logs[member].rank, reverse=True)
    members = (chosen_replica, *(member for member in ranked_replicas if member != chosen_replica))
    decision = RebuildDecision(
        partition_id, chosen_replica, logs[chosen_replica], members
    ).with_log_session(session_id)
    metadata = answers.partition_view.metadata
    assert metadata is not None
    operations = _CommandOperations(command.coordinator, decision, answers, archived)
    await rebuilding.declare_log(decision.metadata(metadata.generation, session_id), operations)
    command.note_step(f"partition {partition_id}: the log of {chosen_replica} is accepted")
    layout = await command.coordinator.storages.read_layout()
    await command.carry_out_plan(
        ReplicaPlan.for_placement({partition_id: members}, layout.assignment)
    )
    return members


@dataclass(frozen=True, slots=True)
class _CommandOperations:
    """The operations that `rebuilding.declare_log` needs (`rebuilding.RebuildOperations`)."""

    coordinator: Coordinator
    decision: RebuildDecision
    answers: _ReplicaAnswers
    archived: ArchivedMark | None

    async def write_metadata(self, metadata: PartitionMetadata) -> None:
        """Write the metadata and the marker of the partition to ZooKeeper."""
        await self.coordinator.write_partition(
            self.decision.partition_id,
            metadata,
            _create_open_marker(self.answers.session, self.archived),
            self.answers.partition_view.versions,
        )

    async def set_low_water_mark(self) -> None:
        """Set the low-water mark of the chosen replica, which makes its log trusted."""
        source = self.decision.source
        reply, link = self.answers.prepared[source], self.answers.connections[source]
        await link.set_low_water_mark(self.decision.partition_id, self.answers.session, reply)

    async def assign_replicas(self) -> None:
        """Assign the first replicas of the partition to their storages."""
        await _assign_replicas(self.coordinator, [self.decision])


async def _assign_replicas(coordinator: Coordinator, decisions: Sequence[RebuildDecision]) -> None:
    """Assign the first replicas of partitions with a chosen log (rebuilding.py, rule 2)."""

    def with_decisions(old: ReplicaAssignments) -> ReplicaAssignments:
        assigned = {name: list(ids) for name, ids in old.partitions.items()}
        for decision in decisions:
            for address, ids in assigned.items():
                is_member = address in decision.first_members
                if decision.partition_id in ids and not is_member:
                    ids.remove(decision.partition_id)
                elif decision.partition_id not in ids and is_member:
                    ids.append(decision.partition_id)
        return ReplicaAssignments({name: tuple(sorted(ids)) for name, ids in assigned.items()})

    await coordinator.storages.change_layout(
        lambda old: replace(old, assignment=with_decisions(old.assignment))
    )


# --- rebuild-metadata


class FormerCluster(NamedTuple):
    """The options that describe the cluster whose metadata is lost."""

    name: str
    storage: tuple[str, ...]
    missing: tuple[str, ...]
    cluster_key: UUID | None
    partitions: int | None
    from_directory: Path | None
    replicas: int | None
    only_znodes: bool
    archive: str | None
    access_file: Path | None


@subcommand
@click.option("--name", default="waltz", help="the name of the cluster [default: waltz]")
@click.option(
    "--storage",
    multiple=True,
    required=True,
    metavar="HOST:PORT:ADMIN_PORT[:GROUP]",
    help="a storage of the cluster, even if it is lost; repeat the option for each, as for "
    "`cluster create`",
)
@click.option(
    "--missing",
    multiple=True,
    metavar="HOST:PORT",
    help="a storage, also named with --storage, that is lost permanently; repeat the option for "
    "each",
)
@click.option(
    "--cluster-key",
    type=click.UUID,
    help="the cluster key (a UUID), as `cluster show-key` prints it",
)
@click.option("--partitions", type=int, help="the partition count of the cluster")
@click.option(
    "--from-directory",
    type=options.PATH_TYPE,
    metavar="DIRECTORY",
    help="the directory of a storage, which contains cluster key and partition count",
)
@click.option(
    "--replicas",
    type=int,
    help="number of replicas of each partition [default: one for each group]",
)
@click.option(
    "--only-znodes",
    is_flag=True,
    help="only create the znodes, so that the storages can start; then run the command again "
    "without this option",
)
@archive_option
@click.option(
    "--access-file",
    type=options.PATH_TYPE,
    metavar="FILE",
    help="a file that `access export` has written, if the cluster had permissions",
)
@change_command(may_create_cluster=True)
async def rebuild_metadata(command: ChangeCommand, **arguments: Any) -> ChangeResult:  # noqa: ANN401
    """Rebuild the znodes of a cluster from the data of its storages."""
    return await _rebuild_cluster(command, FormerCluster(**arguments))


rebuild_metadata.help_details = (
    "The storages do not record whether the cluster had permissions. If it had permissions, "
    "restore them with --access-file. Without this option, the cluster has no permissions, and "
    "daemons with access control reject all requests until `access import` has restored them."
)


async def _rebuild_cluster(command: ChangeCommand, old: FormerCluster) -> ChangeResult:
    new, missing = _described_cluster(old), [ReplicaId(address) for address in old.missing]
    permissions = None if old.access_file is None else read_export(old.access_file)
    replica_count = old.replicas or len(set(new.groups.values()))
    for address in missing:
        if address not in new.groups:
            raise BadConfig(
                f"--missing {address}: expected one of the storages that are named with "
                f"--storage: {', '.join(map(str, new.groups))}"
            )
    await _create_znodes(command, new)
    if permissions is not None:
        await _restore_permissions(command, permissions)
    if old.only_znodes:
        key = str(new.cluster_key)
        return {
            "cluster_key": key,
            "summary": "start the storages, then the servers, then run the command again",
        }
    expected = ExpectedCluster(new.cluster_key.bytes, new.partition_count)
    present_storages = [address for address in new.groups if address not in missing]
    links = await _await_storages(command, present_storages, expected)
    try:
        decisions, failures = await _choose_and_write_logs(command, old, new, missing, links)
    finally:
        for link in links.values():
            link.close()
    result = await _open_partitions(command, new, decisions, replica_count, missing)
    if failures:
        raise BadRequest(
            f"{len(decisions)} partitions are open again, {len(failures)} are not: {failures[0]}"
        )
    return result


async def _choose_and_write_logs(
    command: ChangeCommand,
    old: FormerCluster,
    new: NewCluster,
    missing: Sequence[ReplicaId],
    links: Mapping[ReplicaId, OwnerConnection],
) -> tuple[list[RebuildDecision], list[WaltzError]]:
    """Choose the log of each partition and write its metadata; also return errors."""
    pending = [
        partition_id
        for partition_id in map(PartitionId, range(new.partition_count))
        if await _is_undecided(command.coordinator, partition_id)
    ]
    sessions, replies = await _prepare_all(pending, links)
    replica_count = old.replicas or len(set(new.groups.values()))
    decisions, failures = _choose_logs(pending, replies, new.groups, replica_count, missing)
    recovery = await _open_archive(command, old.archive, new.cluster_key)
    marks: dict[PartitionId, ArchivedMark | None] = {}
    for decision in decisions:
        each, link = decision.partition_id, links[decision.source]
        answers = {name: reply[each] for name, reply in replies.items() if each in reply}
        try:
            log = _recovered_log(each, sessions[each], link, answers)
            marks[each] = await recovery.find_archived_mark(log)
        except WaltzError as error:
            failures.append(error)
    decisions = [each for each in decisions if each.partition_id in marks]
    newest = {
        decision.partition_id: await _highest_ids(
            command, decision, sessions[decision.partition_id], links, replies
        )
        for decision in decisions
    }
    # The IDs are raised before any partition can be opened. So no server gets a generation that was
    # used earlier.
    issued_id = max((each.issued_id for each in newest.values()), default=0)
    await command.coordinator.issued_ids.increase_to(ClientId(issued_id))
    await command.coordinator.increase_ids(
        ClientId(max((each.client_id for each in newest.values()), default=0)),
        {each: Generation(ids.generation + 1) for each, ids in newest.items()},
    )
    for decision in decisions:
        each, archived = decision.partition_id, marks[decision.partition_id]
        generation = Generation(newest[each].generation + 1)
        marker = _create_open_marker(sessions[each], archived)
        await _write_decision(command.coordinator, decision, marker, generation)
        step_text = (
            f"partition {each}: transactions 0..{decision.log.last_synced_id} of the log of "
            f"{decision.source}"
        )
        if archived is not None:
            step_text += f", of which the archive has {archived.first}..{archived.last}"
        command.note_step(step_text)
    return decisions, failures


async def _open_archive(
    command: ChangeCommand, url: str | None, cluster_key: UUID
) -> ArchiveRecovery:
    """Open the archive at a URL, by default at the URL that the storages report."""
    command.report_wait("the storages")
    archive_url = url or await reported_archive_url(command.coordinator, command.report_wait)
    command.report_wait(f"the archive {archive_url}")
    return ArchiveRecovery(archive_url, cluster_key.bytes, command.note_step)


def _recovered_log(
    partition_id: PartitionId,
    session: ClaimedSession,
    link: OwnerConnection,
    replies: Mapping[ReplicaId, Prepared],
) -> RecoveredLog:
    """Describe the log of the chosen replica (at `link`), for the search in the archive."""
    source = replies[link.address]
    starts = {
        name: TransactionId(max(answer.start, BEFORE_FIRST)) for name, answer in replies.items()
    }
    return RecoveredLog(
        partition_id,
        starts[link.address],
        TransactionId(source.synced_max),
        lambda last: link.chain_at(partition_id, session, last),
        starts,
    )


def _choose_logs(
    pending: Sequence[PartitionId],
    replies: Mapping[ReplicaId, Mapping[PartitionId, Prepared]],
    groups: Mapping[ReplicaId, int],
    replica_count: int,
    missing: Sequence[ReplicaId],
) -> tuple[list[RebuildDecision], list[WaltzError]]:
    """Choose the log of each partition; also return the errors of partitions without a log."""
    decisions: list[RebuildDecision] = []
    failures: list[WaltzError] = []
    for number in pending:
        logs = {
            name: reported_log(reply[number]) for name, reply in replies.items() if number in reply
        }
        try:
            decision = rebuilding.choose_log(
                number, logs, groups=groups, replica_count=replica_count, unanswered=missing
            )
        except BadRequest as error:
            failures.append(error)
        else:
            decisions.append(decision)
    return decisions, failures


def _described_cluster(old: FormerCluster) -> NewCluster:
    """Return the cluster that the options describe."""
    from waltz_core.storage.files.control_file import CONTROL_FILE_NAME  # noqa: PLC0415 - loads NumPy
    from waltz_core.storage.files.format import CONTROL_HEADER_BYTES, ControlHeader  # noqa: PLC0415 - as above

    key, count = old.cluster_key, old.partitions
    if old.from_directory is not None:
        path = old.from_directory / CONTROL_FILE_NAME
        try:
            header = ControlHeader.decode(path.read_bytes()[:CONTROL_HEADER_BYTES])
        except OSError as error:
            raise BadConfig(
                f"--from-directory: {path} cannot be read ({error.strerror})"
            ) from error
        key, count = UUID(bytes=header.cluster_key), header.partition_count
    if key is None or count is None:
        raise BadConfig(
            "expected --cluster-key and --partitions, or --from-directory; found neither. Hint: "
            "the directory of a storage contains the cluster key and the partition count."
        )
    storages = tuple(NewStorage.parse(text, index) for index, text in enumerate(old.storage))
    return NewCluster(old.name, count, key, storages)


async def _create_znodes(command: ChangeCommand, new: NewCluster) -> None:
    """Create the znodes, unless an earlier run has created them."""
    coordinator = command.coordinator
    try:
        cluster = await coordinator.read_cluster()
    except BadConfig:
        first_id = rebuilding.first_id_after_loss(int(time.time()))  # noqa: TID251
        await coordinator.create_rebuilt_cluster(new, first_id)
        command.note_step(f"created the znodes of the cluster with key {new.cluster_key}")
        return
    if cluster.store.cluster_key != new.cluster_key:
        raise BadRequest(
            f"another cluster exists at {coordinator.connect_string}, with cluster key "
            f"{cluster.store.cluster_key}"
        )
    for number in range(new.partition_count):
        if await _is_undecided(coordinator, PartitionId(number)):
            return
    raise BadRequest(
        f"the cluster at {coordinator.connect_string} still has its metadata in ZooKeeper, so "
        "there is nothing to rebuild. Hint: if only a part of the metadata is lost, run `cluster "
        "delete` first."
    )


async def _restore_permissions(command: ChangeCommand, exported: Permissions) -> None:
    """Create the permissions from a file, unless an earlier run has created them."""
    permissions = command.coordinator.permissions
    if await permissions.read() is None:
        author = Author(user_and_host(), now_ms())
        change = await permissions.replace(
            exported, author, lambda _before, _after: None, new_key=new_client_key()
        )
        step_text = f"restored the {describe_permissions(exported)}"
        command.note_step(f"{step_text}, as revision {change.after.revision}")


async def _is_undecided(coordinator: Coordinator, partition_id: PartitionId) -> bool:
    """Whether a partition still has no chosen log, or no assigned replicas.

    If an earlier command died before it assigned the replicas, no server has opened the partition.
    So the log of the partition can be chosen again.
    """
    view = await coordinator.read_partition(partition_id)
    assigned = (await coordinator.read_replica_assignment()).replicas_of(partition_id)
    return rebuilding.is_undecided(view.metadata, view.marker) or not assigned


async def _await_storages(
    command: ChangeCommand, storages: Sequence[ReplicaId], expected: ExpectedCluster
) -> dict[ReplicaId, OwnerConnection]:
    """Connect to all storages; wait until all of them answer."""
    while True:
        links, failures = await open_connections(storages, expected)
        if not failures:
            return links
        for link in links.values():
            link.close()
        command.report_wait(
            f"an answer from {', '.join(failures)}. Hint: start these storages; name a storage "
            "with --missing if it is lost.",
            len(links),
            len(storages),
        )
        await asyncio.sleep(POLL_INTERVAL_S)


async def _prepare_all(
    partitions: Sequence[PartitionId], links: Mapping[ReplicaId, OwnerConnection]
) -> tuple[dict[PartitionId, ClaimedSession], dict[ReplicaId, dict[PartitionId, Prepared]]]:
    """Open a session later than all others at each replica; return the sessions and answers."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    newest = dict.fromkeys(partitions, NO_SESSION)
    for link in links.values():
        answers_of_link = await link.prepare(
            {number: ClaimedSession(SessionId(0), nonce) for number in partitions}
        )
        for number, answer in answers_of_link.items():
            if isinstance(answer, Nack):
                newest[number] = max(newest[number], SessionId(answer.promised))
    # Add 2: a storage that has lost the nonce of its promise rejects session newest + 1.
    sessions = {
        number: ClaimedSession(SessionId(newest[number] + 2), nonce) for number in partitions
    }
    replies: dict[ReplicaId, dict[PartitionId, Prepared]] = {}
    for address, link in links.items():
        answers = await link.prepare(sessions)
        replies[address] = {
            number: answer for number, answer in answers.items() if isinstance(answer, Prepared)
        }
        for number, rejected in answers.items():
            if isinstance(rejected, Nack) and rejected.error_code != UnknownPartition.code:
                raise Unavailable(f"{address}, partition {number}: {rejected.message}")
    return sessions, replies


async def _highest_ids(
    command: ChangeCommand,
    decision: RebuildDecision,
    session: ClaimedSession,
    links: Mapping[ReplicaId, OwnerConnection],
    replies: Mapping[ReplicaId, Mapping[PartitionId, Prepared]],
) -> MaximumIds:
    """Return the highest IDs in the last records of the chosen log (rebuilding.py, rule 5)."""
    answer = replies[decision.source][decision.partition_id]
    try:
        return await links[decision.source].highest_ids(decision.partition_id, session, answer)
    except Damaged as error:
        command.note_step(
            f"partition {decision.partition_id}: the client IDs in its last records cannot be "
            "read, so the command derives the next client IDs from the clock of this "
            f"machine: {error}"
        )
        return NO_IDS


def _create_open_marker(session: ClaimedSession, archived: ArchivedMark | None) -> PartitionMarker:
    """Return the marker of a partition that is open in a session."""
    return PartitionMarker(MarkerState.OPEN, session.session_id, session.nonce, archived)


async def _write_decision(
    coordinator: Coordinator,
    decision: RebuildDecision,
    marker: PartitionMarker,
    generation: Generation,
) -> None:
    view = await coordinator.read_partition(decision.partition_id)
    metadata = view.metadata
    assert metadata is not None
    # The generation must not decrease: a server that has not read the new generation yet cannot
    # claim the partition.
    generation = max(metadata.generation, generation)
    new_metadata: PartitionMetadata = decision.metadata(generation, marker.session_id)
    await coordinator.write_partition(decision.partition_id, new_metadata, marker, view.versions)


async def _open_partitions(
    command: ChangeCommand,
    new: NewCluster,
    decisions: Sequence[RebuildDecision],
    replica_count: int,
    missing: Sequence[ReplicaId],
) -> ChangeResult:
    """Assign the chosen logs, wait until servers have opened them, and add the other replicas."""
    await _assign_replicas(command.coordinator, decisions)
    groups = {each: group for each, group in new.groups.items() if each not in missing}
    members = {each.partition_id: each.members for each in decisions}
    placement = fill_up_replicas(members, groups, min(replica_count, len(groups)))
    layout = await command.coordinator.storages.read_layout()
    await command.carry_out_plan(ReplicaPlan.for_placement(placement, layout.assignment))
    return {
        "cluster_key": str(new.cluster_key),
        "partitions": {each.partition_id: each.log.last_synced_id for each in decisions},
        "summary": f"{len(decisions)} partitions are open again",
    }
