"""Resolves host names in such a way that a slow lookup delays only its own host.

The event loops (uvloop and asyncio's own) run lookups in a small pool of threads. If the DNS server
of a name does not answer, the lookup occupies a thread for half a minute, and each retry occupies
another thread. When all threads are occupied, no connection to any other host can be opened.

Rules:
    1. A lookup has a thread of its own. There is at most one lookup for each name, and all callers
       share this lookup.
    2. If a caller times out, the lookup continues for the other callers and for the next caller.
    3. A numeric address needs no lookup.
    4. An invalid host name raises OSError, like an unknown name.
"""

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import TypeAlias

from waltz_core.config.host_names import check_host, is_ip_address

Addresses: TypeAlias = list[str]

_lookups_lock = threading.Lock()
_running_lookups: dict[str, Future[Addresses]] = {}


async def addresses_of(host: str) -> Addresses:
    """Return the numeric addresses of a host, in the order in which the caller should try them.

    Raises:
        OSError: the name is unknown or invalid, or no DNS server answers.
    """
    loop = asyncio.get_running_loop()
    answer_arrived: asyncio.Future[None] = loop.create_future()

    def note_arrival() -> None:
        if not answer_arrived.done():
            answer_arrived.set_result(None)

    def notify(_lookup: Future[Addresses]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(note_arrival)

    lookup = begin_lookup(host)
    if not lookup.done():
        lookup.add_done_callback(notify)
        await answer_arrived
    return list(lookup.result())


def begin_lookup(host: str) -> Future[Addresses]:
    """Return the running lookup of a host, or start one.

    The lookup fails with the same errors as `addresses_of`.
    """
    if is_ip_address(host):
        new_lookup: Future[Addresses] = Future()
        new_lookup.set_result([host])
        return new_lookup
    with _lookups_lock:
        lookup = _running_lookups.get(host)
        if lookup is not None:
            return lookup
        lookup = _running_lookups[host] = Future()
    thread = threading.Thread(target=_look_up, args=(host, lookup), name="lookup", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _remove_lookup(host)
        lookup.set_exception(
            OSError(f"cannot resolve the host name {host}: no thread could be started: {error}")
        )
    return lookup


def _look_up(host: str, lookup: Future[Addresses]) -> None:
    try:
        check_host(host)
        address_infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        _remove_lookup(host)
        lookup.set_exception(error)
    except ValueError as error:
        _remove_lookup(host)
        lookup.set_exception(OSError(f"{host!r} is not a valid host name: {error}"))
    else:
        _remove_lookup(host)
        lookup.set_result(list(dict.fromkeys(str(address[0]) for *_, address in address_infos)))


def _remove_lookup(host: str) -> None:
    with _lookups_lock:
        del _running_lookups[host]
