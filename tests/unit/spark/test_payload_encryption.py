"""Encrypted payloads in Spark without a cluster: options, columns of a read, rows of a write."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types
from pyspark.sql.types import StructType

from tests.unit.spark.test_appender import RandomLog
from waltz_core.client import BatchOutcome, Encryption, ReportOrder
from waltz_core.encryption import keys
from waltz_core.errors import BadConfig, BadFormat, BadRequest, TooLarge
from waltz_core.records.record import TRANSACTION_BYTES_MAX
from waltz_spark.datasource.fetch import BatchConverter
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.options import ReadOptions, parse_read, parse_write
from waltz_spark.writer.appender import BATCH_BYTES_MAX, Appender
from waltz_spark.writer.columns import RowConverter, check_schema
from waltz_spark.writer.earlier_rows import EarlierRecord, EarlierRows, RowSpool
from waltz_spark.writer.row_keys import RowKeys

CONNECT = {"connect": "zk1:2181/waltz/none"}
PARTITION, HEADER = 2, 7


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for key_id in ("a", "b"):
        (tmp_path / key_id).write_text(key_id.encode().hex() * 32)
    return tmp_path


def encryption(directory: Path) -> Encryption:
    return Encryption.from_reference(str(directory), key_id="a")


def destroy(directory: Path, key_id: str) -> None:
    (directory / key_id).unlink()
    keys.key_cache_for.cache_clear()  # as in another process


# --- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"encryptionKeyId": "a"}, "option 'encryptionKeyId' needs option encryptionKeys"),
        (
            {"encryptionKeyIdColumn": "a"},
            "option 'encryptionKeyIdColumn' needs option encryptionKeys",
        ),
        (
            {"encryptionKeys": "/k"},
            "needs exactly one of encryptionKeyId and encryptionKeyIdColumn, found none",
        ),
        (
            {"encryptionKeys": "/k", "encryptionKeyId": "a", "encryptionKeyIdColumn": "b"},
            "needs exactly one of encryptionKeyId and encryptionKeyIdColumn, found both",
        ),
        (
            {"encryptionKeys": "/k", "encryptionKeyId": "a/b"},
            "'encryptionKeyId': expected a key ID",
        ),
        ({"requireEncryption": "true"}, "option 'requireEncryption' is for reading"),
    ],
)
def test_a_write_requires_exactly_one_source_of_key_ids(options: dict[str, str], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        parse_write(CONNECT | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"requireEncryption": "true"}, "'requireEncryption' needs option encryptionKeys"),
        ({"encryptionKeys": "/k", "encryptionKeyId": "a"}, "'encryptionKeyId' is for writing"),
        ({"columns": "data_error"}, "the log has no column 'data_error'."),
        (
            {
                "encryptionKeys": "/k",
                "dataFormat": "json",
                "columnNameOfCorruptRecord": "data_error",
            },
            "column of the log, found 'data_error'",
        ),
    ],
)
def test_a_read_with_wrong_options_is_rejected(options: dict[str, str], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        parse_read(CONNECT | options)


def test_with_encryption_keys_the_schema_has_a_data_error_column() -> None:
    assert WaltzDataSource(CONNECT).schema().endswith("data binary")
    schema = WaltzDataSource(CONNECT | {"encryptionKeys": "/k"}).schema()
    assert schema.endswith("data binary, data_error string")


def log_columns_ddl(*fields: tuple[str, types.DataType, bool]) -> StructType:
    return StructType([types.StructField(*field) for field in fields])


@pytest.mark.parametrize("mode", ["FAILFAST", "DROPMALFORMED", "PERMISSIVE"])
def test_a_not_null_declaration_is_rejected_for_columns_that_may_be_null(mode: str) -> None:
    unpacking = {"dataFormat": "json", "mode": mode, "encryptionKeys": "/k"}
    source = WaltzDataSource(CONNECT | unpacking)
    source.reader(log_columns_ddl(("id", types.LongType(), True), ("partition", INT, False)))
    with pytest.raises(BadRequest, match="column 'id' is NOT NULL"):
        source.reader(log_columns_ddl(("id", types.LongType(), False)))
    plain = WaltzDataSource(CONNECT | {"encryptionKeys": "/k"})
    for name, kind in (("data", types.BinaryType()), ("data_error", types.StringType())):
        with pytest.raises(BadRequest, match=f"'{name}' is NOT NULL .* encryptionKeys"):
            plain.reader(log_columns_ddl((name, kind, False)))
    with pytest.raises(BadRequest, match="'data_error' of the log: expected type string"):
        plain.reader(log_columns_ddl(("data_error", INT, True)))
    # Without keys, users can use this name for their columns.
    WaltzDataSource(CONNECT | {"dataFormat": "json"}).reader(
        log_columns_ddl(("data_error", INT, True))
    )


INT = types.IntegerType()
KINDS = {
    "bigint": types.LongType(),
    "binary": types.BinaryType(),
    "int": INT,
    "string": types.StringType(),
}


def ddl_schema(ddl: str) -> StructType:
    """Parse a DDL schema; Spark itself parses DDL only in Java."""
    fields = [each.split() for each in ddl.split(",")]
    return log_columns_ddl(*((name, KINDS[kind], True) for name, kind in fields))


# --- reading


def log_batch(converter: BatchConverter, payloads: list[bytes]) -> pa.RecordBatch:
    count = len(payloads)
    columns = {
        "partition": pa.array([PARTITION] * count, pa.int32()),
        "transaction_id": pa.array(range(10, 10 + count), pa.int64()),
        "header": pa.array([HEADER] * count, pa.int32()),
        "data": pa.array(payloads, pa.binary()),
    }
    return pa.RecordBatch.from_pydict({name: columns[name] for name in converter.columns})


def encrypt_value(directory: Path, value: object, key_id: str = "a") -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return encryption(directory).encrypt(data, partition=PARTITION, header=HEADER, key_id=key_id)


def read_options(directory: Path, **options: str) -> ReadOptions:
    return parse_read({**CONNECT, "encryptionKeys": str(directory), **options})


def test_without_a_format_an_undecrypted_payload_is_null_and_data_error_has_the_reason(
    directory: Path,
) -> None:
    payloads = [encrypt_value(directory, b"1"), encrypt_value(directory, b"2", "b"), b"plain"]
    destroy(directory, "b")
    schema = ddl_schema("data_error string, transaction_id bigint, data binary")
    converter = BatchConverter(read_options(directory), schema)
    rows = converter.convert(log_batch(converter, payloads)).to_pylist()
    assert rows == [
        {"data_error": None, "transaction_id": 10, "data": b"1"},
        {"data_error": "the key 'b' does not exist", "transaction_id": 11, "data": None},
        {"data_error": None, "transaction_id": 12, "data": b"plain"},
    ]
    required = BatchConverter(
        read_options(directory, requireEncryption="true"), ddl_schema("data_error string")
    )
    assert "data" in required.columns
    rows = required.convert(log_batch(required, payloads)).column(0).to_pylist()
    assert rows == [None, "the key 'b' does not exist", "the payload is not encrypted"]


def test_a_read_of_headers_does_not_decrypt_payloads(directory: Path) -> None:
    converter = BatchConverter(read_options(directory / "none"), ddl_schema("header int"))
    assert "data" not in converter.columns
    assert converter.columns == ["header"]


DDL = "id bigint, transaction_id bigint, _corrupt_record string, data_error string"


@pytest.mark.parametrize(
    ("mode", "ids"),
    [("PERMISSIVE", [1, None, 3, None, 5]), ("DROPMALFORMED", [1, 3, None, 5])],
)
def test_an_undecrypted_payload_is_null_in_every_mode(
    directory: Path, mode: str, ids: list[int | None]
) -> None:
    payloads = [
        encrypt_value(directory, {"id": 1}),
        encrypt_value(directory, b"no json"),
        encrypt_value(directory, {"id": 3}),
        encrypt_value(directory, {"id": 4}, "b"),
        b'{"id": 5}',
    ]
    destroy(directory, "b")
    options = read_options(directory, dataFormat="json", mode=mode, requiredColumns="id")
    converter = BatchConverter(options, ddl_schema(DDL))
    rows = converter.convert(log_batch(converter, payloads)).to_pylist()
    assert [row["id"] for row in rows] == ids
    by_id = {row["transaction_id"]: row for row in rows}
    assert by_id[13]["data_error"] == "the key 'b' does not exist"
    assert by_id[13]["_corrupt_record"] is None
    if mode == "PERMISSIVE":
        assert by_id[11]["_corrupt_record"] == "no json"
        assert by_id[11]["data_error"] is None


def test_failfast_names_a_decrypted_payload_that_cannot_be_unpacked(directory: Path) -> None:
    schema = ddl_schema("id bigint, data_error string")
    good, bad = encrypt_value(directory, {"id": 1}), encrypt_value(directory, b"no json")
    lost = encrypt_value(directory, {"id": 2}, "b")
    destroy(directory, "b")
    converter = BatchConverter(read_options(directory, dataFormat="json"), schema)
    rows = converter.convert(log_batch(converter, [lost, good])).to_pylist()
    assert [row["id"] for row in rows] == [None, 1]
    rows = converter.convert(log_batch(converter, [lost, lost])).to_pylist()
    assert [row["id"] for row in rows] == [None, None]
    with pytest.raises(BadFormat, match="partition 2, transaction 12"):
        converter.convert(log_batch(converter, [lost, good, bad]))


# --- writing


class Log(RandomLog):
    """Accepts every row, independently of the last byte of its ciphertext."""

    def __init__(self, seed: int, *, loss: float) -> None:
        super().__init__(seed, loss=loss)
        self.append_bytes: list[int] = []

    def answer(self, partition: int, rows: list[bytes], order: ReportOrder) -> BatchOutcome:
        self.append_bytes.append(sum(map(len, rows)))
        return super().answer(partition, [row + b"." for row in rows], order)

    @property
    def payloads(self) -> list[bytes]:
        return [each[:-1] for each in self.taken[PARTITION]]


def frame(rows: list[bytes], key_ids: list[str | None] | None = None) -> pa.RecordBatch:
    columns = {
        "data": pa.array(rows, pa.binary()),
        "partition": pa.array([PARTITION] * len(rows), pa.int32()),
        "header": pa.array([HEADER] * len(rows), pa.int32()),
    }
    if key_ids is not None:
        columns["customer"] = pa.array(key_ids, pa.string())
    return pa.RecordBatch.from_pydict(columns)


def write_options(directory: Path, **options: str):
    return parse_write({**CONNECT, "encryptionKeys": str(directory), **options})


def row_converter(options) -> RowConverter:
    return RowConverter(options, 4, {}, keeps_input_columns=False)


def decrypt_column(directory: Path, payloads: list[bytes]) -> Iterator[bytes | None]:
    column = pa.array(payloads, pa.binary())
    decrypted = encryption(directory).decrypt_column(
        column, partition=PARTITION, headers=[HEADER] * len(payloads)
    )
    return decrypted.data.to_pylist()


def test_each_attempt_encrypts_its_rows_with_a_new_salt(directory: Path) -> None:
    rows = [b"row %d" % number for number in range(30)]
    options = write_options(directory, encryptionKeyId="a", batchSize="7")
    log = Log(3, loss=0.1)  # some rows are sent again
    shaped = row_converter(options).convert(frame(rows))
    assert shaped.append.column("data").to_pylist() == rows  # compared and spooled as plain text
    assert list(Appender(log, options).send([shaped]))
    assert decrypt_column(directory, log.payloads) == rows
    assert len({payload[6:22] for payload in log.payloads}) >= 5  # each append has its own salt


def test_the_byte_limit_of_an_append_includes_the_envelopes(directory: Path) -> None:
    options = write_options(directory, encryptionKeyId="a", batchSize="10000")
    log = Log(0, loss=0.0)
    list(
        Appender(log, options).send([row_converter(options).convert(frame([bytes(400)] * 10_000))])
    )
    assert len(log.payloads) == 10_000
    assert max(log.append_bytes) <= BATCH_BYTES_MAX < 10_000 * len(log.payloads[0])


def test_the_key_column_selects_the_key_of_each_row(directory: Path) -> None:
    rows = [b"1", b"2", b"3"]
    options = write_options(directory, encryptionKeyIdColumn="customer")
    log = Log(0, loss=0.0)
    with RowSpool() as spool:  # a repeated attempt spools its rows
        spool.put(row_converter(options).convert(frame(rows, ["a", "b", "a"])))
        list(Appender(log, options).send(spool.take()))
    assert [payload[4:6] for payload in log.payloads] == [b"\x01a", b"\x01b", b"\x01a"]
    destroy(directory, "b")
    assert decrypt_column(directory, log.payloads) == [b"1", None, b"3"]


def test_a_row_without_a_key_is_rejected_before_it_is_sent(directory: Path) -> None:
    options = write_options(directory, encryptionKeyIdColumn="customer")
    with pytest.raises(
        BadRequest,
        match=r"in column 'customer', found null in row 1 \(counted from 0\) of the task",
    ):
        row_converter(options).convert(frame([b"1", b"2"], ["a", None]))
    with pytest.raises(BadConfig, match=r"column 'customer': expected a key ID .*found '\.\./a'"):
        row_converter(options).convert(frame([b"1"], ["../a"]))
    shaped = row_converter(options).convert(frame([b"1"], ["c"]))
    with pytest.raises(BadConfig, match=r"encryption key 'c': .* has no such key"):
        list(Appender(Log(0, loss=0.0), options).send([shaped]))


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("data binary", ": the input has no column 'customer'"),
        ("data binary, customer int", ", column 'customer': expected a string, found int"),
    ],
)
def test_the_key_column_is_checked_on_the_driver(ddl: str, text: str) -> None:
    options = write_options(Path("/k"), encryptionKeyIdColumn="customer")
    with pytest.raises(BadRequest, match=f"option 'encryptionKeyIdColumn'{text}"):
        check_schema(ddl_schema(ddl), options)
    check_schema(ddl_schema("data binary, customer string"), options)


def test_the_payload_limit_includes_the_envelope(directory: Path) -> None:
    options = write_options(directory, encryptionKeyId="a")
    largest = bytes(TRANSACTION_BYTES_MAX - 105)
    log = Log(0, loss=0.0)
    list(Appender(log, options).send([row_converter(options).convert(frame([largest, b"x"]))]))
    assert decrypt_column(directory, log.payloads) == [largest, b"x"]
    with pytest.raises(TooLarge, match="limit of 4,194,199 with encryption"):
        row_converter(options).convert(frame([largest + b"x"]))


def test_equal_rows_with_different_keys_are_not_interchangeable(directory: Path) -> None:
    options = write_options(directory, encryptionKeyIdColumn="customer")
    row_keys = RowKeys(options)
    key = row_keys.keys_of_record(PARTITION, HEADER, b"1")[0]
    for key_ids, is_clear in ((["a", "a"], True), (["a", "b"], False)):
        earlier = EarlierRows({key: [EarlierRecord(PARTITION, 5)]}, keys=row_keys)
        shaped = row_converter(options).convert(frame([b"1", b"1"], key_ids))
        if is_clear:
            rest, (answered,) = earlier.split(shaped)
            assert rest is not None
            assert np.array_equal(answered.transaction_ids, [5])
        else:
            with pytest.raises(BadRequest, match="different locks, marks or encryption keys"):
                earlier.split(shaped)
