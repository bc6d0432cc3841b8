"""The callbacks of a feed: they return the application's mark and apply committed transactions.

This is the contract between the feed and its consumer (an application, the SQL callbacks, a cache),
independent of how the feed is delivered.

Rules:
    1. `client_high_water_mark` is called once when the feed of a partition starts. The feed then
       applies the transactions after that mark in order, each once; with a filter, only those that
       pass it.
    2. A partition's transactions are applied one at a time; partitions do not wait for each other.
    3. A transaction that cannot be applied is never skipped silently: `uncaught_exception` decides
       with its return value.
    4. An outage ends no feed unless the application decides so: failures that may be temporary are
       retried forever, with an occasional warning in the log.
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
    items_of,
)
from waltz_core.cluster.znodes.restored_from import RestoredFrom
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.wire.messages import FILTER_HEADERS_MAX

# The methods of callbacks in addition to `apply_transaction`.
_HOOKS = ("client_high_water_mark", "uncaught_exception")


class PoisonPolicy(Enum):
    """What to do with a transaction for which `apply_transaction` has raised."""

    STOP = auto()  # end this partition's feed; other partitions continue
    SKIP = auto()  # treat it as applied
    RETRY = auto()  # apply it again, after a pause that doubles from 10 ms to 10 s


def policy_of(error: Exception) -> PoisonPolicy:
    """Return the default policy for an error (rule 4).

    RETRY while the log is unreachable (`errors.Unavailable`), and STOP for everything else. An
    append of the application whose outcome is unknown is not repeated.
    """
    unknown = (errors.OutcomeUnknown, errors.CoordinatorOutcomeUnknown)
    if isinstance(error, errors.Unavailable) and not isinstance(error, unknown):
        return PoisonPolicy.RETRY
    return PoisonPolicy.STOP


class Callbacks(ABC):
    """Callbacks for `WaltzClient`. They run on worker threads and may block."""

    def client_high_water_mark(self, partition: int) -> int:
        """Return the ID of the last transaction that the application has applied, -1 for none.

        `LATEST` starts at the current end of the log. The default is -1: every start applies the
        whole log again, as state that is kept only in memory requires.
        """
        return BEFORE_FIRST

    @abstractmethod
    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply one committed transaction, and store its ID as the new mark atomically with it."""

    def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Return what to do after an exception of `apply_transaction` [`policy_of(error)`].

        In an outage of the log, when data is unavailable, it is called repeatedly for the same
        transaction. It is also called, with the ID after the last one applied, when the feed
        itself cannot continue (for example, the log is shorter than the application's mark); the
        return value is ignored then.
        """
        return policy_of(error)


class BatchCallbacks(Callbacks):
    """Callbacks that apply several transactions at once and store the mark; used by SQL views."""

    @abstractmethod
    def begin(self, cluster_key: bytes, restored_from: RestoredFrom) -> None:
        """Receive the key of the log's cluster, and the clusters from which it was restored.

        It is called before each `client_high_water_mark`.

        `subscribe` raises the exceptions of both methods.
        """

    @abstractmethod
    def apply_transactions(
        self, partition: int, transactions: Sequence[Transaction], last: int
    ) -> int:
        """Apply one or more of these transactions from the first on; return how many.

        It is called again with the rest; after 0, with the same transactions. Applying all of them
        moves the mark to `last`, which is higher than the last ID if a filter has removed the
        transactions after it; `transactions` may be empty. An exception concerns the first one.
        """


class AsyncCallbacks(ABC):
    """Callbacks for `AsyncWaltzClient`. They run on its event loop and must not block."""

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the ID of the last transaction that the application has applied, -1 for none.

        `LATEST` starts at the current end of the log. The default is -1: every start applies the
        whole log again, as state that is kept only in memory requires.
        """
        return BEFORE_FIRST

    @abstractmethod
    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Apply one committed transaction, and store its ID as the new mark atomically with it."""

    async def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Return what to do after an exception of `apply_transaction` [`policy_of(error)`].

        In an outage of the log, when data is unavailable, it is called repeatedly for the same
        transaction. It is also called, with the ID after the last one applied, when the feed
        itself cannot continue (for example, the log is shorter than the application's mark); the
        return value is ignored then.
        """
        return policy_of(error)


def check_callbacks(callbacks: object, *, is_async: bool) -> None:
    """Reject objects that are not callbacks, and callbacks for the other client.

    A thread that calls an async function gets a coroutine, and nothing is applied.

    Raises:
        UsageError: names the client to use.
    """
    if isinstance(callbacks, type) or not hasattr(callbacks, "apply_transaction"):
        raise errors.UsageError(f"expected an object of class Callbacks, found {callbacks!r}")
    if is_async and isinstance(callbacks, Callbacks):
        raise errors.UsageError(
            f"{type(callbacks).__name__} has plain functions, but AsyncWaltzClient calls "
            "coroutines. Hint: use WaltzClient, or derive the class from AsyncCallbacks."
        )
    for name in _HOOKS:
        if not hasattr(callbacks, name):
            base = "AsyncCallbacks" if is_async else "Callbacks"
            raise errors.UsageError(
                f"{type(callbacks).__name__}: expected a method {name}, found none. Hint: "
                f"derive the class from {base}, which has such a method, and override it."
            )
    for name in () if is_async else ("apply_transaction", *_HOOKS):
        if inspect.iscoroutinefunction(getattr(callbacks, name, None)):
            raise errors.UsageError(
                f"{name} is an async function, which WaltzClient cannot call. Hint: use "
                "AsyncWaltzClient, or a plain function."
            )


def check_headers(headers: Iterable[int] | None) -> tuple[int, ...]:
    """Return the headers of a filter, an empty tuple for no filter.

    Raises BadRequest for an invalid header, and for a filter that no transaction passes.
    """
    if headers is None:
        return ()
    values = tuple(sorted({check_header(each) for each in items_of("headers", headers)}))
    if not 0 < len(values) <= FILTER_HEADERS_MAX:
        raise errors.BadRequest(
            f"argument headers: expected 1 to {FILTER_HEADERS_MAX} headers, found {len(values)}"
        )
    return values
