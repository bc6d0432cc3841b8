"""`waltz-core`: the table of all commands, and the handling of their errors.

A `WaltzError` is printed as one sentence, with exit code 1. Any other exception is a bug, and is
printed with its traceback.
"""

import logging
import logging.config
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from waltz_core import __version__
from waltz_core.cli.output import print_error, print_result
from waltz_core.cli.subcommands import (
    EXIT_USAGE_ERROR,
    CommandGroup,
    LazySubcommand,
    as_sentence,
    usage_error_text,
)
from waltz_core.errors import BadConfig, WaltzError
from waltz_core.log_lines import TEXT_FORMAT, TIME_FORMAT


class GroupEntry(NamedTuple):
    """A row of the table of commands: a group with its help, subcommands and examples."""

    help_line: str
    subcommands: (
        Mapping[str, Mapping[str, str]] | str
    )  # module -> {subcommand -> line of help}; or the module of a command without subcommands
    examples: Sequence[str] = ()
    aliases: Mapping[str, str] = {}  # name in Waltz 0.13 -> subcommand
    groups: Mapping[str, str] = {}  # first word of two-word subcommands -> line of help


COMMAND_GROUPS: Mapping[str, GroupEntry] = {
    "local": GroupEntry(
        "run a whole cluster on this machine: up, status, down",
        {
            "local_command": {
                "up": "start the processes of the cluster that do not run yet",
                "status": "show the processes of the cluster and whether they run",
                "down": "stop the processes that `up` started; keep the data",
            },
        },
        (
            "local up",
            "local up --directory three --zookeepers 3 --servers 3",
            "local status",
            "local down",
        ),
    ),
    "cluster": GroupEntry(
        "create, show, check and change a cluster: its storages, replicas and preferred owners",
        {
            "cluster.cluster_command": {
                "create": "create the znodes of a new cluster in ZooKeeper",
                "show": "show the servers, storages and partitions of a cluster",
                "protect": "restrict access to the cluster's znodes to the users in the auth file",
            },
            "cluster.cluster_list": {
                "list": "list the clusters in a ZooKeeper ensemble, or below one of its znodes",
                "show-key": "print the cluster key, a UUID that identifies the cluster",
                "delete": (
                    "delete a cluster's znodes from ZooKeeper; the storages keep their records"
                ),
            },
            "cluster.cluster_verify": {
                "verify": "check each partition: its assignment, server, connections, storages and "
                "quorum",
            },
            "cluster.cluster_connectivity": {
                "check-connectivity": (
                    "check the connections to each server, and from each server to each storage"
                ),
            },
            "cluster.cluster_changes": {
                "add-storage": "add an empty storage to the cluster",
                "remove-storage": "move a storage's replicas away, then remove it from the cluster",
                "set-admin-port": "change the admin port of a storage in ZooKeeper",
                "replace-storage": (
                    "move a storage's replicas to another storage, or to an empty one at the "
                    "same address"
                ),
                "add-replica": "add replicas of partitions to storages",
                "remove-replica": "remove replicas of partitions from storages",
                "move-replica": "move replicas of partitions from one storage to another",
                "auto-assign": "distribute all replicas evenly over groups and storages",
                "remove-server": "remove a stopped server from ZooKeeper",
            },
            "cluster.cluster_preferences": {
                "prefer": "make a server the preferred owner of some partitions",
                "unprefer": "no longer prefer a server as the owner of some partitions",
                "audit": "list the changes that commands have made: user, time and outcome",
            },
            "cluster.cluster_disaster_recovery": {
                "accept-replicas": (
                    "accept one replica's log as the log of a partition without a trusted quorum"
                ),
                "rebuild-metadata": "rebuild the znodes of a cluster from the data of its storages",
            },
        },
        (
            "cluster create zk1:2181/waltz/payments --partitions 16 --storage s1:15280:15281",
            "cluster verify --connect zk1:2181/waltz/payments --by-partition",
            "cluster add-replica 0-7 s4:15280 --connect zk1:2181/waltz/payments",
        ),
        {
            "show-cluster-key": "show-key",
            "assign-partition": "add-replica",
            "unassign-partition": "remove-replica",
        },
    ),
    "doctor": GroupEntry(
        "report problems of a cluster, and the commands that repair them",
        "doctor.doctor_command",
        (
            "doctor --connect zk1:2181/waltz/payments",
            "doctor --json --timeout-s 10",
        ),
    ),
    "storage": GroupEntry(
        "run a storage, administer storages",
        {
            "storage.storage_run": {
                "run": "run a storage (sample: conf/storage.toml)",
            },
            "storage.storage_views": {
                "list": "list the partitions of storages, and the state of each",
                "validate": "check that each storage of a cluster answers at both of its ports",
                "max-transaction-id": "print the last transaction ID that a storage has on disk",
            },
            "http_pages": {
                "metrics": "show the metrics of one storage",
            },
            "storage.storage_partitions": {
                "add-partition": "assign partitions to a storage",
                "remove-partition": "remove partitions from a storage",
                "availability": "take partitions offline or online",
                "sync-partitions": "make storages match the assignment in ZooKeeper",
                "recover-partition": (
                    "copy transactions from another storage to an offline replica, up to the "
                    "confirmed low-water mark of the source"
                ),
                "mark-suspect": (
                    "mark replicas as suspect, for example after a disk was restored from a copy"
                ),
                "re-seed": "delete the logs of replicas, and copy them from other replicas again",
            },
            "storage.storage_scrub": {
                "scrub": "verify the records on disk now, and show the progress",
            },
        },
        (
            "storage run --config conf/storage.toml",
            "storage list --connect zk1:2181/waltz/payments",
            "storage scrub --admin s1:15281 --partition 0-15",
        ),
    ),
    "server": GroupEntry(
        "run a server, list servers, choose which partitions they own",
        {
            "server.server_run": {
                "run": "run a server (sample: conf/server.toml)",
            },
            "server.server_command": {
                "list": "list the servers of a cluster, their partitions and states",
            },
            "http_pages": {
                "metrics": "show the metrics of one server",
            },
            "cluster.cluster_preferences": {
                "add-preferred-partition": "make a server the preferred owner of some partitions",
                "remove-preferred-partition": (
                    "no longer prefer a server as the owner of some partitions"
                ),
            },
        },
        (
            "server run --config conf/server.toml",
            "server list --connect zk1:2181/waltz/payments",
            "server metrics server1:15182 --match high_water_mark",
        ),
    ),
    "gateway": GroupEntry(
        "run a gateway, which offers HTTP to applications in other languages",
        {
            "client.gateway_run": {
                "run": "run a gateway (sample: conf/gateway.toml)",
            },
        },
        (
            "gateway run --connect zk1:2181/waltz/payments",
            "gateway run --config conf/gateway.toml",
        ),
    ),
    "access": GroupEntry(
        "show and change the permissions and tokens of principals",
        {
            "access.access_grants": {
                "init": "create the permissions of a cluster",
                "grant": "grant verbs for some partitions to a principal or a group",
                "revoke": "revoke verbs for some partitions from a principal or a group",
                "limit": "limit the bytes, appends, connections and feeds of a principal",
                "accept-0-13": "accept or reject the client IDs of Waltz 0.13 clients",
            },
            "access.access_groups": {
                "group add": "add principals to a group; create the group if it does not exist",
                "group remove": "remove principals from a group",
                "group delete": "delete a group and its grants",
            },
            "access.access_tokens": {
                "token create": "create a token for a principal and write it to a new file",
                "token revoke": "revoke a token, or remove all that have expired",
            },
            "access.access_views": {
                "list": "show the permissions, the tokens, and the daemons that use them",
                "check": "check whether a principal has a verb for a partition, or for `all`",
            },
            "access.access_export": {
                "export": "save the permissions to a file, including the secrets",
                "import": "replace the permissions with those of a file",
            },
        },
        (
            "access init --connect zk1:2181/waltz/payments",
            "access group add servers s1.example s2.example --connect zk1:2181/waltz/payments",
            "access grant servers replicate --group --connect zk1:2181/waltz/payments",
            "access grant spark-etl read,append --partitions 0-3 --connect zk1:2181/waltz/payments",
            "access token create spark-etl --file etl.token --connect zk1:2181/waltz/payments",
            "access check spark-etl append --partition 7 --connect zk1:2181/waltz/payments",
        ),
        groups={
            "group": "change the groups of principals",
            "token": "create and revoke tokens",
        },
    ),
    "archive": GroupEntry(
        "show, verify, repair and expire the transactions in the object store",
        {
            "archive.archive_status": {
                "status": "show the archived transactions of each partition, and the lag",
            },
            "archive.archive_verify": {
                "verify": "read and verify every file of the archive, and replace corrupt objects",
            },
            "archive.archive_expire": {
                "expire": "expire archived transactions, so that the log begins after them",
            },
            "archive.archive_unpin": {
                "unpin": "remove the pin that keeps objects in the archive for a restored cluster",
            },
        },
        (
            "archive status --connect zk1:2181/waltz/payments",
            "archive verify --connect zk1:2181/waltz/payments --archive s3://bucket/waltz",
            "archive expire --connect zk1:2181/waltz/payments --before 2026-01-01T00:00:00Z --yes",
            "archive unpin 5f1c3f0e-7d6b-4a5e-9f0b-0c6d8f2a1b44 --connect zk1:2181/waltz/payments",
        ),
    ),
    "disk": GroupEntry(
        "show and verify the files of a storage, and rebuild indexes",
        {
            "disk.disk_control": {
                "dump-control-file": "print the control files, including damaged ones",
            },
            "disk.disk_segment": {
                "dump-segment": "print the records of segments, one per line",
                "segment-statistic": "print sizes, IDs, batches and sessions of segments",
            },
            "disk.disk_verify": {
                "verify": (
                    "verify every checksum and chain hash; exit code 1 if anything is wrong"
                ),
                "repair-index": "rebuild wrong or missing .idx files from their .seg files",
            },
        },
        (
            "disk verify /var/lib/waltz",
            "disk dump-segment /var/lib/waltz -p 0 --first 41",
        ),
    ),
    "zookeeper": GroupEntry(
        "run the ZooKeeper that comes with PySpark",
        {
            "zookeeper_command": {
                "run": (
                    "run one ZooKeeper server with the given zoo.cfg (sample: conf/zoo.cfg) "
                    "and $SERVER_JVMFLAGS"
                ),
            },
        },
    ),
    "client": GroupEntry(
        "append, read and watch transactions; check the guarantees of the log",
        {
            "client.client_command": {
                "append": "append transactions, one for each argument or line of input",
                "read": "print the transactions of a partition",
                "watch": "print transactions as they are committed, until interrupted",
                "high-water-mark": "print the ID of the last transaction of each partition",
            },
            "client.client_export": {
                "export": "write transactions as Parquet, CSV or JSON",
            },
            "client.client_check": {
                "validate": "append with several clients under one lock, and check that all read "
                "the same log",
                "produce": "append transactions with one client, for `consume` to check",
                "consume": "read and check the transactions of `client produce`",
            },
        },
        (
            "client append --connect zk1:2181/waltz/payments --write-lock account:7 hello",
            "client watch --connect zk1:2181/waltz/payments --partition 0",
            "client export --connect zk1:2181/waltz/payments --format parquet --output log.parquet",
            "client validate --connect zk1:2181/waltz/payments --clients 4",
        ),
        {"create-producer": "produce", "create-consumer": "consume"},
    ),
    "follow": GroupEntry(
        "apply the log to one or several tables, each transaction exactly once",
        "client.follow_command",
        (
            "follow /lake/t --connect zk1:2181/w --key id --column id:int64 --column owner:string",
            "follow /lake/t --connect zk1:2181/w --key id --column id:int64 --until now",
        ),
    ),
    "config": GroupEntry(
        "show every setting and where its value comes from",
        {
            "config_command": {
                "show": "show each setting and where its value comes from: default, file or "
                "environment",
            },
        },
    ),
    "backup": GroupEntry(
        "back up a running cluster: save the position of each log in the archive",
        "backup.backup_command",
        ("backup --connect zk1:2181/waltz/payments --output s3://bucket/backups/monday",),
    ),
    "restore": GroupEntry(
        "create a cluster from a backup and the archive",
        "backup.restore_command",
        ("restore --connect zk1:2181/w --backup monday --archive s3://bucket/w --storage s1:1:2",),
    ),
    "bench": GroupEntry(
        "run a benchmark and print its results as one JSON line",
        "bench_command",
        (
            "bench append-batch --seconds 5",
            "bench test-producers --connect zk1:2181/waltz/payments --writers 8 --lock-pool 100",
        ),
    ),
}
OVERVIEW = """\
waltz-core: a quorum-replicated log with optimistic locking. To start:

  export WALTZ_CONNECT=$(waltz-core local up)         start a cluster on this machine
  waltz-core client append --partition 0 hello world  append two transactions to it
  waltz-core client read --partition 0                read them
  waltz-core cluster show                             show its servers, storages, partitions
  waltz-core doctor                                   show problems and repair commands

`waltz-core --help` lists all commands, `waltz-core cluster --help` those for a cluster."""
PROGRAM_NAME = "waltz-core"
COMPLETION_VARIABLE = "_WALTZ_CORE_COMPLETE"  # set by click's completion scripts
HELP_WIDTH_MAX = 100
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, also after an error or an interrupt."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if COMPLETION_VARIABLE in os.environ:
        from click.shell_completion import shell_complete  # noqa: PLC0415 - for a shell only

        return shell_complete(
            program, {}, PROGRAM_NAME, COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE]
        )
    if not arguments:
        print_result(OVERVIEW)
        return EXIT_USAGE_ERROR
    try:
        # Loading a subcommand takes almost a second, and ctrl-C must work during this time, too.
        return run_command(arguments)
    except WaltzError as error:
        print_error(f"waltz-core: {error}")
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has exited (`waltz-core ... | head`). Python flushes its output
        # buffer at exit, and this flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors of the command are raised."""
    try:
        with program.make_context(PROGRAM_NAME, arguments) as context:
            code = program.invoke(context)
            assert isinstance(code, int)
            return code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        print_error(usage_error_text(error))
        return EXIT_USAGE_ERROR


