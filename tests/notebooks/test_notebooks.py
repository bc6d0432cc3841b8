"""Executes every notebook and compares its outputs with the statements of its text."""

from pathlib import Path

import pytest

from tests.notebooks.notebooks import (
    CLUSTER_PROCESSES_MIN,
    NOTEBOOK_NAMES,
    Notebook,
    execute_notebook,
    read_notebook,
)

# Each notebook starts a cluster and Spark, which takes long on a busy machine.
pytestmark = pytest.mark.notebook


def test_every_notebook_has_a_check_of_its_results():
    assert list(EXPECTED) == NOTEBOOK_NAMES


# `tests/spark` has shorter tests of the same behavior. For the second notebook, these are the tests
# of conflicts in `test_batch.py`. `tests/tidy/test_notebooks_as_committed.py` checks all notebooks,
# but runs none.
@pytest.mark.parametrize(
    "name",
    [
        *NOTEBOOK_NAMES[:1],
        *(pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOK_NAMES[1:]),
    ],
)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path):
    executed = execute_notebook(name, tmp_path)
    assert executed.notebook.errors() == []
    EXPECTED[name](executed.notebook)
    assert executed.notebook.images(), "no plot"
    assert executed.processes_max >= CLUSTER_PROCESSES_MIN
    assert executed.remaining_processes == []
    assert executed.remaining_directories == []


def expect_committed_outputs(name: str, notebook: Notebook) -> None:
    """Check that deterministic outputs equal the committed outputs.

    After an intended change, run the notebook in `make notebook` from the top, and save it.
    """
    assert notebook.output() == read_notebook(name).output()
    assert notebook.tables() == read_notebook(name).tables()


def expect_first_append(notebook: Notebook) -> None:
    expect_committed_outputs("01_first_append_and_read", notebook)
    assert "5 committed, 0 rejected\n" in notebook.output()
    assert "what was read is what was written: True\n" in notebook.output()
    assert "20,000 committed, 0 rejected\n" in notebook.output()
    table_html = notebook.table("result.committed.select")
    altona = [row for row in table_html if row["shop"] == "Altona"]
    assert len(table_html) == 5
    assert len({row["partition"] for row in altona}) == 1
    ids = [int(row["transaction_id"]) for row in altona]
    assert len(ids) == 3
    assert ids == sorted(ids), "the orders of one shop keep their order"
    dense = notebook.table("dense = headers.groupBy")
    assert sum(int(row["transactions"]) for row in dense) == 20_005
    assert all(int(row["transactions"]) == int(row["high_water_mark"]) + 1 for row in dense)
    assert {row["first"] for row in dense} == {"0"}


def expect_optimistic_locking(notebook: Notebook) -> None:
    expect_committed_outputs("02_optimistic_locking", notebook)
    counts = {row[""]: (row["North"], row["South"]) for row in notebook.table("result_north = ")}
    assert counts == {"committed": ("6", "1"), "rejected": ("0", "5")}
    conflicts = notebook.table("conflicts = (")
    assert [row["party"] for row in conflicts] == ["Sander", "Thoma", "Ulmer", "Vogt", "Wolff"]
    assert conflicts[0] == {
        "": "0",
        "party": "Sander",
        "seats": "D6 D7 D8",
        "conflicts with transaction": "3",
        "who was faster": "North, Dietz",
        "their seats": "D5 D6",
    }
    for row in conflicts:
        assert set(row["seats"].split()) & set(row["their seats"].split()), row
    assert "1 more round, 43 seats sold, 43 wanted\n" in notebook.output()
    rounds = [
        (row["committed"], row["to compute again"])
        for row in notebook.table('onLockFailure="retry"')
    ]
    assert rounds == [("2", "6"), ("2", "4"), ("2", "2"), ("2", "0")]
    for row in notebook.table("takings = counted.join"):
        assert row["total"] == row["sum of all sales"]


