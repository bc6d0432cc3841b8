"""How an application takes in the log: its mark out, committed transactions in.

It is the contract between the feed and whoever applies it (an application, the SQL callbacks, a
cache), with nothing of how the feed is brought.

Rules:
    1. `client_high_water_mark` is asked once when the feed of a partition starts; the next
       transaction applied is the one after it, and then each one in order, none twice; where the
       feed is filtered, of those that pass.
    2. A partition's transactions are applied one at a time; partitions do not wait for each other.
    3. A transaction that cannot be applied is never passed over in silence: `uncaught_exception`
       decides, and what it returns is done.
    4. An outage ends no feed unless the application says so: what may work later is tried again for
       as long as it takes, with a warning in the log now and then.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from waltz_core import errors
from waltz_core.client.model.transaction import AsyncTransaction, Transaction, check_header, each_of
from waltz_core.records.record import BEFORE_FIRST

# Header values of one filter.
HEADERS_MAX = 1_000
# What callbacks may have beside `apply_transaction`.
_HOOKS = ("client_high_water_mark", "uncaught_exception")


class PoisonPolicy(Enum):
    """What to do with a transaction that `apply_transaction` has raised on."""

    STOP = auto()  # the partition's feed ends here; the other partitions go on
    SKIP = auto()  # take it as applied
    RETRY = auto()  # apply it again, after a pause that doubles from 10 ms to 10 s


def policy_of(error: Exception) -> PoisonPolicy:
    """Return what is done unless an application decides otherwise (rule 4).

    RETRY while the log cannot be reached (`errors.Unavailable`), and STOP for everything else. An
    append of the application's own whose outcome is unknown is not made again on its behalf.
    """
    in_doubt = (errors.OutcomeUnknown, errors.CoordinatorOutcomeUnknown)
    if isinstance(error, errors.Unavailable) and not isinstance(error, in_doubt):
        return PoisonPolicy.RETRY
    return PoisonPolicy.STOP


class Callbacks(ABC):
    """What `WaltzClient` calls, on worker threads: these methods may block."""

    def client_high_water_mark(self, partition: int) -> int:
        """Return the last transaction that the application has applied, -1 for none.

        `LATEST` starts at the end of the log, whatever is in it. Unless overridden it is -1: every
        start applies the whole log again, as a state that is kept in memory only needs it.
        """
        return BEFORE_FIRST

    @abstractmethod
    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply one committed transaction, and remember its id as the new mark with it."""

    def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Say what to do when `apply_transaction` has raised; `policy_of(error)` unless overridden.

        In an outage of the log, when the data cannot be had, it is asked again and again for the
        same transaction. Also called, with the id after the last one applied, when the feed itself
        cannot go on (the log is shorter than the application's mark, say); the answer then does
        not matter.
        """
        return policy_of(error)


class BatchCallbacks(Callbacks):
    """Callbacks that apply several transactions at once and store their mark, as SQL views do."""

    @abstractmethod
    def begin(self, cluster_key: bytes) -> None:
        """Take the key of the cluster whose log is applied, before each `client_high_water_mark`.

        Whatever raises here, or there, is raised by `subscribe`.
        """

    @abstractmethod
    def apply_some(self, partition: int, transactions: Sequence[Transaction], last: int) -> int:
        """Apply the first of these transactions, or more of them in order; return how many.

        It is called again with the rest; after 0 with the same ones. With all of them everything up
        to `last` is applied: where a filter leaves out what follows the last of them, `last` is
        higher, and there may be no transactions. What it raises concerns the first transaction.
        """


class AsyncCallbacks(ABC):
    """What `AsyncWaltzClient` calls, on its event loop: these methods must not block."""

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the last transaction that the application has applied, -1 for none.

        `LATEST` starts at the end of the log, whatever is in it. Unless overridden it is -1: every
        start applies the whole log again, as a state that is kept in memory only needs it.
        """
        return BEFORE_FIRST

    @abstractmethod
    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Apply one committed transaction, and remember its id as the new mark with it."""

    async def uncaught_exception(
        self,
        partition: int,
        transaction_id: int,
        error: Exception,
    ) -> PoisonPolicy:
        """Say what to do when `apply_transaction` has raised; `policy_of(error)` unless overridden.

        In an outage of the log, when the data cannot be had, it is asked again and again for the
        same transaction. Also called, with the id after the last one applied, when the feed itself
        cannot go on (the log is shorter than the application's mark, say); the answer then does
        not matter.
        """
        return policy_of(error)


def check_callbacks(callbacks: object, *, is_async: bool) -> None:
    """Refuse what is no callbacks, and those of the other client.

    A thread that calls an async function gets a coroutine and nothing is applied.

    Raises:
        UsageError: says which client is the right one.
    """
    if isinstance(callbacks, type) or not hasattr(callbacks, "apply_transaction"):
        raise errors.UsageError(f"expected callbacks, an object of Callbacks; found {callbacks!r}")
    if is_async and isinstance(callbacks, Callbacks):
        raise errors.UsageError(
            f"{type(callbacks).__name__} is made of plain functions: use WaltzClient, or derive "
            "it from AsyncCallbacks"
        )
    for name in _HOOKS:
        if not hasattr(callbacks, name):
            base = "AsyncCallbacks" if is_async else "Callbacks"
            raise errors.UsageError(
                f"{type(callbacks).__name__}: expected a method {name}, found none. "
                f"Hint: derive it from {base}, which has one that can be overridden."
            )
    for name in () if is_async else ("apply_transaction", *_HOOKS):
        if inspect.iscoroutinefunction(getattr(callbacks, name, None)):
            raise errors.UsageError(
                f"{name} is an async function: use AsyncWaltzClient, or a plain function"
            )


def check_headers(headers: Iterable[int] | None) -> tuple[int, ...]:
    """Return the headers of a filter, none for no filter.

    Raises BadRequest for what is no header, and for a filter that lets nothing through.
    """
    if headers is None:
        return ()
    values = tuple(sorted({check_header(each) for each in each_of("headers", headers)}))
    if not 0 < len(values) <= HEADERS_MAX:
        raise errors.BadRequest(f"headers: expected 1 to {HEADERS_MAX}, found {len(values)}")
    return values
