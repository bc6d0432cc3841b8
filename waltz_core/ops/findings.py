"""The table of all findings of the doctor, each with a sentence and a repair command.

Users search for the sentences, and scripts run the commands. Therefore one table contains all of
them, and docs/doctor.md is generated from this table.

Rules:
    1. A finding has its own sentence, and a command that the user can run as printed, except for
       words in capitals: these are placeholders. No command loses data if it is run as printed.
    2. A name never changes its meaning, because scripts depend on it.
"""

import string
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Area(Enum):
    """The part of a cluster to which a finding belongs."""

    ZOOKEEPER = "ZooKeeper"
    PROCESSES = "processes of a cluster on this machine"
    SERVERS = "servers"
    STORAGES = "storages"
    ARCHIVE = "archive"
    REPLICAS = "replicas"
    PARTITIONS = "partitions"


class FindingKind(NamedTuple):
    """One row of the table; names in braces are placeholders, which each finding fills in."""

    area: Area
    name: str
    sentence: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a cluster; `subject` identifies the affected object."""

    name: str
    subject: str
    sentence: str
    command: str
    partition: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the finding, which does not depend on the numbers in its sentence."""
        return self.name, self.subject


def _finding_row(name: str, sentence: str, command: str) -> tuple[str, str, str]:
    return name, sentence, command


_START_COMMAND = "{start}"
_DOCTOR_WITH_TLS = "waltz-core doctor --connect {connect_with_tls_file}"
_DOCTOR_AS_ANOTHER_PRINCIPAL = "waltz-core doctor --connect {connect_with_token_file}"
_MOVE_COMMAND = "{move}"
_REPLICA_OPTIONS = "--connect {connect} --storage {storage} --partition {partition}"
_REPEAT_DOCTOR = "waltz-core doctor --connect {connect}"
_ARCHIVE_STATUS_COMMAND = "waltz-core archive status --connect {connect}"
_SYNC_CLOCK_COMMAND = "timedatectl set-ntp true"
_OFFLINE_AND_ONLINE_COMMANDS = (
    f"waltz-core storage availability {_REPLICA_OPTIONS} --online false && "
    f"waltz-core storage availability {_REPLICA_OPTIONS} --online true"
)

