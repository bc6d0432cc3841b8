"""A followed Delta table: commits with rows and marks, fencing, and commits of others."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from tests.unit.tables.fake_object_store import store_with_answer
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Superseded, Unavailable
from waltz_core.tables.delta_errors import library_error
from waltz_core.tables.delta_table import FollowedDeltaTable, check_schema
from waltz_core.tables.follower import OtherCommit
from waltz_core.tables.row_changes import DELETED_COLUMN
from waltz_core.tables.table_marks import StoredRules, TableMarks, decode_marks, encode_marks

KEY = "00112233445566778899aabbccddeeff"
START = TableMarks("f", KEY, {0: -1, 1: -1})
SCHEMA = pa.schema([("Id", pa.int64()), ("day", pa.string()), ("select", pa.float64())])
COLUMNS = [*SCHEMA.names, "partition", "transaction_id", DELETED_COLUMN]


def changes(*rows: tuple, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return changes: the columns of the schema, partition and ID, and whether it is a delete."""
    fields = [*schema, ("partition", pa.int32()), ("transaction_id", pa.int64())]
    fields.append(pa.field(DELETED_COLUMN, pa.bool_(), nullable=False))
    names = [*schema.names, "partition", "transaction_id", DELETED_COLUMN]
    return pa.Table.from_pylist(
        [dict(zip(names, row, strict=True)) for row in rows], pa.schema(fields)
    )


