"""Passes an open file to another process on this machine, through a Unix socket.

The receiver reads the file from the page cache, without a copy through a socket.

Rules:
    1. The socket has an abstract name. So the socket disappears when its process exits, leaves no
       file, and cannot be reached from other machines or network namespaces.
    2. A connection carries one request of a fixed size and one answer: an open file, or nothing.
    3. The file is open for reading only.
    4. Abstract names exist on Linux only. On other systems, no files are passed.
    5. Only processes of the same user and of root receive files, because a file contains more than
       the requested data. These processes could also open the file by its path. A receiver accepts
       files from these users only, because a process of another user may occupy the name first and
       pass a forged file.
"""

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Final

from waltz_core.errors import Unreachable, WaltzError

_log = logging.getLogger(__name__)

IS_SUPPORTED: Final = sys.platform == "linux"
REQUEST_TIMEOUT_S: Final = 5.0
CALLERS_MAX: Final = 64
ACCEPT_PAUSE_S: Final = 1.0
_NAME_BYTES_MAX: Final = 107
_DESCRIPTOR_MESSAGE: Final = b"\x01"
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group
_ROOT_USER_ID: Final = 0

# A function that opens the requested file for reading and returns its descriptor; raises
# WaltzError.
OpenFile = Callable[[bytes], Awaitable[int]]


async def serve_descriptors(name: str, request_bytes: int, open_requested: OpenFile) -> None:
    """Serve descriptors of files under a socket name until cancelled.

    Return if the system does not support abstract names, or if the name is taken. Readers then use
    their connections to the storage.
    """
    if not IS_SUPPORTED:
        return
    permits = asyncio.Semaphore(CALLERS_MAX)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listening:
        listening.setblocking(False)  # noqa: FBT003 - its only parameter
        async with asyncio.TaskGroup() as callers:
            try:
                listening.bind(_abstract_address(name))
                listening.listen(2 * CALLERS_MAX)
            except OSError as error:  # the name is taken
                _log.warning("segment.sharing_unavailable socket=%s error=%s", name, error)
                return
            while True:
                await permits.acquire()
                try:
                    caller, _ = await _accept(listening)
                except OSError as error:  # too many open files, or the caller has disconnected
                    permits.release()
                    _log.warning("segment.sharing_accept_failed socket=%s error=%s", name, error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                answer_task = callers.create_task(_answer(caller, request_bytes, open_requested))
                answer_task.add_done_callback(lambda _: permits.release())


async def _accept(listening: socket.socket) -> tuple[socket.socket, object]:
    return await asyncio.get_running_loop().sock_accept(listening)


def is_offered(name: str) -> bool:
    """Return whether a trusted process on this machine offers files under a name.

    Does not block.
    """
    if not IS_SUPPORTED:
        return False
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.setblocking(False)  # noqa: FBT003 - its only parameter
        try:
            sock.connect(_abstract_address(name))
            return _user_of(sock) in _trusted_users()
        except OSError:
            return False


def request_descriptor(name: str, request: bytes, *, timeout_s: float) -> int:
    """Request a file from a process on this machine, and return its descriptor (blocking).

    The caller closes the descriptor.

    Raises:
        Unreachable: no trusted process on this machine has the name, or it does not have the file.
    """
    if not IS_SUPPORTED:
        raise Unreachable(f"{name}: this operating system does not support abstract Unix sockets")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(_abstract_address(name))
            user = _user_of(sock)  # the user of the listening process
            if user not in _trusted_users():
                raise Unreachable(f"{name}: untrusted user {user} listens at this socket")
            sock.sendall(request)
            answer, descriptors, _, _ = socket.recv_fds(sock, len(_DESCRIPTOR_MESSAGE), 1)
        except OSError as error:
            raise Unreachable(f"{name}: {error}") from error
        if answer != _DESCRIPTOR_MESSAGE or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Unreachable(f"{name}: the requested file is not available")
        os.set_inheritable(descriptors[0], False)  # noqa: FBT003 - NB: `recv_fds` ignores its flags
        return descriptors[0]


async def _answer(caller: socket.socket, request_bytes: int, open_requested: OpenFile) -> None:
    """Answer one request (rule 2).

    A connection that sends no request in time receives no answer.
    """
    loop = asyncio.get_running_loop()
    with closing(caller):
        user = _user_of(caller)
        if user not in _trusted_users():
            _log.info(
                "segment.sharing_denied error=%s", f"user {user} is not the user of this process"
            )
            return
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = b""
                while len(request) < request_bytes:
                    part = await loop.sock_recv(caller, request_bytes - len(request))
                    if not part:
                        return
                    request += part
            # NB: no timeout here. If a thread opened a file after the timeout, the file would never
            # be closed.
            descriptor = await open_requested(request)
        except (WaltzError, OSError, TimeoutError) as error:
            _log.info("segment.sharing_denied error=%s", error)
            return
        try:
            socket.send_fds(caller, [_DESCRIPTOR_MESSAGE], [descriptor])
        except OSError as error:  # the caller has disconnected meanwhile
            _log.info("segment.sharing_failed error=%s", error)
        finally:
            os.close(descriptor)


def _trusted_users() -> tuple[int, int]:
    return os.geteuid(), _ROOT_USER_ID


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])


def _abstract_address(name: str) -> str:
    encoded = f"\0{name}"
    assert len(encoded.encode()) <= _NAME_BYTES_MAX, name
    return encoded
