"""`waltz-core cluster accept-replicas | rebuild-metadata`: recover from the logs of storages.

Both commands choose one replica's log by a decision, not by a quorum.
`cluster/change/rebuilding.py` makes the decision. This module queries the storages, reports to the
user, and writes to ZooKeeper.
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
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import new_client_key
from waltz_core.cli.access.access_export import describe_permissions, read_export
from waltz_core.cli.archive.archive_status import archive_url
from waltz_core.cli.change_commands import Command, Result, change_command, now_ms, user_name
from waltz_core.cli.cluster.archive_recovery import ArchiveRecovery, RecoveredLog, url_of_archive
from waltz_core.cli.output import print_table
from waltz_core.cli.storage.owner_connection import (
    ClaimedSession,
    ExpectedCluster,
    OwnerConnection,
    log_of,
    open_links,
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
    """The answers of one partition's replicas, in a session that was claimed for the queries."""

    session: ClaimedSession
    view: PartitionView
    prepared: dict[ReplicaId, Prepared]
    links: dict[ReplicaId, OwnerConnection]
    unanswered: dict[ReplicaId, str]
    is_rolled_back: bool  # a replica has a later session than ZooKeeper

    @property
    def logs(self) -> dict[ReplicaId, ReportedLog]:
        return {each: log_of(prepared) for each, prepared in self.prepared.items()}

    def close(self) -> None:
        for link in self.links.values():
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
@archive_url
@click.option(
    "--yes", is_flag=True, help="accept the log; without --yes, only show what could be lost"
)
@change_command()
async def accept_replicas(
    command: Command, *, partition: int, replica: str | None, archive: str | None, yes: bool
) -> Result:
    coordinator = command.coordinator
    cluster = await coordinator.read_cluster()
    partition_id = PartitionId(partition)
    if not 0 <= partition_id < cluster.params.partition_count:
        raise BadConfig(
            "argument PARTITION: expected a partition in "
            f"0..{cluster.params.partition_count - 1}, found {partition_id}"
        )
    facts = ExpectedCluster(cluster.store.cluster_key.bytes, cluster.params.partition_count)
    newest = NO_SESSION
    for _ in range(ATTEMPTS_MAX):
        command.wait_for(f"the replicas of partition {partition_id}")
        try:
            answers = await _query(coordinator, partition_id, facts, newest)
            try:
                return await _decide(command, partition_id, answers, (replica, archive, yes))
            finally:
                answers.close()
        except SessionFenced as fenced:
            newest = SessionId(max(newest, fenced.promised))
        except CoordinatorConflict:
            pass  # the partition's server has claimed a session at the same time: try again
    raise Unavailable(
        f"partition {partition_id}: its server began a new store session during each of "
        f"{ATTEMPTS_MAX} attempts. Hint: run the command again."
    )


async def _query(
    coordinator: Coordinator, partition_id: PartitionId, facts: ExpectedCluster, newest: SessionId
) -> _ReplicaAnswers:
    """Claim a session later than `newest`, as an owner does, and query every replica in it."""
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
    links, unanswered = await open_links(members, facts)
    session_id = SessionId(max(metadata.session_id, newest) + 1)
    session = ClaimedSession(session_id, secrets.token_bytes(NONCE_BYTES))
    claimed = replace(metadata, session_id=session_id)
    marker = replace(marker, session_id=session_id, nonce=session.nonce)
    prepared: dict[ReplicaId, Prepared] = {}
    try:
        versions = await coordinator.write_partition(partition_id, claimed, marker, view.versions)
        for address, link in links.items():
            answer = (await link.prepare({partition_id: session}))[partition_id]
            if isinstance(answer, Prepared):
                prepared[address] = answer
            else:
                _check_not_fenced(address, answer, session_id)
                unanswered[address] = answer.message
    except BaseException:
        for link in links.values():
            link.close()
        raise
    after = PartitionView(claimed, versions.metadata, marker, versions.marker)
    return _ReplicaAnswers(
        session, after, prepared, links, unanswered, newest > metadata.session_id
    )


