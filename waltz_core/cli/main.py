"""`waltz-core`: the table of commands, and what happens when one fails.

Every command ends the same way. A `WaltzError` is one sentence and exit code 1; anything else is a
fault of ours and keeps its traceback.
"""

import logging
import logging.config
import os
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from waltz_core import __version__
from waltz_core.cli.output import say, show
from waltz_core.cli.verbs import NOT_UNDERSTOOD, LazyVerb, Noun, explained, sentence
from waltz_core.errors import BadConfig, WaltzError


class NounEntry(NamedTuple):
    """A noun: its line of help, its verbs with theirs, and examples a person may copy."""

    text: str
    verbs: Mapping[str, tuple[str, str]]  # verb -> (module:function, one line of help)
    examples: Sequence[str] = ()
    aliases: Mapping[str, str] = {}  # name in Waltz 0.13 -> verb


NOUNS: Mapping[str, NounEntry] = {
    "local": NounEntry(
        "run a whole cluster on this machine: up, status, down",
        {
            "up": (
                "local_command:up",
                "start the cluster; a process that runs already is left alone",
            ),
            "status": ("local_command:status", "show what runs"),
            "down": ("local_command:down", "stop what `up` started; the data stays"),
        },
        (
            "local up",
            "local up --directory three --zookeepers 3 --servers 3",
            "local status",
            "local down",
        ),
    ),
    "cluster": NounEntry(
        "create, show, check and change a cluster: its storages, replicas, preferences",
        {
            "create": ("cluster.cluster_command:create", "make a cluster's nodes in ZooKeeper"),
            "show": ("cluster.cluster_command:show_cluster", "show servers, storages, partitions"),
            "protect": (
                "cluster.cluster_command:protect",
                "let only the user of the connect string's auth file at the nodes",
            ),
            "list": (
                "cluster.cluster_roots:list_clusters",
                "list the clusters of a ZooKeeper, or below a root",
            ),
            "show-key": (
                "cluster.cluster_roots:show_key",
                "print the cluster key, which every storage carries",
            ),
            "delete": (
                "cluster.cluster_roots:delete",
                "delete a cluster's nodes from ZooKeeper; the records stay on the storages",
            ),
            "verify": (
                "cluster.cluster_verify:verify",
                "check every partition, from ZooKeeper to storages",
            ),
            "check-connectivity": (
                "cluster.cluster_reach:check_connectivity",
                "check connections: from here to each server, from it to each storage",
            ),
            "add-storage": (
                "cluster.cluster_changes:add_storage",
                "make a storage part of the cluster, empty",
            ),
            "remove-storage": (
                "cluster.cluster_changes:remove_storage",
                "move a storage's replicas away, then take it out of the cluster",
            ),
            "set-admin-port": (
                "cluster.cluster_changes:set_admin_port",
                "set the port at which a storage is administered",
            ),
            "replace-storage": (
                "cluster.cluster_changes:replace_storage",
                "give what a storage held to another one, or to its empty successor",
            ),
            "add-replica": (
                "cluster.cluster_changes:add_replica",
                "give a storage a replica of some partitions",
            ),
            "remove-replica": (
                "cluster.cluster_changes:remove_replica",
                "take the replica of some partitions from a storage",
            ),
            "move-replica": (
                "cluster.cluster_changes:move_replica",
                "move a replica from one storage to another",
            ),
            "auto-assign": (
                "cluster.cluster_changes:auto_assign",
                "spread all replicas evenly over groups and storages",
            ),
            "remove-server": (
                "cluster.cluster_changes:remove_server",
                "delete the node of a dead server",
            ),
            "prefer": (
                "cluster.cluster_checks:prefer",
                "make a server the preferred owner of some partitions",
            ),
            "unprefer": (
                "cluster.cluster_checks:unprefer",
                "end a server's preference for some partitions",
            ),
            "audit": (
                "cluster.cluster_checks:audit",
                "show who has changed the cluster, when and how",
            ),
            "accept-replicas": (
                "cluster.cluster_rescue:accept_replicas",
                "take one replica's log for the log when no quorum is trusted",
            ),
            "rebuild-metadata": (
                "cluster.cluster_rescue:rebuild_metadata",
                "rebuild ZooKeeper's nodes from what the storages have",
            ),
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
    "doctor": NounEntry(
        "report what is wrong with a cluster, and which command repairs it",
        {"": ("doctor.doctor_command:doctor", "")},
        ("doctor --connect zk1:2181/waltz/payments", "doctor --json --timeout-s 10"),
    ),
    "storage": NounEntry(
        "run a storage daemon, administer storages",
        {
            "run": ("storage.storage_run:run_storage", "run a storage (sample: conf/storage.toml)"),
            "list": (
                "storage.storage_views:list_replicas",
                "show which partitions storages hold, and their state",
            ),
            "validate": (
                "storage.storage_views:validate",
                "connect to every storage of a cluster at both ports",
            ),
            "metrics": ("http_pages:metrics", "show the metrics of one storage"),
            "max-transaction-id": (
                "storage.storage_views:max_transaction_id",
                "show the last id that is on disk",
            ),
            "add-partition": ("storage.storage_partitions:add_partition", "hold partitions"),
            "remove-partition": (
                "storage.storage_partitions:remove_partition",
                "hold partitions no longer",
            ),
            "availability": (
                "storage.storage_partitions:availability",
                "take partitions offline, or online",
            ),
            "sync-partitions": (
                "storage.storage_partitions:sync_partitions",
                "make storages hold what ZooKeeper assigns to them",
            ),
            "recover-partition": (
                "storage.storage_partitions:recover_partition",
                "copy what is settled from another storage to a partition that is offline",
            ),
            "scrub": ("storage.storage_scrub:scrub", "read records again now, and show progress"),
            "mark-suspect": (
                "storage.storage_partitions:mark_suspect",
                "trust replicas no longer, as after a restore from a backup",
            ),
            "re-seed": (
                "storage.storage_partitions:re_seed",
                "delete replicas' logs and have them copied from the others",
            ),
        },
        (
            "storage run --config conf/storage.toml",
            "storage list --connect zk1:2181/waltz/payments",
            "storage scrub --admin s1:15281 --partition 0-15",
        ),
    ),
    "server": NounEntry(
        "run a server daemon, list servers, choose what they own",
        {
            "run": ("server.server_run:run_server", "run a server (sample: conf/server.toml)"),
            "list": (
                "server.server_command:list_servers",
                "list the servers of a cluster, what each owns, and whether it can serve it",
            ),
            "metrics": ("http_pages:metrics", "show the metrics of one server"),
            "add-preferred-partition": (
                "cluster.cluster_checks:prefer",
                "make a server the preferred owner of some partitions",
            ),
            "remove-preferred-partition": (
                "cluster.cluster_checks:unprefer",
                "end a server's preference for some partitions",
            ),
        },
        (
            "server run --config conf/server.toml",
            "server list --connect zk1:2181/waltz/payments",
            "server metrics server1:15182 --match high_water_mark",
        ),
    ),
    "disk": NounEntry(
        "show a storage's files, verify them, repair an index",
        {
            "dump-control-file": (
                "disk.disk_control:dump_control_file",
                "show what the control files contain, broken or not",
            ),
            "dump-segment": (
                "disk.disk_segment:dump_segment",
                "print the records of segments, one a line",
            ),
            "segment-statistic": (
                "disk.disk_segment:segment_statistic",
                "count sizes, ids, batches and sessions of segments",
            ),
            "verify": (
                "disk.disk_verify:verify",
                "compute every checksum and every chain again; exit code 1 if anything is wrong",
            ),
            "repair-index": (
                "disk.disk_verify:repair_index",
                "rebuild .idx files from their .seg files, where they are not right",
            ),
        },
        ("disk verify /var/lib/waltz", "disk dump-segment /var/lib/waltz -p 0 --first 41"),
    ),
    "zookeeper": NounEntry(
        "run the ZooKeeper that comes with PySpark",
        {
            "run": (
                "zookeeper_command:run_zookeeper",
                "run one node with a zoo.cfg (sample: conf/zoo.cfg) and the SERVER_JVMFLAGS",
            ),
        },
    ),
    "client": NounEntry(
        "append, read and watch from the shell, check the guarantees of the log",
        {
            "append": (
                "client.client_command:append",
                "append transactions, one for each line or argument",
            ),
            "read": ("client.client_command:read", "print transactions of a partition"),
            "watch": (
                "client.client_command:watch",
                "print transactions as they are committed, until interrupted",
            ),
            "high-water-mark": (
                "client.client_command:high_water_mark",
                "print the id of the last transaction",
            ),
            "validate": (
                "client.client_check:validate",
                "have clients write under one lock and check that all see the same log",
            ),
            "produce": ("client.client_check:produce", "run one producer of `validate` by itself"),
            "consume": (
                "client.client_check:consume",
                "check what producers write, as `validate` does",
            ),
        },
        (
            "client append --connect zk1:2181/waltz/payments --write-lock account:7 hello",
            "client watch --connect zk1:2181/waltz/payments --partition 0",
            "client validate --connect zk1:2181/waltz/payments --clients 4",
        ),
        {"create-producer": "produce", "create-consumer": "consume"},
    ),
    "config": NounEntry(
        "show every setting and where it came from",
        {"show": ("config_command:show_settings", "show settings: defaults, file, environment")},
    ),
    "bench": NounEntry(
        "load a cluster and print one JSON line of figures",
        {"": ("bench_command:bench", "")},
        (
            "bench append-batch --seconds 5",
            "bench test-producers --connect zk1:2181/waltz/payments --writers 8 --lock-pool 100",
        ),
    ),
}
OVERVIEW = """\
waltz-core: the quorum-replicated log with optimistic locking. To begin with:

  export WALTZ_CONNECT=$(waltz-core local up)         start a cluster on this machine
  waltz-core client append --partition 0 hello world  append two transactions to it
  waltz-core client read --partition 0                read them
  waltz-core cluster show                             see its servers, storages, partitions
  waltz-core doctor                                   see what is wrong, and what repairs it

`waltz-core --help` lists all commands, `waltz-core cluster --help` those for a cluster."""
NAME = "waltz-core"
COMPLETE_VARIABLE = "_WALTZ_CORE_COMPLETE"  # what click's completion scripts set
HELP_WIDTH_MAX = 100
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if COMPLETE_VARIABLE in os.environ:
        from click.shell_completion import shell_complete  # noqa: PLC0415 - for a shell only

        return shell_complete(program, {}, NAME, COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
    if not words:
        show(OVERVIEW)
        return NOT_UNDERSTOOD
    try:
        # Loading a verb takes most of a second: ctrl-C belongs to the command from here on.
        return run(words)
    except WaltzError as error:
        say(f"waltz-core: {error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`waltz-core ... | head`): nothing left to say.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return 0


def run(words: list[str]) -> int:
    """Run one command; raises what it raises. Click's own `main` has other exit codes."""
    try:
        with program.make_context(NAME, words) as context:
            code = program.invoke(context)
            assert isinstance(code, int)
            return code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        say(explained(error))
        return NOT_UNDERSTOOD


@click.group(cls=Noun, context_settings={"max_content_width": HELP_WIDTH_MAX})
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
@click.option(
    "--logging",
    "logging_path",
    type=click.Path(path_type=Path),
    help="a logging.toml (sample: conf/logging.toml)",
)
def program(logging_path: Path | None) -> None:
    """Run and administer the quorum-replicated log with optimistic locking."""
    _start_logging(logging_path)


def _command(name: str, entry: NounEntry) -> click.Command:
    if "" in entry.verbs:
        return LazyVerb(name, entry.verbs[""][0], entry.text, examples=entry.examples)
    verbs: list[click.Command] = [LazyVerb(verb, *told) for verb, told in entry.verbs.items()]
    for alias, verb in entry.aliases.items():
        verbs.append(LazyVerb(alias, *entry.verbs[verb], hidden=True))
    noun = Noun(name, verbs, help=sentence(entry.text), short_help=entry.text)
    noun.examples = entry.examples
    return noun


for _name, _entry in NOUNS.items():
    program.add_command(_command(_name, _entry))


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
