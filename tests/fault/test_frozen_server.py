"""A server is frozen: its clients turn to the next owner, long before their timeouts."""

import signal
from concurrent.futures import ThreadPoolExecutor

from tests.fault.changing import address
from tests.fault.load import Story, shown
from tests.patience import HANG_S
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig

# Nothing in this file may take so long.
REQUEST_MS = 600_000


def owned_by(story: Story, name: str) -> list[int]:
    """Return the partitions that a server owns."""
    partitions = shown(story.cluster)["partitions"]
    assert isinstance(partitions, dict)
    where = address(story.cluster, name)
    return [int(number) for number, each in partitions.items() if each["server"] == where]


def test_a_client_that_watches_nothing_finds_out(story: Story):
    """Like a Spark task: it knows where everything is, and has no session with ZooKeeper."""
    with WaltzClient(story.cluster.connect) as watching:
        layout = watching.layout()
    (number, *_) = owned_by(story, "server-1")
    with (
        WaltzClient.at(layout, ClientConfig(request_timeout_ms=REQUEST_MS)) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        first = client.append(story.row(number), partition=number).result(HANG_S)
        story.cluster.kill("server-1", signal.SIGSTOP)
        try:
            appended = client.append(story.row(number), partition=number)
            asked = threads.submit(client.high_water_mark, number)
            read = threads.submit(lambda: list(client.read_range(number, first, first)))
            assert appended.result(HANG_S) == first + 1
            assert asked.result(HANG_S) >= first
            assert [len(chunk.lengths) for chunk in read.result(HANG_S)] == [1]
        finally:
            story.cluster.kill("server-1", signal.SIGCONT)
    story.check_whole()
