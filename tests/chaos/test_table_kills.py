"""A short run of `table_kills.py`, and tests that its comparison detects wrong tables."""

from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable

from tests.chaos.table_kills import EndlessWriter, compare, play
from tests.integration.test_follow import follow
from tests.time_limits import PATIENT_CLIENT
from tests.written_log import PARTITION_COUNT, WrittenLog, end_marks
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster
from waltz_core.tables.table_marks import TableMarks, encode_marks


# `tests/unit/tables/test_inferred_columns.py` infers columns in batches that end anywhere.
@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("follower", ["command", "inferred"])
def test_a_table_is_correct_after_kills_of_its_follower_a_server_and_a_storage(
    tmp_path: Path, follower: str
):
    lines: list[str] = []
    outcome = play(3, 4, follower, tmp_path, lines.append)
    assert outcome.wrong == [], lines
    assert outcome.kills.total() == 4
    assert outcome.counts["versions"] > 4


@pytest.mark.slow
@pytest.mark.fault
def test_the_comparison_detects_wrong_rows_wrong_marks_and_wrong_transactions(tmp_path: Path):
    table = tmp_path / "table"
    with (
        running_cluster(tmp_path / "local", partition_count=PARTITION_COUNT) as cluster,
        WaltzClient(cluster.connect, PATIENT_CLIENT) as client,
    ):
        written = WrittenLog(cluster.connect, [[] for _ in range(PARTITION_COUNT)])
        written.append(client, 60, 1)
        follow(written, table)
        writer = EndlessWriter(client, 1)
        assert list(compare(written, table, writer)) == []
        writer.committed[0, 0] = 1, {"id": -1}
        delta = DeltaTable(table)
        marks = TableMarks("follow", client.cluster().key.hex(), end_marks(written))
        forged = CommitProperties(custom_metadata={"userMetadata": encode_marks(marks)})
        delta.delete("value >= 0", commit_properties=forged)
        version = delta.version()
        delta.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        wrong = list(compare(written, table, writer))
    assert wrong[0] == "partition 0: transaction 0 is not the acknowledged one"
    assert wrong[1].startswith(f"version {version} with marks {end_marks(written)}: keys [")
    marks_text = end_marks(written)
    assert wrong[2] == f"version {version}: expected marks above {marks_text}, found {marks_text}"
    assert wrong[3:] == [f"version {version + 1} has no marks"]
