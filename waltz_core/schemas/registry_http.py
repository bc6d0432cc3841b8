"""HTTP requests to a schema registry.

Rules:
    1. A request ends within its time limit, even if the peer answers slowly: each read waits only
       for the remaining time.
    2. An answer over `ANSWER_BYTES_MAX` is rejected.
    3. The client follows no redirects and uses no proxies: credentials reach only the host that the
       URL names.
    4. Credentials are read from a file for each request, and no message contains them.
"""

import base64
import http.client
import io
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from waltz_core.errors import BadConfig, Unavailable
from waltz_core.schemas.registry_urls import RegistryAddress

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
_AUTH_FILE_BYTES_MAX: Final = 4096
# The maximum number of characters of an answer that an error message contains.
_TEXT_CHARACTERS_MAX: Final = 300


class HttpAnswer(NamedTuple):
    """The status and the body of an answer."""

    status: int
    body: bytes

    @property
    def body_text(self) -> str:
        """The beginning of the body, for a message."""
        return repr(self.body[:_TEXT_CHARACTERS_MAX].decode("utf-8", "replace"))


def basic_auth(auth_file: str) -> str:
    """Return the header for basic authentication, from a file with `user:password`.

    Raises:
        BadConfig: the file cannot be read, or its content has another form.
    """
    try:
        with Path(auth_file).open("rb") as file:
            text = file.read(_AUTH_FILE_BYTES_MAX + 1).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadConfig(f"schema registry: file {auth_file!r} cannot be read ({reason})") from None
    if b":" not in text or len(text) > _AUTH_FILE_BYTES_MAX or len(text.splitlines()) != 1:
        raise BadConfig(
            f"schema registry: expected one line, user:password, in file {auth_file!r}, found "
            "something else"
        )
    return f"Basic {base64.b64encode(text).decode()}"


def request(
    address: RegistryAddress,
    path: str,
    *,
    body: bytes | None,
    headers: Mapping[str, str],
    deadline_s: float,
) -> HttpAnswer:
    """Send a request, POST with a body or GET without one, and return the answer.

    Args:
        address: the address of the schema registry.
        path: the resource, quoted, with a slash at its beginning.
        body: the JSON to send.
        headers: additional headers.
        deadline_s: the time at which the request ends, as `time.monotonic` (rule 1).

    Raises:
        Unavailable: there is no answer in time, or no HTTP answer.
    """
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=_remaining_s(deadline_s))
    plain_socket: socket.socket | None = None
    try:
        connection.connect()
        plain_socket = connection.sock
        limited: Any = _DeadlineSocket(plain_socket, deadline_s)
        connection.sock = limited
        method = "GET" if body is None else "POST"
        connection.request(method, address.path + path, body, dict(headers))
        response = connection.getresponse()
        content = response.read(ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(
            f"the schema registry at {address} cannot be read: {_reason(error)}. Hint: check its "
            "URL, and that it runs."
        ) from None
    finally:
        connection.close()
        if plain_socket is not None:
            plain_socket.close()
    if len(content) > ANSWER_BYTES_MAX:  # rule 2
        raise Unavailable(
            f"the schema registry at {address} answers with over {ANSWER_BYTES_MAX} bytes"
        )
    return HttpAnswer(response.status, content)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {str(error)[:_TEXT_CHARACTERS_MAX]}"


def _remaining_s(deadline_s: float) -> float:
    """Return the seconds until a deadline; raises TimeoutError after it."""
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


class _DeadlineSocket:
    """The socket methods that http.client uses, with a deadline; `request` closes the socket."""

    def __init__(self, plain_socket: socket.socket, deadline_s: float) -> None:
        self._socket = plain_socket
        self._deadline_s = deadline_s

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_remaining_s(self._deadline_s))
        self._socket.sendall(data)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._socket, self._deadline_s))

    def close(self) -> None:
        pass


class _DeadlineReader(io.RawIOBase):
    """A stream of the bytes that a socket receives until a deadline."""

    def __init__(self, plain_socket: socket.socket, deadline_s: float) -> None:
        self._socket = plain_socket
        self._deadline_s = deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        self._socket.settimeout(_remaining_s(self._deadline_s))
        return self._socket.recv_into(buffer)
