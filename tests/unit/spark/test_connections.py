"""One shared client for each cluster and process, also with many threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import ClusterKeyMismatch
from waltz_spark import shared_clients
from waltz_spark.shared_clients import client_of, close_clients, with_client


class Client:
    """Connects when the test permits it; a client of "dead" waits for the test."""

    connected: list[str] = []  # noqa: RUF012 - emptied by each test
    dials = threading.Semaphore(0)
    may_answer = threading.Event()

    def __init__(self, connect: str) -> None:
        self.connected.append(connect)
        if connect.startswith("dead"):
            self.dials.release()
            assert self.may_answer.wait(TEST_TIMEOUT_S)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_clients, "WaltzClient", Client)
    monkeypatch.setattr(shared_clients, "_clients", {})
    Client.connected.clear()
    Client.may_answer.clear()
    yield
    close_clients()


def test_an_unresponsive_zookeeper_does_not_block_other_clusters() -> None:
    with ThreadPoolExecutor() as pool:
        try:
            waiting = pool.submit(client_of, "dead:2181/x")
            assert Client.dials.acquire(timeout=TEST_TIMEOUT_S)
            other = pool.submit(client_of, "live:2181/x")
            assert other.result(TEST_TIMEOUT_S / 2) is client_of("live:2181/x")
            assert not waiting.done()
        finally:
            Client.may_answer.set()
    assert Client.connected == ["dead:2181/x", "live:2181/x"]


def test_callers_of_one_cluster_wait_and_share_the_client() -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client_of, "dead:2181/x")
        assert Client.dials.acquire(timeout=TEST_TIMEOUT_S)
        second = pool.submit(client_of, "dead:2181/x")
        Client.may_answer.set()
        assert first.result(TEST_TIMEOUT_S) is second.result(TEST_TIMEOUT_S)
    assert Client.connected == ["dead:2181/x"]


def test_gc_freeze_is_called_once_for_each_kind_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(shared_clients.gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(shared_clients.gc, "freeze", lambda: done.append("freeze"))
    for work in ("this test's", "this test's", "another of it"):
        shared_clients.freeze_existing_objects(work)
    assert done == ["collect", "freeze"] * 2


def test_a_client_is_replaced_if_its_cluster_was_replaced() -> None:
    first = client_of("live:2181/x")

    def use(client: object) -> object:
        if client is first:
            raise ClusterKeyMismatch("expected the cluster with key 1, found 2")
        return client

    second = with_client("live:2181/x", use)
    assert second is client_of("live:2181/x")
    assert Client.connected == ["live:2181/x"] * 2


def test_a_cluster_key_mismatch_is_an_error_after_one_more_connection() -> None:
    def use(_client: object) -> None:
        raise ClusterKeyMismatch("expected the cluster with key 1, found 2")

    with pytest.raises(ClusterKeyMismatch, match="key 1"):
        with_client("live:2181/x", use)
    assert Client.connected == ["live:2181/x"] * 2
