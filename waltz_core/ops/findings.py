"""Everything that the doctor can find: a sentence for each, and the command that mends it.

The sentences are what people search for and the commands what scripts run, so all of them stand in
one table; docs/doctor.md is written from it.

Rules:
    1. A finding has a sentence of its own, and a command that can be given as it is printed. Words
       in capitals in it are for whoever gives it: nobody here can know them. What may lose data
       is not decided by a command as it is printed.
    2. A name never changes its meaning: scripts look for it.
"""

import string
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Area(Enum):
    """What a finding is about."""

    ZOOKEEPER = "ZooKeeper"
    PROCESSES = "processes of a cluster on this machine"
    SERVERS = "servers"
    STORAGES = "storages"
    REPLICAS = "replicas"
    PARTITIONS = "partitions"


class FindingKind(NamedTuple):
    """One row of the table: names in braces are filled in."""

    area: Area
    name: str
    sentence: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong; `about` is what it is wrong with."""

    name: str
    about: str
    sentence: str
    command: str
    partition: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What stays the same when it is found again, with other figures."""
        return self.name, self.about


def _row(name: str, sentence: str, command: str) -> tuple[str, str, str]:
    return name, sentence, command


_START = "{start}"
_SPEAK = "waltz-core doctor --connect {spoken}"
_MOVE = "{move}"
_AT = "--connect {connect} --storage {storage} --partition {partition}"
_LOOK_AGAIN = "waltz-core doctor --connect {connect}"
_SYNC_CLOCK = "timedatectl set-ntp true"
_DROP_AND_TAKE = (
    f"waltz-core storage availability {_AT} --online false && "
    f"waltz-core storage availability {_AT} --online true"
)