def open_table(path: Path, schema: pa.Schema = SCHEMA) -> FollowedDeltaTable:
    return FollowedDeltaTable(str(path), schema, ["Id", "day"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def table(path: Path) -> FollowedDeltaTable:
    """Return a new table at its marks."""
    table = open_table(path)
    assert table.marks(START) is None
    table.create(START)
    table.finish()
    assert table.marks(START).version == 0
    return table


def up_to(*marks: int) -> TableMarks:
    return START._replace(marks=dict(enumerate(marks)))


def rows(path: Path) -> list[tuple]:
    return sorted(
        tuple(row.values()) for row in pa.table(DeltaTable(path).to_pyarrow_table()).to_pylist()
    )


def test_rows_and_marks_are_written_in_one_commit(path: Path, table: FollowedDeltaTable):
    first = changes(
        (1, "a", 0.5, 0, 0, False), (2, "a", None, 0, 1, False), (3, "a", 0, 1, 0, True)
    )
    assert table.apply(first, up_to(1, 0))
    assert rows(path) == [(1, "a", 0.5, 0, 0), (2, "a", None, 0, 1)]
    state = table.marks(START)
    assert (decode_marks(state.metadata), state.version, state.other_commits) == (
        up_to(1, 0),
        3,
        [],
    )
    second = changes(
        (1, "a", 0, 0, 2, True), (2, "a", 7.0, 0, 3, False), (2, "b", 8.0, 0, 4, False)
    )
    assert table.apply(second, up_to(4, 0))
    assert rows(path) == [(2, "a", 7.0, 0, 3), (2, "b", 8.0, 0, 4)]
    assert DeltaTable(path).version() == 2


def test_a_delta_commit_stores_the_marks_in_the_same_fields_as_a_spark_commit(
    path: Path, table: FollowedDeltaTable
):
    commits = sorted((path / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in commits[0].read_text().splitlines()]
    info, transaction = (
        [action[kind] for action in actions if kind in action] for kind in ("commitInfo", "txn")
    )
    assert json.loads(info[0]["userMetadata"])["waltz"]["marks"] == {"0": -1, "1": -1}
    assert (transaction[0]["appId"], transaction[0]["version"]) == (f"waltz/{KEY}/f", 0)


def test_changes_without_an_effect_write_no_table_version(path: Path, table: FollowedDeltaTable):
    assert not table.apply(changes((1, "a", 0, 0, 0, True)), up_to(0, -1))
    assert not table.apply(changes(), up_to(0, -1))
    assert DeltaTable(path).version() == 0
    assert table.apply(None, up_to(0, -1))
    assert decode_marks(table.marks(START).metadata) == up_to(0, -1)
    assert rows(path) == []


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_commit_fails_if_the_table_has_a_newer_version(
    path: Path, table: FollowedDeltaTable, is_empty: bool
):
    other = open_table(path)
    other.marks(START)
    change = changes((1, "a", 0.5, 0, 0, False))
    assert other.apply(change, up_to(0, -1))
    for _ in range(2):
        with pytest.raises(Superseded, match="another commit came first"):
            table.apply(None if is_empty else change, up_to(0, -1))
    assert decode_marks(table.marks(START).metadata) == up_to(0, -1)
    assert table.apply(changes((1, "a", 0.6, 0, 1, False)), up_to(1, -1))


def test_a_commit_of_another_program_supersedes_the_follower(path: Path, table: FollowedDeltaTable):
    write_deltalake(path, DeltaTable(path).to_pyarrow_table(), mode="append")
    with pytest.raises(Superseded):
        table.apply(None, up_to(0, -1))
    assert table.marks(START).other_commits == [OtherCommit(1, "WRITE")]


def test_the_error_names_the_follower_of_the_other_commit(path: Path, table: FollowedDeltaTable):
    other = START._replace(follower="other")
    second = open_table(path)
    assert second.marks(other).has_rows, "the table needs a start"
    assert second.apply(None, other)
    assert table.marks(START).other_commits == [OtherCommit(1, "WRITE", "other")]


def test_a_table_is_created_once(path: Path, table: FollowedDeltaTable):
    other = open_table(path)
    other.create(START)
    for create in (other.finish, lambda: other.apply(None, up_to(0, -1))):
        with pytest.raises(Superseded, match="another program has created it"):
            create()
    assert other.marks(START).version == 0


def test_a_table_is_created_when_its_first_changes_are_known(path: Path):
    table = FollowedDeltaTable(str(path), None, ["Id"])
    table.create(START)
    state = table.marks(START)
    assert (decode_marks(state.metadata), state.version, state.has_rows) == (START, 0, False)
    assert table.columns() == pa.schema([])
    assert not table.apply(changes(), up_to(0, -1))
    bad = pa.schema([("Id", pa.int64()), ("a b", pa.int64())])
    with pytest.raises(BadConfig, match="Delta does not permit this name"):
        table.apply(changes((1, 1, 0, 1, False), schema=bad), up_to(1, -1))
    assert not path.exists()
    assert table.apply(changes((1, "a", 0.5, 0, 2, False)), up_to(2, -1))
    found = [decode_marks(commit["userMetadata"]) for commit in DeltaTable(path).history()]
    assert found == [up_to(2, -1), START]
    assert table.columns() == SCHEMA


@pytest.mark.parametrize("is_created_again", [True, False])
def test_a_table_that_is_removed_is_an_error(
    path: Path, table: FollowedDeltaTable, is_created_again: bool
):
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    table.marks(START)
    shutil.rmtree(path)
    if is_created_again:
        DeltaTable.create(path, SCHEMA)
    with pytest.raises(BadFormat, match="the table was removed while it was followed"):
        table.marks(START)


def test_an_overwrite_by_another_program_is_reported_as_a_replacement(
    path: Path, table: FollowedDeltaTable
):
    rows = DeltaTable(path).to_pyarrow_table()
    write_deltalake(path, rows, mode="append")
    write_deltalake(path, rows, mode="overwrite")
    DeltaTable.create(path, SCHEMA, mode="overwrite")
    others = table.marks(START).other_commits
    assert [other.is_replacement for other in others] == [True, True, False]


def test_changes_that_the_table_rejects_are_a_permanent_error(
    path: Path, table: FollowedDeltaTable
):
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    delta = DeltaTable(path)
    delta.alter.add_constraint({"positive": '"select" > 0'})
    table.marks(START)
    wrong, right = changes((1, "a", -1.0, 0, 1, False)), changes((1, "a", 1.0, 0, 1, False))
    with pytest.raises(BadRequest, match=r"Invalid data found: 1 rows .* Hint: drop the constr"):
        table.apply(wrong, up_to(1, -1))
    delta.alter.set_table_properties({"delta.appendOnly": "true"})
    table.marks(START)
    with pytest.raises(BadRequest, match=f"table {path}: .* Delta table is append-only"):
        table.apply(right, up_to(1, -1))
    delta.alter.set_table_properties({"delta.appendOnly": "false"})
    table.marks(START)
    for file in path.glob("*.parquet"):
        file.unlink()
    with pytest.raises(BadFormat, match=r"Hint: a program has deleted a file of the table"):
        table.apply(right, up_to(1, -1))


@pytest.mark.parametrize("is_restore", [True, False])
def test_a_commit_between_the_two_newest_follower_commits_is_found(
    path: Path, table: FollowedDeltaTable, is_restore: bool
):
    """A `MERGE` of Spark may succeed after such a commit; then the driver may be killed."""
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    if is_restore:
        DeltaTable(path).restore(0)
    else:
        other = open_table(path)
        other.marks(START._replace(follower="g"))
        other.apply(None, START._replace(follower="g"))
    for _ in range(3):
        write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 0), mode="append")
    spark = open_table(path)
    spark.marks(START._replace(follower="g"))
    assert spark.apply(changes((2, "a", 0.5, 0, 1, False)), up_to(1, -1))
    state = open_table(path).marks(START)
    assert decode_marks(state.metadata) == up_to(1, -1)
    expected = OtherCommit(2, "RESTORE") if is_restore else OtherCommit(2, "WRITE", "g")
    assert state.other_commits == [expected]


def test_a_maintenance_commit_with_copied_marks_is_not_a_follower_commit(
    path: Path, table: FollowedDeltaTable
):
    """Auto compaction of Spark copies the commit metadata of the session."""
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    table.marks(START)
    table.apply(changes((2, "a", 0.5, 0, 1, False)), up_to(1, -1))
    DeltaTable(path).restore(1)
    metadata = {"userMetadata": encode_marks(up_to(0, -1))}
    DeltaTable(path).alter.set_table_properties(
        {"delta.appendOnly": "false"}, commit_properties=CommitProperties(custom_metadata=metadata)
    )
    state = open_table(path).marks(START)
    assert decode_marks(state.metadata) == up_to(1, -1)
    assert state.other_commits == [OtherCommit(4, "SET TBLPROPERTIES"), OtherCommit(3, "RESTORE")]


def test_the_newest_commit_of_the_follower_is_found_below_many_other_commits(
    path: Path, table: FollowedDeltaTable
):
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    delta = DeltaTable(path)
    for number in range(20):
        delta.alter.set_table_properties(
            {"delta.logRetentionDuration": f"interval {number + 1} days"}
        )
    delta.restore(0)
    state = open_table(path).marks(START)
    assert decode_marks(state.metadata) == up_to(0, -1)
    assert [other_commit.version for other_commit in state.other_commits] == list(range(22, 1, -1))
    assert state.other_commits[0].operation == "RESTORE"
    assert state.other_commits[1].operation == "SET TBLPROPERTIES"


def test_a_concurrent_commit_does_not_mix_table_versions(
    path: Path, table: FollowedDeltaTable, monkeypatch: pytest.MonkeyPatch
):
    other = open_table(path)
    other.marks(START)
    history = DeltaTable.history

    def history_after_a_commit(delta: DeltaTable, limit: int | None) -> list[dict]:
        monkeypatch.setattr(DeltaTable, "history", history)
        assert other.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
        return delta.history(limit)

    monkeypatch.setattr(DeltaTable, "history", history_after_a_commit)
    late = open_table(path)
    state = late.marks(START)
    assert (decode_marks(state.metadata), state.version, state.other_commits) == (
        up_to(0, -1),
        1,
        [],
    )
    assert late.apply(None, up_to(1, -1))


def test_marks_of_another_follower_are_ignored(path: Path, table: FollowedDeltaTable):
    other = START._replace(follower="g")
    state = open_table(path).marks(other)
    assert (state.metadata, state.version, state.other_commits, state.has_rows) == (
        None,
        None,
        (),
        True,
    )
    rules = StoredRules(("Id", "day"))
    marks = up_to(0, -1)._replace(rules=rules)
    table.apply(changes((1, "a", 0.5, 0, 0, False)), marks)
    state = open_table(path).marks(other)
    assert (state.has_rows, state.rules) == (True, rules)


def test_the_table_version_is_known_without_marks(path: Path, table: FollowedDeltaTable):
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    delta = DeltaTable(path)
    delta.alter.set_table_properties({"delta.appendOnly": "false"})
    delta.create_checkpoint()
    for version in range(2):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    state = open_table(path).marks(START)
    assert (state.metadata, state.version, state.has_rows) == (None, 1, True)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_key_in_two_partitions_fails_the_merge(
    path: Path, table: FollowedDeltaTable, is_deleted: bool
):
    table.apply(changes((1, "a", 0.5, 0, 4, False), (2, "a", 0.5, 0, 5, False)), up_to(5, -1))
    table.marks(START)
    with pytest.raises(
        BadRequest,
        match=r"key \(1, a\) in partition 0, transaction 4 and partition 1, transaction 7, and ",
    ):
        table.apply(changes((3, "a", 0.5, 1, 6, False), (1, "a", 0, 1, 7, is_deleted)), up_to(5, 7))
    assert DeltaTable(path).version() == 1


def test_columns_may_be_added_but_not_removed(path: Path, table: FollowedDeltaTable):
    table.apply(changes((1, "a", 0.5, 0, 0, False)), up_to(0, -1))
    wide = pa.schema([*SCHEMA, ("more", pa.string())])
    wider = open_table(path, wide)
    wider.marks(START)
    assert wider.apply(changes((2, "a", 0.5, "x", 0, 1, False), schema=wide), up_to(1, -1))
    assert rows(path) == [(1, "a", 0.5, 0, 0, None), (2, "a", 0.5, 0, 1, "x")]
    with pytest.raises(BadConfig, match="column 'more' of the table is not declared"):
        open_table(path).marks(START)
    other = pa.schema([*SCHEMA, ("more", pa.int64())])
    with pytest.raises(
        BadConfig, match="column 'more' has type string in the table, but is declared as int64"
    ):
        open_table(path, other).marks(START)


@pytest.mark.parametrize(
    "kind",
    [
        pa.time32("s"),
        pa.time64("us"),
        pa.duration("us"),
        pa.float16(),
        pa.uint8(),
        pa.uint64(),
        pa.timestamp("ns", "UTC"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.decimal256(39, 0),
        pa.null(),
        pa.list_(pa.uint64()),
        pa.struct([("a", pa.list_(pa.time32("s")))]),
    ],
)
def test_a_type_that_delta_does_not_support_is_rejected(kind: pa.DataType):
    with pytest.raises(BadConfig, match="column 'c': Delta has no type"):
        check_schema(pa.schema([("c", kind)]))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "expected one or more columns"),
        (["a b"], "Delta does not permit this name"),
        ([""], "Delta does not permit this name"),
        (["a\x00b"], "Delta does not permit this name"),
        (["__delta_rs_source"], "without the prefix `__delta_rs_`"),
        (["a", "A"], r"the name 'a' is already used, .* Hint: rename the column"),
        (
            ["_Partition"],
            r"the name '_partition' is already used, .* Reserved names are _deleted, _partition, ",
        ),
    ],
)
def test_a_column_name_that_delta_does_not_permit_is_rejected(names: list[str], message: str):
    with pytest.raises(BadConfig, match=message):
        check_schema(pa.schema([(name, pa.int64()) for name in names]))


