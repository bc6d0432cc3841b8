"""`waltz-core`: the table of commands, and what happens when one fails.

Why it stands alone: every command ends the same way. A `WaltzError` is one sentence and exit code
1; anything else is a fault of ours and keeps its traceback.
"""

import argparse
import logging
import logging.config
import signal
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from waltz_core import __version__
from waltz_core.cli.output import say
from waltz_core.errors import BadConfig, WaltzError

# noun -> (module, one line of help); a module is imported only when its noun is asked for, so that
# a daemon does not pay for what it never uses.
NOUNS: dict[str, tuple[str, str]] = {
    "local": ("waltz_core.cli.local", "a whole cluster on this machine: up, status, down"),
    "cluster": (
        "waltz_core.cli.cluster",
        "create, show and change a cluster: its storages, replicas, preferences",
    ),
    "doctor": (
        "waltz_core.cli.doctor",
        "say what is wrong with a cluster, and which command mends it",
    ),
    "storage": ("waltz_core.cli.storage", "run a storage daemon, administer storages"),
    "server": ("waltz_core.cli.server", "run a server daemon"),
    "disk": ("waltz_core.cli.disk", "look at a storage's files, verify them, mend an index"),
    "zookeeper": ("waltz_core.cli.zookeeper", "run the ZooKeeper that comes with PySpark"),
    "client": ("waltz_core.cli.client", "append, read and watch from the shell"),
    "config": ("waltz_core.cli.config", "show every setting and where it came from"),
    "simulate": (
        "waltz_core.cli.simulate",
        "break everything by seeds, and look for a broken promise",
    ),
    "bench": ("waltz_core.cli.bench", "load a cluster and print one JSON line of figures"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(noun_of(words))
    arguments = parser.parse_args(words)
    verb = getattr(arguments, "verb", None)
    if verb is None:
        parser.print_help()
        return 2
    try:
        _start_logging(arguments.logging)
        result = verb(arguments)
    except WaltzError as error:
        say(f"waltz-core: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`waltz-core ... | head`): nothing left to say.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return 0
    assert isinstance(result, int)
    return result


def noun_of(words: Sequence[str]) -> str | None:
    """Return the first word that is none of the options before it, nor the value of one."""
    head = argparse.ArgumentParser(prog="waltz-core", add_help=False)
    head.add_argument("--version", action="store_true")
    head.add_argument("--logging")
    head.add_argument("noun", nargs="?")
    noun = head.parse_known_args(words)[0].noun
    return None if noun is None else str(noun)


def _parser(noun: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waltz-core", description="The quorum-replicated log with optimistic locking."
    )
    parser.add_argument("--version", action="version", version=f"waltz-core {__version__}")
    parser.add_argument("--logging", type=Path, help="a logging.toml (conf/logging.toml)")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, text) in NOUNS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == noun:
            import_module(module).add(command)
        command.set_defaults(parser=command)
    return parser


def _start_logging(path: Path | None) -> None:
    if path is None:
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
            stream=sys.stderr,
        )
        logging.getLogger("waltz_core.kazoo").setLevel(logging.ERROR)
        return
    try:
        with path.open("rb") as stream:
            logging.config.dictConfig(tomllib.load(stream))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise BadConfig(f"--logging {path}: expected a logging.toml: {error}") from None
