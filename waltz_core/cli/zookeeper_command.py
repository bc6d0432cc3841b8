"""`waltz-core zookeeper run`: run ZooKeeper from PySpark's jars, in the foreground."""

from pathlib import Path

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadConfig
from waltz_core.local import zookeeper_process


@subcommand
@click.option(
    "--config",
    type=options.PATH_TYPE,
    required=True,
    help="the configuration file of ZooKeeper (sample: conf/zoo.cfg)",
)
@options.exit_with_parent_option
def run_command(*, config: Path, exit_with_parent: bool) -> int:
    """Run one ZooKeeper server in the foreground."""
    if not config.is_file():
        raise BadConfig(f"file {config} does not exist. Hint: conf/zoo.cfg is a sample.")
    return zookeeper_process.run(config, exit_with_parent=exit_with_parent)
