"""The client against a whole local cluster: real ZooKeeper, storages, servers, kills in between."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pyspark.serializers import CPickleSerializer

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import (
    BYTES,
    Callbacks,
    RangeForm,
    RowOutcomeCode,
    Transaction,
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
)
from waltz_core.client.read.ranges import ReaderConnection, ReplicaSet
from waltz_core.config import ClientConfig
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.batches import encode_append
from waltz_core.records.raw_records import HEADER_DTYPE, headers_of


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster") / "local"
    with running_cluster(directory) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[WaltzClient]:
    with WaltzClient(cluster.connect) as opened:
        yield opened


def batch_of(rows: list[bytes], locks: list[list[int]] | None = None) -> bytes:
    none: list[list[int]] = [[] for _ in rows]
    return encode_append(
        [0] * len(rows), rows, write_locks=locks or none, read_locks=none, append_locks=none
    )


def log_of(client: WaltzClient, partition: int) -> tuple[np.ndarray, list[bytes]]:
    """Return the headers and the data of a whole partition."""
    last = client.high_water_mark(partition, linearizable=True)
    headers, payloads = [], []
    for chunk in client.read_range(partition, 0, last):
        headers.append(np.frombuffer(headers_of(chunk.records, chunk.lengths), HEADER_DTYPE))
        offset = 0
        for length in chunk.lengths.tolist():
            payloads.append(bytes(chunk.records[offset + 36 : offset + length - 4]))
            offset += length
    return np.concatenate(headers) if headers else np.empty(0, HEADER_DTYPE), payloads


# ---------------------------------------------------------------------------------------------
# normal operation


def test_appends_of_all_kinds_are_in_the_log(client: WaltzClient):
    before = client.high_water_mark(0)
    first_append = client.append(
        b"one", partition=0, header=5, append_locks=[lock("a", 1)]
    ).result()
    assert first_append == before + 1
    outcome = client.append_batch(
        0, batch_of([b"two", b"three"]), 2, client_high_water_mark=-1
    ).result()
    assert outcome.transaction_ids.tolist() == [first_append + 1, first_append + 2]
    assert client.flush(0) == first_append + 2
    assert client.high_water_marks(linearizable=True)[0] == first_append + 2
    assert log_of(client, 0)[1][-3:] == [b"one", b"two", b"three"]
    assert not client.has_pending


def test_replicas_give_the_same_bytes_as_the_server(client: WaltzClient):
    for _ in range(3):
        rows = [b"%05d" % i for i in range(500)]
        client.append_batch(1, batch_of(rows), 500, client_high_water_mark=-1).result()
    last = client.high_water_mark(1)
    wait_until("the last server is ready", lambda: len(client.replicas(1).replicas) == 3)
    replicas = client.replicas(1)
    for form in RangeForm:
        bytes_of_replicas = [
            bytes(c.records)
            for c in client.read_range(1, 0, last, form=form, replicas=replicas, bytes_max=9_000)
        ]
        bytes_of_server = [bytes(c.records) for c in client.read_range(1, 0, last, form=form)]
        assert b"".join(bytes_of_replicas) == b"".join(bytes_of_server)
        assert len(bytes_of_replicas) > len(bytes_of_server) or form is RangeForm.HEADERS


def test_reads_use_the_replica_of_the_clients_group(
    client: WaltzClient, monkeypatch: pytest.MonkeyPatch
):
    client.append(b"x", partition=3).result()
    requests: list[str] = []
    open_link = ReaderConnection.open

    async def record_open(
        address: str, replicas: ReplicaSet, *, timeout_s: float, ssl: None
    ) -> ReaderConnection:
        requests.append(address)
        return await open_link(address, replicas, timeout_s=timeout_s, ssl=ssl)

    wait_until("three replicas", lambda: len(client.replicas(3).replicas) == 3)
    monkeypatch.setattr(ReaderConnection, "open", record_open)
    near = [client.replicas(3, group=group).replicas_in_group for group in range(4)]
    # Each storage of this cluster is a separate group.
    assert sorted(len(each) for each in near) == [0, 1, 1, 1]
    assert {each[0] for each in near if each} == set(client.replicas(3).replicas)
    for group, replicas_in_group in enumerate(near):
        requests.clear()
        replicas = client.replicas(3, group=group)
        assert sum(c.count for c in client.read_range(3, 0, 0, replicas=replicas)) == 1
        assert tuple(requests) == replicas_in_group or not replicas_in_group
        assert len(requests) == 1


def test_a_pickled_layout_opens_a_client_in_another_process(client: WaltzClient):
    client.mount()
    # Spark pickles the layout in the same way, for another process.
    layout = CPickleSerializer().loads(CPickleSerializer().dumps(client.layout()))
    with WaltzClient.at(layout, client_id=client.client_id, connection_sequence=1 << 32) as counts:
        assert counts.cluster() == client.cluster()
        first = counts.append(b"placed", partition=2).result()
        assert log_of(counts, 2)[1][first] == b"placed"


def test_a_forked_process_must_open_a_new_client(client: WaltzClient, cluster: LocalCluster):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.high_water_mark(0)
        except errors.UsageError as error:
            os.write(writer, str(error).encode())
        with WaltzClient(cluster.connect) as new_client:
            os.write(writer, f"; own sees {new_client.partition_count}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    message = os.read(reader, 1_000).decode()
    os.close(reader)
    assert "and cannot be used in the forked process" in message
    assert message.endswith("own sees 4")


def test_the_error_without_zookeeper_names_the_hosts():
    def check(address: str, expected: str) -> None:
        # On a busy machine, the client may find the reason later.
        for timeout_ms in (300, 3_000, 30_000):
            config = ClientConfig(zookeeper_connect_timeout_ms=timeout_ms)
            with pytest.raises(errors.CoordinatorUnavailable) as caught:
                WaltzClient(f"{address}/waltz", config)
            if expected in str(caught.value):
                break
        assert f"answered at {address} within {timeout_ms} ms: {expected}" in str(caught.value)

    check("127.0.0.1:9", "Connection refused")
    check("zookeeper.invalid:2181", "the host name cannot be resolved")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        check(
            address,
            "the host accepts connections, but ZooKeeper does not answer the request for a session",
        )


def test_the_error_without_a_cluster_names_the_command(cluster: LocalCluster):
    hosts = cluster.connect.partition("/")[0]
    with pytest.raises(errors.BadConfig, match="waltz-core cluster create"):
        WaltzClient(f"{hosts}/nowhere")


# ---------------------------------------------------------------------------------------------
# callbacks and contexts on threads


class Ledger(Callbacks):
    """A counter built from the feed; its callbacks block, as databases do."""

    def __init__(self, client: WaltzClient, partition: int) -> None:
        self.mark = client.high_water_mark(partition)
        self.value = 0
        self.threads: set[str] = set()
        self.seen: list[int] = []
        self.changed = threading.Condition()

    def client_high_water_mark(self, partition: int) -> int:
        return self.mark

    def apply_transaction(self, transaction: Transaction) -> None:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        self.value = int(transaction.value(BYTES))
        with self.changed:
            self.seen.append(transaction.transaction_id)
            self.changed.notify_all()

    def has_seen(self, count: int) -> bool:
        """Wait until `count` transactions have been applied."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.seen) >= count, TEST_TIMEOUT_S)


