"""Sessions that begin because enough was written, while real processes write.

Nothing may be lost, refused or doubled by one. What it costs in time is measured, not judged here:
`waltz-core bench checkpoint`.
"""

import pytest

from tests.fault.load import Story, wait_until
from waltz_core.client import WaltzClient
from waltz_core.local import running

pytestmark = pytest.mark.fault
PARTITIONS = range(4)


def sessions(client: WaltzClient) -> list[int]:
    """Return the session of every partition."""
    return [client.replicas(each).session_id for each in PARTITIONS]


def test_a_session_that_begins_under_load_loses_nothing(tmp_path):
    settings: dict[str, dict[str, object]] = {"server": {"checkpoint_interval_count": 100}}
    with running(tmp_path / "cluster", settings=settings, server_count=1) as cluster:
        story = Story(cluster)
        with WaltzClient(cluster.connect) as client, story.load() as load:
            load.await_commits()
            before = sessions(client)

            def all_have_new_sessions() -> bool:
                return all(now > then for now, then in zip(sessions(client), before, strict=True))

            wait_until("every partition has another session", all_have_new_sessions)
            load.await_commits()
            assert load.refusals == []
        story.check_whole()
        story.check_agrees()
