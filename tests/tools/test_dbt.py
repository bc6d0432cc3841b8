"""The dbt project of examples/dbt on a Delta table that `waltz-core follow` keeps."""

from pathlib import Path

from tests.tools.conftest import AccountsTable, read_owners
from tests.tools.environment import ROOT, needs_tools, run_program, tool_environment

pytestmark = needs_tools("dbt")


def models(accounts: AccountsTable, where: Path) -> list[tuple[str, int, int]]:
    """Build the models; return the rows of `owners`."""
    variables = tool_environment(
        "dbt",
        ACCOUNTS_TABLE=str(accounts.table),
        ACCOUNTS_DATABASE=str(where / "accounts.duckdb"),
        DBT_TARGET_PATH=str(where / "target"),
        DBT_LOG_PATH=str(where / "logs"),
    )
    output = run_program("dbt", "build", env=variables, cwd=ROOT / "examples" / "dbt")
    assert "PASS=6 WARN=0 ERROR=0 SKIP=0" in output
    return read_owners(where / "accounts.duckdb")


def test_models_are_built_from_the_rows_of_the_table(accounts: AccountsTable, tmp_path: Path):
    accounts.follow()
    assert models(accounts, tmp_path) == [("Anna", 2, 105), ("Ben", 1, 40)]
    accounts.put_account(2, "Ben", 60)
    accounts.remove_account(3)
    accounts.follow()
    assert models(accounts, tmp_path) == [("Anna", 1, 100), ("Ben", 1, 60)]
