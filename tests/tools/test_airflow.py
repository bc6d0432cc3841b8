"""The sensor and the DAG of examples/airflow."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from tests.tools.conftest import AccountsTable, read_owners
from tests.tools.environment import ROOT, needs_tools, run_program, tool_environment

EXAMPLES = ROOT / "examples"
# Runs sensors with the given arguments once, and prints each answer.
RUN_SENSORS = """
import json, sys
from marks_sensor import MarksSensor
for number, each in enumerate(json.loads(sys.argv[1])):
    try:
        print("answer", MarksSensor(task_id=f"sensor_{number}", **each).poke({}))
    except ValueError as error:
        print("answer", error)
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return tool_environment(
        *("airflow", "dbt"),
        AIRFLOW_HOME=str(tmp_path / "airflow"),
        AIRFLOW__CORE__DAGS_FOLDER=str(EXAMPLES / "airflow"),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        DBT_PROJECT_DIR=str(EXAMPLES / "dbt"),
        DBT_PROFILES_DIR=str(EXAMPLES / "dbt"),
        DBT_TARGET_PATH=str(tmp_path / "target"),
        DBT_LOG_PATH=str(tmp_path / "logs"),
        ACCOUNTS_DATABASE=str(tmp_path / "accounts.duckdb"),
    )


@needs_tools("airflow")
def test_a_sensor_answers_whether_all_marks_are_reached(
    accounts: AccountsTable, variables: dict[str, str], tmp_path: Path
):
    table, connect = str(accounts.table), accounts.connect
    marks = accounts.follow()
    later = marks | {"0": marks["0"] + 1}
    accounts.put_account(2, "Ben", 60)  # partition 0: the log has it, and the table does not
    sensor_calls: list[dict[str, object]] = [
        {"marks": marks, "table": table},
        {"marks": later, "table": table},
        {"marks": later, "connect": connect},
        {"marks": marks | {"1": 100}, "connect": connect},
        {"marks": marks, "table": table, "follower": "other"},
        {"marks": marks},
    ]
    output = run_program(
        "python",
        "-c",
        RUN_SENSORS,
        json.dumps(sensor_calls),
        env=variables,
        cwd=EXAMPLES / "airflow",
    )
    answers = [line for line in output.splitlines() if line.startswith("answer ")]
    assert [answer.removeprefix("answer ") for answer in answers] == [
        *("True", "False", "True", "False", "False"),
        "expected either connect or table, found connect=None and table=None",
    ]


@needs_tools("airflow", "dbt")
def test_a_dag_waits_for_the_table_and_then_builds_the_models(
    accounts: AccountsTable, variables: dict[str, str], tmp_path: Path
):
    accounts.follow()
    accounts.put_account(2, "Ben", 60)
    variables |= {"WALTZ_CONNECT": accounts.connect, "ACCOUNTS_TABLE": str(accounts.table)}
    run_program("airflow", "db", "migrate", env=variables, cwd=tmp_path)
    log = tmp_path / "dag.log"
    line = ["airflow", "dags", "test", "accounts"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            line, env=variables, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            wait_until(
                "the sensor waits",
                lambda: "waiting for marks" in log.read_text() or process.poll() is not None,
            )
            assert process.poll() is None, log.read_text()
            assert not (tmp_path / "accounts.duckdb").exists()
            accounts.follow()
            assert process.wait(TEST_TIMEOUT_S) == 0, log.read_text()
        finally:
            process.kill()
    assert read_owners(tmp_path / "accounts.duckdb") == [("Anna", 2, 105), ("Ben", 1, 60)]
