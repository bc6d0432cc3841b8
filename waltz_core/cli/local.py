"""`waltz-core local up | status | down`: a whole cluster on this machine."""

import argparse
import os
import time
from pathlib import Path

from waltz_core.cli.output import say, show, show_json, show_table
from waltz_core.local import LocalCluster

DIRECTORY_DEFAULT = ".waltz"


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    up = verbs.add_parser("up", help="start the cluster; what runs already is left alone")
    up.add_argument("--zookeepers", type=int, default=1, help="default 1; 3 make an ensemble")
    up.add_argument("--storages", type=int, default=3, help="default 3")
    up.add_argument("--servers", type=int, default=2, help="default 2")
    up.add_argument("--partitions", type=int, default=4, help="default 4")
    up.add_argument(
        "--zookeeper-auth", type=Path, metavar="FILE", help="an auth file (docs/zookeeper.md)"
    )
    up.add_argument("--timeout-s", type=float, default=60.0, help="default 60")
    up.set_defaults(verb=_up)
    status = verbs.add_parser("status", help="show what runs")
    status.add_argument("--json", action="store_true", help="one JSON value on standard output")
    status.set_defaults(verb=_status)
    down = verbs.add_parser("down", help="end what `up` started; the data stays")
    down.set_defaults(verb=_down)
    for verb in (up, status, down):
        verb.add_argument(
            "--directory",
            type=Path,
            default=Path(os.environ.get("WALTZ_LOCAL_DIRECTORY", DIRECTORY_DEFAULT)),
            help=f"where it lives (default {DIRECTORY_DEFAULT}, or $WALTZ_LOCAL_DIRECTORY)",
        )


def _up(arguments: argparse.Namespace) -> int:
    cluster = LocalCluster(
        arguments.directory,
        zookeeper_count=arguments.zookeepers,
        storage_count=arguments.storages,
        server_count=arguments.servers,
        partition_count=arguments.partitions,
        auth_file=arguments.zookeeper_auth,
        usual_ports=True,
    )
    began = time.monotonic()
    connect = cluster.up(arguments.timeout_s)
    took = time.monotonic() - began
    say(f"ready in {took:.1f} s; data, configuration and logs lie in {cluster.directory}")
    show(connect)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    cluster = LocalCluster(arguments.directory)
    rows = [
        (member.name, "up" if member.process() else "down", member.port, member.pid)
        for member in cluster.members
    ]
    if arguments.json:
        members = [dict(zip(("name", "state", "port", "pid"), row, strict=True)) for row in rows]
        show_json({"connect": cluster.connect, "members": members})
    else:
        show_table(("member", "state", "port", "pid"), rows)
        show(cluster.connect)
    return 0 if all(row[1] == "up" for row in rows) else 1


def _down(arguments: argparse.Namespace) -> int:
    ended = LocalCluster(arguments.directory).down()
    say(f"ended {', '.join(ended)}" if ended else "nothing was running")
    return 0