@click.group(cls=CommandGroup, context_settings={"max_content_width": HELP_WIDTH_MAX})
@click.version_option(__version__, prog_name=PROGRAM_NAME, message="%(prog)s %(version)s")
@click.option(
    "--logging",
    "logging_path",
    type=click.Path(path_type=Path),
    help="file with log levels and outputs (sample: conf/logging.toml)",
)
def program(logging_path: Path | None) -> None:
    """Run and administer the quorum-replicated log with optimistic locking."""
    _start_logging(logging_path)


def _build_command(name: str, entry: GroupEntry) -> click.Command:
    """Return the click command for a row of the table."""
    if isinstance(entry.subcommands, str):
        return LazySubcommand(name, entry.subcommands, entry.help_line, examples=entry.examples)
    group = CommandGroup(name, help=as_sentence(entry.help_line), short_help=entry.help_line)
    group.examples = entry.examples
    old_names = {subcommand: alias for alias, subcommand in entry.aliases.items()}
    subgroups = {
        word: CommandGroup(word, help=as_sentence(text), short_help=text)
        for word, text in entry.groups.items()
    }
    for module, subcommands in entry.subcommands.items():
        for subcommand, text in subcommands.items():
            first, _, second_word = subcommand.partition(" ")
            if second_word:
                subgroups[first].add_command(
                    LazySubcommand(second_word, module, text, subcommand=subcommand)
                )
                group.add_command(subgroups[first])
                continue
            group.add_command(LazySubcommand(subcommand, module, text))
            if subcommand in old_names:
                group.add_command(
                    LazySubcommand(
                        old_names[subcommand], module, text, subcommand=subcommand, hidden=True
                    )
                )
    return group


for _name, _entry in COMMAND_GROUPS.items():
    program.add_command(_build_command(_name, _entry))


def _start_logging(path: Path | None) -> None:
    if path is None:
        logging.basicConfig(
            level=logging.INFO, format=TEXT_FORMAT, datefmt=TIME_FORMAT, stream=sys.stderr
        )
        return
    try:
        with path.open("rb") as stream:
            logging.config.dictConfig(tomllib.load(stream))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        # The error of dictConfig names only the logger or handler. The cause of this error names
        # the wrong value.
        reason = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise BadConfig(f"--logging {path}: expected a logging.toml: {reason}") from None