_ROWS: dict[Area, tuple[tuple[str, str, str], ...]] = {
    Area.ZOOKEEPER: (
        _row(
            "zookeeper-away",
            "ZooKeeper cannot be asked, and so nothing of the cluster can be seen: {why}",
            _START,
        ),
        _row(
            "zookeeper-node-away",
            "node {node} of ZooKeeper does not answer: {why}",
            _START,
        ),
        _row(
            "zookeeper-node-alone",
            "node {node} of ZooKeeper answers, and serves nobody: it finds no quorum of the others",
            _START,
        ),
        _row(
            "zookeeper-refuses",
            "ZooKeeper does not show us the cluster: {why}",
            "waltz-core doctor --connect '{hosts}?auth=FILE'",
        ),
        _row(
            "no-cluster",
            "there is no cluster at {connect}; the command creates a new, empty one. If there was "
            "one, ZooKeeper's data is lost: run `cluster rebuild-metadata` instead (When "
            "ZooKeeper's data is lost, in docs/operations.md)",
            "waltz-core cluster create {connect} --partitions COUNT --storage HOST:PORT:ADMIN_PORT",
        ),
        _row(
            "cluster-lost",
            "there is no cluster at {connect} any more; the one in {directory} was there, and its "
            "storages know enough to make ZooKeeper's nodes anew",
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
            "{member} of the cluster in {directory} is stopped by a signal: process {pid}",
            "kill -CONT {pid}",
        ),
    ),
    Area.SERVERS: (
        _row(
            "no-server",
            "no server is registered: nobody takes appends",
            _START,
        ),
        _row(
            "server-away",
            "server {server} is registered, and nobody answers there: {why}",
            "waltz-core cluster remove-server {server} --connect {connect}",
        ),
        _row(
            "server-silent",
            "server {server} takes connections and does not answer ({why}): end its process and "
            "start it again",
            _START,
        ),
        _row(
            "server-shut",
            "server {server} is there, and TLS does not fit ({why}): say behind ?tls= how this "
            "cluster is spoken to, or see to its certificate",
            _SPEAK,
        ),
        _row(
            "server-unreachable",
            "server {server} is given no partitions: other servers cannot connect to it ({why}). "
            "Look at its advertised_host and advertised_port, at its certificate, and at the "
            "network between the servers",
            _LOOK_AGAIN,
        ),
        _row(
            "assignment-stale",
            "which server owns which partition was not decided for the servers that live now: the "
            "lead server {server} has to, and does not; end its process and start it again",
            _START,
        ),
        _row(
            "preference-not-granted",
            "partition {partition}: server {server} is to own it before all others, and {owner} is "
            "so, too, and has it",
            "waltz-core cluster unprefer {partition} {server} --connect {connect}",
        ),
        _row(
            "storage-out-of-reach",
            "server {server} cannot reach storage {storage}, which answers from here: look at the "
            "network between them (this command says the same of the machine that it runs on)",
            "waltz-core storage validate --connect {connect} --storage {storage}",
        ),
    ),
    Area.STORAGES: (
        _row(
            "storage-away",
            "storage {storage} does not answer: {why}; where its process runs, it is reading its "
            "files after a crash, and to be waited for",
            _START,
        ),
        _row(
            "storage-silent",
            "storage {storage} takes connections and does not answer ({why}): end its process and "
            "start it again",
            _START,
        ),
        _row(
            "storage-shut",
            "storage {storage} is there, and TLS does not fit ({why}): say behind ?tls= how this "
            "cluster is spoken to, or see to its certificate",
            _SPEAK,
        ),
        _row(
            "storage-hangs",
            "storage {storage} takes questions, and its threads do not come to their end ({why}), "
            "as when a disk does not answer: look at the disk, end its process and start it again",
            _START,
        ),
        _row(
            "storage-starting",
            "storage {storage} is starting: it reads its files, which may take minutes after a "
            "crash, and has no port before; wait, and do not end it",
            _LOOK_AGAIN,
        ),
        _row(
            "storage-never-started",
            "storage {storage} has never started, or is an original: nothing is registered for it",
            _START,
        ),
        _row(
            "admin-port-wrong",
            "storage {storage} answers, and its administration does not at {admin}, where "
            "ZooKeeper has it: {why}",
            "waltz-core cluster set-admin-port {storage} {port} --connect {connect}",
        ),
        _row(
            "storage-of-another-cluster",
            "at {storage} answers a storage of another cluster: end it, and start the one whose "
            "directory is of this cluster",
            _START,
        ),
        _row(
            "another-storage",
            "at {storage} answers storage {found}, and {expected} is registered: end it, and start "
            "the right one, or let an empty one take its place",
            "waltz-core cluster replace-storage {storage} {storage} --connect {connect}",
        ),
        _row(
            "disk-full",
            "the disk of storage {storage} is full: it refuses appends, with {free} MiB free",
            "{empty}",
        ),
        _row(
            "disk-nearly-full",
            "the disk of storage {storage} is nearly full: {free} MiB are free",
            "{empty}",
        ),
        _row(
            "storage-slow",
            "storage {storage} takes {took} ms to answer an append, {times} times as long as the "
            "others: check its disk, its network and the load of its machine",
            _LOOK_AGAIN,
        ),
        _row(
            "clock-of-storage",
            "the clock of storage {storage} is {seconds} s {way} the clock of this machine: set "
            "the one that is wrong",
            _SYNC_CLOCK,
        ),
    ),
    Area.REPLICAS: (
        _row(
            "replica-offline",
            "partition {partition}: the replica of {storage} was taken offline",
            f"waltz-core storage availability {_AT} --online true",
        ),
        _row(
            "replica-not-held",
            "partition {partition}: it is assigned to {storage}, which does not hold it",
            f"waltz-core storage add-partition {_AT}",
        ),
        _row(
            "replica-left-over",
            "storage {storage} has files of partitions {partitions}, which are assigned to other "
            "storages; the command deletes these files",
            "waltz-core storage remove-partition --connect {connect} --storage {storage} "
            "--partition {partitions} --delete-files",
        ),
        _row(
            "replica-stuck",
            "partition {partition}: {storage} answers, but nothing that needs its log, as when a "
            "disk does not answer: look at the disk, end its process and start it again",
            _START,
        ),
        _row(
            "replica-opening",
            "partition {partition}: {storage} opens its log, which may take minutes: wait",
            _LOOK_AGAIN,
        ),
        _row(
            "replica-unreadable",
            "partition {partition}: {storage} cannot use its log: {why}",
            f"waltz-core storage re-seed {_AT}",
        ),
        _row(
            "replica-damaged",
            "partition {partition}: {count} transactions of {storage} are damaged, and no other "
            "replica has mended them yet",
            f"waltz-core storage scrub {_AT}",
        ),
        _row(
            "replica-suspect",
            "partition {partition}: the replica of {storage} cannot vouch for its log, and counts "
            "for nothing until a new session has repaired it",
            _DROP_AND_TAKE,
        ),
        _row(
            "replica-not-engaged",
            "partition {partition}: the replica of {storage} answers, and its session does not "
            "count on it; it ends at {last}",
            _DROP_AND_TAKE,
        ),
        _row(
            "replica-lagging",
            "partition {partition}: the replica of {storage} is {count} transactions behind: its "
            "disk or its network is slower than those of the others",
            "{empty}",
        ),
    ),
    Area.PARTITIONS: (
        _row(
            "no-quorum",
            "partition {partition}: of its {count} replicas {answering} answer, and {quorum} are "
            "needed: nothing can be appended",
            _START,
        ),
        _row(
            "nobody-can-vouch",
            "partition {partition}: of its {count} replicas {able} can vouch for what was "
            "acknowledged, and {quorum} are needed; the command says what may be lost, and with "
            "--yes decides",
            "waltz-core cluster accept-replicas {partition} --connect {connect}",
        ),
        _row(
            "no-replicas",
            "partition {partition} has no replicas",
            "waltz-core cluster auto-assign --connect {connect}",
        ),
        _row(
            "too-few-replicas",
            "partition {partition} has {count} of the usual {usual} replicas",
            "waltz-core cluster auto-assign --replicas {usual} --connect {connect}",
        ),
        _row(
            "groups-crowded",
            "partition {partition}: its replicas are in fewer groups than they could be, so that "
            "one place may take too many of them with it",
            "{spread}",
        ),
        _row(
            "partition-without-server",
            "partition {partition} belongs to no server",
            _START,
        ),
        _row(
            "partition-not-served",
            "partition {partition}: server {server} owns it, and does not serve it",
            _MOVE,
        ),
        _row(
            "partition-served-by-another",
            "partition {partition}: server {server} serves it, and {owner} owns it; end its "
            "process and start it again",
            _START,
        ),
        _row(
            "session-not-open",
            "partition {partition}: server {server} has no open session, though a quorum of "
            "replicas answers",
            _MOVE,
        ),
        _row(
            "session-of-other-replicas",
            "partition {partition}: its replicas are {assigned}, and the session of server "
            "{server} is with {replicas}",
            _MOVE,
        ),
        _row(
            "mark-not-told",
            "partition {partition}: server {server} has a session, and tells no mark: {why}",
            _MOVE,
        ),
        _row(
            "clock-of-server",
            "partition {partition}: its last commit time lies {seconds} s in the future: the clock "
            "of server {server}, or of this machine, is wrong",
            _SYNC_CLOCK,
        ),
        _row(
            "never-opened",
            "partition {partition} was never opened, though it has a server and a quorum",
            _MOVE,
        ),
        _row(
            "metadata-lost",
            "partition {partition} has a history, and ZooKeeper has lost what it knew of it. All "
            "of the cluster's nodes have to be made anew, which takes the word of all storages: "
            "stop all servers and storages, have the old nodes deleted, and start the storages, "
            "then the servers, while the last command waits for them",
            "{rebuild}",
        ),
        _row(
            "rebuilding-unfinished",
            "partition {partition} waits since ZooKeeper's nodes were made anew: the command was "
            "broken off",
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
    """Return a finding with everything filled in; a field that is missing is our bug."""
    partition = fields.get("partition")
    number = partition if isinstance(partition, int) else None
    kind = KINDS[name]
    texts = {each: str(value) for each, value in fields.items()}
    sentence = kind.sentence.format_map(texts)
    return Finding(name, str(about), sentence, kind.command.format_map(texts), number)


def fields_of(kind: FindingKind) -> set[str]:
    """Return the names that have to be filled in."""
    parsed = string.Formatter().parse(kind.sentence + kind.command)
    return {name for _, name, _, _ in parsed if name}