@pytest.mark.parametrize("name", ["A", "a b", ""])
def test_a_nested_name_that_delta_does_not_support_is_rejected(name: str):
    fields = pa.struct([("a", pa.int64()), (name, pa.int64())])
    for kind in (fields, pa.list_(fields), pa.struct([("x", fields)])):
        with pytest.raises(BadConfig, match=r"column 's\.(x\.)?"):
            check_schema(pa.schema([("s", kind)]))


@pytest.mark.parametrize("nest", [pa.list_, lambda kind: pa.struct([("x", kind)])])
def test_nesting_over_32_levels_is_rejected(path: Path, nest):
    kind, value = pa.int64(), 1
    for _ in range(31):
        kind = nest(kind)
        value = [value] if pa.types.is_list(kind) else {"x": value}
    schema = pa.schema([("Id", pa.int64()), ("day", pa.string()), ("deep", kind)])
    table = open_table(path, schema)
    table.create(START)
    table.marks(START)
    assert table.apply(changes((1, "a", value, 0, 0, False), schema=schema), up_to(0, -1))
    assert rows(path) == [(1, "a", value, 0, 0)]
    with pytest.raises(BadConfig, match="at most 32 levels"):
        check_schema(pa.schema([("deep", nest(nest(kind)))]))


def partitioned(path: Path, schema: pa.Schema, by: str) -> FollowedDeltaTable:
    place = [("_partition", pa.int32()), ("_transaction_id", pa.int64())]
    DeltaTable.create(path, pa.schema([*schema, *place]), partition_by=[by])
    return open_table(path, schema)


