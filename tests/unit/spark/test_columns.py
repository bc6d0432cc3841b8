"""Conversion of a DataFrame's columns to appends, and the errors for invalid ones."""

from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from waltz_core.errors import BadRequest, TooLarge
from waltz_core.records.checksum import crc32
from waltz_core.records.record import LOCKS_MAX, lock_hash, partition_of_hash
from waltz_spark.options import OnLockFailure, WriteOptions
from waltz_spark.writer.columns import LOCK_COLUMNS, RowConverter, check_schema
from waltz_spark.writer.earlier_rows import RowSpool

PLAIN = WriteOptions(connect="zk:2181/waltz/x")
PACKED = WriteOptions(connect="zk:2181/waltz/x", data_format="msgpack")
TYPES = {
    "int": "IntegerType", "long": "LongType", "string": "StringType", "binary": "BinaryType",
    "double": "DoubleType",
}  # fmt: skip


def schema(**columns: str) -> StructType:
    from pyspark.sql import types as t  # noqa: PLC0415

    found = StructType()
    for name, kind in columns.items():
        if kind.startswith("array<"):
            inner = getattr(t, TYPES[kind[6:-1]])()
            found.add(name, t.ArrayType(inner))
        else:
            found.add(name, getattr(t, TYPES[kind])())
    return found


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ({"payload": "binary"}, PLAIN, "no column 'data'"),
        ({"data": "int"}, PLAIN, "'data': expected type binary or string, found int"),
        (
            {"data": "binary", "a": "int"},
            PACKED,
            "expected either column 'data' or option 'dataFormat', found both.",
        ),
        ({"header": "int"}, PACKED, "no column to pack"),
        ({"data": "binary", "header": "long"}, PLAIN, "'header': expected type int, found bigint"),
        ({"data": "binary", "partition": "string"}, PLAIN, "'partition': expected type int"),
        (
            {"data": "binary", "write_locks": "array<string>"},
            PLAIN,
            "'write_locks': expected type array<int>",
        ),
        ({"data": "binary", "read_locks": "int"}, PLAIN, "'read_locks': expected type array<int>"),
        ({"data": "binary", "client_high_water_mark": "double"}, PLAIN, ": expected type long"),
        (
            {"data": "binary", "id": "long", "who": "string"},
            PLAIN,
            "does not have columns 'id', 'who':",
        ),
        ({"data": "binary", "id": "long", "who": "string"}, PLAIN, ".drop('id', 'who')"),
        (
            {"data": "binary", "write_lock": "array<int>"},
            PLAIN,
            ("log has no column 'write_lock'; did you mean 'write_locks'? Hint: rename the column"),
        ),
        # The misspelled column would be a part of the payload, and no lock would be written.
        *(
            ({"id": "long", name: "array<int>"}, PACKED, f"did you mean '{expected_hash}'?")
            for name, expected_hash in (
                ("WRITE_LOCKS", "write_locks"),
                ("Append_Locks", "append_locks"),
                ("write_lock", "write_locks"),
                ("readlocks", "read_locks"),
            )
        ),
        (
            {"d": "array<int>"},
            replace(PACKED, partition_by="d"),
            "xxhash64('d')",
        ),
        (
            {"data": "binary", "id": "long", "who": "string"},
            replace(PLAIN, partition_by="id"),
            "does not have column 'who':",
        ),
        (
            {"data": "binary", "id": "long", "who": "string"},
            replace(PLAIN, results_path="somewhere", result_columns=("who",)),
            "does not have column 'id':",
        ),
        (
            {"data": "binary", "status": "string"},
            replace(PLAIN, results_path="somewhere", result_columns=("status",)),
            "results already have a column 'status'.",
        ),
    ],
)
def test_a_wrong_column_is_reported_in_one_sentence(
    columns: dict[str, str], options: WriteOptions, sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_schema(schema(**columns), options)
    assert sentence in str(caught.value)


def test_an_unsupported_payload_type_is_rejected_at_any_depth() -> None:
    from pyspark.sql import types as t  # noqa: PLC0415

    interval = t.StructType().add("when", t.ArrayType(t.DayTimeIntervalType()))
    found = t.StructType().add("id", t.LongType()).add("nested", interval)
    with pytest.raises(BadRequest, match=r"'nested.when' has type interval day to second"):
        check_schema(found, PACKED)


@pytest.mark.parametrize(
    "options",
    [
        replace(PLAIN, partition_by="id"),
        replace(PLAIN, results_path="somewhere"),
        replace(PLAIN, results_path="somewhere", result_columns=("id",)),
    ],
)
def test_valid_columns_and_columns_named_by_an_option_are_accepted(options: WriteOptions) -> None:
    locks = dict.fromkeys(LOCK_COLUMNS, "array<int>")
    rest = {"header": "int", "partition": "int", "client_high_water_mark": "long"}
    check_schema(schema(data="string", **locks, **rest), PLAIN)
    check_schema(schema(data="string", id="long"), options)
    check_schema(schema(id="long"), PACKED)


def row_converter(options: WriteOptions = PLAIN, **kwargs: int) -> RowConverter:
    return RowConverter(
        options, 4, {0: 10, 1: 11, 2: 12, 3: 13}, keeps_input_columns=False, **kwargs
    )


def test_the_first_lock_chooses_the_partition() -> None:
    one, two = lock_hash("account", 1), lock_hash("account", 2)
    batch = pa.record_batch(
        {
            "data": pa.array([b"a", b"b", b"c"]),
            "write_locks": pa.array([[], [two, one], None], pa.list_(pa.int32())),
            "append_locks": pa.array([[one], [one], [two]], pa.list_(pa.int32())),
        }
    )
    converted = row_converter().convert(batch)
    assert converted.partitions.tolist() == [
        partition_of_hash(one, 4),
        partition_of_hash(two, 4),
        partition_of_hash(two, 4),
    ]
    assert converted.append.column("client_high_water_mark").to_pylist() == [
        10 + partition for partition in converted.partitions.tolist()
    ]


def test_option_partition_by_hashes_like_the_client() -> None:
    options = WriteOptions(connect="zk:2181/waltz/x", partition_by="key")
    keys = [0, 1, -5, 1 << 40, None]
    batch = pa.record_batch({"data": pa.array([b"x"] * 5), "key": pa.array(keys, pa.int64())})
    expected = [partition_of_hash(lock_hash("", key or 0), 4) for key in keys]
    assert row_converter(options).convert(batch).partitions.tolist() == expected


def test_an_invalid_utf8_string_can_choose_a_partition_but_cannot_be_packed() -> None:
    raw = pa.array([b"x", b"\xff"]).view(pa.string())
    batch = pa.record_batch({"data": pa.array([b"x"] * 2), "key": raw})
    chosen = row_converter(replace(PLAIN, partition_by="key")).convert(batch).partitions.tolist()
    assert chosen == [partition_of_hash(lock_hash("", crc32(key)), 4) for key in (b"x", b"\xff")]
    for data_format in ("msgpack", "json"):
        options = replace(PACKED, data_format=data_format)
        for kind in ("key", "nested"):
            lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), raw)
            column = raw if kind == "key" else lists
            with pytest.raises(
                BadRequest, match=f"column '{kind}' cannot be packed .* not valid UTF-8"
            ):
                row_converter(options).convert(pa.record_batch({kind: column}))


