"""An object store that gives the same answer to each request, for tests of client errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class _Answer(BaseHTTPRequestHandler):
    status, code = 200, ""

    def do_GET(self) -> None:
        body = f"<Error><Code>{self.code}</Code><Message>Some text.</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def store_with_answer(status: int | None, code: str) -> Iterator[str]:
    """Yield the URL of a store with this status and code in its answers."""
    handler = type("Answer", (_Answer,), {"status": status, "code": code})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
