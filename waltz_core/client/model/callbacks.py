"""The callbacks of a feed: they return the application's mark and apply committed transactions.

This is the contract between the feed and its consumer (an application, the SQL callbacks, a cache),
independent of how the feed is delivered.

Rules:
    1. `client_high_water_mark` is called once when the feed of a partition starts. The feed then
       passes the transactions after this mark to `apply_transaction` in order, each once. A
       filtered feed passes only the transactions that match the filter.
    2. A partition's transactions are applied one at a time; partitions do not wait for each other.
    3. A transaction that cannot be applied is never skipped silently: the return value of
       `uncaught_exception` decides how the feed continues.
    4. Failures that may be temporary are retried forever, with an occasional warning in the log. So
       an outage ends a feed only if the application decides so.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from waltz_core import errors
from waltz_core.client.model.transaction import (
    AsyncTransaction,
    Transaction,
    check_header,
    check_items,
)
from waltz_core.cluster.znodes.restore_sources import RestoreSources
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.wire.messages import FILTER_HEADERS_MAX

# The methods of callbacks in addition to `apply_transaction`.
_OTHER_METHODS = ("client_high_water_mark", "uncaught_exception")


class PoisonPolicy(Enum):
    """What the feed does with a transaction for which `apply_transaction` has raised."""

    STOP = auto()  # end this partition's feed; other partitions continue
    SKIP = auto()  # treat the transaction as applied
    RETRY = auto()  # apply it again, after a pause that doubles from 10 ms to 10 s


def default_policy(error: Exception) -> PoisonPolicy:
    """Return the default policy for an error (rule 4).

    The policy is RETRY while the log is unreachable (`errors.Unavailable`), and STOP for every
    other error. OutcomeUnknown is an Unavailable, but its policy is STOP, because the append with
    the unknown outcome must not be repeated.
    """
    unknown = (errors.OutcomeUnknown, errors.CoordinatorOutcomeUnknown)
    if isinstance(error, errors.Unavailable) and not isinstance(error, unknown):
        return PoisonPolicy.RETRY
    return PoisonPolicy.STOP


class Callbacks(ABC):
    """Callbacks for `WaltzClient`. They run on worker threads and may block."""

    def client_high_water_mark(self, partition: int) -> int:
        """Return the ID of the last transaction that the application has applied, -1 for none.

        Return `LATEST` to start at the current end of the log. By default, the method returns -1,
        so every start applies the whole log again. This default is for state that is kept only in
        memory.
        """
        return BEFORE_FIRST

    @abstractmethod
    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply one committed transaction and store its ID as the new mark, in one atomic step."""

    def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Return the policy for an exception of `apply_transaction` [default: `default_policy`].

        While the data of the log is unavailable, the client calls this method repeatedly for the
        same transaction. The client also calls this method when the feed itself cannot continue,
        for example because the log is shorter than the application's mark. In that case,
        `transaction_id` is the ID after the last applied one, and the client ignores the return
        value.
        """
        return default_policy(error)


class BatchCallbacks(Callbacks):
    """Callbacks that apply several transactions at once and store the mark; used by SQL views."""

    @abstractmethod
    def begin(self, cluster_key: bytes, restore_sources: RestoreSources) -> None:
        """Receive the cluster key, and the clusters from which this cluster was restored.

        The client calls this method before each `client_high_water_mark`. `subscribe` raises the
        exceptions of both methods.
        """

    @abstractmethod
    def apply_transactions(
        self, partition: int, transactions: Sequence[Transaction], last: int
    ) -> int:
        """Apply one or more of these transactions, from the first on; return the number applied.

        The client calls the method again with the rest of the transactions. When all of them are
        applied, the mark moves to `last`. If a filter has removed the transactions at the end,
        `last` is above the last ID, and `transactions` may be empty. An exception is attributed to
        the first transaction.
        """


class AsyncCallbacks(ABC):
    """Callbacks for `AsyncWaltzClient`. They run on its event loop and must not block."""

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the ID of the last transaction that the application has applied, -1 for none.

        Return `LATEST` to start at the current end of the log. By default, the method returns -1,
        so every start applies the whole log again. This default is for state that is kept only in
        memory.
        """
        return BEFORE_FIRST

    @abstractmethod
    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Apply one committed transaction and store its ID as the new mark, in one atomic step."""

    async def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Return the policy for an exception of `apply_transaction` [default: `default_policy`].

        While the data of the log is unavailable, the client calls this method repeatedly for the
        same transaction. The client also calls this method when the feed itself cannot continue,
        for example because the log is shorter than the application's mark. In that case,
        `transaction_id` is the ID after the last applied one, and the client ignores the return
        value.
        """
        return default_policy(error)


def check_callbacks(callbacks: object, *, is_async: bool) -> None:
    """Raise UsageError for objects that are not callbacks, and for callbacks of the other client.

    Without this check, a thread that calls an async function would get a coroutine and apply
    nothing.

    Raises:
        UsageError: the message states how to correct the callbacks.
    """
    if isinstance(callbacks, type) or not hasattr(callbacks, "apply_transaction"):
        raise errors.UsageError(f"expected an object of class Callbacks, found {callbacks!r}")
    if is_async and isinstance(callbacks, Callbacks):
        raise errors.UsageError(
            f"{type(callbacks).__name__} has plain functions, but AsyncWaltzClient calls "
            "coroutines. Hint: use WaltzClient, or derive the class from AsyncCallbacks."
        )
    for name in _OTHER_METHODS:
        if not hasattr(callbacks, name):
            base_name = "AsyncCallbacks" if is_async else "Callbacks"
            raise errors.UsageError(
                f"{type(callbacks).__name__}: expected a method {name}, found none. Hint: "
                f"derive the class from {base_name}, which has such a method, and override it."
            )
    for name in () if is_async else ("apply_transaction", *_OTHER_METHODS):
        if inspect.iscoroutinefunction(getattr(callbacks, name, None)):
            raise errors.UsageError(
                f"{name} is an async function, which WaltzClient cannot call. Hint: use "
                "AsyncWaltzClient, or a plain function."
            )


def check_headers(headers: Iterable[int] | None) -> tuple[int, ...]:
    """Return the headers of a filter, an empty tuple for no filter.

    Raises BadRequest for an invalid header, for no header, and for too many headers.
    """
    if headers is None:
        return ()
    values = tuple(sorted({check_header(header) for header in check_items("headers", headers)}))
    if not 0 < len(values) <= FILTER_HEADERS_MAX:
        raise errors.BadRequest(
            f"argument headers: expected 1 to {FILTER_HEADERS_MAX} headers, found {len(values)}"
        )
    return values