class Increment(TransactionContext):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.failures = 0
        self.is_applied = threading.Event()

    def partition_id(self, partition_count: int) -> int:
        return 3

    def execute(self, builder: TransactionBuilder) -> bool:
        builder.set_transaction_data(b"%d" % (self.ledger.value + 1), BYTES)
        builder.set_write_locks([lock("counter")])
        return True

    def on_lock_failure(self) -> None:
        self.failures += 1

    def on_application(self) -> None:
        self.is_applied.set()


def test_two_clients_increment_one_counter_without_a_lost_update(cluster: LocalCluster):
    with WaltzClient(cluster.connect) as first_append, WaltzClient(cluster.connect) as two:
        start = first_append.high_water_mark(3)
        contexts = []
        for client in (first_append, two):
            ledger = Ledger(client, 3)
            client.subscribe(ledger, [3])
            contexts += [(client, Increment(ledger)) for _ in range(20)]
        futures = [client.submit(context) for client, context in contexts]
        ids = sorted(future.result(TEST_TIMEOUT_S) for future in futures)
        assert ids == list(range(start + 1, start + 41))
        assert log_of(first_append, 3)[1][start + 1 :] == [b"%d" % i for i in range(1, 41)]
        assert all(context.is_applied.wait(TEST_TIMEOUT_S) for _, context in contexts)
        assert sum(context.failures for _, context in contexts) > 0
        for _, context in contexts:
            # An append is complete when the client that sent it has applied it. The other client
            # continues.
            assert context.ledger.has_seen(len(ids))
            assert context.ledger.threads == {"waltz-callback"}
            assert context.ledger.seen == ids