def test_an_empty_text_in_a_partition_column_is_rejected(path: Path):
    table = partitioned(path, SCHEMA, "day")  # also a key column
    table.marks(START)
    assert table.apply(changes((1, "a", 1.0, 0, 0, False)), up_to(0, -1))
    table.marks(START)
    for is_delete in (False, True):
        with pytest.raises(BadRequest, match="partition 0, transaction 1: expected null or a text"):
            table.apply(changes((1, "", 1.0, 0, 1, is_delete)), up_to(1, -1))
    assert rows(path) == [(1, "a", 1.0, 0, 0)]


@pytest.mark.parametrize("kind", [pa.decimal128(9, 2), pa.binary(), pa.float64()])
def test_an_unreadable_partition_column_is_rejected(path: Path, kind: pa.DataType):
    schema = pa.schema([("Id", pa.int64()), ("day", pa.string()), ("p", kind)])
    table = partitioned(path, schema, "p")
    for _ in range(2):
        with pytest.raises(BadConfig, match="partition column 'p' of the table: expected a bool"):
            table.marks(START)


def test_a_binary_key_in_two_partitions_is_shown_in_hex(path: Path):
    schema = pa.schema([("Id", pa.binary()), ("day", pa.string())])
    table = open_table(path, schema)
    table.create(START)
    table.marks(START)
    assert table.apply(changes((b"\xff\x00", "a", 0, 0, False), schema=schema), up_to(0, -1))
    table.marks(START)
    with pytest.raises(BadRequest, match=r"found key \(ff00, a\) in partition 0, transaction 0"):
        table.apply(changes((b"\xff\x00", "a", 1, 0, False), schema=schema), up_to(0, 0))


