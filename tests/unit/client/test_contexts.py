"""The marks that a transaction context may claim while other clients write."""

import asyncio

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import two_clients
from waltz_core.client import AsyncCallbacks, TransactionContext, lock

LOCKS = [lock("counter")]


class ValueCallbacks(AsyncCallbacks):
    """Keeps the last value of the log, and sets an event when it has applied a transaction."""

    def __init__(self) -> None:
        self.value = 0
        self.is_applied = asyncio.Event()

    async def client_high_water_mark(self, partition: int) -> int:
        return -1

    async def apply_transaction(self, transaction) -> None:
        self.value = await transaction.value()
        self.is_applied.set()

    async def uncaught_exception(self, partition, transaction_id, error):
        raise error


class OvertakenContext(TransactionContext):
    """Adds one to the value, and is overtaken by another writer in its first attempt."""

    def __init__(self, callbacks: ValueCallbacks, other_writes) -> None:
        super().__init__()
        self.callbacks = callbacks
        self.other_writes = other_writes
        self.marks: list[int] = []
        self.lock_failures = 0

    def partition_id(self, partition_count: int) -> int:
        return 0

    async def execute(self, builder) -> bool:
        value = self.callbacks.value
        if not self.marks:
            await self.other_writes()
        self.marks.append(builder.client_high_water_mark)
        builder.set_transaction_data(value + 1)
        builder.set_write_locks(LOCKS)
        return True

    def on_lock_failure(self) -> None:
        self.lock_failures += 1


@run_on_virtual_loop
async def test_a_context_sends_the_mark_that_it_had_before_its_computation():
    """While a context computes, another writer's row is committed and applied; no update is lost.

    With the mark from after the computation, the server would accept an outdated value.
    """
    async with two_clients() as (cluster, first_client, second_client):
        callbacks = ValueCallbacks()
        await first_client.subscribe(callbacks)

        async def other_writes() -> None:
            await (await second_client.append(bytes([10]), partition=0, write_locks=LOCKS))
            await callbacks.is_applied.wait()

        context = OvertakenContext(callbacks, other_writes)
        assert await (await first_client.submit(context)) == 1
        assert context.marks == [-1, 0]
        assert context.lock_failures == 1
        assert [data for _, _, data in cluster.logs[0].rows()] == [bytes([10]), bytes([11])]
