"""The library that applications use: `AsyncWaltzClient`, `WaltzClient`, and their types.

    with WaltzClient("zk1:2181/waltz/payments") as client:
        transaction_id = client.append(b"...", write_locks=[lock("account", 7)]).result()

The names in `__all__` are the public API; other names may change from release to release. The
packages, from the top:

    api      the clients, contexts, subscriptions and SQL views
    read     feeds, ranges and their cache
    stream   appends and mounts of one partition, as a state machine
    links    connections, and the directory of owners
    model    transactions, callbacks, serializers
"""

from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.api.client_metrics import export_metrics
from waltz_core.client.api.exactly_once import (
    begin_write,
    end_write,
    forget_writes,
    summary_of_write,
    tasks_of_write,
)
from waltz_core.client.api.sync_client import WaltzClient
from waltz_core.client.links.directory import ClusterInfo, ClusterLayout
from waltz_core.client.model.callbacks import AsyncCallbacks, Callbacks, PoisonPolicy
from waltz_core.client.model.compression import Zstd
from waltz_core.client.model.decorator import transactional
from waltz_core.client.model.predecessors import PipelinedState, Predecessor
from waltz_core.client.model.serializers import BYTES, JSON, MSGPACK, Serializer
from waltz_core.client.model.transaction import (
    AsyncTransaction,
    Transaction,
    TransactionBuilder,
    TransactionContext,
    lock,
    partition_of,
)
from waltz_core.client.read.archive_ranges import (
    ArchivedObjects,
    find_objects,
    last_committed_before,
    read_archived,
)
from waltz_core.client.read.feed_delivery import LATEST
from waltz_core.client.read.ranges import ArchivedRange, RangeChunk, RangeRow, ReplicaSet
from waltz_core.client.read.reported_rejections import Rejection
from waltz_core.client.stream.appends import ReportOrder
from waltz_core.client.stream.outcome_tracker import BatchOutcome
from waltz_core.client.stream.write_claim import TaskClaim
from waltz_core.encryption.envelopes import DecryptedColumn, DecryptedPayload, Encryption
from waltz_core.schemas.formats import Avro, Protobuf
from waltz_core.wire.messages import RangeForm, RowOutcomeCode

__all__ = [
    "BYTES",
    "JSON",
    "LATEST",
    "MSGPACK",
    "ArchivedObjects",
    "ArchivedRange",
    "AsyncCallbacks",
    "AsyncTransaction",
    "AsyncWaltzClient",
    "Avro",
    "BatchOutcome",
    "Callbacks",
    "ClusterInfo",
    "ClusterLayout",
    "DecryptedColumn",
    "DecryptedPayload",
    "Encryption",
    "PipelinedState",
    "PoisonPolicy",
    "Predecessor",
    "Protobuf",
    "RangeChunk",
    "RangeForm",
    "RangeRow",
    "Rejection",
    "ReplicaSet",
    "ReportOrder",
    "RowOutcomeCode",
    "Serializer",
    "TaskClaim",
    "Transaction",
    "TransactionBuilder",
    "TransactionContext",
    "WaltzClient",
    "Zstd",
    "begin_write",
    "end_write",
    "export_metrics",
    "find_objects",
    "forget_writes",
    "last_committed_before",
    "lock",
    "partition_of",
    "read_archived",
    "summary_of_write",
    "tasks_of_write",
    "transactional",
]
