"""`waltz-core local up | status | down`: a whole cluster on this machine."""

import argparse
import os
import time
from dataclasses import fields
from pathlib import Path

from waltz_core.cli.output import say, show, show_json, show_table
from waltz_core.config.declarations import LocalConfig
from waltz_core.config.settings import (
    Loaded,
    load,
)
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster

# flag -> setting; all of them are fixed for the life of a directory
FIXED = {
    "--zookeepers": "zookeeper_count",
    "--storages": "storage_count",
    "--servers": "server_count",
    "--partitions": "partition_count",
    "--port-base": "port_base",
}


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    up = verbs.add_parser("up", help="start the cluster; what runs already is left alone")
    up.add_argument("--config", type=Path, help="a TOML file (conf/local.toml); flags win over it")
    for flag, name in FIXED.items():
        (doc,) = [each.metadata["doc"] for each in fields(LocalConfig) if each.name == name]
        default = getattr(LocalConfig(), name)
        up.add_argument(flag, dest=name, metavar="N", help=f"default {default}. {doc}")
    up.add_argument(
        "--zookeeper-auth", type=Path, metavar="FILE", help="an auth file (docs/zookeeper.md)"
    )
    up.add_argument(
        "--tls",
        dest="tls_file",
        type=Path,
        metavar="FILE.toml",
        help="settings of kind tls that all processes have (docs/operations.md)",
    )
    up.add_argument("--timeout-s", type=float, help="how long it may take to be ready (default 60)")
    up.set_defaults(verb=_up)
    status = verbs.add_parser("status", help="show what runs")
    status.add_argument("--json", action="store_true", help="one JSON value on standard output")
    status.set_defaults(verb=_status)
    down = verbs.add_parser("down", help="end what `up` started; the data stays")
    down.add_argument("--keep-zookeeper", action="store_true", help="end servers and storages only")
    down.set_defaults(verb=_down)
    for verb in (up, status, down):
        verb.add_argument(
            "--directory",
            type=Path,
            help=f"where it lives (default {LocalConfig().directory}, or $WALTZ_LOCAL_DIRECTORY)",
        )


def _up(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    config = settings.config
    _check_made(LocalCluster(Path(config.directory)), settings)
    cluster = LocalCluster(
        Path(config.directory),
        zookeeper_count=config.zookeeper_count,
        storage_count=config.storage_count,
        server_count=config.server_count,
        partition_count=config.partition_count,
        auth_file=arguments.zookeeper_auth,
        tls=arguments.tls_file,
        usual_ports=True,
        port_base=config.port_base,
    )
    began = time.monotonic()
    connect = cluster.up(config.ready_timeout_ms / 1000, say)
    took = time.monotonic() - began
    say(f"ready in {took:.1f} s; data, configuration and logs lie in {cluster.directory}")
    show(connect)
    return 0


def _check_made(cluster: LocalCluster, settings: Loaded[LocalConfig]) -> None:
    """Refuse counts and ports that a directory's cluster was not made with; nothing starts then."""
    if not cluster.exists():
        return
    kinds = [member.kind for member in cluster.members]
    made = {"partition_count": cluster.partition_count, "port_base": cluster.port_base}
    made |= {f"{kind}_count": kinds.count(kind) for kind in ("zookeeper", "storage", "server")}
    for flag, name in FIXED.items():
        found = getattr(settings.config, name)
        origin = settings.origins.get(name)
        if origin and found != made[name]:
            where = flag if origin.startswith("flag ") else f"{origin}: {name}"
            raise BadConfig(
                f"{where}: the cluster in {cluster.directory} was "
                f"made with {made[name]}, found {found}; give another --directory for another one"
            )


def _config(arguments: argparse.Namespace) -> LocalConfig:
    return _settings(arguments).config


def _settings(arguments: argparse.Namespace) -> Loaded[LocalConfig]:
    """Return the settings by file, environment and flag, and where from; raises BadConfig."""
    given = vars(arguments)
    flags = {name: given.get(name) for name in FIXED.values()}
    if arguments.directory is not None:
        flags["directory"] = str(arguments.directory)
    if given.get("timeout_s") is not None:
        flags["ready_timeout_ms"] = str(round(arguments.timeout_s * 1000))
    return load(LocalConfig, path=given.get("config"), environment=os.environ, flags=flags)


def _status(arguments: argparse.Namespace) -> int:
    cluster = LocalCluster(Path(_config(arguments).directory))
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
    ended = LocalCluster(Path(_config(arguments).directory)).down(
        keep_zookeeper=arguments.keep_zookeeper
    )
    say(f"ended {', '.join(ended)}" if ended else "nothing was running")
    return 0
