"""`waltz-core`: the table of commands, and what happens when one fails.

Every command ends the same way. A `WaltzError` is one sentence and exit code 1; anything else is a
fault of ours and keeps its traceback.
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
from waltz_core.cli.output import say, show
from waltz_core.cli.parsing import NOT_UNDERSTOOD, Parser
from waltz_core.errors import BadConfig, WaltzError

# noun -> (module, one line of help); a module is imported only when its noun is asked for, so that
# a daemon does not pay for what it never uses.
NOUNS: dict[str, tuple[str, str]] = {
    "local": ("waltz_core.cli.local_command", "a whole cluster on this machine: up, status, down"),
    "cluster": (
        "waltz_core.cli.cluster.cluster_command",
        "create, show, check and change a cluster: its storages, replicas, preferences",
    ),
    "doctor": (
        "waltz_core.cli.doctor.doctor_command",
        "say what is wrong with a cluster, and which command mends it",
    ),
    "storage": (
        "waltz_core.cli.storage.storage_command",
        "run a storage daemon, administer storages",
    ),
    "server": (
        "waltz_core.cli.server.server_command",
        "run a server daemon, list servers, choose what they own",
    ),
    "disk": (
        "waltz_core.cli.disk.disk_command",
        "look at a storage's files, verify them, mend an index",
    ),
    "zookeeper": ("waltz_core.cli.zookeeper_command", "run the ZooKeeper that comes with PySpark"),
    "client": (
        "waltz_core.cli.client.client_command",
        "append, read and watch from the shell, check what the log promises",
    ),
    "config": ("waltz_core.cli.config_command", "show every setting and where it came from"),
    "bench": ("waltz_core.cli.bench_command", "load a cluster and print one JSON line of figures"),
}
# Verbs that are declared without the others of their noun when one of them is what was asked for.
ALONE: dict[tuple[str, str], str] = {
    ("storage", "run"): "waltz_core.cli.storage.storage_run",
    ("server", "run"): "waltz_core.cli.server.server_run",
}
# What a person may copy and change; at the end of a noun's help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "local": (
        "local up",
        "local up --directory three --zookeepers 3 --servers 3",
        "local status",
        "local down",
    ),
    "cluster": (
        "cluster create zk1:2181/waltz/payments --partitions 16 --storage s1:15280:15281",
        "cluster verify --connect zk1:2181/waltz/payments --by-partition",
        "cluster add-replica 0-7 s4:15280 --connect zk1:2181/waltz/payments",
    ),
    "doctor": ("doctor --connect zk1:2181/waltz/payments", "doctor --json --timeout-s 10"),
    "storage": (
        "storage run --config conf/storage.toml",
        "storage list --connect zk1:2181/waltz/payments",
        "storage scrub --admin s1:15281 --partition 0-15",
    ),
    "server": (
        "server run --config conf/server.toml",
        "server list --connect zk1:2181/waltz/payments",
        "server metrics server1:15182 --match high_water_mark",
    ),
    "disk": ("disk verify /var/lib/waltz", "disk dump-segment /var/lib/waltz -p 0 --first 41"),
    "client": (
        "client append --connect zk1:2181/waltz/payments --write-lock account:7 hello",
        "client watch --connect zk1:2181/waltz/payments --partition 0",
        "client validate --connect zk1:2181/waltz/payments --clients 4",
    ),
    "bench": (
        "bench append-batch --seconds 5",
        "bench test-producers --connect zk1:2181/waltz/payments --writers 8 --lock-pool 100",
    ),
}
OVERVIEW = """\
waltz-core: the quorum-replicated log with optimistic locking. To begin with:

  export WALTZ_CONNECT=$(waltz-core local up)         start a cluster on this machine
  waltz-core client append --partition 0 hello world  append two transactions to it
  waltz-core client read --partition 0                read them
  waltz-core cluster show                             see its servers, storages, partitions
  waltz-core doctor                                   see what is wrong, and what mends it

