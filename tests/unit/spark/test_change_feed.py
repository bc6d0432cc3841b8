"""Rows of a change feed: kinds and payloads, transactions without changes, and options."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import msgpack
import pytest
from pyspark.sql.types import StructType

from tests.schema_registry import run_schema_registry
from tests.unit.spark.feeds import (
    DELETE_HEADER,
    OPTIONS,
    PARTITION,
    SCHEMA,
    Log,
    Transaction,
    expected_rows,
    options_of,
    reader,
    rows_of,
    transaction_with,
)
from waltz_core.client import Avro
from waltz_core.encryption import keys
from waltz_core.encryption.envelopes import Encryption
from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_spark.datasource import change_feed
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.options import parse_read

DROP = {"mode": "DROPMALFORMED"}


def feed(log: Log, begin: int = -1, **options: str) -> list[tuple]:
    return rows_of(reader(log, begin, log.mark, **options).rows())


def test_the_change_feed_has_the_kind_of_each_change_and_the_row_before_it() -> None:
    log = Log(
        [
            transaction_with(id=1, op="I", amount=10),
            transaction_with(id=2, amount=20),
            transaction_with(id=1, op="U", amount=11),
            transaction_with(id=1, op="D"),
            transaction_with(id=1, op="D"),  # the key is absent, so there is no row
            transaction_with(DELETE_HEADER, id=2, amount="any"),  # a delete needs only the key
            transaction_with(id=1, op="I", amount=12),
        ]
    )
    assert feed(log) == [
        (1, "I", 10, "insert", 0),
        (2, None, 20, "insert", 1),
        (1, "I", 10, "update_preimage", 2),
        (1, "U", 11, "update_postimage", 2),
        (1, "U", 11, "delete", 3),
        (2, None, 20, "delete", 5),
        (1, "I", 12, "insert", 6),
    ]
    assert feed(log) == expected_rows(log.transactions)


def test_a_read_from_any_start_has_the_rows_of_a_full_read() -> None:
    log = Log(
        [transaction_with(id=n % 7, op="IUD"[n % 3], amount=n) for n in range(60)], batch_rows=8
    )
    whole = feed(log)
    for begin in (0, 20, 58):
        log.reads.clear()
        assert feed(log, begin) == [row for row in whole if row[-1] > begin]
        assert log.reads == [(0, begin), (begin + 1, 59)]


def test_a_change_feed_is_the_same_for_payloads_with_and_without_schemas(tmp_path: Path) -> None:
    plain = [
        {"id": 1, "op": "I", "amount": 10},
        {"id": 1, "op": "U", "amount": 11},
        {"id": 2, "op": "I", "amount": 20},
        {"id": 1, "op": "D", "amount": None},
    ]
    (tmp_path / "a").write_text("0f" * 32)
    keys_of_log = Encryption.from_reference(str(tmp_path), key_id="a")
    kinds = {"id": "long", "op": "string", "amount": ["null", "long"]}
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    schema = {"type": "record", "name": "Row", "fields": fields}
    with run_schema_registry() as registry:
        rows = Avro(registry.url, subject="rows-value", schema=schema)
        given = {"dataFormat": "avro", "schemaRegistry": registry.url}
        avro = [rows.serialize(each) for each in plain]
        log = Log([Transaction(0, each) for each in avro])
        expected = expected_rows([transaction_with(**each) for each in plain])
        assert feed(log, **given) == expected
        sealed = [keys_of_log.encrypt(each, partition=PARTITION, header=0) for each in avro]
        with_keys = given | {"encryptionKeys": str(tmp_path)}
        assert feed(Log([Transaction(0, each) for each in sealed]), **with_keys) == expected
        # An encrypted payload without a key is no change.
        lost = Log(
            [*(Transaction(0, each) for each in sealed[:3]), Transaction(0, b"WZE\x01\x01b")]
        )
        assert len(feed(lost, **with_keys, **DROP)) == 4
        with pytest.raises(BadFormat, match="transaction 1: expected a payload in avro: "):
            feed(Log([Transaction(0, avro[0]), Transaction(0, b"{}")]), **given)


def test_log_columns_have_the_values_of_the_changing_transaction() -> None:
    schema = StructType().add("amount", "long")
    for name, kind in (
        ("header", "integer"),
        ("data", "binary"),
        ("commit_time", "timestamp"),
        ("partition", "integer"),
        ("id", "long"),
        ("_change_type", "string"),
    ):
        schema.add(name, kind)
    log = Log(
        [
            transaction_with(5, id=1, amount=1),
            transaction_with(6, id=1, amount=2),
            transaction_with(DELETE_HEADER, id=1),
        ]
    )
    feed_rows = feed(log, schema=schema, deleteWhere="header >= 9")
    times = [datetime.fromtimestamp(n / 1000, UTC) for n in range(3)]
    data = [transaction.data for transaction in log.transactions]
    assert feed_rows == [
        (1, 5, data[0], times[0], PARTITION, 1, "insert"),
        (1, 6, data[1], times[1], PARTITION, 1, "update_preimage"),
        (2, 6, data[1], times[1], PARTITION, 1, "update_postimage"),
        (2, 9, data[2], times[2], PARTITION, 1, "delete"),
    ]


def test_a_key_may_have_several_columns_of_all_types_of_keys() -> None:
    kinds = {
        "flag": ("boolean", [True, False]),
        "price": ("decimal(5,2)", ["1.50", "1.51"]),
        "name": ("string", ["a", "b"]),
        "raw": ("binary", [b"a", b"b"]),
        "day": ("date", [1, 2]),
        "at": ("timestamp", [10**15, 10**15 + 1]),
    }
    schema = StructType()
    for name, (kind, _) in kinds.items():
        schema.add(name, kind)
    schema.add("_change_type", "string")
    one = {name: values[0] for name, (_, values) in kinds.items()}
    others = [one | {name: values[1]} for name, (_, values) in kinds.items()]
    log = Log([transaction_with(**each) for each in (one, *others, one)])
    rules = {"key": ",".join(kinds), "deleteWhere": ""}
    feed_rows = feed(log, schema=schema, **rules)
    assert [row[-1] for row in feed_rows] == ["insert"] * 7 + [
        "update_preimage",
        "update_postimage",
    ]
    assert feed_rows[-1][1:5] == (Decimal("1.50"), "a", b"a", date(1970, 1, 2))


def test_a_batch_ends_when_the_payloads_of_previous_rows_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(change_feed, "PREVIOUS_BYTES_MAX", 20)
    log = Log([transaction_with(id=n % 5, op="U", amount=n) for n in range(20)])
    batches = list(reader(log, 4, 19).rows())
    # Two payloads of 14 bytes are over the limit, and each of the 15 changes is an update.
    assert [batch.num_rows for batch in batches] == [4] * 7 + [2]
    assert rows_of(iter(batches)) == [row for row in expected_rows(log.transactions) if row[-1] > 4]


# ---- transactions that are no changes


@pytest.mark.parametrize(
    ("transaction", "text"),
    [
        (Transaction(0, b"\xc1"), "expected a payload in msgpack"),
        (Transaction(DELETE_HEADER, b"\xc1"), "expected a payload in msgpack"),
        (Transaction(0, msgpack.packb([1])), "expected a map of columns"),
        (transaction_with(op="U", amount=1), "expected a value in key column 'id', found null"),
        (
            transaction_with(DELETE_HEADER, op="U"),
            "expected a value in key column 'id', found null",
        ),
        (transaction_with(id=1, amount="many"), "column 'amount': expected int64, found 'many'"),
        (transaction_with(id="x", op="D", amount="many"), "column 'id': expected int64, found 'x'"),
    ],
)
def test_an_invalid_transaction_fails_the_read_or_is_skipped(
    transaction: Transaction, text: str
) -> None:
    log = Log(
        [
            transaction_with(id=1, amount=1),
            transaction_with(id=2),
            transaction,
            transaction_with(id=1, op="D"),
        ]
    )
    for begin in (-1, 2):  # both reads fail: one begins before it, one after it
        with pytest.raises(BadFormat, match=f"partition 3, transaction 2[:,] .*{text}"):
            feed(log, begin)
    assert [row[3:] for row in feed(log, **DROP)] == [("insert", 0), ("insert", 1), ("delete", 3)]
    assert feed(log, **DROP) == expected_rows(log.transactions)


def test_a_delete_does_not_need_the_required_columns() -> None:
    schema = StructType().add("id", "long").add("amount", "long", nullable=False)
    schema.add("op", "string").add("_change_type", "string")
    log = Log([transaction_with(id=1, amount=1, op="I"), transaction_with(id=1, op="D")])
    for options in ({}, {"requiredColumns": "amount"}):
        feed_rows = feed(log, schema=schema, **options)
        assert feed_rows == [(1, 1, "I", "insert"), (1, 1, "I", "delete")]
    log = Log([transaction_with(id=1, op="I")])
    with pytest.raises(BadFormat, match="column 'amount' is NOT NULL"):
        feed(log, schema=schema)
    assert feed(log, schema=schema, **DROP) == []


def test_column_names_of_json_payloads_are_case_insensitive() -> None:
    log = Log([Transaction(0, json.dumps({"Id": 1, "AMOUNT": n}).encode()) for n in range(2)])
    feed_rows = feed(log, dataFormat="json", key="ID")
    assert [row[2:] for row in feed_rows] == [
        (0, "insert", 0),
        (0, "update_preimage", 1),
        (1, "update_postimage", 1),
    ]


# ---- encryption


def encrypt_transactions(
    directory: Path, *transactions: Transaction, key_id: str = "a"
) -> list[Transaction]:
    (directory / key_id).write_text(sha256(key_id.encode()).hexdigest())
    keys.key_cache_for.cache_clear()
    with_key = Encryption.from_reference(str(directory), key_id=key_id)
    return [
        Transaction(
            transaction.header,
            with_key.encrypt(transaction.data, partition=PARTITION, header=transaction.header),
        )
        for transaction in transactions
    ]


def test_payloads_are_decrypted_for_the_feed_and_stored_encrypted(tmp_path: Path) -> None:
    schema = SCHEMA.fields[:]
    schema = StructType(schema).add("data_error", "string")
    secret = [transaction_with(7, id=123456789, amount=n) for n in range(2)]
    log = Log(
        encrypt_transactions(tmp_path, *secret, transaction_with(DELETE_HEADER, id=123456789))
    )
    state_file = tmp_path / "state"
    found = []
    for end in range(3):
        found += rows_of(
            reader(
                log, end - 1, end, state_file, schema=schema, encryptionKeys=str(tmp_path)
            ).rows()
        )
        stored = state_file.read_bytes()
        assert log.transactions[min(end, 1)].data in stored
        assert not any(each.data[1:8] in stored for each in secret)
    assert found == [
        (*row, None)
        for row in expected_rows([*secret, transaction_with(DELETE_HEADER, id=123456789)])
    ]


def test_payloads_with_a_destroyed_key_are_skipped(tmp_path: Path) -> None:
    first = encrypt_transactions(
        tmp_path, transaction_with(id=1, amount=1), transaction_with(id=2, amount=2), key_id="gone"
    )
    log = Log(
        first
        + encrypt_transactions(
            tmp_path, transaction_with(id=1, amount=3), transaction_with(id=2, op="D")
        )
    )
    options = {"encryptionKeys": str(tmp_path)}
    state_file = tmp_path / "state"
    assert len(rows_of(reader(log, -1, 1, state_file, **options, **DROP).rows())) == 2
    (tmp_path / "gone").unlink()
    keys.key_cache_for.cache_clear()
    assert feed(log, **options, **DROP) == [(1, None, 3, "insert", 2)]
    # The state has the encrypted row, which it cannot decrypt either.
    kept = rows_of(reader(log, 1, 3, state_file, **options, **DROP).rows())
    assert kept == [(1, None, 3, "insert", 2)]
    with pytest.raises(BadFormat, match=r"transaction 0: the payload cannot be decrypted .*gone"):
        feed(log, **options)


# ---- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"changeFeed": ""}, "option 'key' needs changeFeed=true"),
        ({"changeFeed": "", "key": ""}, "option 'deleteHeaders' needs changeFeed=true"),
        ({"changeFeed": "yes"}, "'changeFeed': expected one of true, false, found 'yes'"),
        ({"dataFormat": ""}, "'changeFeed' needs option dataFormat: it unpacks the key"),
        ({"key": ""}, "'changeFeed' needs option key: its columns identify the row"),
        ({"key": "id,id"}, "option 'key': expected columns, each once, found 'id,id'"),
        ({"key": ","}, "option 'key': expected columns, each once, found ','"),
        ({"minPartitions": "2"}, "'minPartitions' is not for a change feed: a task reads a whole"),
        ({"maxTransactionsPerTask": "9"}, "'maxTransactionsPerTask' is not for a change feed"),
        ({"transactionIds": "1-5"}, "'transactionIds' is not for a change feed: .*Hint: use"),
        ({"columnNameOfCorruptRecord": "bad"}, "'columnNameOfCorruptRecord' is not for a change"),
        ({"mode": "PERMISSIVE"}, "option 'mode': a change feed has no row .*Hint: use FAILFAST"),
        ({"deleteWhere": "op == 1"}, "condition for deletes: expected a column, or one comparison"),
        (
            {"headers": "1,2"},
            "'deleteHeaders': expected headers that option 'headers' also lists, found 9",
        ),
    ],
)
def test_options_that_a_change_feed_does_not_support_are_errors(
    options: dict[str, str], text: str
) -> None:
    with pytest.raises(BadConfig, match=text):
        parse_read(OPTIONS | options)


@pytest.mark.parametrize(
    ("schema", "options", "text"),
    [
        (SCHEMA, {"key": "no"}, "option 'key': expected columns of your schema .*found 'no'"),
        (SCHEMA, {"key": "transaction_id"}, "option 'key': expected columns of your schema"),
        (SCHEMA, {"deleteWhere": "no = 1"}, "option 'deleteWhere': expected columns .*found 'no'"),
        (SCHEMA, {"deleteWhere": "op = 1"}, "condition for deletes: expected a literal of type"),
        (StructType().add("id", "double"), {"deleteWhere": ""}, "key column 'id': expected a bool"),
    ],
)
def test_rules_must_match_the_schema(
    schema: StructType, options: dict[str, str], text: str
) -> None:
    source = WaltzDataSource(OPTIONS | options)
    with pytest.raises(BadConfig, match=text):
        source.reader(schema)
    with pytest.raises(BadConfig, match=text):
        source.streamReader(schema).initialOffset()


def test_only_a_change_feed_reserves_column_change_type() -> None:
    other = StructType().add("id", "long").add("_change_type", "long")
    with pytest.raises(BadRequest, match="column '_change_type' of the log: expected type string"):
        WaltzDataSource(OPTIONS | {"deleteWhere": ""}).reader(other)
    # Without a change feed, a payload column may have this name.
    WaltzDataSource({"path": OPTIONS["path"], "dataFormat": "msgpack"}).reader(other)
    required = StructType().add("id", "long", nullable=False).add("op", "string")
    options = {"encryptionKeys": "/none"}
    WaltzDataSource(OPTIONS | options).reader(required)


def test_rules_use_the_column_names_of_the_schema() -> None:
    rules = options_of(key="ID", deleteWhere="OP = 'D'").change_feed_rules
    assert rules is not None
    assert rules.delete_where is not None
    assert (tuple(rules.key), rules.delete_where.column) == (("id",), "op")
