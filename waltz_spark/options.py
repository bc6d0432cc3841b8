"""Parses and validates the options of `format("waltz")`.

Spark passes options as strings with lower-case names and ignores unknown options. Waltz rejects an
unknown name on the driver, before any task starts, and suggests the nearest valid name.
`option_table.py` lists all options.

Rules:
    1. An option that is neither in the table nor one of Spark's own keys is rejected.
    2. An option for the other direction (reading or writing) is rejected, too.
    3. A value is parsed once, here; the rest of the package uses typed values.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum

from waltz_core.encryption.key_ids import check_key_id
from waltz_core.errors import BadConfig
from waltz_core.records.typed_values import TYPED_FORMATS
from waltz_core.schemas.registered_schemas import RegisteredSchema
from waltz_core.schemas.registry_urls import addresses_of
from waltz_core.tables.row_changes import ChangeRules, parse_condition
from waltz_core.user_functions import is_function_name
from waltz_spark.option_table import (
    CONNECT_VARIABLE,
    OPTION_BY_NAME,
    OPTIONS,
    TASK_TRANSACTIONS_MAX,
    TRIGGER_TRANSACTIONS_MAX,
    Purpose,
)

# Keys that Spark itself adds to the options of a source or a sink.
SPARK_KEYS = frozenset({"path", "checkpointlocation", "queryname", "provider", "owner"})
LOG_COLUMNS = ("partition", "transaction_id", "header", "request_id", "commit_time", "data")
# The additional column of reads with option `encryptionKeys`.
ERROR_COLUMN = "data_error"
# The additional column of reads with option `changeFeed`.
CHANGE_COLUMN = "_change_type"
DATA_FORMATS = ("msgpack", "json", *TYPED_FORMATS)
_REGISTRY_OPTIONS = (
    "schemaRegistry",
    "schemaRegistryAuthFile",
    "schemaSubject",
    "schemaVersion",
    "schemaMessage",
)
_WRITE_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,140}")


class CorruptPayloadMode(Enum):
    """The values of option `mode`, as in Spark: what a read does with a corrupt payload."""

    FAIL = "failfast"
    NULLS = "permissive"
    DROP = "dropmalformed"


class OnLockFailure(Enum):
    """The handling of a row that a lock has rejected."""

    FAIL = "fail"
    RETRY = "retry"
    REJECT = "reject"


Marks = dict[int, int]  # high-water marks by partition


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The schema registry of a read or a write; for a write, also the schema to use.

    The driver finds the schema in the registry and stores it in `schema`.
    """

    urls: str
    auth_file: str | None = None
    subject: str | None = None
    version: int | None = None  # None: the latest version
    # Whether the driver derives the schema from the columns and registers it.
    is_derived_from_columns: bool = False
    message: str | None = None
    schema: RegisteredSchema | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read, parsed; the driver resolves the high-water marks later."""

    connect: str
    columns: tuple[str, ...]
    starting_marks: str | Marks = "earliest"
    starting_time_ms: int | None = None
    ending_marks: str | Marks = "latest"
    partitions: tuple[int, ...] | None = None
    transaction_ids: tuple[tuple[int, int], ...] = ()
    headers: tuple[int, ...] = ()
    task_count_min: int = 1
    task_transactions_max: int = TASK_TRANSACTIONS_MAX
    fails_on_data_loss: bool = True
    reads_from_replicas: bool = True
    archive_url: str | None = None
    group: int | None = None
    trigger_transactions_max: int = TRIGGER_TRANSACTIONS_MAX
    poll_ms: int = 100
    data_format: str | None = None
    corrupt_payload_mode: CorruptPayloadMode = CorruptPayloadMode.FAIL
    corrupt_column: str = "_corrupt_record"
    required_columns: tuple[str, ...] = ()
    registry: RegistryOptions | None = None
    encryption_keys: str | None = None
    requires_encryption: bool = False
    change_feed_rules: ChangeRules | None = None
    traces: str | None = None

    @property
    def log_columns(self) -> tuple[str, ...]:
        """The names of the log's columns that this read can return."""
        return log_columns(
            has_keys=self.encryption_keys is not None,
            has_changes=self.change_feed_rules is not None,
        )


