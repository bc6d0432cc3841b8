"""A followed table equals a replay of the log, wherever its batches end and however often they run.

Random logs of several partitions, with upserts and deletes; random limits of batches, which are cut
into random parts as the tasks of a batch are, and some of which fail before their commit.
"""

from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.tables.row_changes import (
    DELETED,
    ChangeRules,
    changes_of,
    last_changes,
    parse_condition,
    rows_after,
)
from waltz_core.tables.table_marks import LogState, TableMarks, continued, encode, next_batch

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
# The part of a row that does not depend on its place in the log.
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
        (partition, place, header, f"{account}{partition}", day, op, value)
        for partition, bodies in enumerate(log)
        for place, (header, account, day, op, value) in enumerate(bodies)
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


def replayed(rows: list[tuple]) -> Content:
    """Return the table by the definition, without Arrow."""
    table: Content = {}
    for partition, transaction, header, account, day, op, value in rows:
        if header == DELETE_HEADER or op == "D":
            table.pop((account, day), None)
        else:
            table[account, day] = (partition, transaction, value)
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
            if row[DELETED]:
                content.pop(key, None)
            else:
                content[key] = (row["partition"], row["transaction_id"], row["value"])
        return StoredTable(content, encode(marks), marks.version)


class Turn(NamedTuple):
    """One turn of a follower."""

    visible: int  # percent of the log that is committed
    count_max: int
    cuts: list[int]
    is_killed: bool  # before its commit


TURNS = st.lists(
    st.builds(
        Turn,
        st.integers(0, 100),
        st.integers(1, 30),
        st.lists(st.integers(0, 99), max_size=3),
        st.booleans(),
    ),
    max_size=12,
)
REST = Turn(100, 1_000, [], is_killed=False)


@given(LOGS, TURNS)
def test_a_followed_table_equals_a_replay_of_the_log(log, turns):
    rows = rows_of(log)
    start = TableMarks("f", CLUSTER, dict.fromkeys(range(PARTITIONS), -1))
    ends = dict.fromkeys(range(PARTITIONS), -1)
    stored = StoredTable({})
    for turn in (*turns, REST):
        grown = {part: len(each) * turn.visible // 100 - 1 for part, each in enumerate(log)}
        ends = {part: max(end, grown[part]) for part, end in ends.items()}
        table = continued(stored.metadata, stored.version, start)
        batch = next_batch(table.marks, LogState(ends, {}), turn.count_max)
        # Rows that the table has are dropped: a repeated micro-batch has them.
        read = rows_after(table_of(up_to(rows, batch), turn.cuts), table.marks)
        changes = last_changes(changes_of(read, RULES), KEY)
        if not turn.is_killed:
            stored = stored.merged(changes, table._replace(marks=batch))
            assert stored.content == replayed(up_to(rows, batch))
    assert stored.content == replayed(rows)


def up_to(rows: list[tuple], marks: dict[int, int]) -> list[tuple]:
    """Return the rows up to the marks."""
    return [row for row in rows if row[1] <= marks[row[0]]]


@given(LOGS, st.lists(st.integers(0, 3), min_size=90, max_size=90))
def test_the_last_changes_of_parts_are_those_of_the_whole(log, parts):
    changes = changes_of(table_of(rows_of(log), []), RULES)
    part_of = pa.array(parts[: changes.num_rows])
    pieces = [changes.filter(pc.equal(part_of, part)) for part in range(4)]
    reduced = [last_changes(piece, KEY) for piece in pieces]
    left = last_changes(pa.concat_tables([*reduced[:2]]), KEY)
    right = last_changes(pa.concat_tables([*reduced[2:]]), KEY)
    whole = last_changes(changes, KEY)
    for parts_again in ([left, right], [right, left], reduced):
        again = last_changes(pa.concat_tables(parts_again), KEY)
        assert again.sort_by(SORTING) == whole.sort_by(SORTING)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=40))
def test_changes_of_one_transaction_keep_their_order(found):
    """Of a changes function; transactions may be in any order, and in any number of chunks."""
    fields = {"partition": pa.int32(), "transaction_id": pa.int64(), "id": pa.int64()}
    schema = pa.schema([*fields.items(), (DELETED, pa.bool_())])
    rows = [
        {"partition": 0, "transaction_id": at, "id": key, DELETED: gone} for at, key, gone in found
    ]
    chunks = [pa.Table.from_pylist([row], schema) for row in rows]
    last = last_changes(pa.concat_tables([schema.empty_table(), *chunks]), ["id"])
    ordered = sorted(rows, key=lambda row: row["transaction_id"])
    expected = {row["id"]: row for row in ordered}
    assert {row["id"]: row for row in last.to_pylist()} == expected
