"""`waltz-core local up | status | down`: a whole cluster on this machine."""

import os
import time
from dataclasses import fields
from pathlib import Path

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result, print_table
from waltz_core.cli.subcommands import SubcommandFunction, subcommand
from waltz_core.config.declarations import LocalConfig
from waltz_core.config.settings import LoadedConfig, load_config
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster

# Options that cannot change after the cluster was created, with their settings.
FIXED_OPTIONS = {
    "--zookeepers": "zookeeper_count",
    "--storages": "storage_count",
    "--servers": "server_count",
    "--partitions": "partition_count",
    "--port-base": "port_base",
}
_directory_option = click.option(
    "--directory",
    type=options.PATH_TYPE,
    help="the directory of the cluster [default: $WALTZ_LOCAL_DIRECTORY, otherwise "
    f"{LocalConfig().directory}]",
)


def _with_fixed_options(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the options that cannot change after the cluster was created."""
    docs = {
        setting_field.name: setting_field.metadata["doc"] for setting_field in fields(LocalConfig)
    }
    for flag, name in reversed(FIXED_OPTIONS.items()):
        text = f"{docs[name]} [default: {getattr(LocalConfig(), name)}]"
        function = click.option(flag, name, metavar="N", help=text)(function)
    return function


@subcommand
@options.config_option
@_with_fixed_options
@click.option(
    "--zookeeper-auth",
    type=options.PATH_TYPE,
    metavar="FILE",
    help="an auth file with the users of ZooKeeper (docs/zookeeper.md)",
)
@click.option(
    "--tls",
    "tls_file",
    type=options.PATH_TYPE,
    metavar="FILE.toml",
    help="a file with TLS settings for all processes (docs/operations.md)",
)
@click.option(
    "--archive",
    metavar="URL",
    help="archive the transactions at this URL, such as file:///tmp/archive (docs/archive.md); "
    "later starts use it again [default: the URL of the previous start; none for a new "
    "cluster]",
)
@click.option(
    "--timeout-s",
    type=float,
    metavar="S",
    help="seconds to wait until the cluster is ready "
    f"[default: {LocalConfig().ready_timeout_ms // 1000}]",
)
@_directory_option
def up(
    *,
    directory: Path | None,
    config: Path | None,
    timeout_s: float | None,
    zookeeper_auth: Path | None,
    tls_file: Path | None,
    archive: str | None,
    **flags: str | None,
) -> int:
    """Start the processes of the local cluster that do not run yet."""
    if timeout_s is not None:
        flags["ready_timeout_ms"] = str(round(timeout_s * 1000))
    settings = _load_settings(directory, config, flags)
    local_config = settings.config
    _check_fixed_settings(LocalCluster(Path(local_config.directory)), settings)
    if archive:
        from waltz_core.archive.store import ArchiveStore  # noqa: PLC0415 - loads Arrow

        ArchiveStore(archive)  # raises BadConfig for a wrong URL, before the URL is stored
    cluster = LocalCluster(
        Path(local_config.directory),
        zookeeper_count=local_config.zookeeper_count,
        storage_count=local_config.storage_count,
        server_count=local_config.server_count,
        partition_count=local_config.partition_count,
        auth_file=zookeeper_auth,
        tls=tls_file,
        archive_url=archive or "",
        try_default_ports=True,
        port_base=local_config.port_base,
    )
    start_s = time.monotonic()
    connect = cluster.up(local_config.ready_timeout_ms / 1000, print_error)
    elapsed_s = time.monotonic() - start_s
    print_error(
        f"ready in {elapsed_s:.1f} s; data, configuration and logs are in {cluster.directory}"
    )
    print_result(connect)
    return 0


def _check_fixed_settings(cluster: LocalCluster, settings: LoadedConfig[LocalConfig]) -> None:
    """Raise BadConfig if counts or ports differ from those of the existing cluster."""
    if not cluster.exists():
        return
    kinds = [member.kind for member in cluster.members]
    fixed_values = {"partition_count": cluster.partition_count, "port_base": cluster.port_base}
    fixed_values |= {
        f"{kind}_count": kinds.count(kind) for kind in ("zookeeper", "storage", "server")
    }
    for flag, name in FIXED_OPTIONS.items():
        requested_value = getattr(settings.config, name)
        origin = settings.origins.get(name)
        if origin and requested_value != fixed_values[name]:
            source = flag if origin.startswith("flag ") else f"{origin}: {name}"
            raise BadConfig(
                f"{source}: the cluster in {cluster.directory} was created with "
                f"{fixed_values[name]}, "
                f"which cannot be changed; found {requested_value}. Hint: create another cluster "
                "with "
                "another --directory."
            )


def _load_settings(
    directory: Path | None, config: Path | None = None, flags: dict[str, str | None] | None = None
) -> LoadedConfig[LocalConfig]:
    """Load the settings from file, environment and options; raises BadConfig."""
    flags = {**(flags or {}), "directory": None if directory is None else str(directory)}
    return load_config(LocalConfig, path=config, environment=os.environ, flags=flags)


@subcommand
@options.json_option
@_directory_option
def status(*, as_json: bool, directory: Path | None) -> int:
    """Show the processes of the local cluster; exit code 1 if one does not run."""
    cluster = LocalCluster(Path(_load_settings(directory).config.directory))
    rows = [
        (member.name, "up" if member.process() else "down", member.port, member.pid)
        for member in cluster.members
    ]
    if as_json:
        members = [dict(zip(("name", "state", "port", "pid"), row, strict=True)) for row in rows]
        print_json({"connect": cluster.connect, "members": members})
    else:
        print_table(("member", "state", "port", "pid"), rows)
        print_result(cluster.connect)
    return 0 if all(row[1] == "up" for row in rows) else 1


@subcommand
@click.option("--keep-zookeeper", is_flag=True, help="stop only servers and storages")
@_directory_option
def down(*, keep_zookeeper: bool, directory: Path | None) -> int:
    """Stop the processes of the local cluster."""
    cluster = LocalCluster(Path(_load_settings(directory).config.directory))
    ended = cluster.down(keep_zookeeper=keep_zookeeper)
    print_error(f"stopped {', '.join(ended)}" if ended else "no process of the cluster was running")
    return 0
