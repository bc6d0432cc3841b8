"""An application with few annotations, which mypy must accept."""

from waltz_core.client import (
    BYTES,
    JSON,
    AsyncCallbacks,
    AsyncTransaction,
    Callbacks,
    Transaction,
    TransactionBuilder,
    Zstd,
    lock,
    transactional,
)


class OnTheLoop(AsyncCallbacks):
    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        plain = await transaction.value()
        entry = await transaction.value(JSON)
        packed = await transaction.value(Zstd(JSON))
        data = await transaction.value(BYTES)
        self.seen = [plain["account"], entry["account"], packed["account"], data.hex()]


class OnThreads(Callbacks):
    def apply_transaction(self, transaction: Transaction) -> None:
        plain = transaction.value()
        entry = transaction.value(JSON)
        data = transaction.value(BYTES)
        self.seen = [plain["account"], entry["account"], data.hex()]


@transactional(partition_by=lambda account, amount: lock("account", account), pipelined=True)
def pay(builder: TransactionBuilder, account: int, amount: int) -> bool:
    for predecessor in builder.predecessors(0):
        earlier = predecessor.value()
        amount += earlier["amount"]
    builder.set_transaction_data({"account": account, "amount": amount}, JSON)
    return True


pay(7, 100)
