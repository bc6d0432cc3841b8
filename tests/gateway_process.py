"""A gateway in a separate process, and a client for its JSON interface."""

import base64
import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.ports import free_port
from tests.time_limits import TEST_TIMEOUT_S


class GatewayAnswer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: Any


class GatewayClient:
    """One persistent connection to a gateway."""

    def __init__(self, url: str, *, token: str | None = None, authorities: str = "") -> None:
        scheme, _, address = url.partition("://")
        host, _, port = address.rpartition(":")
        self._token = token
        if scheme == "https":
            context = ssl.create_default_context(cafile=authorities)
            self._connection = http.client.HTTPSConnection(
                host, int(port), timeout=TEST_TIMEOUT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, int(port), timeout=TEST_TIMEOUT_S)

    def response(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """Send a request; return the response, whose body is not read yet."""
        named = {name.replace("_", "-"): header for name, header in headers.items()}
        if method == "POST":
            named.setdefault("Content-Type", "application/json")
        if self._token is not None:
            named["Authorization"] = f"Bearer {self._token}"
        self._connection.request(method, path, body, named)
        return self._connection.getresponse()

    def get(self, path: str, **headers: str) -> GatewayAnswer:
        return self._answer(self.response("GET", path, **headers))

    def append(self, *transactions: dict[str, Any], key: str | None = None) -> GatewayAnswer:
        """Append transactions, each with `data` as text."""
        named = {} if key is None else {"Idempotency_Key": key}
        return self._answer(
            self.response("POST", "/v1/transactions", append_body(*transactions), **named)
        )

    def exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> GatewayAnswer:
        return self._answer(self.response(method, path, body, **headers))

    def post(self, body: bytes) -> GatewayAnswer:
        return self._answer(self.response("POST", "/v1/transactions", body))

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def _answer(response: http.client.HTTPResponse) -> GatewayAnswer:
        headers = {name.lower(): each for name, each in response.getheaders()}
        return GatewayAnswer(response.status, headers, json.loads(response.read()))


def append_body(*transactions: dict[str, Any]) -> bytes:
    """Return the body of an append."""
    rows = [
        {**transaction, "data": base64.b64encode(transaction["data"].encode()).decode()}
        for transaction in transactions
    ]
    return json.dumps({"transactions": rows}).encode()


class GatewayProcess:
    """A gateway that may be killed, and started again at the same port."""

    def __init__(self, connect: str, log_path: Path | None = None, **settings: object) -> None:
        self.port = free_port()
        self._log_path = log_path
        named = {"connect": connect, "port": self.port, "http_port": 0, **settings}
        self._words = [
            word
            for name, value in named.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            log = None if self._log_path is None else stack.enter_context(self._log_path.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "waltz_core", "gateway", "run", *self._words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        assert words[:2] == ["gateway", "ready"], words
        self.url = words[2]

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def terminate(self) -> int:
        """Stop it; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        self._process.communicate(timeout=TEST_TIMEOUT_S)
        return self._process.returncode


@contextlib.contextmanager
def run_gateway(
    connect: str, log_path: Path | None = None, **settings: object
) -> Iterator[GatewayProcess]:
    """Run a gateway while the block runs."""
    gateway = GatewayProcess(connect, log_path, **settings)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.kill()