_ROWS_BY_AREA: dict[Area, tuple[tuple[str, str, str], ...]] = {
    Area.ZOOKEEPER: (
        _finding_row(
            "zookeeper-unavailable",
            "ZooKeeper does not answer, so the state of the cluster is unknown: {why}",
            _START_COMMAND,
        ),
        _finding_row(
            "zookeeper-server-unavailable",
            "ZooKeeper server {server} does not answer: {why}",
            _START_COMMAND,
        ),
        _finding_row(
            "zookeeper-server-without-quorum",
            "ZooKeeper server {server} answers, but it is not part of a quorum, so it "
            "serves no client",
            _START_COMMAND,
        ),
        _finding_row(
            "zookeeper-access-denied",
            "ZooKeeper denies access to the cluster's znodes: {why}",
            "waltz-core doctor --connect '{hosts}?auth=FILE'",
        ),
        _finding_row(
            "no-cluster",
            "there is no cluster at {connect}. Hint: the command creates a new, empty cluster. "
            "If a cluster existed there, ZooKeeper has lost its data; then run `cluster "
            "rebuild-metadata` instead (docs/operations.md, section 'When ZooKeeper's data is "
            "lost')",
            "waltz-core cluster create {connect} --partitions COUNT --storage HOST:PORT:ADMIN_PORT",
        ),
        _finding_row(
            "cluster-lost",
            "ZooKeeper no longer has the cluster at {connect}. The cluster's storages in "
            "{directory} have the data from which the command rebuilds the znodes",
            "{rebuild}",
        ),
    ),
    Area.PROCESSES: (
        _finding_row(
            "process-down",
            "{member} of the cluster in {directory} does not run",
            "waltz-core local up --directory {directory}",
        ),
        _finding_row(
            "process-stopped",
            "{member} of the cluster in {directory} is paused by a signal: process {pid}",
            "kill -CONT {pid}",
        ),
    ),
    Area.SERVERS: (
        _finding_row(
            "no-server",
            "no server is registered, so the cluster accepts no appends",
            _START_COMMAND,
        ),
        _finding_row(
            "server-unavailable",
            "server {server} is registered in ZooKeeper, but nothing listens at its address "
            "({why})",
            "waltz-core cluster remove-server {server} --connect {connect}",
        ),
        _finding_row(
            "server-silent",
            "server {server} accepts connections, but does not answer ({why}). Hint: "
            "stop its process and start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "server-tls-failed",
            "the TLS handshake with server {server} fails ({why}). Hint: name a file "
            "with the cluster's TLS settings in the connect string (?tls=FILE), or check the "
            "server's certificate.",
            _DOCTOR_WITH_TLS,
        ),
        _finding_row(
            "server-access-denied",
            "server {server} rejects the doctor's requests: {why}. Hint: use a token whose "
            "principal has the permissions `read` and `administer`.",
            _DOCTOR_AS_ANOTHER_PRINCIPAL,
        ),
        _finding_row(
            "server-unreachable",
            "server {server} gets no partitions, because other servers cannot connect to "
            "it ({why}). Hint: check its settings advertised_host and advertised_port, its "
            "certificate, and the network between the servers.",
            _REPEAT_DOCTOR,
        ),
        _finding_row(
            "assignment-stale",
            "ZooKeeper's assignment of partitions does not match the running servers: the "
            "leader {server} has not written a new assignment. Hint: stop its process "
            "and start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "preference-not-granted",
            "partition {partition}: servers {server} and {owner} are both preferred owners; "
            "{owner} owns the partition",
            "waltz-core cluster unprefer {partition} {server} --connect {connect}",
        ),
        _finding_row(
            "storage-out-of-reach",
            "server {server} cannot connect to storage {storage}, although this machine "
            "can. Hint: check the network between them. The command tests the connection to "
            "the storage from the machine on which you run it.",
            "waltz-core storage validate --connect {connect} --storage {storage}",
        ),
    ),
    Area.STORAGES: (
        _finding_row(
            "storage-unavailable",
            "storage {storage} does not answer: {why}. Hint: if its process runs, it "
            "may still be reading its files after a crash; then wait.",
            _START_COMMAND,
        ),
        _finding_row(
            "storage-silent",
            "storage {storage} accepts connections, but does not answer ({why}). Hint: "
            "stop its process and start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "storage-tls-failed",
            "the TLS handshake with storage {storage} fails ({why}). Hint: name a file "
            "with the cluster's TLS settings in the connect string (?tls=FILE), or check the "
            "storage's certificate.",
            _DOCTOR_WITH_TLS,
        ),
        _finding_row(
            "storage-access-denied",
            "storage {storage} rejects the doctor's requests: {why}. Hint: use a token whose "
            "principal has the permissions `read` and `administer`.",
            _DOCTOR_AS_ANOTHER_PRINCIPAL,
        ),
        _finding_row(
            "storage-unresponsive",
            "storage {storage} accepts requests, but does not complete them ({why}); "
            "its disk may hang. Hint: check the disk, then stop the process and start it "
            "again.",
            _START_COMMAND,
        ),
        _finding_row(
            "storage-starting",
            "storage {storage} is starting: it reads its files, which may take minutes "
            "after a crash, and then opens its port. Hint: wait, and do not stop the process.",
            _REPEAT_DOCTOR,
        ),
        _finding_row(
            "storage-never-started",
            "storage {storage} is not registered in ZooKeeper: it has never started, or "
            "it is a Waltz 0.13 storage",
            _START_COMMAND,
        ),
        _finding_row(
            "admin-port-wrong",
            "storage {storage} answers, but not at {admin}, the admin address that ZooKeeper has "
            "for it: {why}",
            "waltz-core cluster set-admin-port {storage} {port} --connect {connect}",
        ),
        _finding_row(
            "storage-cluster-mismatch",
            "the storage at {storage} belongs to another cluster. Hint: stop it, and "
            "start the storage whose directory belongs to this cluster.",
            _START_COMMAND,
        ),
        _finding_row(
            "storage-id-mismatch",
            "the storage at {storage} has the storage ID {found}, but ZooKeeper has the ID "
            "{expected} for this address. Hint: stop this storage and start the registered one. "
            "If the registered one is lost, start a storage with an empty directory at this "
            "address; the command then replaces the lost storage with the new one.",
            "waltz-core cluster replace-storage {storage} {storage} --connect {connect}",
        ),
        _finding_row(
            "disk-full",
            "the disk of storage {storage} is full: {free} MiB are free, and the "
            "storage rejects appends",
            "{drain}",
        ),
        _finding_row(
            "disk-nearly-full",
            "the disk of storage {storage} is nearly full: {free} MiB are free",
            "{drain}",
        ),
        _finding_row(
            "disk-full-soon",
            "the disk of storage {storage} will be full in {days} days: {free} MiB "
            "are free, and in the last day {rate} MiB were written",
            "{drain}",
        ),
        _finding_row(
            "storage-slow",
            "storage {storage} takes {latency_ms} ms to answer an append, {ratio} times as "
            "long as the other storages. Hint: check its disk, its network and the load of "
            "its machine.",
            _REPEAT_DOCTOR,
        ),
        _finding_row(
            "storage-clock-skew",
            "the clock of storage {storage} is {seconds} s {direction} the clock of this "
            "machine. Hint: synchronize both clocks.",
            _SYNC_CLOCK_COMMAND,
        ),
    ),
    Area.ARCHIVE: (
        _finding_row(
            "archive-settings-differ",
            "storage {storage} archives to {found}, but the other storages archive to "
            "{expected}. Hint: set the same archive_url in the settings of all storages, "
            "then stop this storage and start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "archive-url-missing",
            "transactions of partitions {partitions} are archived, but no storage that "
            "answers has the setting archive_url. Transactions that are only in the archive "
            "cannot be read. Hint: set archive_url in the settings of all storages, then "
            "stop them and start them again.",
            _START_COMMAND,
        ),
        _finding_row(
            "archive-unavailable",
            "storages {storages} have failed to write to the archive (highest number of "
            "consecutive failures: {count}): {why}. Hint: check the credentials, the network and "
            "the object store. While writes fail, storages remove no old segments. The command "
            "reads the archive from the machine on which you run it.",
            _ARCHIVE_STATUS_COMMAND,
        ),
        _finding_row(
            "archive-damaged",
            "storages {storages} found that a file of the archive is missing or corrupt ({why}). "
            "Hint: the command lists all such files. It replaces an object if a storage still "
            "has all of its transactions; restore other files from a copy or from an earlier "
            "version in the object store.",
            "waltz-core archive verify --repair --connect {connect}",
        ),
        _finding_row(
            "archive-idle",
            "the storages have the archive {url}, but nothing is archived. Hint: set "
            "archive_interval_ms in the settings of the servers, then stop them and start "
            "them again. The storages write the first objects after archive_age_ms.",
            _START_COMMAND,
        ),
        _finding_row(
            "archive-lagging",
            "partition {partition}: {count} committed transactions are not archived "
            "yet; the oldest was committed {hours} h ago. Hint: check the setting "
            "archive_interval_ms of the servers, and `archive.failed` in their logs.",
            _ARCHIVE_STATUS_COMMAND,
        ),
    ),
    Area.REPLICAS: (
        _finding_row(
            "replica-offline",
            "partition {partition}: the replica on storage {storage} was taken offline",
            f"waltz-core storage availability {_REPLICA_OPTIONS} --online true",
        ),
        _finding_row(
            "replica-not-held",
            "partition {partition} is assigned to storage {storage}, but the storage has no "
            "replica of it",
            f"waltz-core storage add-partition {_REPLICA_OPTIONS}",
        ),
        _finding_row(
            "replica-left-over",
            "storage {storage} has files of partitions {partitions}, which ZooKeeper "
            "assigns to other storages. Hint: the command deletes these files.",
            "waltz-core storage remove-partition --connect {connect} --storage {storage} "
            "--partition {partitions} --delete-files",
        ),
        _finding_row(
            "replica-stuck",
            "partition {partition}: storage {storage} answers, but requests for its replica do "
            "not complete; the disk may hang. Hint: check the disk, then stop the process and "
            "start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "replica-opening",
            "partition {partition}: storage {storage} is still opening the log of its replica, "
            "which may take minutes",
            _REPEAT_DOCTOR,
        ),
        _finding_row(
            "replica-unreadable",
            "partition {partition}: storage {storage} cannot use the log of its replica ({why})",
            f"waltz-core storage re-seed {_REPLICA_OPTIONS}",
        ),
        _finding_row(
            "replica-damaged",
            "partition {partition}: the replica on storage {storage} has {count} damaged "
            "transactions, which are not repaired from another replica yet",
            f"waltz-core storage scrub {_REPLICA_OPTIONS}",
        ),
        _finding_row(
            "replica-suspect",
            "partition {partition}: the log of the replica on storage {storage} is not trusted, "
            "so the replica does not count towards a quorum until a new store session has "
            "repaired it",
            _OFFLINE_AND_ONLINE_COMMANDS,
        ),
        _finding_row(
            "replica-not-engaged",
            "partition {partition}: the replica on storage {storage} answers, but it is not in "
            "sync, so it does not count towards a quorum; its log ends at transaction {last}",
            _OFFLINE_AND_ONLINE_COMMANDS,
        ),
        _finding_row(
            "replica-lagging",
            "partition {partition}: the replica on storage {storage} lags by {count} "
            "transactions, because its disk or its network is slower than those of the other "
            "replicas",
            "{drain}",
        ),
    ),
    Area.PARTITIONS: (
        _finding_row(
            "no-quorum",
            "partition {partition} accepts no appends: only {answering} of {count} "
            "replicas answer, and a quorum of {quorum} is required",
            _START_COMMAND,
        ),
        _finding_row(
            "no-trusted-quorum",
            "partition {partition}: only {trusted} of {count} replicas have a trusted "
            "log, and a quorum of {quorum} is required. Hint: the command lists what could "
            "be lost; add --yes to accept the loss.",
            "waltz-core cluster accept-replicas {partition} --connect {connect}",
        ),
        _finding_row(
            "no-replicas",
            "partition {partition} has no replicas",
            "waltz-core cluster auto-assign --connect {connect}",
        ),
        _finding_row(
            "too-few-replicas",
            "partition {partition} has {count} replicas instead of the usual {usual}",
            "waltz-core cluster auto-assign --replicas {usual} --connect {connect}",
        ),
        _finding_row(
            "replicas-share-group",
            "partition {partition}: its replicas are in fewer groups of storages than "
            "possible, so the loss of one group could cost the quorum",
            "{spread}",
        ),
        _finding_row(
            "partition-without-server",
            "partition {partition} has no owner",
            _START_COMMAND,
        ),
        _finding_row(
            "partition-not-served",
            "partition {partition}: server {server} owns it, but does not answer requests for it",
            _MOVE_COMMAND,
        ),
        _finding_row(
            "partition-served-by-another",
            "partition {partition}: server {server} answers requests for it, but "
            "{owner} owns it. Hint: stop the process of {server} and start it again.",
            _START_COMMAND,
        ),
        _finding_row(
            "session-not-open",
            "partition {partition}: server {server} has no open store session, although "
            "a quorum of replicas answers",
            _MOVE_COMMAND,
        ),
        _finding_row(
            "session-replicas-outdated",
            "partition {partition}: ZooKeeper assigns the replicas {assigned}, but the "
            "store session of server {server} uses {replicas}",
            _MOVE_COMMAND,
        ),
        _finding_row(
            "high-water-mark-unknown",
            "partition {partition}: server {server} has an open store session, but does not "
            "return the high-water mark ({why})",
            _MOVE_COMMAND,
        ),
        _finding_row(
            "server-clock-skew",
            "partition {partition}: the last transaction was committed {seconds} s in the "
            "future, so the clock of server {server} or of this machine is wrong",
            _SYNC_CLOCK_COMMAND,
        ),
        _finding_row(
            "never-opened",
            "partition {partition} has never been opened, although it has a server and a "
            "quorum of storages",
            _MOVE_COMMAND,
        ),
        _finding_row(
            "metadata-lost",
            "partition {partition} has records, but ZooKeeper has lost the partition's "
            "metadata. Hint: stop all servers and storages. Then the commands delete the old "
            "znodes and rebuild all znodes of the cluster. While `cluster rebuild-metadata` "
            "waits, start all storages, then the servers.",
            "{rebuild}",
        ),
        _finding_row(
            "rebuilding-unfinished",
            "partition {partition} is not served, because `cluster rebuild-metadata` was "
            "interrupted before it had completed",
            "{rebuild}",
        ),
    ),
}

FINDING_KINDS: dict[str, FindingKind] = {
    name: FindingKind(area, name, sentence, command)
    for area, rows in _ROWS_BY_AREA.items()
    for name, sentence, command in rows
}


def new_finding(name: str, subject: object, **fields: object) -> Finding:
    """Return a finding whose placeholders are filled in from `fields`."""
    partition = fields.get("partition")
    number = partition if isinstance(partition, int) else None
    kind = FINDING_KINDS[name]
    texts = {field_name: str(value) for field_name, value in fields.items()}
    sentence = kind.sentence.format_map(texts)
    return Finding(name, str(subject), sentence, kind.command.format_map(texts), number)


def placeholder_names(kind: FindingKind) -> set[str]:
    """Return the names of the placeholders in a finding's sentence and command."""
    parsed_text = string.Formatter().parse(kind.sentence + kind.command)
    return {name for _, name, _, _ in parsed_text if name}
