"""Limits of memory and time for a process that runs decoders; Linux only.

Rules:
    1. The process gets 1 GiB of additional address space, so that a huge allocation fails, even if
       the memory is never touched.
    2. An input may let the process grow by 64 MiB and 200 times its size at most.
    3. An input may take 10 s of CPU time.
"""

import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from tests.fuzz.decoder import Decoder, Defect

ADDRESS_SPACE_BYTES = 1 << 30
GROWTH_BYTES = 64 << 20
GROWTH_FACTOR = 200
CPU_S = 10.0
_MOST = re.compile(rb"VmHWM:\s+(\d+) kB")


class TookTooLong(BaseException):
    """An input took too long. This is not an `Exception`, because no decoder may handle it."""


def limit_memory() -> None:
    """Apply rule 1 to this process, for the rest of its life."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def cpu_time(limit_s: float) -> Iterator[None]:
    """Raise TookTooLong in the main thread when `limit_s` of CPU time have passed."""

    def stop(*_: object) -> None:
        raise TookTooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def check_limited(decoder: Decoder, data: bytes, *, cpu_s: float = CPU_S) -> None:
    """Check an input by all rules; raises Defect."""
    before = _most_bytes(forget=True)
    try:
        with cpu_time(cpu_s):
            decoder.check(data)
    except TookTooLong as error:
        raise Defect(
            decoder.name, data, f"took more than {cpu_s:g} s of CPU time", "an unknown place"
        ) from error
    grown = [now - then for now, then in zip(_most_bytes(), before, strict=True)]
    if max(grown) > GROWTH_BYTES + GROWTH_FACTOR * len(data):
        raise Defect(decoder.name, data, f"took {max(grown):,} bytes of memory", "an unknown place")


def _most_bytes(*, forget: bool = False) -> tuple[int, int]:
    """Return the maximum memory of the process and of PyArrow.

    `forget` resets the maximum to the current memory. `getrusage` is not used, because a process
    inherits its maximum from the parent.
    """
    if forget:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status", "rb") as file:
        found = _MOST.search(file.read())
    assert found is not None
    return int(found[1]) * 1024, pa.default_memory_pool().max_memory()