def _check_not_fenced(address: ReplicaId, answer: Nack, session_id: SessionId) -> None:
    if answer.promised >= session_id:
        raise SessionFenced(f"{address}: {answer.message}", answer.promised)


async def _decide(
    command: Command,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    requested: tuple[str | None, str | None, bool],
) -> Result:
    logs, (replica, archive, is_accepted) = answers.logs, requested
    chosen = _chosen_replica(replica, partition_id, logs)
    lost = rebuilding.missing_in_chosen(logs[chosen], logs)
    lost += [
        f"{each} did not answer: {reason.removeprefix(f'{each}: ')}"
        for each, reason in answers.unanswered.items()
    ]
    shown: dict[str, object] = {
        "partition": partition_id,
        "chosen": chosen,
        "replicas": {each: log._asdict() for each, log in logs.items()},
        "unanswered": answers.unanswered,
        "may_be_lost": lost,
        "accepted": is_accepted,
    }
    if not command.as_json:
        _show_replicas(logs, answers.unanswered)
    for each in lost:
        command.note(each)
    if not is_accepted:
        return {
            **shown,
            "summary": f"nothing was changed. Hint: add --yes to make the log of {chosen} the log "
            f"of partition {partition_id}. Records that only other replicas have are then lost.",
        }
    _check_needed(partition_id, answers)
    archived = await _archived_mark_of(command, partition_id, answers, (chosen, archive))
    members = await _declare_chosen_log(command, partition_id, answers, chosen, archived)
    return {
        **shown,
        "summary": f"the log of {chosen}, transactions 0..{logs[chosen].synced_max}, is now the "
        f"log of partition {partition_id}; its replicas are {', '.join(members)}",
    }