def test_only_nulls_in_the_partition_column_are_replaced() -> None:
    batch = pa.record_batch(
        {"data": pa.array([b"x"] * 3), "partition": pa.array([3, None, 3], pa.int32())}
    )
    assert row_converter().convert(batch).partitions.tolist() == [3, 1, 3]


def test_null_locks_are_ignored() -> None:
    batch = pa.record_batch(
        {
            "data": pa.array([b"x", b"y"]),
            "append_locks": pa.array([[None], [7, None]], pa.list_(pa.int32())),
        }
    )
    converted = row_converter().convert(batch)
    assert converted.append.column("append_locks").to_pylist() == [[], [7]]


LOCKS = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("columns", "error", "sentence"),
    [
        (
            {"data": [None]},
            BadRequest,
            r"'data' is null in row 2 \(counted from 0\) of the task, .* Hint: ",
        ),
        (
            {"data": [None], "header": pa.array([7], pa.int32())},
            BadRequest,
            r"is null in row 2 \(counted from 0\) of the task \({'header': 7}\)",
        ),
        (
            {"data": [b"x" * (4 * 1024 * 1024 + 1)]},
            TooLarge,
            "4,194,305 bytes is over the limit of 4,194,304",
        ),
        (
            {"data": [b"x"], "partition": pa.array([9], pa.int32())},
            BadRequest,
            "'partition': expected a partition in 0..3, found 9",
        ),
        (
            {"data": [b"x"] * 4, "client_high_water_mark": [-1, None, -7, -8]},
            BadRequest,
            r"column 'client_high_water_mark': .* found -7 in row 4 \(counted from 0\) of the task",
        ),
        *(
            (
                {"data": [b"x"] * 2, name: pa.array([[], range(LOCKS_MAX + 1)], LOCKS)},
                TooLarge,
                f"'{name}': expected at most 65,536 locks",
            )
            for name in LOCK_COLUMNS
        ),
    ],
)
def test_a_wrong_value_is_reported_in_one_sentence(
    columns: dict[str, object], error: type[Exception], sentence: str
) -> None:
    shaped = row_converter()
    marks = pa.array([-1, None], pa.int64())
    right = {"data": pa.array([b"x", b"y"]), "client_high_water_mark": marks}
    assert shaped.convert(pa.record_batch(right)).append.num_rows == 2
    arrays = {"data": pa.array(columns["data"], pa.binary())}
    arrays |= {name: pa.array(column) for name, column in columns.items() if name != "data"}
    with pytest.raises(error, match=sentence):
        shaped.convert(pa.record_batch(arrays))


