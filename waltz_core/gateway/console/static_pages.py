"""Serves the files of the console's pages.

Rules:
    1. The files are read once, when the gateway starts. No other paths exist.
    2. Because of `CONTENT_SECURITY_POLICY`, the browser loads nothing from another origin, runs no
       inline script, and does not show the console in a frame of another page.
    3. After an upgrade, the browser must load the new files. So each file has an `ETag`. At each
       use, the browser checks its cached copy with this `ETag`.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

CONSOLE_PATH: Final = "/console/"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_RESPONSE_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of all files, of the console's root, and of the gateway's root."""
    folder = resources.files(__package__) / "pages"
    routes = [Route("/", _redirect), Route(CONSOLE_PATH.rstrip("/"), _redirect)]
    for page_file in folder.iterdir():
        media_type = _MEDIA_TYPES.get(page_file.name.rpartition(".")[2])
        if media_type is None:
            continue
        page = _page(page_file.read_bytes(), media_type)
        name = "" if page_file.name == "index.html" else page_file.name
        routes.append(Route(CONSOLE_PATH + name, page))
    return routes


def _page(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_RESPONSE_HEADERS, "ETag": tag}

    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return page


async def _redirect(_request: Request) -> Response:
    return RedirectResponse(CONSOLE_PATH, headers=_RESPONSE_HEADERS)
