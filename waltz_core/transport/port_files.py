"""The files of a daemon's port: TLS files and the audit log; SIGHUP opens them again."""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from waltz_core.config.declarations import ServerConfig, StorageConfig
from waltz_core.metrics import Metrics
from waltz_core.transport import tls
from waltz_core.transport.admission.audit_log import AuditFile


@asynccontextmanager
async def open_port_files(
    config: ServerConfig | StorageConfig,
    port: tls.ListenContext | None,
    dialing: ssl.SSLContext | None = None,
    *,
    metrics: Metrics,
) -> AsyncIterator[None]:
    """Open the audit log of a port, and open all its files again on SIGHUP, until the block ends.

    `port` is None without TLS. The port then has neither TLS files nor an audit log. Raises
    BadConfig if the audit log cannot be opened.
    """
    if port is None:
        yield
        return
    audit = AuditFile(config.audit_log) if config.audit_log else None
    if port.access is not None:
        port.access.audit = audit
        name = f"waltz_{config.kind}_denied_requests_total"
        port.access.on_denied = partial(metrics.add, name)

    def reopen() -> None:
        tls.reload_files(config, port, dialing)
        if audit is not None:
            audit.reopen()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reopen)
    try:
        yield
    finally:
        if audit is not None:
            await audit.close()