def log_columns(*, has_keys: bool, has_changes: bool) -> tuple[str, ...]:
    """Return the names of the log's columns, with the error and the change column if needed."""
    optional_columns = [(has_keys, ERROR_COLUMN), (has_changes, CHANGE_COLUMN)]
    return (*LOG_COLUMNS, *(name for is_included, name in optional_columns if is_included))


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write, parsed."""

    connect: str
    partitions: tuple[int, ...] | None = None
    data_format: str | None = None
    registry: RegistryOptions | None = None
    partition_by: str | None = None
    marks: Marks = field(default_factory=dict)
    on_lock_failure: OnLockFailure = OnLockFailure.FAIL
    results_path: str | None = None
    result_columns: tuple[str, ...] | None = None
    batch_rows: int = 4000
    in_flight_max: int = 8
    is_exactly_once: bool = True
    write_name: str | None = None
    retention_days: int = 7
    recompute_function: str | None = None
    retries_max: int = 10
    backoff_ms: int = 50
    identity_columns: tuple[str, ...] = ()
    encryption_keys: str | None = None
    encryption_key_id: str | None = None
    encryption_key_column: str | None = None
    traces: str | None = None

    @property
    def returns_rejected_rows(self) -> bool:
        """Whether a rejected row has status RETRY, so that the caller must compute it again."""
        return self.on_lock_failure is OnLockFailure.RETRY and self.recompute_function is None


# A number of milliseconds with fewer digits is a time before 1973: the number is probably in
# seconds.
_MILLISECONDS_DIGITS = 12
# Options of Spark's Kafka source, with the options of Waltz that correspond to them.
_KAFKA_OPTIONS = {
    "kafka.bootstrap.servers": "connect",
    "assign": "partitions",
    "startingoffsets": "startingHighWaterMarks",
    "endingoffsets": "endingHighWaterMarks",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "maxoffsetspertrigger": "maxTransactionsPerTrigger",
}


def check_names(options: Mapping[str, str]) -> None:
    """Reject unknown option names (rule 1).

    Raises:
        BadConfig: an option is unknown; the message names it and the nearest valid option.
    """
    for key in options:
        if key.lower() in OPTION_BY_NAME or key.lower() in SPARK_KEYS or key.startswith("option."):
            continue
        if key == "paths":  # Spark's own name for load() of a list
            raise BadConfig(
                "load(): expected one connect string, found several: a read uses one cluster"
            )
        if key.lower() in _KAFKA_OPTIONS:
            raise BadConfig(
                f"format 'waltz' has no option {key!r}. Hint: did you mean "
                f"{_KAFKA_OPTIONS[key.lower()]!r}? docs/kafka.md compares the options with "
                "those of Kafka."
            )
        nearest = difflib.get_close_matches(key.lower(), list(OPTION_BY_NAME), n=1, cutoff=0.5)
        if nearest:
            suggestion = f"did you mean {OPTION_BY_NAME[nearest[0]].name!r}?"
        else:
            suggestion = f"the options are {', '.join(option.name for option in OPTIONS)}."
        raise BadConfig(f"format 'waltz' has no option {key!r}. Hint: {suggestion}")


def parse_read(options: Mapping[str, str], purpose: Purpose = Purpose.READ) -> ReadOptions:
    """Parse the options of a batch read (`BATCH`), a stream (`STREAM`), or either (`READ`).

    Raises:
        BadConfig: an option is not valid; the message has the expected and the found value.
    """
    parser = _OptionParser(options, purpose)
    first = "latest" if purpose is Purpose.STREAM else "earliest"
    starting_ms = parser.timestamp_ms("startingTimestamp")
    if starting_ms is not None and parser.text("startingHighWaterMarks") is not None:
        raise BadConfig(
            "options 'startingTimestamp' and 'startingHighWaterMarks' both set the start of "
            "the read. Hint: use one of them."
        )
    if parser.text("columnNameOfCorruptRecord") in parser.log_columns():
        raise BadConfig(
            "option 'columnNameOfCorruptRecord': expected a column of your schema that is "
            f"not a column of the log, found {parser.text('columnNameOfCorruptRecord')!r}"
        )
    for name in ("mode", "columnNameOfCorruptRecord", "requiredColumns"):
        if parser.text(name) is not None and parser.text("dataFormat") is None:
            raise BadConfig(f"option {name!r} needs option dataFormat, which unpacks payloads")
    encryption_required = parser.choice("requireEncryption", ("true", "false")) == "true"
    if encryption_required and parser.text("encryptionKeys") is None:
        raise BadConfig("option 'requireEncryption' needs option encryptionKeys")
    return ReadOptions(
        connect=parser.connect_string(),
        columns=parser.columns(),
        starting_marks=parser.marks_or_word(
            "startingHighWaterMarks", ("earliest", "latest"), first
        ),
        starting_time_ms=starting_ms,
        ending_marks=parser.marks_or_word("endingHighWaterMarks", ("latest",), "latest"),
        partitions=parser.integers("partitions", minimum=0),
        transaction_ids=parser.id_ranges("transactionIds"),
        headers=parser.integers("headers") or (),
        task_count_min=parser.integer("minPartitions", 1, 100_000),
        task_transactions_max=parser.integer("maxTransactionsPerTask", 1, 1 << 40),
        fails_on_data_loss=parser.choice("failOnDataLoss", ("true", "false")) == "true",
        reads_from_replicas=parser.choice("readFrom", ("replica", "server")) == "replica",
        archive_url=parser.text("archive"),
        group=parser.group(),
        trigger_transactions_max=parser.integer("maxTransactionsPerTrigger", 1, 1 << 40),
        poll_ms=parser.integer("pollInterval", 0, 3_600_000),
        data_format=parser.optional_choice("dataFormat", DATA_FORMATS),
        corrupt_payload_mode=CorruptPayloadMode(parser.choice("mode", _CORRUPT_PAYLOAD_MODES)),
        corrupt_column=parser.text("columnNameOfCorruptRecord") or "_corrupt_record",
        required_columns=tuple(_split_list(parser.text("requiredColumns") or "")),
        registry=parser.registry(),
        encryption_keys=parser.text("encryptionKeys"),
        requires_encryption=encryption_required,
        change_feed_rules=parser.change_feed_rules(),
        traces=parser.function_name("traces", "shop.tracing:start"),
    )


def parse_write(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        BadConfig: an option is not valid; the message has the expected and the found value.
    """
    parser = _OptionParser(options, Purpose.WRITE)
    names, identity = parser.text("resultColumns"), parser.text("identityColumns")
    recompute = parser.recompute_function()
    is_exactly_once = parser.choice("exactlyOnce", ("true", "false")) == "true"
    write_name, results_path = parser.write_name(), parser.text("resultsPath")
    if write_name is not None and not is_exactly_once:
        raise BadConfig("option 'writeId' needs exactlyOnce=true, found false")
    if names is not None and results_path is None:
        raise BadConfig("option 'resultColumns' needs option resultsPath")
    if identity is not None and parser.text("dataFormat") is None:
        raise BadConfig(
            "option 'identityColumns' needs option dataFormat, which packs columns into the payload"
        )
    encryption_key_id, key_column = parser.encryption_key()
    return WriteOptions(
        connect=parser.connect_string(),
        partitions=parser.integers("partitions", minimum=0),
        data_format=parser.optional_choice("dataFormat", DATA_FORMATS),
        registry=parser.registry_for_write(),
        partition_by=parser.text("partitionBy"),
        marks=parser.marks("clientHighWaterMarks"),
        on_lock_failure=OnLockFailure(parser.choice("onLockFailure", ("fail", "reject", "retry"))),
        results_path=results_path,
        result_columns=None if names is None else tuple(_split_list(names)),
        batch_rows=parser.integer("batchSize", 1, 10_000),
        in_flight_max=parser.integer("maxInFlight", 1, 64),
        is_exactly_once=is_exactly_once,
        write_name=write_name,
        retention_days=parser.integer("writeRetention", 1, 365),
        recompute_function=recompute,
        retries_max=parser.integer("maxRetries", 1, 1_000),
        backoff_ms=parser.integer("retryBackoff", 0, 60_000),
        identity_columns=() if identity is None else tuple(_split_list(identity)),
        encryption_keys=parser.text("encryptionKeys"),
        encryption_key_id=encryption_key_id,
        encryption_key_column=key_column,
        traces=parser.function_name("traces", "shop.tracing:start"),
    )


