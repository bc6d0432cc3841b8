"""The common part of all `run` subcommands: settings, memory, limits and the parent process."""

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
from waltz_core.cli.subcommands import SubcommandFunction
from waltz_core.config.declarations import LogConfig
from waltz_core.config.settings import load_config
from waltz_core.errors import BadConfig
from waltz_core.log_lines import set_log_format

_log = logging.getLogger(__name__)

DaemonConfigT = TypeVar("DaemonConfigT", bound=LogConfig)
MIB = 1024 * 1024
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The number of new objects after which Python collects its young generation. The default of 700 is
# for scripts.
_COLLECTION_THRESHOLD = 10_000
# Open files in addition to connections: the log, the sockets for listening and for ZooKeeper, and
# some segments.
_OTHER_OPEN_FILES = 100


def with_daemon_options(
    kind: type[DaemonConfigT],
) -> Callable[[Callable[[], Callable[[DaemonConfigT], None]]], SubcommandFunction]:
    """Declare `--config` and one option for each setting, and run the daemon with them.

    The decorated function imports the daemon and returns its `run`, so `--help` does not import the
    daemon.
    """

    def decorate(load_daemon: Callable[[], Callable[[DaemonConfigT], None]]) -> SubcommandFunction:
        @options.config_option
        @options.exit_with_parent_option
        @functools.wraps(load_daemon)
        def run(*, config: Path | None, exit_with_parent: bool, **flags: str | None) -> int:
            disable_numpy_threads()
            if exit_with_parent:
                stop_with_parent()
            settings = load_config(kind, path=config, environment=os.environ, flags=flags).config
            if click.get_current_context().find_root().params["logging_path"] is None:
                set_log_format(settings.log_format)
            run_daemon(settings, load_daemon())
            return 0

        for part in reversed(dataclasses.fields(kind)):
            run = click.option(
                f"--{part.name.replace('_', '-')}",
                part.name,
                metavar="VALUE",
                help=_option_help(part.metadata["doc"], part.metadata["example"], part.default),
            )(run)
        return run

    return decorate


def _option_help(doc: str, example: str, default: object) -> str:
    """Return the help text of an option: the setting's description and default."""
    default_text = str(default).lower() if isinstance(default, bool) else str(default) or "empty"
    return f"{doc} ({f'required, such as {example}' if example else f'default {default_text}'})"


def run_daemon(config: DaemonConfigT, run: Callable[[DaemonConfigT], None]) -> None:
    """Adjust the process, then run a daemon until it is stopped.

    Raises:
        BadConfig: Python runs without assertions (`python -O`).
    """
    if not __debug__:
        raise BadConfig(
            "a daemon does not run under `python -O`, because the assertions that protect the "
            "log would be disabled"
        )
    keep_freed_memory()
    freeze_startup_objects()
    raise_open_files_limit(getattr(config, "connections_max", 0))
    run(config)


def stop_with_parent() -> None:
    """Send SIGTERM to this process when standard input closes, because the parent has exited."""

    def stop_when_input_closes() -> None:
        # Do not read sys.stdin: if a thread holds its lock at exit, the interpreter aborts.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_input_closes, name="parent-watch", daemon=True).start()


def disable_numpy_threads() -> None:
    """Prevent NumPy from starting threads for matrices; must be called before NumPy is imported.

    A daemon computes no matrices. NumPy would start one thread for each further core. These starts
    take a fifth of NumPy's import time.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def freeze_startup_objects() -> None:
    """Collect garbage less often, and exclude the objects that exist now from collections.

    A daemon with a thousand partitions creates several hundred thousand long-lived objects at its
    start. Without this function, repeated full collections took a third of the start time.
    """
    gc.freeze()
    gc.set_threshold(_COLLECTION_THRESHOLD, 20, 20)


def raise_open_files_limit(connections_max: int) -> None:
    """Raise the limit for open files to its maximum; log a warning if the maximum is too low.

    A thousand partitions need a thousand connections. The low default limit of a shell protects
    only programs that use `select`. The daemons do not use `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < connections_max + _OTHER_OPEN_FILES:
        _log.warning(
            "process.open_files_limit_low limit=%d connections_max=%d expected_at_least=%d hint=%r",
            limit,
            connections_max,
            connections_max + _OTHER_OPEN_FILES,
            "raise the limit (ulimit -n, LimitNOFILE=) or lower connections_max",
        )


def keep_freed_memory() -> None:
    """Configure the C library to keep freed memory, up to a limit, instead of returning it.

    For every frame, a daemon allocates and frees a buffer of the size of a batch. If the C library
    returned this memory to the kernel, each buffer would cost a page fault and a cleared page per 4
    KiB. In a measurement, this was a sixth of a storage's CPU time. If the C library has no
    `mallopt`, this function does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
    mallopt(_M_TRIM_THRESHOLD, 256 * MIB)
