"""The table of all options of `format("waltz")`: name, use, default, description.

It is the source for the code (`options.py`) and for `docs/reference/spark-options.md`.
"""

from dataclasses import dataclass
from enum import Enum

CONNECT_ENVIRONMENT = "WALTZ_CONNECT"
TASK_TRANSACTIONS_MAX = 1_000_000
TRIGGER_TRANSACTIONS_MAX = 1_000_000


class Purpose(Enum):
    """The use of an option."""

    BOTH = "reading and writing"
    READ = "reading"
    BATCH = "reading a batch"
    STREAM = "reading a stream"
    WRITE = "writing"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    use: Purpose
    default: str
    text: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "connect",
        Purpose.BOTH,
        f"the path of load() or save(), otherwise ${CONNECT_ENVIRONMENT}",
        "The cluster: ZooKeeper's hosts, then the cluster's root: `zk1:2181,zk2:2181/waltz/pay`.",
    ),
    Option(
        "dataFormat",
        Purpose.BOTH,
        "none",
        "`msgpack`, `json`, `avro` or `protobuf`. Writing: every column that is not a column of "
        "the log is packed by name into `data`. Reading: `data` is unpacked into the columns of "
        "your schema.",
    ),
    Option(
        "schemaRegistry",
        Purpose.BOTH,
        "none",
        "With `dataFormat=avro` or `protobuf`: the URL of a schema registry with Confluent's HTTP "
        "API, `http://registry:8081`; several with commas, the first one that answers is used.",
    ),
    Option(
        "schemaRegistryAuthFile",
        Purpose.BOTH,
        "none",
        "A file on the driver and on every worker with `user:password` for the schema registry.",
    ),
    Option(
        "encryptionKeys",
        Purpose.BOTH,
        "none",
        "Where tasks find encryption keys: a directory, or `module:function`. Writing needs "
        "`encryptionKey` or `encryptionKeyColumn`, too. Reading: payloads are decrypted, and "
        "column `data_error` has the reason for one that is null.",
    ),
    Option(
        "startingHighWaterMarks",
        Purpose.READ,
        "earliest (batch), latest (stream)",
        '`earliest`, `latest`, or JSON by partition, `{"0": 41}`: the read starts AFTER it. A '
        "stream with a checkpoint continues from there.",
    ),
    Option(
        "startingTimestamp",
        Purpose.READ,
        "none",
        "Instead of marks: start with the first transaction that was committed at or after "
        "`2026-11-21T10:00:00Z` (UTC without an offset), or milliseconds since 1970.",
    ),
    Option(
        "endingHighWaterMarks",
        Purpose.BATCH,
        "latest",
        "`latest`, or JSON by partition, inclusive; it must name each partition that is read. "
        "`latest` is resolved once, on the driver.",
    ),
    Option(
        "partitions",
        Purpose.BOTH,
        "all",
        "Which partitions of the log to use: `0,3,5`. Writing: rows without a lock are distributed "
        "over these; a row that belongs to another one is an error.",
    ),
    Option(
        "columns",
        Purpose.BOTH,
        "all",
        "Which columns to fetch, in this order; without `data` only headers are fetched. In SQL "
        "also the columns of `INSERT INTO` a view.",
    ),
    Option(
        "transactionIds",
        Purpose.READ,
        "all",
        "Ranges of transaction IDs to fetch: `1000-1999,5000`; they apply to every partition. IDs "
        "before the start of the read are not fetched.",
    ),
    Option(
        "headers",
        Purpose.READ,
        "all",
        "Application headers to fetch, filtered by the server: `7,9`; 1,000 at most.",
    ),
    Option(
        "minPartitions",
        Purpose.READ,
        "1",
        "Split the read into at least this many tasks.",
    ),
    Option(
        "maxTransactionsPerTask",
        Purpose.READ,
        str(TASK_TRANSACTIONS_MAX),
        "A task reads at most this many transactions.",
    ),
    Option(
        "maxTransactionsPerTrigger",
        Purpose.STREAM,
        str(TRIGGER_TRANSACTIONS_MAX),
        "Maximum number of transactions of a micro-batch, distributed over the partitions in "
        "proportion to their lag.",
    ),
    Option(
        "pollInterval",
        Purpose.STREAM,
        "100",
        "Time in milliseconds for which the driver caches the log's marks, which Spark requests "
        "about 90 times a second. `0` disables the cache: use it if `processAllAvailable` must see "
        "the latest writes.",
    ),
    Option(
        "failOnDataLoss",
        Purpose.READ,
        "true",
        "Whether missing transactions are an error: a mark above the end of the log, or a start, "
        "an end or `transactionIds` below its first available transaction. `false` reads the "
        "transactions that exist. A start after the given end is always an error.",
    ),
    Option(
        "mode",
        Purpose.READ,
        "FAILFAST",
        "For a payload that cannot be unpacked into your schema: `FAILFAST` fails and names it, "
        "`PERMISSIVE` returns nulls, `DROPMALFORMED` drops the row.",
    ),
    Option(
        "requiredColumns",
        Purpose.READ,
        "none",
        "With `dataFormat`: columns that each payload must have, `id,amount`, in any case. A "
        "payload without one is handled according to `mode`; other absent columns are null.",
    ),
    Option(
        "columnNameOfCorruptRecord",
        Purpose.READ,
        "_corrupt_record",
        "A column of your schema, string or binary, for payloads that could not be unpacked (with "
        "`PERMISSIVE`).",
    ),
    Option(
        "requireEncryption",
        Purpose.READ,
        "false",
        "With `encryptionKeys`: `true` reads a payload that is not encrypted as null, with the "
        "reason in `data_error`.",
    ),
    Option(
        "readFrom",
        Purpose.READ,
        "replica",
        "`replica`: tasks read directly from a storage, and fall back to the server; `server`: "
        "always through the server, which is slower (5.6 times in a trial).",
    ),
    Option(
        "archive",
        Purpose.READ,
        "none",
        "The URL of the cluster's archive, as in `archive_url` of its storages: tasks read what is "
        "archived directly from there, in parallel, with the credentials of the workers' "
        "environment. Without it, and if the archive cannot be read, they read from storages.",
    ),
    Option(
        "group",
        Purpose.READ,
        "none",
        "The group of storages in which the tasks run (`cluster add-storage --group`): they prefer "
        "its storages if these have a replica of the partition.",
    ),
    Option(
        "partitionBy",
        Purpose.WRITE,
        "the first lock, otherwise round-robin",
        "For rows that name no partition: the column whose hash chooses it.",
    ),
    Option(
        "schemaSubject",
        Purpose.WRITE,
        "none",
        "With a schema registry: the subject of the schema that is written, `orders-value`.",
    ),
    Option(
        "schemaVersion",
        Purpose.WRITE,
        "Avro: a schema of the columns, Protobuf: `latest`",
        "The version of the subject that is written, a number or `latest`. Without it, "
        "`dataFormat=avro` makes a schema of the columns, and registers it before any task.",
    ),
    Option(
        "schemaMessage",
        Purpose.WRITE,
        "the first one",
        "With `dataFormat=protobuf`: the full name of the message type that is written.",
    ),
    Option(
        "encryptionKey",
        Purpose.WRITE,
        "none",
        "With `encryptionKeys`: the ID of the key that encrypts all rows.",
    ),
    Option(
        "encryptionKeyColumn",
        Purpose.WRITE,
        "none",
        "With `encryptionKeys`: a string column with the ID of each row's key.",
    ),
    Option(
        "clientHighWaterMarks",
        Purpose.WRITE,
        "the marks when the job started",
        "JSON by partition: the marks from which the rows were computed.",
    ),
    Option(
        "onLockFailure",
        Purpose.WRITE,
        "fail",
        "`fail`: the job aborts at the first rejected row and reports what is in the log. "
        "`reject`: a rejected row is final, with status REJECTED in the results. `retry`: it has "
        "status RETRY and the mark from which to compute it again; with `recompute`, the task does "
        "that at once.",
    ),
    Option(
        "recompute",
        Purpose.WRITE,
        "none",
        "With `onLockFailure=retry`: `module:function`, called in the task with the rejected rows "
        "and the transactions since their mark, two Arrow tables; it returns the recomputed rows.",
    ),
    Option(
        "maxRetries",
        Purpose.WRITE,
        "10",
        "A row is recomputed at most this many times, 1 to 1,000; then it is REJECTED.",
    ),
    Option(
        "retryBackoff",
        Purpose.WRITE,
        "50",
        "Milliseconds before a row is recomputed, doubled each time up to 5 s, with jitter.",
    ),
    Option(
        "identityColumns",
        Purpose.WRITE,
        "none",
        "Packed columns that identify a row and that `recompute` does not change: a task that runs "
        "again finds its rows in the log by them.",
    ),
    Option(
        "resultsPath",
        Purpose.WRITE,
        "none",
        "A directory for every row's outcome, as Parquet; on any file system of pyarrow. Each "
        "write adds its files to the directory, so that Spark reads the outcomes of all of them; "
        "concurrent writes need separate directories.",
    ),
    Option(
        "resultColumns",
        Purpose.WRITE,
        "all but data",
        "The input columns in the results: `id,tail`.",
    ),
    Option(
        "batchSize", Purpose.WRITE, "4000", "Rows in one append, 1 to 10,000 (and at most 4 MiB)."
    ),
    Option("maxInFlight", Purpose.WRITE, "8", "Appends that a task keeps in flight, 1 to 64."),
    Option(
        "exactlyOnce",
        Purpose.WRITE,
        "true",
        "A task that runs again finds the rows of its earlier attempts in the log, and writes the "
        "rest. `false`: a task that runs again writes all of its rows again.",
    ),
    Option(
        "writeId",
        Purpose.WRITE,
        "new for each write",
        "Identifies the write and makes it idempotent when the whole job runs again: rows that are "
        "already in the log are not written again, a finished write appends nothing, and a run "
        "with different rows fails. In `foreachBatch` use it with `batchId`.",
    ),
    Option(
        "batchId",
        Purpose.WRITE,
        "none",
        "The number that `foreachBatch` passes; it distinguishes the batches of one `writeId`.",
    ),
    Option(
        "writeRetention",
        Purpose.WRITE,
        "7",
        "Days for which a named write is remembered after its end, by ZooKeeper's clock, 1 to 365.",
    ),
)
BY_KEY = {option.name.lower(): option for option in OPTIONS}
