"""An Airflow sensor that waits until a log, or a table of a follower, has reached given marks.

Marks are a dictionary from partitions to transaction IDs. The partitions are texts, as in JSON:
`{"0": 41, "1": 7}`. Therefore an Airflow task can return marks, and pass them to the sensor.
"""

import json
from contextlib import suppress

from airflow.sdk import BaseSensorOperator, Context
from deltalake import DeltaTable

from waltz_core.client import WaltzClient


def log_marks(connect: str) -> dict[str, int]:
    """Return the marks of a log. They cover all transactions committed before the call."""
    with WaltzClient(connect) as client:
        marks = client.high_water_marks(linearizable=True)
    return {str(partition): mark for partition, mark in marks.items()}


def table_marks(table: str, follower: str = "follow") -> dict[str, int]:
    """Return the marks in the newest commit of a follower; an empty dictionary without commits."""
    for commit in DeltaTable(table).history():
        with suppress(ValueError, KeyError, TypeError):  # another program's metadata
            waltz = json.loads(commit["userMetadata"])["waltz"]
            if waltz["follower"] == follower:
                return {str(partition): int(mark) for partition, mark in waltz["marks"].items()}
    return {}


class MarksSensor(BaseSensorOperator):
    """Waits until each of the given partitions has reached its mark.

    Args:
        marks: a transaction ID for each partition; also the result of another task.
        connect: the connect string of the log. Pass either `connect` or `table`.
        table: the directory or URL of a Delta table that `waltz-core follow` keeps up to date.
        follower: the name of the table's follower.
        **options: options of Airflow's sensors, such as `timeout` and `poke_interval`.

    Raises:
        ValueError: expected `connect` or `table`, found both or neither.
    """

    template_fields = ("marks", "connect", "table")

    def __init__(
        self,
        *,
        marks: dict[str, int],
        connect: str | None = None,
        table: str | None = None,
        follower: str = "follow",
        **options: object,
    ) -> None:
        super().__init__(**options)
        if (connect is None) == (table is None):
            raise ValueError(f"expected either connect or table, found {connect=} and {table=}")
        self.marks = marks
        self.connect = connect
        self.table = table
        self.follower = follower

    def poke(self, context: Context) -> bool:
        """Return whether all marks are reached; log the missing ones."""
        if self.table is not None:
            found = table_marks(self.table, self.follower)
        else:
            found = log_marks(self.connect)
        missing = {
            partition: mark
            for partition, mark in self.marks.items()
            if found.get(partition, -1) < mark
        }
        if missing:
            self.log.info("waiting for marks %s, found %s", missing, found)
        return not missing
