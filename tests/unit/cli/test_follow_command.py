"""`waltz-core follow`: wrong options are errors before anything is opened or created."""

import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ARGUMENTS = ["--connect", "h:1/w", "--key", "id", "--column", "id:int64"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--key", "id"], "key: expected column names, each once"),
        (["--format", "parquet"], "a Parquet table is append-only: expected no key"),
        (["--key", "no"], "key: expected columns of the table, found 'no'. Hint: declare this"),
        (["--column", "a:int46"], "--column a: expected one of the types"),
        (["--column", "ID:int64"], "does not distinguish upper and lower case"),
        (["--delete-where", "a AND b"], "expected a column, or one comparison of a column with"),
        (["--data-format", "avro"], "--data-format avro needs --schema-registry URL"),
        (["--changes", "f"], "changes function: expected 'module:function', such as"),
        (["--changes", "no:f"], "changes function: 'no:f' cannot be imported (No module"),
        (
            ["--changes", "tests.changes_functions:return_pairs", "--delete-header", "1"],
            "the changes function tests.changes_functions:return_pairs or rules for deletes",
        ),
        (["--tables", "x"], "--tables cannot be used with TABLE or with one of the options"),
        (["--interval-s", "0"], "--interval-s: expected more than 0, found 0"),
        (
            ["--start-marks", "7"],
            """--start-marks: expected a mark for each partition, such as {""",
        ),
        (["--start-marks", '{"0": -2}'], "--start-marks: expected a mark for each partition"),
        (["--start-marks", '{"x": 1}'], "--start-marks: expected a mark for each partition"),
        (["--start-time", "2026-11-28"], "--start-time: expected a time with a time zone"),
        (
            ["--start-time", "2026-11-28T10:00:00Z", "--start-marks", '{"0": 1}'],
            "expected either --start-marks or --start-time, found both",
        ),
    ],
)
def test_the_error_names_a_wrong_option(tmp_path: Path, more: list[str], message: str):
    table = tmp_path / "table"
    result = run_command("follow", str(table), *ARGUMENTS, *more)
    assert result.returncode == 1
    assert message in result.stderr
    assert not table.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'expected a section such as ["/lake/accounts"] for each table'),
        ("x = 1", 'expected a section such as ["/lake/accounts"] for each table'),
        ("[x", "tables.toml: "),
        ("[x]\ncolumn = 1", """section ["x"]: unknown option 'column'; did you mean 'columns'"""),
        ("[x]\nkey = 1", """["x"], option key: expected a text or a list of texts, found 1"""),
        ("[x]\nheaders = [true]", "headers: expected a number or a list of numbers, found [True]"),
        ("[x]\nchanges = ['a:b']", "changes: expected a text, found ['a:b']"),
        ("[x]\nheaders = 1", "table x: key: expected one or more columns for a Delta table"),
        (
            "[x]\nkey='id'\nchanges='a:b'",
            "table x: changes function a:b: expected declared columns",
        ),
        ("[x]\nkey='id'\ncolumns='id:int7'", "table x: --column id: expected one of the types"),
    ],
)
def test_an_error_in_a_file_of_tables_is_reported(tmp_path: Path, text: str, message: str):
    file = tmp_path / "tables.toml"
    file.write_text(text)
    result = run_command("follow", "--tables", str(file), "--connect", "h:1/w")
    assert result.returncode == 1
    assert message in result.stderr


def test_follow_needs_a_table_with_a_key_or_a_file_of_tables():
    for arguments in ([], ["table"], ["--key", "id"]):
        result = run_command("follow", "--connect", "h:1/w", *arguments)
        assert result.returncode == 1
        assert "follow: expected TABLE and --key, or --tables FILE" in result.stderr


@pytest.mark.parametrize("more", [["--until", "tomorrow"], ["--data-format", "xml"]])
def test_an_unknown_choice_is_a_usage_error(more: list[str]):
    assert run_command("follow", "table", *ARGUMENTS, *more).returncode == 2


def test_the_error_about_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.delitem(sys.modules, "waltz_core.tables.delta_table", raising=False)
    result = run_command("follow", "table", *ARGUMENTS)
    assert result.returncode == 1
    assert "Hint: run pip install 'waltz-spark[tables]'." in result.stderr
