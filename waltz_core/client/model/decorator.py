"""A decorator that turns a function into a transaction context.

    @transactional(partition_by=lambda account, amount: lock("account", account))
    def pay(builder: TransactionBuilder, account: int, amount: int) -> bool:
        builder.set_write_locks([lock("account", account)])
        builder.set_transaction_data({"account": account, "amount": amount})
        return True

    client.submit(pay(7, 100)).result()

The decorator is a short form of `TransactionContext`. To use hooks (`on_completion`,
`on_application`, ...), derive a class from `TransactionContext`.
"""

import operator
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, SupportsIndex, TypeAlias, cast

from waltz_core import errors
from waltz_core.client.model.transaction import TransactionBuilder, TransactionContext, partition_of

ArgumentsT = ParamSpec("ArgumentsT")
# A function that fills in the builder; it returns False if there is nothing to append.
Execute: TypeAlias = Callable[Concatenate[TransactionBuilder, ArgumentsT], bool | Awaitable[bool]]


class FunctionContext(TransactionContext):
    """The context of one call of a decorated function; pass it to `submit`."""

    def __init__(
        self,
        name: str,
        choose_partition: Callable[[int], int],
        call: Callable[[TransactionBuilder], bool | Awaitable[bool]],
    ) -> None:
        super().__init__()
        self._name = name
        self._choose_partition = choose_partition
        self._call = call

    def partition_id(self, partition_count: int) -> int:
        """Return the partition that the arguments of the decorator determine."""
        return self._choose_partition(partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Call the function; if it is `async`, `AsyncWaltzClient` awaits the result."""
        return cast("bool", self._call(builder))

    def __repr__(self) -> str:
        return f"<transaction {self._name}>"


def transactional(
    *bare: object,
    partition: int | None = None,
    partition_by: Callable[..., int] | None = None,
    retries_max: int | None = None,
    timeout_ms: int | None = 60_000,
    pipelined: bool = False,
) -> Callable[[Execute[ArgumentsT]], Callable[ArgumentsT, FunctionContext]]:
    """Decorate a function of a builder and other arguments; a call then returns a context.

    A call of the decorated function, without the builder, does not execute it: the call returns a
    context to submit once. The client executes the function at each attempt, like
    `TransactionContext.execute`. With `AsyncWaltzClient`, the function may be `async`.

    Args:
        bare: detects a decorator without parentheses; never pass it.
        partition: the partition of every transaction.
        partition_by: instead of `partition`, a function of the same arguments that returns a lock;
            the transaction goes to the partition of this lock.
        retries_max: number of retries; None for no limit.
        timeout_ms: timeout for all attempts together; None for no limit.
        pipelined: whether the function uses `builder.predecessors`.

    Raises:
        BadRequest: not exactly one of `partition` and `partition_by` is given.
    """
    if bare or (partition is None) == (partition_by is None):
        raise errors.BadRequest(
            "@transactional: expected exactly one of the arguments partition and partition_by, "
            "found both or none; partition_by is a function that takes the arguments of the call "
            "and returns a lock"
        )

    def decorate(function: Execute[ArgumentsT]) -> Callable[ArgumentsT, FunctionContext]:
        name = getattr(function, "__qualname__", repr(function))

        def create_context(*args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs) -> FunctionContext:
            def choose_partition(partition_count: int) -> int:
                if partition_by is None:
                    assert partition is not None
                    return partition
                hashed: object = partition_by(*args, **kwargs)
                if not isinstance(hashed, SupportsIndex):
                    raise errors.BadRequest(
                        f"partition_by of {name}: expected a lock as the result, as lock(name, "
                        f"key) returns it, found {hashed!r}"
                    )
                return partition_of(operator.index(hashed), partition_count)

            context = FunctionContext(
                name, choose_partition, lambda builder: function(builder, *args, **kwargs)
            )
            context.retries_max = retries_max
            context.timeout_ms = timeout_ms
            context.pipelined = pipelined
            return context

        create_context.__name__ = getattr(function, "__name__", "transaction")
        create_context.__qualname__ = name
        create_context.__doc__ = function.__doc__
        return create_context

    return decorate