def expect_ledger(notebook: Notebook) -> None:
    expect_committed_outputs("03_ledger", notebook)
    batches = notebook.table("SELECT number AS batch")
    assert sum(int(row["transfers"]) for row in batches) == 1_016
    assert max(int(row["transfers"]) for row in batches) == 300
    (sums,) = notebook.table("sums = ask")
    assert float(sums["customers (EUR)"]) == -float(sums["vaults (EUR)"]) == 16_000
    assert float(sums["all (EUR)"]) == 0
    output = notebook.output()
    assert "power cut: the view has batch 4, Spark does not know it\n" in output
    assert "batch 4 came again and was left out; the stream is 0 transactions behind\n" in output
    assert "1,816 transfers in the view\n" in output
    assert "1,816 transfers in the log, the view equals the log: True\n" in output
    assert "sum over all 20 accounts: 0 cents\n" in output


def expect_time_travel(notebook: Notebook) -> None:
    snapshot, live, *rest = notebook.output().splitlines()
    assert snapshot == "the snapshot: 5 reads, 1 hash"
    assert live.startswith("the log as it is: 5 reads, ")
    assert int(live.split()[-2]) >= 2, "no client wrote while the snapshot was read"
    assert rest == [
        "before and since are the whole: True",
        "24 states were read by time travel, all lie on the replay: True",
    ]
    assert len(notebook.table("traveled.head")) == 3


def expect_measurements(notebook: Notebook) -> None:
    assert notebook.output() == "12,000 transactions, each thing was won exactly once: True\n"
    rates = notebook.table("def write_rate")
    assert [int(row["batchSize"]) for row in rates] == [1, 10, 100, 1_000]
    assert all(float(row["rows per second"]) > 0 for row in rates)
    contention = notebook.table("def expected")
    shares = [
        (float(row["measured (% refused)"]), float(row["expected (% refused)"]))
        for row in contention
    ]
    assert len(shares) == 6
    assert all(abs(measured - expected) < 4 for measured, expected in shares)
    assert [measured for measured, _ in shares] == sorted(
        (each for each, _ in shares), reverse=True
    )
    half, most, nearly_all = (int(row["ms"]) for row in notebook.table("latency_ms = "))
    assert 0 < half <= most <= nearly_all


def expect_correct_table(notebook: Notebook) -> None:
    expect_committed_outputs("06_a_table_that_is_never_wrong", notebook)
    output = notebook.output()
    assert output.count(" ended with -9\n") == 4
    assert "the last follower ended with 0\n" in output
    assert "wrong rows in all versions: 0\n" in output
    assert "repeated keys in all versions: 0\n" in output
    assert "the log has what was appended: True\n" in output
    assert "the table contains the whole log: True\n" in output
    assert "versions written by another run: 0\n" in output


def expect_audit(notebook: Notebook) -> None:
    before = read_notebook("07_time_travel_and_audit")
    assert notebook.output() == before.output()
    found, expected = (
        [table for table in each.tables() if "commit_time" not in table]
        for each in (notebook, before)
    )
    assert found == expected
    (row,) = notebook.table("rows.loc[[KETTLE]]")
    (cause,) = notebook.table("read(partition, cause, cause + 1)")
    assert cause["cents"] == row["cents"]
    assert (cause["program"], cause["by"]) == ("import", "nordwind-w07.csv")
    history = notebook.table("history_of(KETTLE, partition).drop")
    assert [change["by"] for change in history] == [
        "opening",
        "Anna",
        "Boris",
        "nordwind-w07.csv",
    ]
    assert [float(change["before"]) for change in history[1:]] == [
        float(change["cents"]) for change in history[:-1]
    ]
    assert "prices that are less than half of the old ones: 0\n" in notebook.output()


EXPECTED = {
    "01_first_append_and_read": expect_first_append,
    "02_optimistic_locking": expect_optimistic_locking,
    "03_ledger": expect_ledger,
    "04_replay_and_time_travel": expect_time_travel,
    "05_measure_your_cluster": expect_measurements,
    "06_a_table_that_is_never_wrong": expect_correct_table,
    "07_time_travel_and_audit": expect_audit,
}
