"""Transactions, locks and contexts: the values of the programming model."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from waltz_core import errors
from waltz_core.client import BYTES, JSON, MSGPACK, TransactionBuilder, lock, partition_of
from waltz_core.client.model.predecessors import NO_PREDECESSORS
from waltz_core.client.model.transaction import check_data, check_mark, check_partition, check_range
from waltz_core.records.checksum import crc32
from waltz_core.records.record import LOCKS_MAX, TRANSACTION_BYTES_MAX, lock_hash, partition_of_hash
from waltz_core.wire.messages import ENTRIES_MAX


def builder() -> TransactionBuilder:
    return TransactionBuilder(0, -1)


def test_the_hash_of_a_text_key_is_its_crc_32():
    assert lock("account", "äb") == lock_hash("account", crc32("äb".encode()))
    assert lock("account") == lock("account", 0)
    assert partition_of(lock("account", 7), 5) == partition_of_hash(lock("account", 7), 5)
    with pytest.raises(errors.BadRequest, match="64 bits"):
        lock("account", 1 << 63)
    assert lock("account", np.int64(7)) == lock("account", 7)
    for wrong in (None, 1.5, b"x", "\ud800"):
        with pytest.raises(
            errors.BadRequest, match="expected an integer or a string as its key, found"
        ):
            lock("account", wrong)
    with pytest.raises(errors.BadRequest, match="expected a string as its name"):
        lock(None, 7)


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (BYTES, b"\0x"),
        (MSGPACK, {"a": [1, -2.5, None, "ü", b"\xff"], 3: True}),
        (JSON, {"a": [1, -2.5, None, "ü"], "b": {"c": [True]}}),
        (MSGPACK, None),
        (JSON, None),
    ],
)
def test_serializers_return_the_value_that_was_serialized(serializer, value):
    assert serializer.deserialize(serializer.serialize(value)) == value
    assert BYTES.serialize(memoryview(b"abc")) == b"abc"


@pytest.mark.parametrize(
    ("serializer", "value"), [(BYTES, "text"), (MSGPACK, object()), (JSON, b"bytes")]
)
def test_serializers_reject_values_that_they_cannot_write(serializer, value):
    with pytest.raises(errors.BadRequest, match="transaction data"):
        serializer.serialize(value)


@pytest.mark.parametrize("serializer", [MSGPACK, JSON])
def test_serializers_reject_bytes_that_they_cannot_read(serializer):
    with pytest.raises(errors.BadFormat, match="transaction data"):
        serializer.deserialize(b"\xc1\xff")


def test_json_is_compatible_with_other_programs():
    with pytest.raises(
        errors.BadRequest,
        match=r"transaction data cannot be written as JSON: found nan at \$\.a\[1\]",
    ):
        JSON.serialize({"a": [1, float("nan")]})
    with pytest.raises(
        errors.BadFormat, match=r"transaction data is not valid JSON: found Infinity at \$\.a"
    ):
        JSON.deserialize(b'{"a": Infinity}')


def test_a_mark_is_a_transaction_id_or_none():
    assert [check_mark(mark) for mark in (-1, 0, np.int64(41))] == [-1, 0, 41]
    for wrong in ([1], {0: 1}, "1", 1.0, -2, True, 1 << 63):
        with pytest.raises(errors.BadRequest, match="client_high_water_mark: expected a"):
            check_mark(wrong)


def test_a_builder_rejects_invalid_values():
    column = builder()
    column.set_header(-(1 << 31))
    column.set_transaction_data([1])
    column.set_write_locks([lock("a")])
    column.set_read_locks(iter([1, 2]))
    column.set_append_locks(())
    assert (column.header, column.data) == (-(1 << 31), b"\x91\x01")
    assert (column.write_locks, column.read_locks, column.append_locks) == (
        (lock("a"),),
        (1, 2),
        (),
    )
    with pytest.raises(
        errors.BadRequest, match=r"signed 32-bit integer \(-2147483648\.\.2147483647"
    ):
        column.set_header(1 << 31)
    for wrong in (["account"], None, 7):
        with pytest.raises(errors.BadRequest, match="write locks"):
            column.set_write_locks(wrong)
    with pytest.raises(errors.TooLarge):
        column.set_transaction_data(b"x" * (TRANSACTION_BYTES_MAX + 1), BYTES)
    wide = memoryview(array("q", bytes(TRANSACTION_BYTES_MAX + 8)))
    with pytest.raises(errors.TooLarge, match=f"found {TRANSACTION_BYTES_MAX + 8}"):
        check_data(wide)


def test_the_locks_of_a_transaction_fit_into_a_frame():
    array = builder()
    assert LOCKS_MAX <= ENTRIES_MAX
    array.set_append_locks(range(LOCKS_MAX))
    with pytest.raises(errors.BadRequest, match=f"append locks: expected at most {LOCKS_MAX}"):
        array.set_append_locks(range(LOCKS_MAX + 1))


def test_partition_numbers_must_exist():
    assert [check_partition(each, "pay", 4) for each in (0, 3, np.int32(2))] == [0, 3, 2]
    for wrong in (-1, 4):
        with pytest.raises(errors.UnknownPartition, match=r"cluster 'pay' has partitions 0\.\.3"):
            check_partition(wrong, "pay", 4)
    for wrong in ("0", 1.0, None):
        with pytest.raises(errors.BadRequest, match="argument partition: expected an integer"):
            check_partition(wrong, "pay", 4)


def test_names_that_differ_in_the_last_digit_collide_for_small_keys_only():
    """docs/client.md, "Locks"; the hash is that of Waltz 0.13."""
    numbers = [{lock(name, key) for key in range(100)} for name in ("shard0", "shard1")]
    texts = [{lock("shard", f"{shard}/{key}") for key in range(100)} for shard in (0, 1)]
    assert numbers[0] == numbers[1]
    assert not texts[0] & texts[1]


def test_the_ends_of_a_range_are_transaction_ids():
    check_range(3, 0, np.int64(5))
    for first, last in (("0", 5), (0, "5"), (0.5, 5), (0, None), (True, 5)):
        with pytest.raises(
            errors.BadRequest,
            match=r"partition 3: expected a transaction ID "
            r"as its \w+ ID",
        ):
            check_range(3, first, last)
    for first, last in ((-1, 5), (5, 1)):
        with pytest.raises(errors.BadRequest, match="expected 0 <= first <= last"):
            check_range(3, first, last)


def test_an_append_states_predecessors_only_if_they_cover_all_its_checked_locks():
    one = builder()
    assert one.mark_and_state() == (-1, None)
    one.pipelined_state = replace(
        NO_PREDECESSORS, session_id=3, base_mark=4, mark=9, locks=frozenset((1,))
    )
    one.client_high_water_mark = 5
    assert one.mark_and_state() == (5, None)  # without these locks the append is independent
    assert one.predecessors(5) == ()
    one.set_write_locks([1])
    assert one.mark_and_state() == (9, one.pipelined_state)
    one.set_read_locks([2])
    for mark in (5, 6, 12):
        one.client_high_water_mark = mark
        claimed, pipelined_state = one.mark_and_state()
        assert (claimed, pipelined_state.session_id, pipelined_state.predecessors) == (mark, 3, ())