def test_all_types_of_columns_survive_a_commit(path: Path):
    kinds = {
        "key": (pa.binary(), b"k"),
        "a": (pa.bool_(), True),
        "b": (pa.int8(), -1),
        "c": (pa.decimal128(38, 2), None),
        "d": (pa.timestamp("us", "UTC"), None),
        "e": (pa.timestamp("us"), None),
        "f": (pa.date32(), None),
        "g": (pa.list_(pa.struct([("x", pa.float32())])), [{"x": 0.5}, None]),
        "h": (pa.map_(pa.string(), pa.int64()), [("x", 1)]),
        "i": (pa.large_string(), "text"),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in kinds.items()])
    table = FollowedDeltaTable(str(path), schema, ["key"])
    table.create(START)
    table.marks(START)
    values = [value for _, value in kinds.values()]
    assert table.apply(changes((*values, 0, 0, False), schema=schema), up_to(0, -1))
    assert FollowedDeltaTable(str(path), schema, ["key"]).marks(START).version == 1
    assert rows(path) == [(*values, 0, 0)]


def test_a_key_must_be_a_declared_column(path: Path):
    with pytest.raises(BadConfig, match="expected columns of the table, found 'no'"):
        FollowedDeltaTable(str(path), SCHEMA, ["Id", "no"])


def test_errors_of_the_library_name_the_table(tmp_path: Path):
    place = tmp_path / "file"
    place.write_text("")
    table = open_table(place / "table")
    table.create(START)
    with pytest.raises(BadRequest, match=f"table {place}/table: .* Not a directory|NotADir"):
        table.finish()


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (403, "AccessDenied", BadConfig, "answers 403 Forbidden (AccessDenied: Some text.). Hint:"),
        (400, "ExpiredToken", BadConfig, "Hint: check the credentials in the environment"),
        (404, "NoSuchBucket", BadConfig, "the bucket does not exist. Hint: create it"),
        (301, "PermanentRedirect", BadConfig, "another region. Hint: set AWS_REGION"),
        (501, "NotImplemented", BadRequest, "(NotImplemented: Some text.). Hint: the obj"),
        (503, "SlowDown", Unavailable, "answers 503 Service Unavailable (SlowDown: Some text.)"),
        (None, "", Unavailable, "error sending request"),
    ],
)
def test_errors_of_an_object_store_are_classified(
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    code: str,
    error: type[Exception],
    message: str,
):
    with store_with_answer(status, code) as url:
        names = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
        names |= {"ALLOW_HTTP": "true", "ENDPOINT_URL": url if status else "http://127.0.0.1:1"}
        for name, value in names.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(error, match=re.escape(message)) as caught:
            FollowedDeltaTable("s3://bucket/table", SCHEMA, ["Id"]).marks(START)
    assert str(caught.value).startswith("table s3://bucket/table: ")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token", BadConfig, "AWS_ACCESS_"),
        (
            "Unable to open file /x [31m↳[0m Permission denied (os error 13)",
            BadConfig,
            "permission",
        ),
        ("URL scheme is not allowed", BadConfig, "AWS_ALLOW_HTTP"),
        ("Unknown scheme: foo. Known schemes: s3", BadConfig, "a directory, or a URL"),
        ("something new", BadRequest, ""),
    ],
)
def test_other_errors_of_the_library_are_classified(text: str, error: type[Exception], hint: str):
    found = library_error("t", OSError(text))
    assert type(found) is error
    assert hint in str(found).partition(" Hint: ")[2]
