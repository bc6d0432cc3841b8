"""What the three problems share: state that is made from the log, and a cluster to run on.

Used by `counter.py`, `constraint.py` and `payments.py`; it does nothing by itself.
"""

import argparse
import contextlib
import secrets
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import waltz_core.local
from waltz_core.client import Callbacks, Transaction, WaltzClient

WAIT_S_MAX = 60.0


class FromLog(Callbacks):
    """An application's state: every transaction of one header, taken in in the log's order."""

    def __init__(self, header: int) -> None:
        self._header = header
        self._applied = -1
        self._moved = threading.Condition()

    @abstractmethod
    def take(self, value: Any) -> None:  # noqa: ANN401 - whatever the application has written
        """Take in what one transaction says."""

    def apply_transaction(self, transaction: Transaction) -> None:
        """Called by the client for each committed transaction."""
        value: Any = transaction.value() if transaction.header == self._header else None
        with self._moved:
            if value is not None:
                self.take(value)
            self._applied = transaction.transaction_id
            self._moved.notify_all()

    def wait_for(self, transaction_id: int) -> None:
        """Wait until the state has come so far."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._applied >= transaction_id, WAIT_S_MAX):
                raise SystemExit(f"nothing comes from the log: it stands at {self._applied}")

    def catch_up(self, client: WaltzClient, partition: int) -> None:
        """Wait until the state holds everything that is in the log now."""
        self.wait_for(client.high_water_mark(partition, linearizable=True))


@contextlib.contextmanager
def cluster(connect: str | None) -> Iterator[str]:
    """Give the connect string of a cluster: the one that was named, or a small one of its own."""
    if connect is not None:
        yield connect
        return
    print("starting a small cluster: a ZooKeeper, three storages, two servers", flush=True)
    with waltz_core.local.cluster() as local:
        yield local


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return what all three take from their command lines."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--connect", help="a running cluster; default: one of its own")
    parser.add_argument(
        "--plain", action="store_true", help="without locks, as a log like Kafka's would take it"
    )
    return parser


def fresh_name() -> str:
    """Return a name that nothing in the log has yet."""
    return secrets.token_hex(4)
