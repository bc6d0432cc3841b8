"""What `storage run` and `server run` share: settings by file and flag, the event loop, the end.

Both daemons are started, told their settings and stopped in the same way.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.verbs import VerbFunction
from waltz_core.config.settings import Config, load
from waltz_core.errors import BadConfig

_log = logging.getLogger(__name__)

C = TypeVar("C", bound=Config)
MIB = 1024 * 1024
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# After so many new objects cycles are looked for among the young ones; Python's 700 is for scripts.
_NEW_OBJECTS = 10_000
# Open files besides connections: the log, sockets of our own, those of ZooKeeper, a few segments.
_OTHER_FILES = 100


def daemon(kind: type[C]) -> Callable[[Callable[[], Callable[[C], None]]], VerbFunction]:
    """Declare `--config` and one option for each setting of a daemon.

    What is decorated returns the daemon's `run`, which it imports: help needs no daemon.
    """

    def decorate(load_daemon: Callable[[], Callable[[C], None]]) -> VerbFunction:
        @options.config_file
        @options.exit_with_parent
        @functools.wraps(load_daemon)
        def run(*, config: Path | None, exit_with_parent: bool, **flags: str | None) -> int:
            spare_threads()
            if exit_with_parent:
                end_with_parent()
            run_daemon(
                load(kind, path=config, environment=os.environ, flags=flags).config, load_daemon()
            )
            return 0

        for part in reversed(dataclasses.fields(kind)):
            run = click.option(
                f"--{part.name.replace('_', '-')}",
                part.name,
                metavar="VALUE",
                help=_help(part.metadata["doc"], part.metadata["example"], part.default),
            )(run)
        return run

    return decorate


def _help(doc: str, example: str, default: object) -> str:
    """Return what a flag's help says: the setting's own words, and what holds without it."""
    shown = str(default).lower() if isinstance(default, bool) else str(default) or "empty"
    return f"{doc} ({f'required, such as {example}' if example else f'default {shown}'})"


def run_daemon(config: C, run: Callable[[C], None]) -> None:
    """Run a daemon until it is told to stop.

    Raises:
        BadConfig: Python runs without its assertions.
    """
    if not __debug__:
        raise BadConfig("a daemon does not run under `python -O`: its assertions guard the log")
    keep_freed_memory()
    spare_what_stays()
    allow_open_files(getattr(config, "connections_max", 0))
    run(config)


def end_with_parent() -> None:
    """End this process when its standard input ends: whoever started it is gone."""

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a thread, ends the interpreter with an abort.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def spare_threads() -> None:
    """Have numpy start no threads for matrices, of which a daemon has none; before its import.

    They cost a fifth of that import, and stay, one for each core but the first.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def spare_what_stays() -> None:
    """Look for cycles less often, and never among what the imports have made.

    A daemon of a thousand partitions makes some hundred thousand objects when it starts, and all of
    them stay: looking at all there is again and again was a third of that start.
    """
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)


def allow_open_files(connections_max: int) -> None:
    """Take as many open files as this process may, and log where they are too few for its settings.

    A thousand partitions need as many connections. The limit that a shell sets is for programs that
    wait with `select`, which no daemon does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < connections_max + _OTHER_FILES:
        _log.warning(
            "process.open_files_too_few limit=%d connections_max=%d expected_at_least=%d hint=%r",
            limit,
            connections_max,
            connections_max + _OTHER_FILES,
            "raise the limit (ulimit -n, LimitNOFILE=) or lower connections_max",
        )


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, up to a limit, instead of giving it back each time.

    A daemon takes and frees a buffer of the size of a batch for every frame. Given back, each one
    costs the kernel a page fault and a cleared page for every 4 KiB of it (measured: a sixth of a
    storage's CPU). Where the C library has no `mallopt` nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
    mallopt(_M_TRIM_THRESHOLD, 256 * MIB)
