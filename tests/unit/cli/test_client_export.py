"""`client export`: formats, columns, and a file that is complete or absent."""

import csv
import datetime as dt
import io
import json
import os
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import run_command
from waltz_core.cli.client import client_export
from waltz_core.cli.client.client_export import _open_output, _write_csv, _write_json
from waltz_core.cli.client.payload_columns import declared_schema
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records.batches import READ_SCHEMA

ROWS = [
    {
        "partition": 0,
        "transaction_id": 7,
        "header": -1,
        "request_id": {"client_id": 1, "generation": 2, "partition": 0, "sequence": 3},
        "commit_time": dt.datetime(2026, 11, 29, 10, tzinfo=dt.UTC),
        "data": b"a\n\xff,",
    },
    {
        "partition": 0,
        "transaction_id": 8,
        "header": 0,
        "request_id": {"client_id": 1, "generation": 2, "partition": 0, "sequence": 4},
        "commit_time": None,
        "data": b"",
    },
]


def log_reader() -> pa.RecordBatchReader:
    batches = [pa.RecordBatch.from_pylist([row], schema=READ_SCHEMA) for row in ROWS]
    return pa.RecordBatchReader.from_batches(READ_SCHEMA, batches)


def test_csv_has_a_column_for_each_field_and_escaped_text_for_bytes():
    sink = io.BytesIO()
    assert _write_csv(log_reader(), sink) == 2
    first, second = csv.DictReader(io.StringIO(sink.getvalue().decode()))
    assert first["transaction_id"] == "7"
    assert first["request_id.sequence"] == "3"
    assert first["commit_time"].startswith("2026-11-29 10:00:00")
    assert first["data"] == "a\\n\\xff,"
    assert (second["commit_time"], second["data"]) == ("", "")


def test_an_empty_export_to_csv_has_the_names_of_the_columns():
    sink = io.BytesIO()
    assert _write_csv(pa.RecordBatchReader.from_batches(READ_SCHEMA, []), sink) == 0
    assert sink.getvalue().startswith(b'"partition","transaction_id"')


def test_json_has_a_line_for_each_transaction():
    sink = io.BytesIO()
    assert _write_json(log_reader(), sink) == 2
    first, second = map(json.loads, sink.getvalue().splitlines())
    assert first["request_id"]["sequence"] == 3
    assert first["commit_time"] == "2026-11-29T10:00:00+00:00"
    assert first["data"] == "a\n\\xff,"
    assert second["commit_time"] is None


def test_json_has_decimals_as_text_and_dates_in_iso_8601():
    sink = io.BytesIO()
    values = {"price": [Decimal("-7.50"), Decimal("0.00")], "day": [dt.date(2026, 1, 31), None]}
    assert _write_json(pa.table(values).to_reader(), sink) == 2
    assert list(map(json.loads, sink.getvalue().splitlines())) == [
        {"price": "-7.50", "day": "2026-01-31"},
        {"price": "0.00", "day": None},
    ]


def test_json_rejects_numbers_that_it_cannot_express():
    reader = pa.table({"price": [1.0, float("nan")]}).to_reader()
    with pytest.raises(BadFormat, match=r"line 2 of the output: found nan"):
        _write_json(reader, io.BytesIO())


def test_parquet_has_the_log_s_schema_and_row_groups_of_many_batches(monkeypatch):
    sink = io.BytesIO()
    assert client_export._write_parquet(log_reader(), sink) == 2
    found = pq.ParquetFile(sink)
    assert found.num_row_groups == 1
    assert found.read().to_pylist() == ROWS
    monkeypatch.setattr(client_export, "ROW_GROUP_BYTES", 1)
    sink = io.BytesIO()
    assert client_export._write_parquet(log_reader(), sink) == 2
    assert pq.ParquetFile(sink).num_row_groups == 2


def test_a_file_is_complete_or_absent(tmp_path):
    output = tmp_path / "log.csv"
    with pytest.raises(ZeroDivisionError), _open_output(output) as sink:  # noqa: PT012
        sink.write(b"a")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with _open_output(output) as sink:
        sink.write(b"a")
        assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    with (
        pytest.raises(BadConfig, match=r"--output .*log.csv/x cannot be written: Not a directory"),
        _open_output(output / "x"),
    ):
        pass


def test_an_output_that_is_not_a_regular_file_is_not_replaced(tmp_path):
    output = tmp_path / "pipe"
    os.mkfifo(output)
    with (
        pytest.raises(BadConfig, match="expected a regular file, found another kind"),
        _open_output(output),
    ):
        pass
    assert output.is_fifo()


def test_an_exported_column_has_its_declared_type_or_the_type_in_the_log():
    assert declared_schema(()) is None
    schema = declared_schema(("transaction_id", "id:int64", "header:string"))
    assert schema.names == ["transaction_id", "id", "header"]
    assert schema.field("id").type == pa.int64()
    assert declared_schema(["price:decimal(10,2)"]).field("price").type == pa.decimal128(10, 2)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("owner", "the log has no column 'owner'. Hint: use NAME:TYPE for a column of the payload"),
        ("id:int46", "--column id: expected one of the types bool"),
        ("price:decimal(39,2)", "--column price: precision should be between 1 and 38"),
    ],
)
def test_the_error_names_a_wrong_column(column: str, message: str):
    result = run_command(
        "client", "export", "--connect", "h:1/w", "--format", "csv", "--column", column
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data-format", "avro"], "--data-format avro needs --schema-registry URL"),
        (
            ["--schema-registry", "http://r"],
            "--schema-registry and --schema-registry-auth-file need --data-format avro or protobuf",
        ),
        (
            ["--data-format", "protobuf", "--schema-registry", "http://u:secret@r"],
            "expected a URL without a user and a password",
        ),
    ],
)
def test_a_format_with_schemas_needs_a_registry(options: list[str], message: str):
    columns = ["--column", "id:int64"]
    result = run_command(
        "client", "export", "--connect", "h:1/w", "--format", "csv", *columns, *options
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert "secret" not in result.stderr
