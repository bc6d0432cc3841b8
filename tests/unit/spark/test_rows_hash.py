"""The hash by which a finished write recognizes its rows, and the error for other rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadRequest
from waltz_core.records.record import partition_of_hash
from waltz_spark.options import WriteOptions
from waltz_spark.writer.columns import RowConverter
from waltz_spark.writer.rows_hash import RowsHash, hash_rows

PLAIN = WriteOptions(connect="zk:2181/waltz/x")
PACKED = replace(PLAIN, data_format="msgpack")
WITH_IDENTITY_COLUMNS = replace(PACKED, identity_columns=("id", "day"))
PARTITIONS = 4
Row = tuple[bytes, int, int | None]  # payload, header, partition

# Few different values, so that rows are often equal.
rows_of_any_kind = st.tuples(
    st.sampled_from([b"", b"a", b"b", b"\0", b"\0\0", b"x" * 3_000]),
    st.sampled_from([0, 1, -1]),
    st.sampled_from([None, 0, 3]),
)


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    data, headers, partitions = (list(part) for part in zip(*rows, strict=True))
    return pa.RecordBatch.from_pydict(
        {
            "data": pa.array(data, pa.binary()),
            "header": pa.array(headers, pa.int32()),
            "partition": pa.array(partitions, pa.int32()),
        }
    )


def hash_of(
    batches: Sequence[pa.RecordBatch], options: WriteOptions = PLAIN, *, task: int = 0
) -> RowsHash:
    shaper = RowConverter(
        options, PARTITIONS, {}, keeps_input_columns=False, first_round_robin_index=task
    )
    sums = (hash_rows(batch, shaper.convert(batch), options) for batch in batches)
    return reduce(RowsHash.plus, sums, RowsHash())


def hash_of_columns(columns: dict[str, object], options: WriteOptions = PLAIN) -> RowsHash:
    return hash_of([pa.RecordBatch.from_pydict(columns)], options)


@given(st.data())
def test_the_row_sum_does_not_depend_on_order_batches_or_tasks(data: st.DataObject) -> None:
    rows = data.draw(st.lists(rows_of_any_kind, min_size=1, max_size=12))
    expected = hash_of([batch_of(rows)])
    shuffled = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {0, len(rows)})
    parts = [batch_of(shuffled).slice(start, end - start) for start, end in pairwise(cuts)]
    by_task = [hash_of([part], task=task) for task, part in enumerate(parts)]
    assert reduce(RowsHash.plus, by_task) == hash_of(parts) == expected
    assert expected.rows == len(rows)


@given(*[st.lists(rows_of_any_kind, min_size=1, max_size=6)] * 2)
def test_different_rows_have_different_hashes(one: list[Row], other: list[Row]) -> None:
    sums = [hash_of([batch_of(rows)]) for rows in (one, other)]
    assert (sums[0].digest == sums[1].digest) == (Counter(one) == Counter(other))


def test_the_row_sum_is_the_same_in_every_version() -> None:
    """The hash is stored in records of finished writes."""
    found = hash_of([batch_of([(b"Monday", 7, 3), (b"", 0, None), (b"x" * 5_000, -1, 0)])])
    assert found.as_fields() == {"rows": 3, "rows_hash": "679d80a9b48c1a9d"}


def test_text_of_any_arrow_type_is_hashed_by_its_bytes() -> None:
    kinds = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())
    assert (
        len({hash_of_columns({"data": pa.array(["day", "night"]).cast(kind)}) for kind in kinds})
        == 1
    )


def test_packed_rows_are_hashed_by_their_payload() -> None:
    columns = {"id": pa.array([1, 2]), "owner": pa.array(["Anna", "Boris"])}
    large = columns | {"owner": columns["owner"].cast(pa.large_string())}
    assert hash_of_columns(columns, PACKED) == hash_of_columns(large, PACKED)
    assert hash_of_columns(columns, PACKED) != hash_of_columns(
        columns | {"owner": pa.array(["Anna", "B."])}, PACKED
    )


def test_the_hash_includes_the_partition_but_not_locks_and_marks() -> None:
    def hash_with_lock(first: int, partition: int | None) -> RowsHash:
        return hash_of_columns(
            {
                "data": [b"x"],
                "partition": pa.array([partition], pa.int32()),
                "write_locks": pa.array([[first, 8]], pa.list_(pa.int32())),
                "client_high_water_mark": [first],
            }
        )

    other_partition = next(
        n
        for n in range(8, 99)
        if partition_of_hash(n, PARTITIONS) != partition_of_hash(7, PARTITIONS)
    )
    assert hash_with_lock(7, 2) == hash_with_lock(other_partition, 2)
    assert hash_with_lock(7, None) != hash_with_lock(other_partition, None)
    assert hash_of_columns({"data": [b"x"]}) != hash_with_lock(7, None), (
        "a round-robin partition is not hashed"
    )


def test_rows_are_hashed_by_their_identity_columns_if_there_are_any() -> None:
    def hash_of_row(number: int, day: str, amount: float) -> RowsHash:
        columns = {
            "id": [number],
            "day": [day],
            "amount": [amount],
            "header": pa.array([3], pa.int32()),
        }
        return hash_of_columns(columns, WITH_IDENTITY_COLUMNS)

    assert hash_of_row(1, "Monday", 2.5) == hash_of_row(1, "Monday", 7.5)
    assert (
        len(
            {hash_of_row(1, "Monday", 0), hash_of_row(2, "Monday", 0), hash_of_row(1, "Tuesday", 0)}
        )
        == 3
    )


def test_the_check_accepts_equal_rows_and_summaries_without_hashes() -> None:
    rows = RowsHash(2, 77)
    rows.check_equal("daily", {"committed": 2, **rows.as_fields()}, hint="")
    rows.check_equal("daily", {"committed": 9}, hint="")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            RowsHash(2, 5),
            (
                "the write ID was used with different rows: write 'daily' was completed "
                "with 1 row, but this run has 2 rows. Hint: Do this."
            ),
        ),
        (
            RowsHash(1, 5),
            (
                "the write ID was used with different rows: write 'daily' was completed "
                "with 1 row, but this run has 1 row; the counts are equal, the hashes "
                "differ: 000000000000004d and 0000000000000005. Hint: Do this."
            ),
        ),
    ],
)
def test_the_error_for_different_rows_names_both_counts(rows: RowsHash, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        rows.check_equal("daily", RowsHash(1, 77).as_fields(), hint="Do this.")
    assert str(caught.value) == sentence
