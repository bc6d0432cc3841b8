"""The high-water marks up to which a table contains the log, and the rule for the next batch.

Each commit of a follower contains the marks after its rows, as JSON in its metadata:

    {"waltz": {"follower": "f", "cluster": "00112233445566778899aabbccddeeff", "marks": {"0": 41},
               "rules": {"key": ["id"], "headers": [], "delete_where": "op = 'D'"}}}

Rules:
    1. Metadata with the key `waltz` must have exactly this form. Metadata without this key was
       written by another program, and contains no marks.
    2. A batch begins after the table marks, and ends at most `count_max` transactions later. The
       content of a batch depends only on the start and the end of the batch.
    3. Marks never decrease. If the log ends before the table marks, or begins after them, the log
       has lost transactions of the table.
    4. Each commit has a version, which increases with each batch. The version is at most the number
       of transactions up to the marks of the commit. It is higher than the number of transactions
       up to the marks of each earlier commit. Without Spark, the version equals the number of
       transactions.
    5. A table with a version but without marks has lost its marks. In this case, the follower
       reports an error and does not start from the beginning, because the user must decide.
    6. A follower never changes the rules of a table. Without this rule, the rows would be a mixture
       of two rules, and no replay of the log could reproduce them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from waltz_core.errors import BadConfig, BadFormat, ClusterKeyMismatch, DataLoss
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.records.strict_json import from_json, to_json

# For each partition, a high-water mark.
MarkMap: TypeAlias = Mapping[int, int]

_METADATA_KEY = "waltz"
_FIELDS = ("follower", "cluster", "marks", "rules")
_CLUSTER_KEY_PATTERN = re.compile("[0-9a-f]{32}")
_PARTITION_PATTERN = re.compile("0|[1-9][0-9]{0,9}")
_PARTITION_MAX = 2**31 - 1
_ID_MAX = 2**63 - 1


class StoredRules(NamedTuple):
    """The rules for deriving rows from transactions, in a canonical form that can be compared.

    Fields with their default are not stored.

    Attributes:
        key: the key columns, sorted.
        headers: the headers of the table's transactions, sorted; () if all transactions belong to
            it. None if a query of the user selects the transactions; such a query cannot be
            compared.
        delete_headers: the headers of transactions that are deletes, sorted.
        delete_where: the condition for other deletes.
        changes: the name of the changes function.
    """

    key: tuple[str, ...] = ()
    headers: tuple[int, ...] | None = None
    delete_headers: tuple[int, ...] = ()
    delete_where: str | None = None
    changes: str | None = None


class TableMarks(NamedTuple):
    """The marks of a table, with the follower, the cluster key in hex, and the rules."""

    follower: str
    cluster: str
    marks: MarkMap
    rules: StoredRules = StoredRules()

    @property
    def version(self) -> int:
        """The number of transactions up to the marks (rule 4)."""
        return sum(mark + 1 for mark in self.marks.values())

    @property
    def application(self) -> str:
        """The identifier of the follower in the commits of the table (Delta: `txn`)."""
        return f"waltz/{self.cluster}/{self.follower}"


class LogState(NamedTuple):
    """The current state of the log: high-water mark and first available ID of each partition."""

    marks: MarkMap
    first_available_ids: MarkMap


def encode_marks(table: TableMarks) -> str:
    """Encode marks as metadata of a commit; raises BadConfig if a name is missing (rule 1)."""
    if not table.follower:
        raise BadConfig("follower: expected a name, found ''")
    marks = {str(partition): mark for partition, mark in sorted(table.marks.items())}
    default = StoredRules()
    rules = {
        name: value
        for name, value in table.rules._asdict().items()
        if value != getattr(default, name)
    }
    parts = (table.follower, table.cluster, marks, rules)
    return to_json({_METADATA_KEY: dict(zip(_FIELDS, parts, strict=True))}).decode()


def decode_marks(metadata: str | None) -> TableMarks | None:
    """Decode the marks in the metadata of a commit; None if another program wrote it (rule 1).

    Raises:
        BadFormat: the metadata contains `waltz`, but not in the form of this version.
    """
    try:
        value = from_json((metadata or "null").encode())
    except ValueError:
        return None
    if not isinstance(value, dict) or _METADATA_KEY not in value:
        return None
    body = value[_METADATA_KEY]
    if len(value) > 1 or not isinstance(body, dict) or sorted(body) != sorted(_FIELDS):
        raise _bad_marks_error(f"an object {_METADATA_KEY!r} with {', '.join(_FIELDS)}", value)
    follower, cluster, marks, rules = (body[name] for name in _FIELDS)
    if not isinstance(follower, str) or not follower:
        raise _bad_marks_error("a name of the follower", follower)
    if not isinstance(cluster, str) or not _CLUSTER_KEY_PATTERN.fullmatch(cluster):
        raise _bad_marks_error("a cluster's key with 32 hexadecimal digits", cluster)
    if not isinstance(marks, dict):
        raise _bad_marks_error("an object of marks by partition", marks)
    return TableMarks(
        follower,
        cluster,
        dict(map(_decode_mark, marks, marks.values())),
        _decode_rules(rules),
    )


def _decode_rules(rules: Any) -> StoredRules:  # noqa: ANN401 - any JSON value
    if not isinstance(rules, dict) or not rules.keys() <= set(StoredRules._fields):
        raise _bad_marks_error(f"an object of rules with {', '.join(StoredRules._fields)}", rules)
    rule_values: dict[str, Any] = {}
    for name, value in rules.items():
        parts = value if isinstance(value, list) else [value]
        if not all(type(part) in (str, int) for part in parts):
            raise _bad_marks_error(f"texts or numbers for rule {name!r}", value)
        rule_values[name] = tuple(parts) if isinstance(value, list) else value
    return StoredRules(**rule_values)


def _decode_mark(name: str, mark: Any) -> tuple[int, int]:  # noqa: ANN401 - any JSON value
    if not _PARTITION_PATTERN.fullmatch(name) or int(name) > _PARTITION_MAX:
        raise _bad_marks_error("a partition", name)
    if type(mark) is not int or not BEFORE_FIRST <= mark <= _ID_MAX:
        raise _bad_marks_error(f"a mark of partition {name}, -1 or a transaction ID", mark)
    return int(name), mark


def _bad_marks_error(expected: str, found_value: object) -> BadFormat:
    return BadFormat(
        f"metadata of the table: expected {expected}, found {found_value!r:.200}. Hint: another "
        "program, or a later version of Waltz, may have written it."
    )


def marks_to_continue_from(
    metadata: str | None, version: int | None, start: TableMarks
) -> TableMarks:
    """Return the marks from which a follower continues a table.

    Args:
        metadata: the metadata of the follower's newest commit; None if there is none.
        version: the newest version that the table records for `start.application`, if any (rule 4).
        start: the follower, its cluster, its rules, and the start marks for a table that it has not
            written yet.

    Raises:
        BadConfig: the table was written with other rules (rule 6).
        ClusterKeyMismatch: the table follows another cluster.
        BadFormat: the marks are lost (rule 5), or marks and version do not belong to one commit.
    """
    marks = decode_marks(metadata)
    if marks is None:
        if version is None:
            return start
        raise BadFormat(
            f"follower {start.follower!r}: expected a commit of the table with high-water marks "
            f"for version {version}, found none, because the table's log was cleaned up. Hint: "
            "pass the marks of the table, or build the table again."
        )
    if marks.cluster != start.cluster:
        raise ClusterKeyMismatch(
            f"follower {start.follower!r}: the table follows cluster {marks.cluster}, but "
            f"the connect string names cluster {start.cluster}. Hint: correct the connect "
            "string, or build the table again."
        )
    if marks.follower != start.follower or version is None or version > marks.version:
        raise BadFormat(
            f"follower {start.follower!r}: version {version} of the table has no high-water marks "
            f"of this follower; the latest ones are of follower {marks.follower!r}, version "
            f"{marks.version}. Hint: another program has restored or changed the table. To "
            "continue, pass another follower name, and the marks of the table."
        )
    return marks._replace(rules=common_rules(marks.rules, start.rules))


def common_rules(stored_rules: StoredRules, given_rules: StoredRules) -> StoredRules:
    """Return the rules of a table; raises BadConfig if the given rules differ (rule 6)."""
    if stored_rules.headers is None:
        stored_rules = stored_rules._replace(headers=given_rules.headers)
    elif given_rules.headers is None:
        given_rules = given_rules._replace(headers=stored_rules.headers)
    for name, old, new in zip(StoredRules._fields, stored_rules, given_rules, strict=True):
        if old != new:
            raise BadConfig(
                f"{name}: expected {_rule_text(old)}, as in the commits of the table, found "
                f"{_rule_text(new)}. Hint: pass the rules with which the table was created, or "
                "build a new table with other rules."
            )
    return stored_rules


def _rule_text(rule: object) -> str:
    parts = rule if isinstance(rule, tuple) else () if rule is None else (rule,)
    return ", ".join(map(str, parts)) or "none"


def next_batch_marks(marks: MarkMap, log: LogState, count_max: int) -> dict[int, int]:
    """Return the marks at the end of the batch that begins after the table marks (rule 2).

    The result equals the table marks if the log has no more transactions. If a partition has no
    table mark, its batch begins before its first transaction.

    Raises:
        DataLoss: the log has lost transactions (rule 3).
    """
    begin = {partition: marks.get(partition, int(BEFORE_FIRST)) for partition in log.marks}
    for partition, mark in marks.items():
        end = log.marks.get(partition, int(BEFORE_FIRST))
        if mark > end:
            raise DataLoss(
                f"the table has transactions of partition {partition} up to {mark}, but the "
                f"log ends at {end}: the log belongs to another cluster, or was created "
                "again. Hint: build the table again."
            )
    for partition, mark in begin.items():
        first = log.first_available_ids.get(partition, 0)
        if mark + 1 < first:
            raise DataLoss(
                f"the table has transactions of partition {partition} up to {mark}, but the "
                f"first available one in the log is {first}: those in between have expired. "
                "Hint: build the table again."
            )
    return divide_by_lag(begin, log.marks, count_max)


def divide_by_lag(starts: MarkMap, ends: MarkMap, count_max: int) -> dict[int, int]:
    """Lower the ends of a batch, so that it has at most `count_max` transactions in total.

    The count is divided in proportion to the lags of the partitions, so that all partitions catch
    up at about the same time.
    """
    lags = {partition: max(0, ends[partition] - starts[partition]) for partition in ends}
    total = sum(lags.values())
    if total <= count_max:
        return {partition: starts[partition] + lag for partition, lag in lags.items()}
    shares = {partition: lag * count_max // total for partition, lag in lags.items()}
    remaining = count_max - sum(shares.values())
    for partition in sorted(lags, key=lambda each: shares[each] - lags[each] * count_max / total):
        if remaining and shares[partition] < lags[partition]:
            shares[partition] += 1
            remaining -= 1
    return {partition: starts[partition] + share for partition, share in shares.items()}