_CORRUPT_PAYLOAD_MODES = tuple(each.value for each in CorruptPayloadMode)
_REASONS_TO_REQUIRE = {
    "dataFormat": "it unpacks the key from payloads",
    "key": "its columns identify the row of a transaction",
}
_WHOLE_PARTITION_REASON = (
    "a task reads a whole partition of the log, because a row depends on the one before it"
)
_REASONS_TO_REJECT = {
    "maxTransactionsPerTask": _WHOLE_PARTITION_REASON,
    "minPartitions": _WHOLE_PARTITION_REASON,
    "transactionIds": "the rows depend on all transactions before them. Hint: use options "
    "startingHighWaterMarks and endingHighWaterMarks.",
    "columnNameOfCorruptRecord": "it has no row for a payload that cannot be unpacked",
}
_ALLOWED_PURPOSES = {
    Purpose.READ: {Purpose.READ, Purpose.BATCH, Purpose.STREAM, Purpose.BOTH},
    Purpose.BATCH: {Purpose.READ, Purpose.BATCH, Purpose.BOTH},
    Purpose.STREAM: {Purpose.READ, Purpose.STREAM, Purpose.BOTH},
    Purpose.WRITE: {Purpose.WRITE, Purpose.BOTH},
}


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class _OptionParser:
    """Parses the options that Spark has passed; each method parses one option or one type."""

    def __init__(self, options: Mapping[str, str], purpose: Purpose) -> None:
        self._values = {key.lower(): value for key, value in options.items()}
        for key in self._values:
            option = OPTION_BY_NAME.get(key)
            if option is not None and option.purpose not in _ALLOWED_PURPOSES[purpose]:
                raise BadConfig(
                    f"option {option.name!r} is for {option.purpose.value}, but it was used for "
                    f"{purpose.value}"
                )

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return value if value not in (None, "") else None

    def connect_string(self) -> str:
        value = self.text("path") or self.text("connect") or os.environ.get(CONNECT_VARIABLE)
        if not value:
            raise BadConfig(
                "no cluster is given. Hint: pass a connect string such as "
                "'zk1:2181,zk2:2181/waltz/payments' to load(...) or save(...), as option "
                f"'connect', or in ${CONNECT_VARIABLE} (CREATE TABLE loses options: use "
                "CREATE TEMPORARY VIEW)."
            )
        return value

    def write_name(self) -> str | None:
        name, batch = self.text("writeId"), self.text("batchId")
        if name is None:
            if batch is not None:
                raise BadConfig("option 'batchId' needs option 'writeId'")
            return None
        number = 0
        if batch is not None:
            number = self.integer("batchId", 0, 1 << 62)
        if _WRITE_ID_PATTERN.fullmatch(name) is None or name in {".", ".."}:
            raise BadConfig(
                "option 'writeId': expected up to 140 letters, digits, '-', '_' and '.', "
                f"found {name[:200]!r}"
            )
        # No writeId contains a "~", so this name is unique.
        return name if batch is None else f"{name}~{number}"

    def recompute_function(self) -> str | None:
        value = self.text("recompute")
        if self.choice("onLockFailure", ("fail", "reject", "retry")) != "retry":
            for name in ("recompute", "maxRetries", "retryBackoff"):
                if self.text(name) is not None:
                    raise BadConfig(f"option {name!r} needs onLockFailure=retry")
        for name in ("maxRetries", "retryBackoff"):
            if value is None and self.text(name) is not None:
                raise BadConfig(f"option {name!r} needs option 'recompute'")
        return self.function_name("recompute", "shop.stock:again")

    def function_name(self, name: str, example: str) -> str | None:
        """Return the value of an option that names a function, after a check."""
        value = self.text(name)
        if value is not None and not is_function_name(value):
            raise BadConfig(
                f"option {name!r}: expected 'module:function', such as {example!r}, found {value!r}"
            )
        return value

    def encryption_key(self) -> tuple[str | None, str | None]:
        """Check and return the values of `encryptionKeyId` and `encryptionKeyIdColumn`."""
        key_id, column = self.text("encryptionKeyId"), self.text("encryptionKeyIdColumn")
        has_keys = self.text("encryptionKeys") is not None
        if has_keys and (key_id is None) == (column is None):
            raise BadConfig(
                "option 'encryptionKeys' needs exactly one of encryptionKeyId and "
                f"encryptionKeyIdColumn, found {'none' if key_id is None else 'both'}"
            )
        for name, value in (("encryptionKeyId", key_id), ("encryptionKeyIdColumn", column)):
            if value is not None and not has_keys:
                raise BadConfig(f"option {name!r} needs option encryptionKeys")
        if key_id is not None:
            check_key_id(key_id, "option 'encryptionKeyId'")
        return key_id, column

    def registry(self) -> RegistryOptions | None:
        """Return the schema registry for `dataFormat`; None if the format has no schemas."""
        data_format = self.optional_choice("dataFormat", DATA_FORMATS)
        urls, auth_file = self.text("schemaRegistry"), self.text("schemaRegistryAuthFile")
        if data_format not in TYPED_FORMATS:
            for name in _REGISTRY_OPTIONS:
                if self.text(name) is not None:
                    raise BadConfig(f"option {name!r} needs dataFormat=avro or protobuf")
            return None
        if urls is None:
            raise BadConfig(
                f"dataFormat={data_format} needs option schemaRegistry, the URL of a schema "
                "registry: http://registry:8081"
            )
        addresses_of(urls)
        return RegistryOptions(urls, auth_file)

    def registry_for_write(self) -> RegistryOptions | None:
        """Return the schema registry, with the subject, version and message type to write."""
        registry = self.registry()
        if registry is None:
            return None
        subject, message = self.text("schemaSubject"), self.text("schemaMessage")
        version = self.text("schemaVersion")
        is_avro = self.choice("dataFormat", DATA_FORMATS) == "avro"
        if subject is None:
            raise BadConfig(
                "writing with a schema registry needs option schemaSubject. Hint: a subject, "
                "such as 'orders-value', has the versions of one schema."
            )
        if message is not None and is_avro:
            raise BadConfig("option 'schemaMessage' needs dataFormat=protobuf, found avro")
        number = None
        if version is not None and version.lower() != "latest":
            number = self.integer("schemaVersion", 1, (1 << 31) - 1)
        return replace(
            registry,
            subject=subject,
            version=number,
            is_derived_from_columns=is_avro and version is None,
            message=message,
        )

    def change_feed_rules(self) -> ChangeRules | None:
        """Return the rules of a change feed, None without `changeFeed`.

        The schema of the read is not known yet, so the columns in the rules are checked later.
        """
        if not self._has_change_feed():
            for name in ("key", "deleteHeaders", "deleteWhere"):
                if self.text(name) is not None:
                    raise BadConfig(f"option {name!r} needs changeFeed=true")
            return None
        self._check_change_feed_options()
        key, condition = tuple(_split_list(self.text("key") or "")), self.text("deleteWhere")
        if not key or len(set(key)) != len(key):
            raise BadConfig(
                f"option 'key': expected columns, each once, found {self.text('key')!r}"
            )
        return ChangeRules(
            key=key,
            delete_headers=self.integers("deleteHeaders") or (),
            delete_where=None if condition is None else parse_condition(condition),
        )

    def _check_change_feed_options(self) -> None:
        """Reject options that a change feed does not support; require options that it needs."""
        for name, reason in _REASONS_TO_REQUIRE.items():
            if self.text(name) is None:
                raise BadConfig(f"option 'changeFeed' needs option {name}: {reason}")
        for name, reason in _REASONS_TO_REJECT.items():
            if self.text(name) is not None:
                raise BadConfig(f"option {name!r} is not for a change feed: {reason}")
        if self.choice("mode", _CORRUPT_PAYLOAD_MODES) == CorruptPayloadMode.NULLS.value:
            raise BadConfig(
                "option 'mode': a change feed has no row for a payload that cannot be unpacked. "
                "Hint: use FAILFAST, or DROPMALFORMED to ignore such transactions."
            )
        read_headers, deletes = self.integers("headers") or (), self.integers("deleteHeaders") or ()
        if read_headers and (absent_headers := sorted(set(deletes) - set(read_headers))):
            raise BadConfig(
                "option 'deleteHeaders': expected headers that option 'headers' also lists, "
                f"found {absent_headers[0]}, which the read does not fetch"
            )

    def _has_change_feed(self) -> bool:
        return self.choice("changeFeed", ("true", "false")) == "true"

    def log_columns(self) -> tuple[str, ...]:
        return log_columns(
            has_keys=self.text("encryptionKeys") is not None, has_changes=self._has_change_feed()
        )

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = (self.text(name) or OPTION_BY_NAME[name.lower()].default).lower()
        if value not in choices:
            raise BadConfig(
                f"option {name!r}: expected one of {', '.join(choices)}, found {value!r}"
            )
        return value

    def optional_choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        return None if self.text(name) is None else self.choice(name, choices)

    def integer(self, name: str, minimum: int, maximum: int) -> int:
        value = self.text(name) or OPTION_BY_NAME[name.lower()].default
        try:
            number = int(value)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise BadConfig(
                f"option {name!r}: expected an integer from {minimum} to {maximum}, found {value!r}"
            )
        return number

    def group(self) -> int | None:
        if self.text("group") is None:
            return None
        if self.choice("readFrom", ("replica", "server")) != "replica":
            raise BadConfig(
                "option 'group' needs readFrom=replica: if the server reads, its own "
                "setting 'group' applies"
            )
        return self.integer("group", 0, (1 << 31) - 1)

    def integers(self, name: str, minimum: int = -(1 << 31)) -> tuple[int, ...] | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            numbers = tuple(sorted({int(part) for part in _split_list(value)}))
        except ValueError:
            numbers = ()
        if not numbers or numbers[0] < minimum or numbers[-1] >= 1 << 31:
            raise BadConfig(
                f"option {name!r}: expected a list of integers such as '0,3,5', found {value!r}"
            )
        return numbers

    def id_ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        value = self.text(name)
        if value is None:
            return ()
        ranges: list[tuple[int, int]] = []
        for part in _split_list(value):
            first, separator, last = part.partition("-")
            try:
                pair = (int(first), int(last) if separator else int(first))
            except ValueError:
                pair = (0, -1)
            if not 0 <= pair[0] <= pair[1]:
                raise BadConfig(
                    f"option {name!r}: expected ranges such as '1000-1999,5000', found {part!r}"
                )
            ranges.append(pair)
        if not ranges:
            raise BadConfig(
                f"option {name!r}: expected ranges such as '1000-1999,5000', found {value!r}"
            )
        return tuple(sorted(ranges))

    def columns(self) -> tuple[str, ...]:
        value = self.text("columns")
        known_columns = self.log_columns()
        if value is None:
            return known_columns
        names = tuple(_split_list(value))
        for name in names:
            if name not in known_columns:
                nearest = difflib.get_close_matches(name, known_columns, n=1)
                suggestion = (
                    f"did you mean {nearest[0]!r}?"
                    if nearest
                    else f"the columns are {', '.join(known_columns)}"
                )
                raise BadConfig(
                    f"option 'columns': the log has no column {name!r}. Hint: {suggestion}"
                )
        if not names or len(set(names)) != len(names):
            raise BadConfig(f"option 'columns': expected each column once, found {value!r}")
        return names

    def timestamp_ms(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if value.isdecimal() and len(value) > 8:  # up to 8 digits are a date, 20261121
            if len(value) < _MILLISECONDS_DIGITS:
                raise BadConfig(
                    f"option {name!r}: expected milliseconds since 1970, found {value}, which "
                    f"seems to be seconds. Hint: use {value}000."
                )
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise BadConfig(
                f"option {name!r}: expected a time such as '2026-11-21T10:00:00Z', or "
                f"milliseconds since 1970, found {value!r}"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return math.ceil(moment.timestamp() * 1000)

    def marks_or_word(self, name: str, keywords: tuple[str, ...], default: str) -> str | Marks:
        value = self.text(name) or default
        if value.lower() in keywords:
            return value.lower()
        if not value.lstrip().startswith("{"):
            raise BadConfig(
                f"option {name!r}: expected {' or '.join(keywords)}, or JSON such as "
                f"'{{\"0\": 41}}', "
                f"found {value!r}"
            )
        return self.marks(name)

    def marks(self, name: str) -> Marks:
        value = self.text(name)
        if value is None:
            return {}
        try:
            pairs = json.loads(value, object_pairs_hook=tuple)
            marks = {int(partition): _check_mark(mark) for partition, mark in pairs}
            # The remaining cases: the JSON is not an object, or has two marks for a partition.
            is_valid = isinstance(pairs, tuple) and len(marks) == len(pairs)
        except (ValueError, TypeError):
            marks, is_valid = {}, False
        if not is_valid:
            raise BadConfig(
                f"option {name!r}: expected a JSON object with a high-water mark for each "
                f"partition, such as '{{\"0\": 41}}', found {value!r}"
            )
        return marks


def _check_mark(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 63:
        raise ValueError(value)
    return value
