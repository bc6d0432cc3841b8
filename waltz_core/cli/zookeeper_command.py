"""`waltz-core zookeeper run`: ZooKeeper out of PySpark's jars, in the foreground."""

import argparse
from pathlib import Path

from waltz_core.errors import BadConfig
from waltz_core.local import zookeeper_process


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    run = verbs.add_parser(
        "run", help="run one node with a zoo.cfg (see conf/zoo.cfg) and the SERVER_JVMFLAGS"
    )
    run.add_argument("--config", type=Path, required=True, help="a zoo.cfg")
    run.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    run.set_defaults(verb=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.config.is_file():
        raise BadConfig(f"no such file: {arguments.config} (conf/zoo.cfg is a sample)")
    return zookeeper_process.run(arguments.config, exit_with_parent=arguments.exit_with_parent)
