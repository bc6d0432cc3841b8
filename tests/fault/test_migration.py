"""A cluster of Waltz 0.13 migrates to this version, and back (docs/compatibility.md).

The tests write and read files and nodes of 0.13 byte by byte. For this, they use only the
description of their layout (`tests/crash/layout.py`, docs/zookeeper.md), and no code of this
version.
"""

import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kazoo.client import KazooClient

from tests.commands import run_command
from tests.crash import layout
from tests.fault.load import are_all_replicas_engaged, differing_segments, wait_until
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")
UNRESOLVED = -(1 << 63)
SEGMENT_IDS = 1_200
ASSIGNED = 5  # and available
UNUSED = layout.Structure(-1, -1, -1, ASSIGNED, 1)


class Metadata(NamedTuple):
    """The metadata of partition 0 in ZooKeeper; `states`: address -> (session, closing mark)."""

    generation: int
    session: int
    states: dict[str, tuple[int, int]]

    def encode(self) -> bytes:
        parts = [struct.pack(">biqi", 1, self.generation, self.session, len(self.states))]
        for address, state in self.states.items():
            name = address.encode()
            parts.append(struct.pack(">bbiH", 1, 1, 0, len(name)) + name)
            parts.append(struct.pack(">qq", *state))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> "Metadata":
        version, generation, session, count = struct.unpack_from(">biqi", data)
        assert version == 1
        at, states = 17, {}
        for _ in range(count):
            *versions, partition, size = struct.unpack_from(">bbiH", data, at)
            assert (versions, partition) == ([1, 1], 0)
            at += 8
            address = data[at : at + size].decode()
            states[address] = struct.unpack_from(">qq", data, at + size)
            at += size + 16
        assert at == len(data)
        return cls(generation, session, states)


class OldCluster:
    """The directories and nodes of a stopped 0.13 cluster, in place of those of a local cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        members = [member for member in cluster.members if member.name in STORAGES]
        self.addresses = [f"{cluster.host}:{member.port}" for member in members]
        self.directories = [cluster.directory / member.name for member in members]
        hosts, _, root = cluster.connect.partition("/")
        self.root = f"/{root}"
        self.node = f"{self.root}/store/partition/0"
        self.zookeeper = KazooClient(hosts)
        self.zookeeper.start(timeout=TEST_TIMEOUT_S)
        store, _ = self.zookeeper.get(f"{self.root}/store")
        self.key = store[1:17]

    def leave_nodes(self, metadata: Metadata) -> None:
        """Keep only the znodes that 0.13 creates; no 0.13 server runs."""
        self.zookeeper.delete(f"{self.root}/x", recursive=True)
        self.zookeeper.create(self.node, metadata.encode())  # with the first session
        path = f"{self.root}/serverDescriptors"
        cversion = self.zookeeper.exists(path).children_version
        owned = struct.pack(">ii", 1, 2) + struct.pack(">iiii", 0, metadata.generation, 1, 1)
        self.zookeeper.set(path, struct.pack(">Biii", 3, cversion, 2, 1) + owned)

    def write(self, records: list[bytes], lasts: list[int], marks: list[tuple[int, int]]) -> None:
        """Write each storage's log up to an ID, with its last session and the session's mark."""
        for directory, last, (session, mark) in zip(self.directories, lasts, marks, strict=True):
            (directory / "0").mkdir(parents=True)
            structures = [layout.Structure(session, mark, mark, ASSIGNED, 9), UNUSED]
            control = layout.control(self.key, structures)
            (directory / "waltz-storage.ctl").write_bytes(control)
            for first in range(0, last + 1, SEGMENT_IDS):
                part = records[first : min(first + SEGMENT_IDS, last + 1)]
                for suffix, data in zip(
                    ("seg", "idx"), layout.segment(self.key, 0, first, part), strict=True
                ):
                    (directory / "0" / f"{first:019d}.{suffix}").write_bytes(data)

    def read(self, directory: Path) -> tuple[layout.Control, dict[int, list[bytes]]]:
        """Return the records that 0.13 finds in a directory."""
        files = {path: path.read_bytes() for path in directory.rglob("*.*")}
        return layout.read_directory(files, directory)

    def run(self, session: int, added: list[bytes]) -> None:
        """Open a session at the end of the log and append on all storages, like 0.13."""
        for directory in self.directories:
            found, logs = self.read(directory)
            mark = len(logs[0]) - 1
            first, second = found.partitions
            first = first._replace(
                session=session,
                low_water_mark=mark,
                local_low_water_mark=mark,
                sequence=first.sequence + 1,
            )
            control = layout.control(self.key, [first, second])
            (directory / "waltz-storage.ctl").write_bytes(control)
            segment = max((directory / "0").glob("*.seg"))
            with segment.open("ab") as seg, segment.with_suffix(".idx").open("ab") as idx:
                for one in added:
                    idx.write(seg.tell().to_bytes(8, "big"))
                    seg.write(one)
        states = dict.fromkeys(self.addresses, (session, UNRESOLVED))
        metadata = Metadata(self.metadata().generation, session, states)
        self.zookeeper.set(self.node, metadata.encode())

    def metadata(self) -> Metadata:
        return Metadata.decode(self.zookeeper.get(self.node)[0])

    def close(self) -> None:
        self.zookeeper.stop()
        self.zookeeper.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(
        tmp_path / "cluster", exit_with_parent=True, server_count=1, partition_count=2
    )
    cluster.prepare()
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def old_cluster(cluster: LocalCluster) -> Iterator[OldCluster]:
    found = OldCluster(cluster)
    yield found
    found.close()


def make_records(first: int, count: int) -> list[bytes]:
    return [
        layout.record(number, b"%d-" % number + bytes(40)) for number in range(first, first + count)
    ]


def log_of(client: WaltzClient, partition: int = 0) -> list[bytes]:
    """Return the records of the partition, in the order of the segments."""
    last = client.high_water_mark(partition, linearizable=True)
    found: list[bytes] = []
    if last < 0:
        return found
    for chunk in client.read_range(partition, 0, last):
        data, at = bytes(chunk.records), 0
        for length in chunk.lengths.tolist():
            found.append(data[at : at + length])
            at += length
    return found


def append(client: WaltzClient, count: int, partition: int = 0) -> None:
    for each in [
        client.append(b"ours %d" % number, partition=partition) for number in range(count)
    ]:
        each.result(timeout=TEST_TIMEOUT_S)


def is_valid(directory: Path) -> bool:
    return run_command("disk", "verify", str(directory)).returncode == 0


def refused_0_13_server(cluster: LocalCluster, name: str) -> str:
    """Send the hello of a 0.13 server to a storage; return the storage's log lines about it."""
    text = b"Waltz Storage Client"
    payload = struct.pack(">ihi", 1, 0, len(text)) + text
    member = cluster.member(name)
    with socket.create_connection((cluster.host, member.port), timeout=TEST_TIMEOUT_S) as link:
        link.sendall(b"H" + struct.pack(">hi", 0, len(payload)) + payload)
        while link.recv(4096):  # reads the storage's hello, and then the end of the connection
            pass
    log = cluster.log_path(name)
    wait_until("the refusal is logged", lambda: "Waltz Storage Client" in log.read_text())
    (line,) = [each for each in log.read_text().splitlines() if "Waltz Storage Client" in each]
    return line


