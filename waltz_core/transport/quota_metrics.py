"""Metrics of the principals with limits at one daemon (`access/quotas.py`, rule 6)."""

import asyncio
from typing import Final

from waltz_core.metrics import Metrics
from waltz_core.transport.tls import ListenContext

PUBLISH_INTERVAL_S: Final = 1.0


async def publish_quotas(metrics: Metrics, area: str, port: ListenContext | None) -> None:
    """Publish the metrics of principals every second; return at once without access control.

    `area` is "server" or "storage". Labels that the permissions no longer contain are dropped.
    """
    if port is None or port.access is None:
        return
    quotas, published_labels = port.access.quotas, set[str]()
    prefix = f"waltz_{area}_principal"
    while True:
        for label in published_labels - quotas.usage.keys():
            metrics.forget(principal=label)
        published_labels = set(quotas.usage)
        for label, usage in quotas.usage.items():
            interval_usage = usage.take()
            metrics.add(f"{prefix}_bytes_total", interval_usage.bytes, principal=label)
            metrics.add(f"{prefix}_delayed_requests_total", interval_usage.delayed, principal=label)
            metrics.add(
                f"{prefix}_rejected_requests_total", interval_usage.rejected, principal=label
            )
            if area == "server":
                metrics.add(f"{prefix}_appends_total", interval_usage.appends, principal=label)
        for label, (connections, feeds) in quotas.connection_and_feed_counts().items():
            metrics.set(f"{prefix}_connections", connections, principal=label)
            if area == "server":
                metrics.set(f"{prefix}_feeds", feeds, principal=label)
        await asyncio.sleep(PUBLISH_INTERVAL_S)