# ---------------------------------------------------------------------------------------------
# kills


def load(
    client: WaltzClient, stop: threading.Event, name: bytes, counts: Counter, mismatches: list
) -> None:
    """Append batches and single rows until stopped; record the outcomes."""
    pending: list[tuple[int, int, list[bytes], object]] = []
    number = 0
    while not stop.is_set():
        partition = number % client.partition_count
        rows = [b"%s-%d-%d" % (name, number, i) for i in range(20)]
        future = client.append_batch(partition, batch_of(rows), 20, client_high_water_mark=-1)
        single = client.append(b"%s-%d" % (name, number), partition=partition)
        pending.append((partition, 20, rows, future))
        pending.append((partition, 1, [b"%s-%d" % (name, number)], single))
        number += 1
        if number % 10 == 0:
            future.exception(TEST_TIMEOUT_S)
    for partition, count, rows, future in pending:
        try:
            outcome = future.result(TEST_TIMEOUT_S)
        except errors.OutcomeUnknown:
            counts["unknown"] += count
        except errors.WaltzError:
            counts["failed"] += count
            mismatches.extend((partition, None, row) for row in rows)
        else:
            ids = [outcome] if count == 1 else outcome.transaction_ids.tolist()
            reasons = [0] if count == 1 else outcome.reasons.tolist()
            for row, transaction_id, reason in zip(rows, ids, reasons, strict=True):
                counts[RowOutcomeCode(reason).name] += 1
                mismatches.append((partition, transaction_id if reason == 0 else None, row))


def test_outcomes_while_a_server_is_killed_agree_with_the_log(cluster: LocalCluster):
    stop = threading.Event()
    counts: Counter[str] = Counter()
    claims: list[tuple[int, int | None, bytes]] = []
    with ThreadPoolExecutor(2) as pool, WaltzClient(cluster.connect) as client:
        client.mount()
        # One of the two clients uses the layout, and queries ZooKeeper when the layout is outdated.
        with WaltzClient.at(client.layout()) as other:
            runs = [
                pool.submit(load, each, stop, b"%d" % i, counts, claims)
                for i, each in enumerate((client, other))
            ]
            wait_until("appends", lambda: client.high_water_mark(0) > 20)
            cluster.kill("server-1")
            marks = client.high_water_marks()
            wait_until(
                "appends in all partitions",
                lambda: all(client.high_water_mark(p) > marks[p] + 50 for p in marks),
            )
            cluster.start("server-1")
            stop.set()
            for run in runs:
                run.result(TEST_TIMEOUT_S)
        check_claims(client, claims)
    assert counts["COMMITTED"] > 0
    assert counts["unknown"] == 0
    assert counts["failed"] == 0


def check_claims(client: WaltzClient, claims: list[tuple[int, int | None, bytes]]) -> None:
    for partition in range(client.partition_count):
        headers, payloads = log_of(client, partition)
        assert np.array_equal(headers["transaction_id"], np.arange(headers.size))
        assert np.unique(headers["req_id"]).size == headers.size, "a request ID is in the log twice"
        count = Counter(payloads)
        for where, transaction_id, row in claims:
            if where != partition:
                continue
            if transaction_id is None:
                assert count[row] == 0, f"{row!r} was reported as failed and is in the log"
            else:
                assert payloads[transaction_id] == row
                assert count[row] == 1, f"{row!r} is in the log twice"
