"""The HTTP pages of a daemon: /livez, /readyz, /health and /metrics.

Rules:
    1. /livez needs only a running event loop. /readyz and /health describe this process, and send
       no request to another process.
    2. An outage of ZooKeeper has no effect on /livez and /readyz: appends continue without
       ZooKeeper, and a restart of the daemon would not end the outage.
    3. The pages accept GET and HEAD only, within the limits of `http_port.py`.
    4. If a page raises an exception, the daemon logs it, answers with status 500, and continues.
    5. Only a daemon with an `http_port` imports the HTTP libraries, because these imports cost time
       and memory.
"""

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from waltz_core.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger(__name__)


class Health(NamedTuple):
    """Whether a daemon is healthy, the reasons why it is not ready, and details for operators."""

    is_healthy: bool
    unready_reasons: Sequence[str]  # empty: the daemon is ready
    details: Mapping[str, object]


HealthCallback: TypeAlias = Callable[[], Awaitable[Health]]


@contextlib.asynccontextmanager
async def serve_pages(
    metrics: Metrics, health: HealthCallback, *, host: str, port: int
) -> AsyncIterator[int]:
    """Serve the pages while the block runs; yields the port. Port 0 uses any free port.

    Raises:
        BadConfig: the daemon cannot listen at this address.
    """
    from waltz_core.transport.http_port import serve_http  # noqa: PLC0415 - rule 5

    async with serve_http(_pages(metrics, health), host=host, port=port) as listening_port:
        yield listening_port


def _pages(metrics: Metrics, health: HealthCallback) -> "Starlette":
    from starlette.applications import Starlette  # noqa: PLC0415 - rule 5
    from starlette.responses import PlainTextResponse, Response  # noqa: PLC0415 - rule 5
    from starlette.routing import Route  # noqa: PLC0415 - rule 5

    async def livez(_request: "Request") -> "Response":
        return PlainTextResponse("ok\n")

    async def readyz(_request: "Request") -> "Response":
        reasons = (await health()).unready_reasons
        return answer(not reasons, {"is_ready": not reasons, "reasons": reasons})

    async def health_page(_request: "Request") -> "Response":
        found = await health()
        return answer(found.is_healthy, {"is_healthy": found.is_healthy, **found.details})

    async def metrics_page(_request: "Request") -> "Response":
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    def answer(is_well: bool, details: Mapping[str, object]) -> "Response":  # noqa: FBT001
        body = json.dumps(details, default=str) + "\n"
        return Response(body, 200 if is_well else 503, media_type="application/json")

    async def failed(request: "Request", error: Exception) -> "Response":
        _log.error("http.page_failed page=%s", request.url.path, exc_info=error)
        return PlainTextResponse("the page failed; the log of the daemon has the error\n", 500)

    pages = {"/livez": livez, "/readyz": readyz, "/health": health_page, "/metrics": metrics_page}
    return Starlette(
        routes=[Route(path, page) for path, page in pages.items()],
        exception_handlers={Exception: failed},
    )
