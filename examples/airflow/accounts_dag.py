"""Every hour: notes the marks of the log, waits until a table has them, then runs dbt on the table.

So the models contain everything that was committed before the run. `waltz-core follow` keeps the
table, in a process of its own. Environment variables: WALTZ_CONNECT, the log; ACCOUNTS_TABLE, the
table; DBT_PROJECT_DIR, the dbt project.
"""

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, task
from marks_sensor import MarksSensor, log_marks


@dag(schedule="@hourly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def accounts() -> None:
    """Declare the three tasks."""

    @task
    def marks_of_the_log() -> dict[str, int]:
        return log_marks(os.environ["WALTZ_CONNECT"])

    table_has_them = MarksSensor(
        task_id="table_has_them",
        table=os.environ["ACCOUNTS_TABLE"],
        marks=marks_of_the_log(),
        mode="reschedule",  # occupies no worker between two looks at the table
        poke_interval=10,
        timeout=timedelta(hours=1),
    )

    @task.bash
    def models() -> str:
        return "dbt build"

    table_has_them >> models()


accounts()
