"""Every option of `format("waltz")`: its name, when it means something, its default, what it does.

This table is the one source for the code (`options.py`) and for `docs/spark.md`, which a test
compares.
"""

from dataclasses import dataclass
from enum import Enum

CONNECT_ENVIRONMENT = "WALTZ_CONNECT"
TASK_TRANSACTIONS_MAX = 1_000_000
TRIGGER_TRANSACTIONS_MAX = 1_000_000


class Use(Enum):
    """When an option means something."""

    BOTH = "reading and writing"
    READ = "reading"
    BATCH = "reading a batch"
    STREAM = "reading a stream"
    WRITE = "writing"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    use: Use
    default: str
    text: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "connect",
        Use.BOTH,
        f"the path of load() or save(), else ${CONNECT_ENVIRONMENT}",
        "The cluster: ZooKeeper's hosts, then the cluster's root: `zk1:2181,zk2:2181/waltz/pay`.",
    ),
    Option(
        "dataFormat",
        Use.BOTH,
        "none",
        "`msgpack` or `json`. Writing: every column that is no column of the log is packed by name "
        "into `data`. Reading: `data` is unpacked into the columns of the schema you give.",
    ),
    Option(
        "startingHighWaterMarks",
        Use.READ,
        "earliest (batch), latest (stream)",
        '`earliest`, `latest`, or JSON by partition, `{"0": 41}`: the read starts AFTER it. A '
        "stream that has a checkpoint goes on from there.",
    ),
    Option(
        "startingTimestamp",
        Use.READ,
        "none",
        "In place of the marks: start with the first transaction that was committed at or after "
        "`2026-11-21T10:00:00Z` (UTC where no offset is given), or so many ms since 1970.",
    ),
    Option(
        "endingHighWaterMarks",
        Use.BATCH,
        "latest",
        "`latest`, or JSON by partition, inclusive; it names each partition that is read. `latest` "
        "is resolved once, on the driver.",
    ),
    Option("partitions", Use.READ, "all", "Which partitions of the log to read: `0,3,5`."),
    Option(
        "columns",
        Use.BOTH,
        "all",
        "Which columns to fetch, in this order; without `data` only headers travel. In SQL also "
        "what `INSERT INTO` a view takes.",
    ),
    Option(
        "transactionIds",
        Use.READ,
        "all",
        "Ranges of transaction ids to fetch: `1000-1999,5000`; applied in every partition read.",
    ),
    Option(
        "headers",
        Use.READ,
        "all",
        "Application headers to fetch, filtered by the server: `7,9`.",
    ),
    Option(
        "minPartitions",
        Use.READ,
        "1",
        "Split the read into at least this many tasks.",
    ),
    Option(
        "maxTransactionsPerTask",
        Use.READ,
        str(TASK_TRANSACTIONS_MAX),
        "A task reads at most this many transactions.",
    ),
    Option(
        "maxTransactionsPerTrigger",
        Use.STREAM,
        str(TRIGGER_TRANSACTIONS_MAX),
        "A micro-batch reads at most this many transactions, shared out by how far each partition "
        "lags.",
    ),
    Option(
        "pollInterval",
        Use.STREAM,
        "100",
        "The marks are asked for at most once in so many milliseconds; Spark would ask ninety "
        "times a second. `0` where `processAllAvailable` must see what was written a moment ago.",
    ),
    Option(
        "failOnDataLoss",
        Use.READ,
        "true",
        "A mark past the end of the log is an error; `false` reads what is there. A start after "
        "the end that you give is always an error.",
    ),
    Option(
        "mode",
        Use.READ,
        "FAILFAST",
        "A payload that cannot be unpacked into your schema: `FAILFAST` fails and names it, "
        "`PERMISSIVE` gives nulls, `DROPMALFORMED` leaves the row out.",
    ),
    Option(
        "requiredColumns",
        Use.READ,
        "none",
        "With `dataFormat`: columns that each payload must have, `id,amount`, in any case. A "
        "payload that lacks one is handled as `mode` says; other columns that are absent become "
        "null.",
    ),
    Option(
        "columnNameOfCorruptRecord",
        Use.READ,
        "_corrupt_record",
        "A column of this name in your schema, string or binary, has the payloads that could not "
        "be unpacked (with `PERMISSIVE`).",
    ),
    Option(
        "readFrom",
        Use.READ,
        "replica",
        "`replica`: tasks pull ranges straight from a storage, and fall back to the server; "
        "`server`: always through the server, which is slower (5.6 times in a trial).",
    ),
    Option(
        "group",
        Use.READ,
        "none",
        "The group of storages that the tasks run in (`cluster add-storage --group`): they read "
        "from its storages where these hold the partition, and else from others.",
    ),
    Option(
        "partitionBy",
        Use.WRITE,
        "the first lock, else round robin",
        "A column whose hash chooses the partition of rows that name none.",
    ),
    Option(
        "clientHighWaterMarks",
        Use.WRITE,
        "the marks when the job started",
        "JSON by partition: the marks that the rows were computed from.",
    ),
    Option(
        "onLockFailure",
        Use.WRITE,
        "fail",
        "`fail`: the job aborts at the first refused row and says what is in the log by then. "
        "`reject`: a refused row is final and comes back in the results as REJECTED. `retry`: it "
        "comes back as RETRY, with the mark from which to compute it again; or `recompute` does "
        "that at once.",
    ),
    Option(
        "recompute",
        Use.WRITE,
        "none",
        "With `onLockFailure=retry`: `module:function`, called in the task with the refused rows "
        "and the transactions since their mark, two Arrow tables; it returns the rows anew.",
    ),
    Option(
        "maxRetries",
        Use.WRITE,
        "10",
        "A row is computed again at most so many times, 1 to 1,000; then it is REJECTED.",
    ),
    Option(
        "retryBackoff",
        Use.WRITE,
        "50",
        "Milliseconds before a row is computed again, doubled each time up to 5 s, with jitter.",
    ),
    Option(
        "identityColumns",
        Use.WRITE,
        "none",
        "Packed columns that tell which row it is and that `recompute` leaves alone: a task that "
        "is run again finds its rows in the log by them.",
    ),
    Option(
        "resultsPath",
        Use.WRITE,
        "none",
        "Where every row's outcome goes, as Parquet; any file system that pyarrow opens. Each "
        "write adds its files to the directory, so that Spark reads the outcomes of all of them; "
        "writes that run at the same time need directories of their own.",
    ),
    Option(
        "resultColumns",
        Use.WRITE,
        "all but data",
        "The input columns that the results carry: `id,tail`.",
    ),
    Option("batchSize", Use.WRITE, "4000", "Rows in one append, 1 to 10,000 (and at most 4 MiB)."),
    Option("maxInFlight", Use.WRITE, "8", "Appends that a task keeps in flight, 1 to 64."),
    Option(
        "exactlyOnce",
        Use.WRITE,
        "true",
        "A task that is run again finds in the log what its earlier attempts have written, and "
        "writes the rest. `false`: a task that is run again writes all of its rows again.",
    ),
    Option(
        "writeId",
        Use.WRITE,
        "new for each write",
        "Names the write, so that the whole job can be run again: what it has written stays "
        "written once, a write that is done appends nothing, and one with other rows is an error. "
        "In `foreachBatch` with `batchId`.",
    ),
    Option(
        "batchId",
        Use.WRITE,
        "none",
        "The number that `foreachBatch` hands over; it tells the batches of one `writeId` apart.",
    ),
    Option(
        "writeRetention",
        Use.WRITE,
        "7",
        "For so many days after its end a named write is remembered, by ZooKeeper's clock.",
    ),
)
BY_KEY = {option.name.lower(): option for option in OPTIONS}
