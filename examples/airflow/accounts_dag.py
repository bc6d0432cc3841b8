"""Every hour: get the marks of the log, wait until a table has reached these marks, and run dbt.

Therefore the models contain all transactions that were committed before the run. A separate process
runs `waltz-core follow`, which keeps the table up to date. Environment variables: WALTZ_CONNECT is
the log, ACCOUNTS_TABLE is the table, and DBT_PROJECT_DIR is the dbt project.
"""

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, task
from marks_sensor import MarksSensor, log_marks


@dag(schedule="@hourly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def accounts() -> None:
    """Declare the three tasks."""

    @task
    def get_log_marks() -> dict[str, int]:
        return log_marks(os.environ["WALTZ_CONNECT"])

    wait_for_table = MarksSensor(
        task_id="wait_for_table",
        table=os.environ["ACCOUNTS_TABLE"],
        marks=get_log_marks(),
        mode="reschedule",  # occupies no worker between two checks of the table
        poke_interval=10,
        timeout=timedelta(hours=1),
    )

    @task.bash
    def run_dbt() -> str:
        return "dbt build"

    wait_for_table >> run_dbt()


accounts()
