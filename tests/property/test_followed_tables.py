"""A followed table equals a replay of the log, wherever its batches end and however often they run.

The logs are random. They have several partitions with upserts and deletes, by rules or by a changes
function. The limits of batches are random, too. Each batch is split into random parts, like the
tasks of a batch in Spark, and some batches fail before their commit.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.tables import row_changes
from waltz_core.tables.row_changes import (
    DELETED_COLUMN,
    ChangeRules,
    changes_function,
    compute_changes,
    last_changes,
    parse_condition,
    reduce_batches,
)
from waltz_core.tables.table_marks import (
    LogState,
    TableMarks,
    encode_marks,
    marks_to_continue_from,
    next_batch_marks,
)

CLUSTER = "00112233445566778899aabbccddeeff"
PARTITIONS = 3
KEY = ["account", "day"]
DELETE_HEADER = 9
RULES = ChangeRules(KEY, [DELETE_HEADER], parse_condition("op = 'D'"))
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("transaction_id", pa.int64()),
        ("header", pa.int32()),
        ("account", pa.string()),
        ("day", pa.int64()),
        ("op", pa.string()),
        ("value", pa.int64()),
    ]
)
SORTING = [("partition", "ascending"), ("transaction_id", "ascending")]
RESULT = pa.schema(
    [*(part for part in SCHEMA if part.name not in ("header", "op")), (DELETED_COLUMN, pa.bool_())]
)
# A row without its position in the log.
BODIES = st.tuples(
    st.sampled_from((0, 1, DELETE_HEADER)),
    st.sampled_from("abc"),
    st.integers(0, 1),
    st.sampled_from(("I", "U", "D", None)),
    st.integers(0, 99),
)
LOGS = st.lists(st.lists(BODIES, max_size=30), min_size=PARTITIONS, max_size=PARTITIONS)

Key = tuple[str, int]
Content = dict[Key, tuple[int, int, int]]  # partition, transaction, value


def rows_of(log: list[list[tuple]]) -> list[tuple]:
    """Return the rows of a log; each account belongs to one partition."""
    return [
        (partition, index, header, f"{account}{partition}", day, op, value)
        for partition, bodies in enumerate(log)
        for index, (header, account, day, op, value) in enumerate(bodies)
    ]


def table_of(rows: list[tuple], cuts: list[int]) -> pa.Table:
    """Return rows as a table, in chunks that end at the cuts."""
    at = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    chunks = [rows[first:last] for first, last in pairwise(at)]
    names = SCHEMA.names
    return pa.concat_tables(
        pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in chunk], SCHEMA)
        for chunk in chunks
    )


def by_rules(row: tuple) -> list[tuple[Key, int | None]]:
    """Return the changes of a transaction: the value of a key, or None for a delete."""
    _, _, header, account, day, op, value = row
    return [((account, day), None if header == DELETE_HEADER or op == "D" else value)]


def by_function(row: tuple) -> list[tuple[Key, int | None]]:
    """Return up to four changes of a transaction, of two keys."""
    _, _, _, account, day, _, value = row
    return [
        ((account, (day + number) % 2), None if (value + number) % 3 == 0 else value + number)
        for number in range(value % 5)
    ]


def function(rows: pa.Table) -> pa.Table:
    """Return the changes of transactions."""
    found = []
    for row in zip(*(rows[name].to_pylist() for name in SCHEMA.names), strict=True):
        for (account, day), value in by_function(row):
            found.append((row[0], row[1], account, day, value, value is None))
    names = RESULT.names
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in found], RESULT)


BY_FUNCTION = ChangeRules(KEY, function=changes_function(f"{__name__}:function", SCHEMA, KEY))
CASES = st.sampled_from(((RULES, by_rules), (BY_FUNCTION, by_function)))


def replayed(rows: list[tuple], changes: Callable = by_rules) -> Content:
    """Return the table by the definition, without Arrow."""
    table: Content = {}
    for row in rows:
        for key, value in changes(row):
            if value is None:
                table.pop(key, None)
            else:
                table[key] = (row[0], row[1], value)
    return table


class StoredTable(NamedTuple):
    """A table with its metadata, like a version of a Delta table."""

    content: Content
    metadata: str | None = None
    version: int | None = None

    def merged(self, changes: pa.Table, marks: TableMarks) -> "StoredTable":
        """Return the next version: rows and marks change together."""
        content = dict(self.content)
        for row in changes.to_pylist():
            key = (row["account"], row["day"])
            if row[DELETED_COLUMN]:
                content.pop(key, None)
            else:
                content[key] = (row["partition"], row["transaction_id"], row["value"])
        return StoredTable(content, encode_marks(marks), marks.version)


class Turn(NamedTuple):
    """One turn of a follower."""

    visible: int  # the committed percentage of the log
    count_max: int
    cuts: list[int]
    is_killed: bool  # the follower is killed before its commit
    part_bytes: int = 1 << 20


TURNS = st.lists(
    st.builds(
        Turn,
        st.integers(0, 100),
        st.integers(1, 30),
        st.lists(st.integers(0, 99), max_size=3),
        st.booleans(),
        st.sampled_from((1, 200, 1 << 20)),
    ),
    max_size=12,
)
REST = Turn(100, 1_000, [], is_killed=False)


@given(LOGS, TURNS, CASES)
def test_a_followed_table_equals_a_replay_of_the_log(log, turns, case):
    rules, plain = case
    rows = rows_of(log)
    start = TableMarks("f", CLUSTER, dict.fromkeys(range(PARTITIONS), -1))
    ends = dict.fromkeys(range(PARTITIONS), -1)
    stored = StoredTable({})
    for turn in (*turns, REST):
        grown = {part: len(each) * turn.visible // 100 - 1 for part, each in enumerate(log)}
        ends = {part: max(end, grown[part]) for part, end in ends.items()}
        table = marks_to_continue_from(stored.metadata, stored.version, start)
        batch = next_batch_marks(table.marks, LogState(ends, {}), turn.count_max)
        # A repeated micro-batch has rows that the table already contains; they are dropped.
        read = table_of(up_to(rows, batch), turn.cuts)
        with patch.object(row_changes, "PART_BYTES", turn.part_bytes):
            changes = reduce_batches(read.to_batches(), rules, SCHEMA, table.marks)
        if not turn.is_killed:
            stored = stored.merged(changes, table._replace(marks=batch))
            assert stored.content == replayed(up_to(rows, batch), plain)
    assert stored.content == replayed(rows, plain)


def up_to(rows: list[tuple], marks: dict[int, int]) -> list[tuple]:
    """Return the rows up to the marks."""
    return [row for row in rows if row[1] <= marks[row[0]]]


@given(LOGS, st.lists(st.integers(0, 3), min_size=90, max_size=90))
def test_the_last_changes_of_parts_merge_to_the_same_result_in_any_order(log, parts):
    changes = compute_changes(table_of(rows_of(log), []), RULES)
    part_of = pa.array(parts[: changes.num_rows])
    pieces = [changes.filter(pc.equal(part_of, part)) for part in range(4)]
    reduced = [last_changes(piece, KEY) for piece in pieces]
    first_half = last_changes(pa.concat_tables([*reduced[:2]]), KEY)
    second_half = last_changes(pa.concat_tables([*reduced[2:]]), KEY)
    whole = last_changes(changes, KEY)
    for parts_again in ([first_half, second_half], [second_half, first_half], reduced):
        again = last_changes(pa.concat_tables(parts_again), KEY)
        assert again.sort_by(SORTING) == whole.sort_by(SORTING)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=40))
def test_changes_of_one_transaction_keep_their_order(found):
    """A changes function may get transactions in any order, and in any number of chunks."""
    fields = {"partition": pa.int32(), "transaction_id": pa.int64(), "id": pa.int64()}
    schema = pa.schema([*fields.items(), (DELETED_COLUMN, pa.bool_())])
    rows = [
        {"partition": 0, "transaction_id": at, "id": key, DELETED_COLUMN: is_deleted}
        for at, key, is_deleted in found
    ]
    chunks = [pa.Table.from_pylist([row], schema) for row in rows]
    last = last_changes(pa.concat_tables([schema.empty_table(), *chunks]), ["id"])
    ordered = sorted(rows, key=lambda row: row["transaction_id"])
    expected = {row["id"]: row for row in ordered}
    assert {row["id"]: row for row in last.to_pylist()} == expected