def _check_needed(partition_id: PartitionId, answers: _ReplicaAnswers) -> None:
    """Raise BadRequest if the partition's server can open a session without this command."""
    metadata, marker = answers.view.metadata, answers.view.marker
    assert metadata is not None
    if answers.is_rolled_back or rebuilding.is_waiting(metadata, marker):
        return
    trusted = [
        each
        for each, log in answers.logs.items()
        if each in metadata.states and not log.is_suspect and not log.is_damaged
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


def _chosen_replica(
    requested: str | None, partition_id: PartitionId, logs: Mapping[ReplicaId, ReportedLog]
) -> ReplicaId:
    if not logs:
        raise Unavailable(
            f"partition {partition_id}: no replica answers. Hint: start a storage that has one."
        )
    if requested is None:
        return max(logs, key=lambda each: _rank(logs[each]))
    if requested not in logs:
        raise BadConfig(
            f"storage {requested} did not answer as a replica of partition {partition_id}"
        )
    return ReplicaId(requested)


def _rank(log: ReportedLog) -> tuple[bool, int, int, bool]:
    """Return the sort key of a log: undamaged logs first, then the most data, then trusted logs."""
    return not log.is_damaged, *log.rank, not log.is_suspect


def _show_replicas(
    logs: Mapping[ReplicaId, ReportedLog], unanswered: Mapping[ReplicaId, str]
) -> None:
    rows: list[tuple[object, ...]] = [
        (
            each,
            log.last_session,
            log.synced_max,
            "suspect" if log.is_suspect else "damaged" if log.is_damaged else "-",
        )
        for each, log in logs.items()
    ]
    rows += [(each, "-", "-", "no answer") for each in unanswered]
    print_table(("replica", "last session", "last ID", "problem"), rows)


async def _archived_mark_of(
    command: Command,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    requested: tuple[ReplicaId, str | None],
) -> ArchivedMark | None:
    """Return the archived mark: from ZooKeeper or, for a partition to be rebuilt, the archive."""
    marker, (chosen, url) = answers.view.marker, requested
    assert marker is not None
    if not rebuilding.is_waiting(answers.view.metadata, marker):
        return marker.archived
    cluster_key = (await command.coordinator.read_cluster()).store.cluster_key
    recovery = await _archive_recovery(command, url, cluster_key)
    link = answers.links[chosen]
    log = _recovered_log(partition_id, answers.session, link, answers.prepared)
    return await recovery.mark_of(log)


async def _declare_chosen_log(
    command: Command,
    partition_id: PartitionId,
    answers: _ReplicaAnswers,
    chosen: ReplicaId,
    archived: ArchivedMark | None,
) -> tuple[ReplicaId, ...]:
    """Declare one replica's log to be the log; the other replicas copy what they lack."""
    session_id, logs = answers.session.session_id, answers.logs
    others = sorted(logs, key=lambda each: logs[each].rank, reverse=True)
    members = (chosen, *(each for each in others if each != chosen))
    verdict = RebuildDecision(partition_id, chosen, logs[chosen], members).declared_in(session_id)
    metadata = answers.view.metadata
    assert metadata is not None
    operations = _CommandOperations(command.coordinator, verdict, answers, archived)
    await rebuilding.declare_log(verdict.metadata(metadata.generation, session_id), operations)
    command.note(f"partition {partition_id}: the log of {chosen} is accepted")
    layout = await command.coordinator.storages.read()
    await command.carry_out(ReplicaPlan.for_placement({partition_id: members}, layout.assignment))
    return members


@dataclass(frozen=True, slots=True)
class _CommandOperations:
    """The operations that `rebuilding.declare_log` needs (`rebuilding.RebuildOperations`)."""

    coordinator: Coordinator
    verdict: RebuildDecision
    answers: _ReplicaAnswers
    archived: ArchivedMark | None

    async def write(self, metadata: PartitionMetadata) -> None:
        """Write the metadata and the marker of the partition to ZooKeeper."""
        await self.coordinator.write_partition(
            self.verdict.partition_id,
            metadata,
            _opened_marker(self.answers.session, self.archived),
            self.answers.view.versions,
        )

    async def mark(self) -> None:
        """Set the low-water mark of the chosen replica, which makes its log trusted."""
        source = self.verdict.source
        prepared, link = self.answers.prepared[source], self.answers.links[source]
        await link.set_mark(self.verdict.partition_id, self.answers.session, prepared)

    async def assign(self) -> None:
        """Assign the first replicas of the partition to their storages."""
        await _assign(self.coordinator, [self.verdict])


async def _assign(coordinator: Coordinator, verdicts: Sequence[RebuildDecision]) -> None:
    """Assign the first replicas of partitions whose log was chosen (rebuilding.py, rule 2)."""

    def assigned(old: ReplicaAssignments) -> ReplicaAssignments:
        held = {each: list(its) for each, its in old.partitions.items()}
        for verdict in verdicts:
            for address, its in held.items():
                is_member = address in verdict.first_members
                if verdict.partition_id in its and not is_member:
                    its.remove(verdict.partition_id)
                elif verdict.partition_id not in its and is_member:
                    its.append(verdict.partition_id)
        return ReplicaAssignments({each: tuple(sorted(its)) for each, its in held.items()})

    await coordinator.storages.change(lambda old: replace(old, assignment=assigned(old.assignment)))


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
    type=options.PATH,
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
@archive_url
@click.option(
    "--access-file",
    type=options.PATH,
    metavar="FILE",
    help="a file that `access export` has written, if the cluster had permissions",
)
@change_command(creates=True)
async def rebuild_metadata(command: Command, **words: Any) -> Result:  # noqa: ANN401
    return await _rebuild(command, FormerCluster(**words))


rebuild_metadata.details = (
    "The storages do not record whether the cluster had permissions. If it had, restore them "
    "with --access-file. Otherwise the cluster has no permissions, and daemons with access "
    "control reject all requests until `access import` has restored them."
)


async def _rebuild(command: Command, chosen: FormerCluster) -> Result:
    new, missing = _new_cluster(chosen), [ReplicaId(each) for each in chosen.missing]
    saved = None if chosen.access_file is None else read_export(chosen.access_file)
    replica_count = chosen.replicas or len(set(new.groups.values()))
    for each in missing:
        if each not in new.groups:
            raise BadConfig(
                f"--missing {each}: expected a storage that --storage also names, found only "
                f"{', '.join(map(str, new.groups))}"
            )
    await _make_nodes(command, new)
    if saved is not None:
        await _restore_access(command, saved)
    if chosen.only_znodes:
        key = str(new.cluster_key)
        return {
            "cluster_key": key,
            "summary": "start the storages, then the servers, then run the command again",
        }
    facts = ExpectedCluster(new.cluster_key.bytes, new.partition_count)
    there = [each for each in new.groups if each not in missing]
    links = await _await_storages(command, there, facts)
    try:
        verdicts, failures = await _decide_all(command, chosen, new, missing, links)
    finally:
        for link in links.values():
            link.close()
    result = await _open_all(command, new, verdicts, replica_count, missing)
    if failures:
        raise BadRequest(
            f"{len(verdicts)} partitions are open again, {len(failures)} are not: {failures[0]}"
        )
    return result


async def _decide_all(
    command: Command,
    chosen: FormerCluster,
    new: NewCluster,
    missing: Sequence[ReplicaId],
    links: Mapping[ReplicaId, OwnerConnection],
) -> tuple[list[RebuildDecision], list[WaltzError]]:
    """Write the log and the archived mark of each partition; also return the errors of others."""
    undecided = [
        partition_id
        for partition_id in map(PartitionId, range(new.partition_count))
        if await _is_undecided(command.coordinator, partition_id)
    ]
    sessions, prepared = await _query_all(undecided, links)
    replica_count = chosen.replicas or len(set(new.groups.values()))
    verdicts, failures = _choose_all(undecided, prepared, new.groups, replica_count, missing)
    recovery = await _archive_recovery(command, chosen.archive, new.cluster_key)
    marks: dict[PartitionId, ArchivedMark | None] = {}
    for verdict in verdicts:
        each, link = verdict.partition_id, links[verdict.source]
        answers = {name: its[each] for name, its in prepared.items() if each in its}
        try:
            log = _recovered_log(each, sessions[each], link, answers)
            marks[each] = await recovery.mark_of(log)
        except WaltzError as error:
            failures.append(error)
    verdicts = [each for each in verdicts if each.partition_id in marks]
    newest = {
        verdict.partition_id: await _newest_ids(
            command, verdict, sessions[verdict.partition_id], links, prepared
        )
        for verdict in verdicts
    }
    # Raise the IDs before any partition can be opened. So no server gets a generation that was
    # used.
    issued = max((each.issued_id for each in newest.values()), default=0)
    await command.coordinator.issued_ids.raise_to(ClientId(issued))
    await command.coordinator.raise_ids(
        ClientId(max((each.client_id for each in newest.values()), default=0)),
        {each: Generation(its.generation + 1) for each, its in newest.items()},
    )
    for verdict in verdicts:
        each, archived = verdict.partition_id, marks[verdict.partition_id]
        generation = Generation(newest[each].generation + 1)
        marker = _opened_marker(sessions[each], archived)
        await _write_verdict(command.coordinator, verdict, marker, generation)
        shown = (
            f"partition {each}: transactions 0..{verdict.log.synced_max} of the log of "
            f"{verdict.source}"
        )
        if archived is not None:
            shown += f", of which the archive has {archived.first}..{archived.last}"
        command.note(shown)
    return verdicts, failures


async def _archive_recovery(
    command: Command, url: str | None, cluster_key: UUID
) -> ArchiveRecovery:
    """Open the archive at a URL, by default at the URL that the storages report."""
    command.wait_for("the storages")
    found = url or await url_of_archive(command.coordinator, command.wait_for)
    command.wait_for(f"the archive {found}")
    return ArchiveRecovery(found, cluster_key.bytes, command.note)


def _recovered_log(
    partition_id: PartitionId,
    session: ClaimedSession,
    link: OwnerConnection,
    prepared: Mapping[ReplicaId, Prepared],
) -> RecoveredLog:
    """Describe the log of the chosen replica, at `link`, for the search in the archive."""
    source = prepared[link.address]
    starts = {each: TransactionId(max(its.start, BEFORE_FIRST)) for each, its in prepared.items()}
    return RecoveredLog(
        partition_id,
        starts[link.address],
        TransactionId(source.synced_max),
        lambda last: link.chain_at(partition_id, session, last),
        starts,
    )


def _choose_all(
    undecided: Sequence[PartitionId],
    prepared: Mapping[ReplicaId, Mapping[PartitionId, Prepared]],
    groups: Mapping[ReplicaId, int],
    replica_count: int,
    missing: Sequence[ReplicaId],
) -> tuple[list[RebuildDecision], list[WaltzError]]:
    """Choose the log of every partition; also return the errors of partitions without a choice."""
    verdicts: list[RebuildDecision] = []
    failures: list[WaltzError] = []
    for each in undecided:
        logs = {name: log_of(its[each]) for name, its in prepared.items() if each in its}
        try:
            verdict = rebuilding.choose_log(
                each, logs, groups=groups, replica_count=replica_count, unanswered=missing
            )
        except BadRequest as error:
            failures.append(error)
        else:
            verdicts.append(verdict)
    return verdicts, failures


def _new_cluster(chosen: FormerCluster) -> NewCluster:
    from waltz_core.storage.files.control_file import CONTROL_NAME  # noqa: PLC0415 - loads NumPy
    from waltz_core.storage.files.format import CONTROL_HEADER_BYTES, ControlHeader  # noqa: PLC0415 - as above

    key, count = chosen.cluster_key, chosen.partitions
    if chosen.from_directory is not None:
        path = chosen.from_directory / CONTROL_NAME
        try:
            header = ControlHeader.decode(path.read_bytes()[:CONTROL_HEADER_BYTES])
        except OSError as error:
            raise BadConfig(
                f"--from-directory: {path} cannot be read ({error.strerror})"
            ) from error
        key, count = UUID(bytes=header.cluster_key), header.partition_count
    if key is None or count is None:
        raise BadConfig(
            "expected --cluster-key and --partitions, or --from-directory with the directory "
            "of a storage, which contains both; found neither"
        )
    storages = tuple(NewStorage.parse(text, index) for index, text in enumerate(chosen.storage))
    return NewCluster(chosen.name, count, key, storages)


async def _make_nodes(command: Command, new: NewCluster) -> None:
    """Create the znodes, unless an earlier run has created them."""
    coordinator = command.coordinator
    try:
        found = await coordinator.read_cluster()
    except BadConfig:
        await coordinator.create_for_rebuilding(new, rebuilding.ids_from(int(time.time())))  # noqa: TID251
        command.note(f"created the znodes of the cluster with key {new.cluster_key}")
        return
    if found.store.cluster_key != new.cluster_key:
        raise BadRequest(
            f"another cluster exists at {coordinator.where}, with cluster key "
            f"{found.store.cluster_key}"
        )
    for number in range(new.partition_count):
        if await _is_undecided(coordinator, PartitionId(number)):
            return
    raise BadRequest(
        f"the cluster at {coordinator.where} still has its metadata in ZooKeeper, so there is "
        "nothing to rebuild. Hint: if only a part of the metadata is lost, run `cluster "
        "delete` first."
    )


async def _restore_access(command: Command, saved: Permissions) -> None:
    """Create the permissions from a file, unless an earlier run has created them."""
    permissions = command.coordinator.permissions
    if await permissions.read() is None:
        author = Author(user_name(), now_ms())
        change = await permissions.replace(
            saved, author, lambda _before, _after: None, new_key=new_client_key()
        )
        what = f"restored the {describe_permissions(saved)}"
        command.note(f"{what}, as revision {change.after.revision}")


async def _is_undecided(coordinator: Coordinator, partition_id: PartitionId) -> bool:
    """Whether a partition still needs a chosen log, or the replicas of the chosen log.

    If an earlier command died before it assigned the replicas, they are missing. The partition was
    never opened then, so its log is chosen again.
    """
    view = await coordinator.read_partition(partition_id)
    assigned = (await coordinator.read_replica_assignment()).replicas_of(partition_id)
    return rebuilding.is_waiting(view.metadata, view.marker) or not assigned


async def _await_storages(
    command: Command, storages: Sequence[ReplicaId], facts: ExpectedCluster
) -> dict[ReplicaId, OwnerConnection]:
    while True:
        links, failures = await open_links(storages, facts)
        if not failures:
            return links
        for link in links.values():
            link.close()
        command.wait_for(
            f"an answer of {', '.join(failures)}. Hint: start that storage, or name it with "
            "--missing if it is lost.",
            len(links),
            len(storages),
        )
        await asyncio.sleep(POLL_INTERVAL_S)


async def _query_all(
    partitions: Sequence[PartitionId], links: Mapping[ReplicaId, OwnerConnection]
) -> tuple[dict[PartitionId, ClaimedSession], dict[ReplicaId, dict[PartitionId, Prepared]]]:
    """Let every replica promise a session later than all others, and return their states."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    newest = dict.fromkeys(partitions, NO_SESSION)
    for link in links.values():
        requested = await link.prepare(
            {each: ClaimedSession(SessionId(0), nonce) for each in partitions}
        )
        for each, answer in requested.items():
            if isinstance(answer, Nack):
                newest[each] = max(newest[each], SessionId(answer.promised))
    # Add 2: a storage that has lost the nonce of its promise accepts only the following session.
    sessions = {each: ClaimedSession(SessionId(newest[each] + 2), nonce) for each in partitions}
    prepared: dict[ReplicaId, dict[PartitionId, Prepared]] = {}
    for address, link in links.items():
        answers = await link.prepare(sessions)
        prepared[address] = {
            each: answer for each, answer in answers.items() if isinstance(answer, Prepared)
        }
        for each, rejected in answers.items():
            if isinstance(rejected, Nack) and rejected.error_code != UnknownPartition.code:
                raise Unavailable(f"{address}, partition {each}: {rejected.message}")
    return sessions, prepared


async def _newest_ids(
    command: Command,
    verdict: RebuildDecision,
    session: ClaimedSession,
    links: Mapping[ReplicaId, OwnerConnection],
    prepared: Mapping[ReplicaId, Mapping[PartitionId, Prepared]],
) -> MaximumIds:
    """Return the highest IDs in the last records of the chosen log (rebuilding.py, rule 5)."""
    answer = prepared[verdict.source][verdict.partition_id]
    try:
        return await links[verdict.source].newest_ids(verdict.partition_id, session, answer)
    except Damaged as error:
        command.note(
            f"partition {verdict.partition_id}: the client IDs in its last records cannot be "
            "read, so the command derives the next client IDs from the clock of this "
            f"machine: {error}"
        )
        return NO_IDS


def _opened_marker(session: ClaimedSession, archived: ArchivedMark | None) -> PartitionMarker:
    """Return the marker of a partition that is open in a session."""
    return PartitionMarker(MarkerState.OPEN, session.session_id, session.nonce, archived)


async def _write_verdict(
    coordinator: Coordinator,
    verdict: RebuildDecision,
    marker: PartitionMarker,
    generation: Generation,
) -> None:
    view = await coordinator.read_partition(verdict.partition_id)
    metadata = view.metadata
    assert metadata is not None
    # The generation must not decrease: a server that has not read it yet cannot claim the
    # partition.
    generation = max(metadata.generation, generation)
    written: PartitionMetadata = verdict.metadata(generation, marker.session_id)
    await coordinator.write_partition(verdict.partition_id, written, marker, view.versions)


async def _open_all(
    command: Command,
    new: NewCluster,
    verdicts: Sequence[RebuildDecision],
    replica_count: int,
    missing: Sequence[ReplicaId],
) -> Result:
    """Assign the chosen logs, wait until servers have opened them, and add the other replicas."""
    await _assign(command.coordinator, verdicts)
    groups = {each: group for each, group in new.groups.items() if each not in missing}
    members = {each.partition_id: each.members for each in verdicts}
    wanted = fill_up_replicas(members, groups, min(replica_count, len(groups)))
    layout = await command.coordinator.storages.read()
    await command.carry_out(ReplicaPlan.for_placement(wanted, layout.assignment))
    return {
        "cluster_key": str(new.cluster_key),
        "partitions": {each.partition_id: each.log.synced_max for each in verdicts},
        "summary": f"{len(verdicts)} partitions are open again",
    }
