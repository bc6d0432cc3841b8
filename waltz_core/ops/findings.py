"""All findings of the doctor, each with a sentence and a command that repairs the problem.

Users search for the sentences and scripts run the commands. So all of them are in one table, from
which docs/doctor.md is generated.

Rules:
    1. A finding has its own sentence, and a command that can be run as printed. Words in capitals
       in a command are placeholders for the user. No command loses data when it is run as printed.
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
    """One row of the table; names in braces are fields that a finding fills in."""

    area: Area
    name: str
    sentence: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a cluster; `about` identifies the affected object."""

    name: str
    about: str
    sentence: str
    command: str
    partition: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the finding; it does not depend on the figures in the sentence."""
        return self.name, self.about


def _row(name: str, sentence: str, command: str) -> tuple[str, str, str]:
    return name, sentence, command


_START = "{start}"
_DOCTOR = "waltz-core doctor --connect {scheme_free}"
_AS_ANOTHER = "waltz-core doctor --connect {with_token}"
_MOVE = "{move}"
_AT = "--connect {connect} --storage {storage} --partition {partition}"
_REPEAT_DOCTOR = "waltz-core doctor --connect {connect}"
_ARCHIVE_STATUS = "waltz-core archive status --connect {connect}"
_SYNC_CLOCK = "timedatectl set-ntp true"
_OFFLINE_AND_ONLINE = (
    f"waltz-core storage availability {_AT} --online false && "
    f"waltz-core storage availability {_AT} --online true"
)

_ROWS: dict[Area, tuple[tuple[str, str, str], ...]] = {
    Area.ZOOKEEPER: (
        _row(
            "zookeeper-unavailable",
            "ZooKeeper does not answer, so the state of the cluster is unknown: {why}",
            _START,
        ),
        _row(
            "zookeeper-server-unavailable",
            "ZooKeeper server {server} does not answer: {why}",
            _START,
        ),
        _row(
            "zookeeper-server-without-quorum",
            "ZooKeeper server {server} answers, but it is not part of a quorum, so it "
            "serves no client",
            _START,
        ),
        _row(
            "zookeeper-access-denied",
            "ZooKeeper denies access to the cluster's znodes: {why}",
            "waltz-core doctor --connect '{hosts}?auth=FILE'",
        ),
        _row(
            "no-cluster",
            "there is no cluster at {connect}. Hint: the command creates a new, empty cluster. "
            "If a cluster existed there, ZooKeeper has lost its data; then run `cluster "
            "rebuild-metadata` instead (docs/operations.md, section 'When ZooKeeper's data is "
            "lost')",
            "waltz-core cluster create {connect} --partitions COUNT --storage HOST:PORT:ADMIN_PORT",
        ),
        _row(
            "cluster-lost",
            "ZooKeeper no longer has the cluster at {connect}. Its storages in "
            "{directory} have the data from which the command rebuilds its znodes",
            "{rebuild}",
        ),
    ),
    Area.PROCESSES: (
        _row(
            "process-down",
            "{member} of the cluster in {directory} does not run",
            "waltz-core local up --directory {directory}",
        ),
        _row(
            "process-stopped",
            "{member} of the cluster in {directory} is paused by a signal: process {pid}",
            "kill -CONT {pid}",
        ),
    ),
    Area.SERVERS: (
        _row(
            "no-server",
            "no server is registered, so the cluster accepts no appends",
            _START,
        ),
        _row(
            "server-unavailable",
            "server {server} is registered in ZooKeeper, but nothing listens at its address "
            "({why})",
            "waltz-core cluster remove-server {server} --connect {connect}",
        ),
        _row(
            "server-silent",
            "server {server} accepts connections, but does not answer ({why}). Hint: "
            "stop its process and start it again.",
            _START,
        ),
        _row(
            "server-tls-failed",
            "the TLS handshake with server {server} fails ({why}). Hint: name a file "
            "with the cluster's TLS settings in the connect string (?tls=FILE), or check the "
            "server's certificate.",
            _DOCTOR,
        ),
        _row(
            "server-access-denied",
            "server {server} rejects the doctor's requests: {why}. Hint: use a token whose "
            "principal has the permissions `read` and `administer`.",
            _AS_ANOTHER,
        ),
        _row(
            "server-unreachable",
            "server {server} gets no partitions, because other servers cannot connect to "
            "it ({why}). Hint: check its settings advertised_host and advertised_port, its "
            "certificate, and the network between the servers.",
            _REPEAT_DOCTOR,
        ),
        _row(
            "assignment-stale",
            "ZooKeeper's assignment of partitions does not match the running servers: the "
            "leader {server} has not written a new assignment. Hint: stop its process "
            "and start it again.",
            _START,
        ),
        _row(
            "preference-not-granted",
            "partition {partition}: servers {server} and {owner} are both preferred owners; "
            "{owner} owns the partition",
            "waltz-core cluster unprefer {partition} {server} --connect {connect}",
        ),
        _row(
            "storage-out-of-reach",
            "server {server} cannot connect to storage {storage}, although this machine "
            "can. Hint: check the network between them. The command tests the connection to "
            "the storage from the machine on which you run it.",
            "waltz-core storage validate --connect {connect} --storage {storage}",
        ),
    ),
    Area.STORAGES: (
        _row(
            "storage-unavailable",
            "storage {storage} does not answer: {why}. Hint: if its process runs, it "
            "may still be reading its files after a crash; then wait.",
            _START,
        ),
        _row(
            "storage-silent",
            "storage {storage} accepts connections, but does not answer ({why}). Hint: "
            "stop its process and start it again.",
            _START,
        ),
        _row(
            "storage-tls-failed",
            "the TLS handshake with storage {storage} fails ({why}). Hint: name a file "
            "with the cluster's TLS settings in the connect string (?tls=FILE), or check the "
            "storage's certificate.",
            _DOCTOR,
        ),
        _row(
            "storage-access-denied",
            "storage {storage} rejects the doctor's requests: {why}. Hint: use a token whose "
            "principal has the permissions `read` and `administer`.",
            _AS_ANOTHER,
        ),
        _row(
            "storage-unresponsive",
            "storage {storage} accepts requests, but does not complete them ({why}); "
            "its disk may hang. Hint: check the disk, then stop the process and start it "
            "again.",
            _START,
        ),
        _row(
            "storage-starting",
            "storage {storage} is starting: it reads its files, which may take minutes "
            "after a crash, and then opens its port. Hint: wait, and do not stop the process.",
            _REPEAT_DOCTOR,
        ),
        _row(
            "storage-never-started",
            "storage {storage} is not registered in ZooKeeper: it has never started, or "
            "it is a Waltz 0.13 storage",
            _START,
        ),
        _row(
            "admin-port-wrong",
            "storage {storage} answers, but not at {admin}, the admin address that ZooKeeper has "
            "for it: {why}",
            "waltz-core cluster set-admin-port {storage} {port} --connect {connect}",
        ),
        _row(
            "storage-cluster-mismatch",
            "the storage at {storage} belongs to another cluster. Hint: stop it, and "
            "start the storage whose directory belongs to this cluster.",
            _START,
        ),
        _row(
            "storage-id-mismatch",
            "the storage at {storage} has the storage ID {found}, but ZooKeeper has the ID "
            "{expected} for this address. Hint: stop this storage and start the registered one. "
            "If the registered one is lost, start a storage with an empty directory; the command "
            "then makes it the replacement.",
            "waltz-core cluster replace-storage {storage} {storage} --connect {connect}",
        ),
        _row(
            "disk-full",
            "the disk of storage {storage} is full: {free} MiB are free, and the "
            "storage rejects appends",
            "{empty}",
        ),
        _row(
            "disk-nearly-full",
            "the disk of storage {storage} is nearly full: {free} MiB are free",
            "{empty}",
        ),
        _row(
            "disk-full-soon",
            "the disk of storage {storage} will be full in {days} days: {free} MiB "
            "are free, and in the last day {rate} MiB were written",
            "{empty}",
        ),
        _row(
            "storage-slow",
            "storage {storage} takes {took} ms to answer an append, {times} times as "
            "long as the other storages. Hint: check its disk, its network and the load of "
            "its machine.",
            _REPEAT_DOCTOR,
        ),
        _row(
            "storage-clock-skew",
            "the clock of storage {storage} is {seconds} s {way} the clock of this "
            "machine. Hint: synchronize both clocks.",
            _SYNC_CLOCK,
        ),
    ),
    Area.ARCHIVE: (
        _row(
            "archive-settings-differ",
            "storage {storage} archives to {found}, but the other storages archive to "
            "{expected}. Hint: set the same archive_url in the settings of all storages, "
            "then stop this storage and start it again.",
            _START,
        ),
        _row(
            "archive-url-missing",
            "transactions of partitions {partitions} are archived, but no storage that "
            "answers has the setting archive_url. Transactions that are only in the archive "
            "cannot be read. Hint: set archive_url in the settings of all storages, then "
            "stop them and start them again.",
            _START,
        ),
        _row(
            "archive-unavailable",
            "storages {storages} could not write to the archive {count} times in a row: "
            "{why}. Hint: check the credentials, the network and the object store. Until "
            "then, storages remove no old segments. The command reads the archive from the "
            "machine on which you run it.",
            _ARCHIVE_STATUS,
        ),
        _row(
            "archive-damaged",
            "storages {storages} found that a file of the archive is missing or corrupt ({why}). "
            "Hint: the command lists all such files. It replaces an object if a storage still "
            "has all of its transactions; restore other files from a copy or from an earlier "
            "version in the object store.",
            "waltz-core archive verify --repair --connect {connect}",
        ),
        _row(
            "archive-idle",
            "the storages have the archive {url}, but nothing is archived. Hint: set "
            "archive_interval_ms in the settings of the servers, then stop them and start "
            "them again. The storages write the first objects after archive_age_ms.",
            _START,
        ),
        _row(
            "archive-lagging",
            "partition {partition}: {count} committed transactions are not archived "
            "yet; the oldest was committed {hours} h ago. Hint: check the setting "
            "archive_interval_ms of the servers, and `archive.failed` in their logs.",
            _ARCHIVE_STATUS,
        ),
    ),
    Area.REPLICAS: (
        _row(
            "replica-offline",
            "partition {partition}: the replica on storage {storage} was taken offline",
            f"waltz-core storage availability {_AT} --online true",
        ),
        _row(
            "replica-not-held",
            "partition {partition} is assigned to storage {storage}, but the storage has no "
            "replica of it",
            f"waltz-core storage add-partition {_AT}",
        ),
        _row(
            "replica-left-over",
            "storage {storage} has files of partitions {partitions}, which ZooKeeper "
            "assigns to other storages. Hint: the command deletes these files.",
            "waltz-core storage remove-partition --connect {connect} --storage {storage} "
            "--partition {partitions} --delete-files",
        ),
        _row(
            "replica-stuck",
            "partition {partition}: storage {storage} answers, but requests for its replica do "
            "not complete; the disk may hang. Hint: check the disk, then stop the process and "
            "start it again.",
            _START,
        ),
        _row(
            "replica-opening",
            "partition {partition}: storage {storage} is still opening the log of its replica, "
            "which may take minutes",
            _REPEAT_DOCTOR,
        ),
        _row(
            "replica-unreadable",
            "partition {partition}: storage {storage} cannot use the log of its replica ({why})",
            f"waltz-core storage re-seed {_AT}",
        ),
        _row(
            "replica-damaged",
            "partition {partition}: the replica on storage {storage} has {count} damaged "
            "transactions, which are not repaired from another replica yet",
            f"waltz-core storage scrub {_AT}",
        ),
        _row(
            "replica-suspect",
            "partition {partition}: the log of the replica on storage {storage} is not trusted, "
            "so the replica does not count towards a quorum until a new store session has "
            "repaired it",
            _OFFLINE_AND_ONLINE,
        ),
        _row(
            "replica-not-engaged",
            "partition {partition}: the replica on storage {storage} answers, but it is not in "
            "sync, so it does not count towards a quorum; its log ends at transaction {last}",
            _OFFLINE_AND_ONLINE,
        ),
        _row(
            "replica-lagging",
            "partition {partition}: the replica on storage {storage} lags by {count} "
            "transactions, because its disk or its network is slower than those of the other "
            "replicas",
            "{empty}",
        ),
    ),
    Area.PARTITIONS: (
        _row(
            "no-quorum",
            "partition {partition} accepts no appends: only {answering} of {count} "
            "replicas answer, and a quorum of {quorum} is required",
            _START,
        ),
        _row(
            "no-trusted-quorum",
            "partition {partition}: only {able} of {count} replicas have a trusted "
            "log, and a quorum of {quorum} is required. Hint: the command lists what could "
            "be lost; add --yes to accept the loss.",
            "waltz-core cluster accept-replicas {partition} --connect {connect}",
        ),
        _row(
            "no-replicas",
            "partition {partition} has no replicas",
            "waltz-core cluster auto-assign --connect {connect}",
        ),
        _row(
            "too-few-replicas",
            "partition {partition} has {count} replicas instead of the usual {usual}",
            "waltz-core cluster auto-assign --replicas {usual} --connect {connect}",
        ),
        _row(
            "replicas-share-group",
            "partition {partition}: its replicas are in fewer groups of storages than "
            "possible, so the loss of one group could cost the quorum",
            "{spread}",
        ),
        _row(
            "partition-without-server",
            "partition {partition} has no owner",
            _START,
        ),
        _row(
            "partition-not-served",
            "partition {partition}: server {server} owns it, but does not answer requests for it",
            _MOVE,
        ),
        _row(
            "partition-served-by-another",
            "partition {partition}: server {server} answers requests for it, but "
            "{owner} owns it. Hint: stop the process of {server} and start it again.",
            _START,
        ),
        _row(
            "session-not-open",
            "partition {partition}: server {server} has no open store session, although "
            "a quorum of replicas answers",
            _MOVE,
        ),
        _row(
            "session-replicas-outdated",
            "partition {partition}: ZooKeeper assigns the replicas {assigned}, but the "
            "store session of server {server} uses {replicas}",
            _MOVE,
        ),
        _row(
            "high-water-mark-unknown",
            "partition {partition}: server {server} has an open store session, but does not "
            "return the high-water mark ({why})",
            _MOVE,
        ),
        _row(
            "server-clock-skew",
            "partition {partition}: the last transaction was committed {seconds} s in the "
            "future, so the clock of server {server} or of this machine is wrong",
            _SYNC_CLOCK,
        ),
        _row(
            "never-opened",
            "partition {partition} has never been opened, although it has a server and a "
            "quorum of storages",
            _MOVE,
        ),
        _row(
            "metadata-lost",
            "partition {partition} has records, but ZooKeeper has lost the partition's "
            "metadata. Hint: rebuild all znodes of the cluster; all storages must answer. "
            "Stop all servers and storages, and delete the old znodes. Then start the "
            "storages, run the last command, and start the servers while it waits for them.",
            "{rebuild}",
        ),
        _row(
            "rebuilding-unfinished",
            "partition {partition} is not served, because `cluster rebuild-metadata` was "
            "interrupted before it had completed",
            "{rebuild}",
        ),
    ),
}

KINDS: dict[str, FindingKind] = {
    name: FindingKind(area, name, sentence, command)
    for area, rows in _ROWS.items()
    for name, sentence, command in rows
}


def finding(name: str, about: object, **fields: object) -> Finding:
    """Return a finding with all fields filled in; a missing field is a bug."""
    partition = fields.get("partition")
    number = partition if isinstance(partition, int) else None
    kind = KINDS[name]
    texts = {each: str(value) for each, value in fields.items()}
    sentence = kind.sentence.format_map(texts)
    return Finding(name, str(about), sentence, kind.command.format_map(texts), number)


def fields_of(kind: FindingKind) -> set[str]:
    """Return the names of the fields that the sentence and the command of a finding need."""
    parsed = string.Formatter().parse(kind.sentence + kind.command)
    return {name for _, name, _, _ in parsed if name}
