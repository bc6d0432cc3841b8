"""Functions as transaction contexts."""

import pytest

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import memory_cluster
from waltz_core import errors
from waltz_core.client import MSGPACK, TransactionBuilder, lock, partition_of, transactional
from waltz_core.records.record import PartitionId, TransactionId


@transactional(partition_by=lambda account, amount=0: lock("account", account), retries_max=3)
def pay(builder: TransactionBuilder, account: int, amount: int = 0) -> bool:
    """Pay."""
    builder.set_write_locks([lock("account", account)])
    builder.set_transaction_data({"account": account, "amount": amount})
    return amount > 0


def test_a_call_of_a_decorated_function_returns_a_context_without_executing_it():
    context = pay(7, amount=100)
    assert (context.retries_max, context.timeout_ms) == (3, 60_000)
    assert context.creation_time_ms > 0
    assert context.partition_id(5) == partition_of(lock("account", 7), 5)
    assert (pay.__name__, pay.__doc__) == ("pay", "Pay.")
    assert repr(context) == "<transaction pay>"


def test_a_context_fills_in_the_builder_of_each_attempt():
    context = pay(7, 100)
    for mark in (3, 9):
        builder = TransactionBuilder(PartitionId(0), TransactionId(mark))
        assert context.execute(builder)
        assert builder.write_locks == (lock("account", 7),)
        assert builder.data is not None
        assert MSGPACK.deserialize(builder.data) == {"account": 7, "amount": 100}


@pytest.mark.parametrize(
    "decorate",
    [
        transactional,
        lambda: transactional(partition=1, partition_by=lambda: lock("a")),
        lambda: transactional(print),  # the brackets were forgotten
    ],
)
def test_the_decorator_sets_the_partition_of_all_calls(decorate):
    with pytest.raises(
        errors.BadRequest, match=r"@transactional: expected exactly one of the arguments"
    ):
        decorate()


def test_function_partition_by_must_return_a_lock():
    @transactional(partition_by=lambda: None)
    def without_partition(builder: TransactionBuilder) -> bool:
        return True

    with pytest.raises(
        errors.BadRequest, match=r"without_partition: expected a lock as the result, .* found None"
    ):
        without_partition().partition_id(4)


@run_on_virtual_loop
async def test_the_transactions_of_submitted_functions_are_in_the_log():
    @transactional(partition=1)
    async def append_word(builder: TransactionBuilder, word: str) -> bool:
        builder.set_transaction_data(word)
        return True

    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        assert await (await client.submit(append_word("one"))) == 0
        assert [MSGPACK.deserialize(row[2]) for row in cluster.logs[1].rows()] == ["one"]