def test_log_columns_are_not_packed() -> None:
    batch = pa.record_batch(
        {"a": [1], "header": pa.array([5], pa.int32()), "partition": pa.array([0], pa.int32())}
    )
    converted = row_converter(PACKED).convert(batch)
    assert converted.append.column("data").to_pylist() == [b"\x81\xa1a\x01"]
    assert converted.append.column("header").to_pylist() == [5]


def test_rows_taken_from_the_spool_have_the_same_schema_as_before() -> None:
    """One batch can contain rows from the spool and other rows."""
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("data", pa.binary())]
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([b"x"])], schema=pa.schema(fields))
    options = replace(
        PLAIN, results_path="r", recompute_function="a:b", on_lock_failure=OnLockFailure.RETRY
    )
    shaped = RowConverter(options, 4, {}, keeps_input_columns=True).convert(batch)
    with RowSpool() as spool:
        spool.put(shaped)
        (again,) = spool.take()
    assert shaped.identity is not None
    assert shaped.source is not None
    assert again.identity == shaped.identity
    assert again.identity.schema == shaped.identity.schema
    assert again.source.schema == shaped.source.schema
    assert again.append.schema == shaped.append.schema


def test_rows_without_a_lock_are_distributed_starting_at_the_task_number() -> None:
    """Tasks with one row each use all partitions."""
    batch = pa.RecordBatch.from_pydict({"data": [b"a", b"b"]})
    for task in range(6):
        rows = row_converter(first_round_robin_index=task)
        found = rows.convert(batch).partitions.tolist() + rows.convert(batch).partitions.tolist()
        assert found == [turn % 4 for turn in range(task, task + 4)]


CHOSEN_PARTITIONS = replace(PLAIN, partitions=(1, 3))


def test_rows_without_a_lock_are_distributed_over_the_given_partitions() -> None:
    batch = pa.RecordBatch.from_pydict({"data": [b"a", b"b", b"c"]})
    rows = row_converter(CHOSEN_PARTITIONS, first_round_robin_index=3)
    shaped = rows.convert(batch)
    assert shaped.partitions.tolist() == [3, 1, 3]
    assert shaped.append.column("client_high_water_mark").to_pylist() == [13, 11, 13]
    assert rows.convert(batch).partitions.tolist() == [1, 3, 1]


def test_a_row_outside_the_chosen_partitions_is_rejected_unless_it_names_a_partition() -> None:
    locks = {
        partition_of_hash(lock_hash("account", key), 4): lock_hash("account", key)
        for key in range(99)
    }
    batch = pa.record_batch(
        {
            "data": pa.array([b"a", b"b"]),
            "write_locks": pa.array([[locks[1]], [locks[2]]], pa.list_(pa.int32())),
        }
    )
    with pytest.raises(
        BadRequest,
        match=r"the first lock chooses the partition: expected one of the partitions 1, 3 "
        r"\(option 'partitions'\), found partition 2 in row 1 .* Hint: set a partition in column "
        "'partition'",
    ):
        row_converter(CHOSEN_PARTITIONS).convert(batch)
    named = batch.append_column("partition", pa.array([None, 3], pa.int32()))
    assert row_converter(CHOSEN_PARTITIONS).convert(named).partitions.tolist() == [1, 3]
    outside = batch.append_column("partition", pa.array([None, 0], pa.int32()))
    with pytest.raises(
        BadRequest,
        match=r"column 'partition': expected one of .* 1, 3 .*, found partition 0 in row 1",
    ):
        row_converter(CHOSEN_PARTITIONS).convert(outside)


def test_option_partition_by_does_not_depend_on_the_chosen_partitions() -> None:
    """Without this rule, two writers could append a key to two partitions without a conflict."""
    (other,) = [key for key in range(100) if partition_of_hash(lock_hash("", key), 4) == 2][:1]
    batch = pa.record_batch({"data": pa.array([b"x"]), "key": pa.array([other], pa.int64())})
    with pytest.raises(BadRequest, match=r"column 'key' chooses the partition: .* partition 2 in"):
        row_converter(replace(CHOSEN_PARTITIONS, partition_by="key")).convert(batch)
