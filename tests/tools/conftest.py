"""A cluster and a followed table for each test of a tool."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import duckdb
import pytest

from tests.commands import run_command
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster

UPSERT, DELETE = 1, 2


class AccountsTable(NamedTuple):
    """A log of accounts in JSON, and the Delta table that `waltz-core follow` keeps."""

    client: WaltzClient
    connect: str
    table: Path

    def put_account(self, number: int, owner: str, balance: int) -> None:
        row = {"id": number, "owner": owner, "balance": balance}
        self._append(number, json.dumps(row).encode(), UPSERT)

    def remove_account(self, number: int) -> None:
        self._append(number, json.dumps({"id": number}).encode(), DELETE)

    def _append(self, number: int, payload: bytes, header: int) -> None:
        self.client.append(payload, partition=number % 2, header=header).result()

    def follow(self) -> dict[str, int]:
        """Apply the log up to its end; return the marks of the table."""
        columns = ("id:int64", "owner:string", "balance:int64")
        declared = [word for column in columns for word in ("--column", column)]
        result = run_command(
            *("follow", str(self.table), "--connect", self.connect, "--data-format", "json"),
            *("--key", "id", *declared, "--delete-header", str(DELETE)),
            *("--until", "now", "--json"),
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["marks"]


def read_owners(database: Path) -> list[tuple[str, int, int]]:
    """Return the rows of dbt's model: owner, number of accounts, balance."""
    with duckdb.connect(str(database), read_only=True) as opened:
        return opened.sql("SELECT owner, accounts, balance FROM owners ORDER BY owner").fetchall()


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[AccountsTable]:
    directory = tmp_path / "cluster"
    options = {"storage_count": 1, "server_count": 1, "partition_count": 2}
    with (
        running_cluster(directory, **options) as cluster,
        WaltzClient(cluster.connect, PATIENT_CLIENT) as client,
    ):
        found = AccountsTable(client, cluster.connect, tmp_path / "accounts")
        found.put_account(1, "Anna", 100)
        found.put_account(2, "Ben", 40)
        found.put_account(3, "Anna", 5)
        yield found
