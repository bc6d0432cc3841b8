"""The gateway process: its ports, its session with ZooKeeper, its metrics and its shutdown.

Rules:
    1. The gateway stores nothing on disk: applications may use several gateways, and operators may
       restart a gateway at any time.
    2. The gateway needs ZooKeeper to start. Later, it needs ZooKeeper only to find the owners of
       partitions that have moved.
    3. The gateway listens on a non-loopback address only with TLS, or with `insecure_network`,
       because requests contain tokens.
    4. A token in the connect string is an error, because callers without a token would get the
       permissions of this token.
"""

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

from waltz_core import errors
from waltz_core.cluster.zookeeper.startup import retry_start_step
from waltz_core.config.declarations import ClientConfig, GatewayConfig
from waltz_core.config.host_names import is_loopback
from waltz_core.daemon_pages import Health, HealthCallback, serve_pages
from waltz_core.gateway.callers import Callers
from waltz_core.gateway.http_routes import GatewayParts, GatewayRoutes
from waltz_core.gateway.shared_directory import SharedDirectory
from waltz_core.metrics import Metrics
from waltz_core.transport import net, tls
from waltz_core.transport.http_port import serve_http
from waltz_core.transport.token_source import token_source_in

_log = logging.getLogger(__name__)


def run(config: GatewayConfig) -> None:
    """Run a gateway until SIGTERM or SIGINT; raises the error if the gateway fails."""
    try:
        net.run(serve(config, on_ready=_print_ready))
    except BaseExceptionGroup as group:
        # A single error is easier to read than an exception group.
        waltz_errors, _ = group.split(errors.WaltzError)
        if waltz_errors is None:
            raise
        raise errors.first_error_in(waltz_errors) from group


def _print_ready(address: str) -> None:
    _log.info("gateway.ready address=%s", address)
    print(f"gateway ready {address}", flush=True)  # noqa: T201 - the parent process waits for it


async def serve(
    config: GatewayConfig,
    *,
    on_ready: Callable[[str], None] = lambda _address: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve HTTP requests until `stop` is set; without `stop`, until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    context = _tls_context(config)
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, _reload_certificate, config, context)
    client_config = _client_config(config)
    directory = SharedDirectory(config.connect, client_config)
    await retry_start_step(
        "the cluster", directory.open, timeout_ms=config.zookeeper_connect_timeout_ms
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(directory.close)
        callers = Callers(config.connect, client_config, directory)
        stack.push_async_callback(callers.close)
        metrics = Metrics("gateway", has_process_metrics=True)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        parts = GatewayParts(
            config,
            client_config,
            callers,
            metrics,
            tasks,
            coordinator=lambda: directory.directory.coordinator,
        )
        routes = GatewayRoutes(parts)
        metrics.set_source("waltz_gateway_callers", lambda: len(callers))
        metrics.set_source("waltz_gateway_feeds", lambda: routes.feed_count)
        background = [
            tasks.create_task(directory.watch_assignment(), name="directory"),
            tasks.create_task(callers.close_idle_callers(), name="idle_callers"),
        ]
        pages: AbstractAsyncContextManager[object] = nullcontext()
        if config.http_port:
            health = _health_callback(directory)
            pages = serve_pages(metrics, health, host=config.http_host, port=config.http_port)
        served = serve_http(
            routes.asgi_app(),
            host=config.listen_host,
            port=config.port,
            keep_alive_connections_max=config.connections_max,
            ssl=context,
        )
        async with pages, served as port:
            scheme = "http" if context is None else "https"
            on_ready(f"{scheme}://{config.listen_host}:{port}")
            await stop.wait()
        routes.viewer.close()
        await routes.changes.interrupt()
        for task in background:
            task.cancel()


def _health_callback(directory: SharedDirectory) -> HealthCallback:
    async def health() -> Health:
        owners = directory.directory.owners
        count = directory.directory.cluster.partition_count
        details = {"partitions_with_owner": len(owners), "partition_count": count}
        reasons = [] if owners else ["no partition has an owner"]
        return Health(len(owners) == count, reasons, details)

    return health


def _client_config(config: GatewayConfig) -> ClientConfig:
    if token_source_in(config.connect) is not None:
        raise errors.BadConfig(
            "setting connect: expected no token, because the gateway forwards the tokens of its "
            "callers. Hint: remove token_file or token_env."
        )
    return ClientConfig(
        connect=config.connect,
        zookeeper_connect_timeout_ms=config.zookeeper_connect_timeout_ms,
        zookeeper_session_timeout_ms=config.zookeeper_session_timeout_ms,
        zookeeper_request_timeout_ms=config.zookeeper_request_timeout_ms,
        tls=config.tls,
        tls_certificate=config.tls_certificate,
        tls_key=config.tls_key,
        tls_authorities=config.tls_authorities,
        tls_verify=config.tls_verify,
        request_timeout_ms=config.request_timeout_ms,
    )


def _tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the port, None for plain HTTP; raises BadConfig (rule 3)."""
    if config.https_certificate:
        return _load_tls_context(config)
    if is_loopback(config.listen_host):
        return None
    if not config.insecure_network:
        raise errors.BadConfig(
            f"setting listen_host: {config.listen_host!r} is not a loopback address, so the "
            "gateway requires https_certificate. Hint: in a private network, or behind a proxy "
            "with TLS, insecure_network = true permits it without TLS."
        )
    _log.warning(
        "network.insecure host=%s missing=%r hint=%r",
        config.listen_host,
        "https_certificate",
        "every host that can connect may read and write: see docs/security.md",
    )
    return None


def _load_tls_context(config: GatewayConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    tls.load_certificate(context, "https", config.https_certificate, config.https_key)
    return context


def _reload_certificate(config: GatewayConfig, context: ssl.SSLContext | None) -> None:
    """Read the certificate file again; if it is not valid, keep the previous certificate."""
    if context is None:
        return
    try:
        _load_tls_context(config)  # checks both files before `context` uses one of them
        tls.load_certificate(context, "https", config.https_certificate, config.https_key)
    except errors.BadConfig as error:
        _log.error("tls.reload_failed error=%s", error)
    else:
        _log.info("tls.reloaded certificate=%s", config.https_certificate)
