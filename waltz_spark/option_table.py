"""The table of all options of `format("waltz")`: name, use, default, description.

The table is the source for the parser (`options.py`) and for `docs/reference/spark-options.md`.
"""

from dataclasses import dataclass
from enum import Enum

CONNECT_VARIABLE = "WALTZ_CONNECT"
TASK_TRANSACTIONS_MAX = 1_000_000
TRIGGER_TRANSACTIONS_MAX = 1_000_000


class Purpose(Enum):
    """The operations for which an option is valid; the values appear in error messages."""

    BOTH = "reading and writing"
    READ = "reading"
    BATCH = "reading a batch"
    STREAM = "reading a stream"
    WRITE = "writing"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of `format("waltz")`, with its documentation in Markdown."""

    name: str
    purpose: Purpose
    default: str
    description: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "connect",
        Purpose.BOTH,
        f"the path of load() or save(), otherwise ${CONNECT_VARIABLE}",
        "The cluster to use: the hosts of ZooKeeper, followed by the root of the cluster: "
        "`zk1:2181,zk2:2181/waltz/pay`.",
    ),
    Option(
        "dataFormat",
        Purpose.BOTH,
        "none",
        "Format of the payload: `msgpack`, `json`, `avro` or `protobuf`. A write packs the "
        "columns that are not columns of the log, by name, into `data`. A read unpacks `data` "
        "into the columns of your schema.",
    ),
    Option(
        "schemaRegistry",
        Purpose.BOTH,
        "none",
        "With `dataFormat=avro` or `protobuf`: the URL of a schema registry with Confluent's "
        "HTTP API, `http://registry:8081`. You can list several URLs, separated by commas. Waltz "
        "uses the first one that answers.",
    ),
    Option(
        "schemaRegistryAuthFile",
        Purpose.BOTH,
        "none",
        "A file with `user:password` for the schema registry, on the driver and on every worker.",
    ),
    Option(
        "encryptionKeys",
        Purpose.BOTH,
        "none",
        "Where tasks find the encryption keys: a directory, or a function `module:function`. A "
        "write also needs `encryptionKeyId` or `encryptionKeyIdColumn`. A read decrypts the "
        "payloads. If a payload cannot be decrypted, it is null, and column `data_error` has the "
        "reason.",
    ),
    Option(
        "traces",
        Purpose.BOTH,
        "none",
        "Record an OpenTelemetry span for each task. The value is a function of yours, "
        "`module:function`, without arguments. The function sets the tracer provider "
        "and the exporter; each Python worker calls it once. The workers need "
        "`waltz-spark[traces]`.",
    ),
    Option(
        "startingHighWaterMarks",
        Purpose.READ,
        "earliest (batch), latest (stream)",
        "Where the read starts: `earliest`, `latest`, or JSON with a mark for each partition. "
        'With the mark `{"0": 41}`, the read of partition 0 starts after transaction 41. A '
        "stream with a checkpoint continues from the checkpoint instead.",
    ),
    Option(
        "startingTimestamp",
        Purpose.READ,
        "none",
        "A start time, instead of `startingHighWaterMarks`. The read starts with the first "
        "transaction that was committed at or after this time: `2026-11-21T10:00:00Z` (UTC if it "
        "has no offset), or milliseconds since 1970.",
    ),
    Option(
        "endingHighWaterMarks",
        Purpose.BATCH,
        "latest",
        "Where the read ends: `latest`, or JSON with the last transaction ID to read in each "
        'partition, `{"0": 99}`. The JSON must name each partition that is read. The driver '
        "determines `latest` once.",
    ),
    Option(
        "partitions",
        Purpose.BOTH,
        "all",
        "The partitions of the log to read or write: `0,3,5`. A write distributes rows without a "
        "lock over these partitions, and fails if a row belongs to another partition.",
    ),
    Option(
        "columns",
        Purpose.BOTH,
        "all",
        "The columns to read, in this order. If `data` is not among them, tasks fetch only the "
        "headers of the transactions. In SQL, the option also determines the columns of `INSERT "
        "INTO` a view.",
    ),
    Option(
        "transactionIds",
        Purpose.READ,
        "all",
        "The transaction IDs to read, as ranges: `1000-1999,5000`. They apply to every "
        "partition. IDs before the start of the read are ignored.",
    ),
    Option(
        "headers",
        Purpose.READ,
        "all",
        "The application headers of the transactions to read: `7,9`, at most 1,000 headers. The "
        "server filters the transactions.",
    ),
    Option(
        "minPartitions",
        Purpose.READ,
        "1",
        "Split the read into at least this number of tasks.",
    ),
    Option(
        "maxTransactionsPerTask",
        Purpose.READ,
        str(TASK_TRANSACTIONS_MAX),
        "A task reads at most this number of transactions.",
    ),
    Option(
        "maxTransactionsPerTrigger",
        Purpose.STREAM,
        str(TRIGGER_TRANSACTIONS_MAX),
        "Maximum number of transactions of a micro-batch. They are distributed over the "
        "partitions in proportion to the lag of each partition.",
    ),
    Option(
        "pollInterval",
        Purpose.STREAM,
        "100",
        "Time in milliseconds for which the driver caches the high-water marks of the log. "
        "Without a cache, Spark would request them about 90 times a second. `0` disables the "
        "cache; use it if `processAllAvailable` must see the latest writes.",
    ),
    Option(
        "failOnDataLoss",
        Purpose.READ,
        "true",
        "Whether the read fails if transactions are missing. They are missing if a mark is above "
        "the end of the log, or if a start, an end or `transactionIds` is below the first "
        "available transaction. `false` reads the transactions that exist. A start after the end "
        "is always an error.",
    ),
    Option(
        "mode",
        Purpose.READ,
        "FAILFAST",
        "What happens to a payload that cannot be unpacked into your schema: `FAILFAST` "
        "fails and names the transaction, `PERMISSIVE` returns nulls, `DROPMALFORMED` drops "
        "the row.",
    ),
    Option(
        "requiredColumns",
        Purpose.READ,
        "none",
        "With `dataFormat`: columns that each payload must have, `id,amount`. The names are "
        "case-insensitive. A payload without one of them is handled as option `mode` states. Other "
        "missing columns are null.",
    ),
    Option(
        "changeFeed",
        Purpose.READ,
        "false",
        "With `dataFormat` and `key`: `true` returns a change data feed, as in Delta. It has "
        "each insert, update and delete of a row, and the previous content of the row. Column "
        "`_change_type` of your schema is `insert`, `update_preimage`, `update_postimage` or "
        "`delete`.",
    ),
    Option(
        "key",
        Purpose.READ,
        "none",
        "With `changeFeed`: the columns of your schema that identify a row, `country,id`. All "
        "transactions of a key must be in one partition of the log.",
    ),
    Option(
        "deleteHeaders",
        Purpose.READ,
        "none",
        "With `changeFeed`: the application headers of transactions that delete a row: `9`.",
    ),
    Option(
        "deleteWhere",
        Purpose.READ,
        "none",
        "With `changeFeed`: the condition under which a transaction deletes a row. It is a "
        "boolean column, or a comparison of a column with a literal, such as `op = 'D'`.",
    ),
    Option(
        "columnNameOfCorruptRecord",
        Purpose.READ,
        "_corrupt_record",
        "With `mode=PERMISSIVE`: a string or binary column of your schema that gets each "
        "payload that cannot be unpacked.",
    ),
    Option(
        "requireEncryption",
        Purpose.READ,
        "false",
        "With `encryptionKeys`: if `true`, a payload that is not encrypted is read as null, "
        "with the reason in `data_error`.",
    ),
    Option(
        "readFrom",
        Purpose.READ,
        "replica",
        "Where tasks read: `replica` reads directly from a storage, and falls back to the "
        "server. `server` always reads through the server, which is slower (5.6 times in a "
        "measurement).",
    ),
    Option(
        "archive",
        Purpose.READ,
        "none",
        "The URL of the cluster's archive, as in setting `archive_url` of the storages. With "
        "this option, tasks read archived transactions directly and in parallel from the object "
        "store. They use the credentials in the environment of the workers. Without this option, "
        "or if a task cannot read the archive, the task reads from storages.",
    ),
    Option(
        "group",
        Purpose.READ,
        "none",
        "The number of the group of storages near the tasks (`waltz-core cluster add-storage "
        "--group`), for example in the same rack. Tasks prefer the storages of this group that "
        "have a replica of the partition.",
    ),
    Option(
        "partitionBy",
        Purpose.WRITE,
        "the first lock, otherwise round-robin",
        "The column whose hash selects the partition of a row, if the row has no value in column "
        "`partition`.",
    ),
    Option(
        "schemaSubject",
        Purpose.WRITE,
        "none",
        "With a schema registry: the subject (the name in the registry) of the schema with which "
        "the write encodes payloads, `orders-value`.",
    ),
    Option(
        "schemaVersion",
        Purpose.WRITE,
        "Avro: a schema of the columns, Protobuf: `latest`",
        "The version of the schema in `schemaSubject`, a number or `latest`. Without it, a write "
        "with `dataFormat=avro` derives a schema from the columns, and registers it before any "
        "task starts.",
    ),
    Option(
        "schemaMessage",
        Purpose.WRITE,
        "the first one",
        "With `dataFormat=protobuf`: the full name of the message type of the payloads.",
    ),
    Option(
        "encryptionKeyId",
        Purpose.WRITE,
        "none",
        "With `encryptionKeys`: the ID of the key that encrypts the payloads of all rows.",
    ),
    Option(
        "encryptionKeyIdColumn",
        Purpose.WRITE,
        "none",
        "With `encryptionKeys`: a string column with the ID of the key that encrypts the "
        "row's payload.",
    ),
    Option(
        "clientHighWaterMarks",
        Purpose.WRITE,
        "the high-water marks when the job started",
        'JSON with a high-water mark for each partition, `{"0": 41}`: the end of the data from '
        "which the rows were computed. Waltz rejects a row if one of its locks was written after "
        "this mark.",
    ),
    Option(
        "onLockFailure",
        Purpose.WRITE,
        "fail",
        "What happens if a row is rejected because of a lock. `fail`: the job aborts at the "
        "first rejected row and reports what is in the log. `reject`: the row is not written, "
        "and has status REJECTED in the results. `retry`: the row has status RETRY in the "
        "results, with the high-water mark from which to compute it again. With `recompute`, the "
        "task computes it again at once.",
    ),
    Option(
        "recompute",
        Purpose.WRITE,
        "none",
        "With `onLockFailure=retry`: a function `module:function` that a task calls to "
        "compute rejected rows again. Its arguments are two Arrow tables: the rejected rows, "
        "and the transactions since their high-water marks. It returns the recomputed rows.",
    ),
    Option(
        "maxRetries",
        Purpose.WRITE,
        "10",
        "Maximum number of times that a row is recomputed, 1 to 1,000. After that, the row has "
        "status REJECTED.",
    ),
    Option(
        "retryBackoff",
        Purpose.WRITE,
        "50",
        "Pause in milliseconds before a row is recomputed. It doubles each time, up to 5 s, "
        "with jitter.",
    ),
    Option(
        "identityColumns",
        Purpose.WRITE,
        "none",
        "With `recompute`: packed columns that identify a row and that `recompute` does not "
        "change. A task that runs again uses them to find its rows in the log.",
    ),
    Option(
        "resultsPath",
        Purpose.WRITE,
        "none",
        "A directory for the outcome of every row, as Parquet files. It can be on any file "
        "system that pyarrow supports. Each write adds its files to the directory; concurrent "
        "writes need separate directories.",
    ),
    Option(
        "resultColumns",
        Purpose.WRITE,
        "all but data",
        "Which input columns the results contain: `id,tail`.",
    ),
    Option(
        "batchSize",
        Purpose.WRITE,
        "4000",
        "Number of rows in one append, 1 to 10,000. An append has at most 4 MiB.",
    ),
    Option(
        "maxInFlight", Purpose.WRITE, "8", "Number of appends that a task keeps in flight, 1 to 64."
    ),
    Option(
        "exactlyOnce",
        Purpose.WRITE,
        "true",
        "With `true`, a task that runs again finds the rows of its earlier attempts in the "
        "log, and writes only the rest. With `false`, it writes all of its rows again.",
    ),
    Option(
        "writeId",
        Purpose.WRITE,
        "a random one for each write",
        "Name of the write, which makes it idempotent when the whole job runs again: rows "
        "that are already in the log are not written again, a completed write appends "
        "nothing, and a run with different rows fails. In `foreachBatch` use it with "
        "`batchId`.",
    ),
    Option(
        "batchId",
        Purpose.WRITE,
        "none",
        "The batch number that Spark passes to `foreachBatch`; it distinguishes the batches "
        "of one `writeId`.",
    ),
    Option(
        "writeRetention",
        Purpose.WRITE,
        "7",
        "Days for which ZooKeeper remembers a write with a `writeId` after its end, 1 to 365.",
    ),
)
OPTION_BY_NAME = {option.name.lower(): option for option in OPTIONS}