def test_a_0_13_cluster_is_migrated_and_migrated_back(
    cluster: LocalCluster, old_cluster: OldCluster, tmp_path: Path
) -> None:
    # Stopped with appends in flight; the third storage was down in the last session.
    log = make_records(0, 1_500)
    old_cluster.write(log, [1_499, 1_479, 1_249], [(7, 1_399), (7, 1_399), (5, 999)])
    first, second, third = old_cluster.addresses
    states = {first: (7, UNRESOLVED), second: (7, UNRESOLVED), third: (5, 1_399)}
    old_cluster.leave_nodes(Metadata(3, 7, states))

    # Rehearse on a copy.
    for directory in old_cluster.directories:
        copy = tmp_path / "copy" / directory.name
        shutil.copytree(directory, copy)
        assert is_valid(copy)

    # Take over: the same directories, the same root.
    cluster.up()
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        log_of_0_13 = log_of(client)
        assert len(log_of_0_13) >= 1_480, "a quorum of the 0.13 storages had these transactions"
        assert log_of_0_13 == log[: len(log_of_0_13)]
        append(client, 30)
        append(client, 5, partition=1)
        log = log_of(client)
        assert log[: len(log_of_0_13)] == log_of_0_13
        assert len(log) == len(log_of_0_13) + 30
        other = log_of(client, 1)
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(cluster))
    line = refused_0_13_server(cluster, STORAGES[0])
    assert "this side supports [1, 2, 3, 4]" in line
    assert "supports [0]" in line
    assert "Hint: migrate the whole cluster at once" in line

    # The way back: 0.13 finds its files and nodes.
    cluster.down(keep_zookeeper=True)
    assert differing_segments(cluster) == []
    session = old_cluster.metadata().session
    assert session > 7
    assert set(old_cluster.metadata().states) == set(old_cluster.addresses)
    for directory in old_cluster.directories:
        found, logs = old_cluster.read(directory)
        assert logs == {0: log, 1: other}
        assert found.partitions[0].session == session
        assert is_valid(directory)
    more = make_records(len(log), 300)
    old_cluster.run(session + 1, more)

    # And forward again.
    cluster.up()
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        assert log_of(client) == log + more
        append(client, 3)
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(cluster))
        log = log_of(client)
    cluster.down(keep_zookeeper=True)
    assert differing_segments(cluster) == []
    for directory in old_cluster.directories:
        assert old_cluster.read(directory)[1] == {0: log, 1: other}
        assert is_valid(directory)


def test_unequal_replicas_of_0_13_keep_all_acknowledged_records(
    cluster: LocalCluster, old_cluster: OldCluster
) -> None:
    """The replicas have the same records in different batches; no log is truncated for this."""
    log = make_records(0, 1_500)
    old_cluster.write(log, [1_499] * 3, [(7, 1_399), (7, 1_399), (7, 1_099)])
    old_cluster.leave_nodes(Metadata(3, 7, dict.fromkeys(old_cluster.addresses, (7, UNRESOLVED))))
    cluster.up()
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        assert log_of(client) == log
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(cluster))
    cluster.down(keep_zookeeper=True)
    assert differing_segments(cluster) == []
    batches = [
        b"".join(path.read_bytes() for path in sorted(directory.glob("0/*.chn")))
        for directory in old_cluster.directories
    ]
    assert len(batches[0]) == len(batches[1]) == len(batches[2])
    for directory in old_cluster.directories:
        assert old_cluster.read(directory)[1][0] == log
        assert is_valid(directory)
