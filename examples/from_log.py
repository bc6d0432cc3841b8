"""Code that `counter.py`, `constraint.py` and `payments.py` share: a state, and a cluster."""

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


class LogState(Callbacks):
    """An application's state, computed from all transactions with one header, in log order."""

    def __init__(self, header: int) -> None:
        self._header = header
        self._applied = -1
        self._state_changed = threading.Condition()

    @abstractmethod
    def apply_value(self, value: Any) -> None:  # noqa: ANN401 - any value of the application
        """Apply the value of one transaction with the header to the state."""

    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply a committed transaction, and wake the callers of `wait_for`."""
        value: Any = transaction.value() if transaction.header == self._header else None
        with self._state_changed:
            if value is not None:
                self.apply_value(value)
            self._applied = transaction.transaction_id
            self._state_changed.notify_all()

    def wait_for(self, transaction_id: int) -> None:
        """Wait until the state includes a transaction; exit after 60 s."""
        with self._state_changed:
            if not self._state_changed.wait_for(
                lambda: self._applied >= transaction_id, WAIT_S_MAX
            ):
                raise SystemExit(f"the feed has stopped at transaction {self._applied}")

    def catch_up(self, client: WaltzClient, partition: int) -> None:
        """Wait until the state includes all transactions that the partition has now."""
        self.wait_for(client.high_water_mark(partition, linearizable=True))


@contextlib.contextmanager
def cluster(connect: str | None) -> Iterator[str]:
    """Yield the given connect string; for None, run a temporary cluster and yield its string."""
    if connect is not None:
        yield connect
        return
    print("starting a small cluster: a ZooKeeper, three storages, two servers", flush=True)
    with waltz_core.local.cluster() as local:
        yield local


def options_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options; its description is the first line of `about`."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--connect", help="a running cluster [default: a temporary one]")
    parser.add_argument(
        "--plain", action="store_true", help="without locks, like a log without optimistic locking"
    )
    return parser


def random_name() -> str:
    """Return a random name, so that a run does not share its state with other runs."""
    return secrets.token_hex(4)