`waltz-core --help` lists all commands, `waltz-core cluster --help` those for a cluster."""
VERBS_COLUMN = 28
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        show(OVERVIEW)
        return NOT_UNDERSTOOD
    try:
        # Loading a noun takes most of a second: ctrl-C belongs to the command from here on.
        return _run(words)
    except WaltzError as error:
        say(f"waltz-core: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`waltz-core ... | head`): nothing left to say.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return 0


def _run(words: list[str]) -> int:
    noun = noun_of(words)
    parser = parser_for(noun, _word_after(noun, words))
    if noun in NOUNS and words == [noun] and verbs_of(verbs_of(parser)[noun]):
        words.append("--help")
    arguments, unknown = parser.parse_known_args(words)
    arguments.parser.refuse_unknown(unknown)
    verb = getattr(arguments, "verb", None)
    if verb is None:
        parser.print_help()
        return NOT_UNDERSTOOD
    _start_logging(arguments.logging)
    from waltz_core.cli import own_transport  # noqa: PLC0415 - help needs no sockets

    own_transport.begin(arguments)
    result = verb(arguments)
    assert isinstance(result, int)
    return result


def noun_of(words: Sequence[str]) -> str:
    """Return the first word that is none of the options before it, nor the value of one."""
    head = Parser(prog="waltz-core", add_help=False)
    head.add_argument("--version", action="store_true")
    head.add_argument("--logging")
    head.add_argument("noun", nargs="?", default="")
    return str(head.parse_known_args(words)[0].noun)


def _word_after(noun: str, words: Sequence[str]) -> str:
    return next(iter(words[words.index(noun) + 1 :]), "") if noun in words else ""


def parser_for(noun: str, verb: str = "") -> Parser:
    """Return the parser of all nouns, of which this one's verbs are declared.

    Where `verb` can stand alone, it is the only one: a daemon does not pay for the others.
    """
    parser = Parser(
        prog="waltz-core", description="The quorum-replicated log with optimistic locking."
    )
    parser.add_argument("--version", action="version", version=f"waltz-core {__version__}")
    parser.add_argument("--logging", type=Path, help="a logging.toml (conf/logging.toml)")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, text) in NOUNS.items():
        command = commands.add_parser(name, help=text, description=_sentence(text))
        if name == noun and (noun, verb) in ALONE:
            verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
            import_module(ALONE[noun, verb]).add(verbs)
        elif name == noun:
            import_module(module).add(command)
        if name == noun:
            _describe_verbs(command)
        if name in EXAMPLES:
            lines = [f"  waltz-core {each}" for each in EXAMPLES[name]]
            command.epilog = "\n".join(["examples:", *lines])
        command.set_defaults(parser=command)
    for command in (parser, *commands.choices.values()):
        command.formatter_class = _Formatter
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Room for the longest names, and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=VERBS_COLUMN)


def _describe_verbs(command: argparse.ArgumentParser) -> None:
    """Have a verb's own help begin with what its noun's says of it."""
    verbs = verbs_of(command)
    for action in command._actions:
        for told in getattr(action, "_choices_actions", ()):
            verbs[told.dest].description = _sentence(told.help or "")
    for verb in verbs.values():
        verb.formatter_class = _Formatter
        verb.set_defaults(parser=verb)  # who is told of a word that it does not take


def verbs_of(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a noun's verbs, aliases among them (none: it is one itself); or all nouns."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in command._actions:  # argparse tells it nowhere else
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _start_logging(path: Path | None) -> None:
    if path is None:
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
            stream=sys.stderr,
        )
        return
    try:
        with path.open("rb") as stream:
            logging.config.dictConfig(tomllib.load(stream))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        # dictConfig's own error only names the logger or handler; the cause has the wrong value.
        why = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise BadConfig(f"--logging {path}: expected a logging.toml: {why}") from None
