"""Takes the pictures of the console in docs/images, at a real cluster with one killed storage.

Usage: scripts/run python -m tests.fault.console_images
"""

import json
import tempfile
from pathlib import Path
from random import Random

from tests.browser import PHONE, ConsolePage, open_console, run_browser
from tests.gateway_process import run_gateway
from waltz_core.client import WaltzClient, lock
from waltz_core.errors import LockFailed
from waltz_core.local import LocalCluster, running_cluster

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = 1280, 800
TRANSACTION_COUNT = 400


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {"storage_count": 3, "server_count": 2, "partition_count": 6}
        with (
            running_cluster(Path(directory), **settings) as cluster,
            run_gateway(cluster.connect) as gateway,
            run_browser() as browser,
        ):
            append_bookings(cluster)
            with open_console(browser, gateway.url, size=SIZE) as console:
                take(console, "#/partitions/0/transactions", "transactions")
                take(console, "#/partitions/0", "partition")
                take_cluster(console, cluster, "cluster")
            with open_console(browser, gateway.url, size=PHONE, is_dark=True) as console:
                take(console, "#/", "phone")


def append_bookings(cluster: LocalCluster) -> None:
    """Append transactions of two clients, some of which conflict."""
    random = Random(7)
    with (
        WaltzClient(cluster.connect) as first_client,
        WaltzClient(cluster.connect) as second_client,
    ):
        for number in range(TRANSACTION_COUNT):
            booking = {"seat": f"{number % 30}{random.choice('ABCDEF')}", "price": number % 90}
            partition = random.randrange(6)
            client = random.choice((first_client, second_client))
            mark = client.high_water_mark(partition)
            data, seat_lock = json.dumps(booking).encode(), lock("seat", booking["seat"])
            stale = mark - 1 if number % 9 == 0 else mark
            try:
                client.append(
                    data,
                    partition=partition,
                    write_locks=[seat_lock, lock("plane", 1)],
                    client_high_water_mark=max(stale, -1),
                ).result()
            except LockFailed:
                continue


def take(console: ConsolePage, fragment: str, name: str) -> None:
    """Open a page, wait until it shows data, and take its picture."""
    console.open(fragment)
    console.page.locator("tbody tr").nth(2).wait_for()
    console.save(IMAGES / f"console-{name}.png")


def take_cluster(console: ConsolePage, cluster: LocalCluster, name: str) -> None:
    """Take the picture of a cluster with a killed storage."""
    console.open("#/")
    console.page.wait_for_selector('[data-testid="storage-card"][data-state="up"]')
    cluster.kill("storage-2")
    console.page.wait_for_selector('[data-testid="storage-card"][data-state="down"]')
    # The sessions of the partitions open again without this storage.
    console.page.get_by_text("appends continue").wait_for()
    console.save(IMAGES / f"console-{name}.png")


if __name__ == "__main__":
    main()
