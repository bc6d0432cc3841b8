"""`waltz-core cluster list | show-key | delete`: list, identify and delete clusters."""

import asyncio

import click

from waltz_core.administration.change_run import ChangeResult
from waltz_core.administration.member_queries import is_answering
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import (
    ChangeCommand,
    change_command,
    open_command_session,
    with_cluster_argument,
)
from waltz_core.cli.output import print_error, print_json, print_result, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.errors import BadConfig, BadRequest, WaltzError
from waltz_core.wire.messages import WireProtocol

# A session needs a root. If the connect string has no root, the command uses this root, at which no
# cluster can exist.
ROOT_FOR_CONNECTING = "/zookeeper"
DETAIL_COLUMNS = ("servers", "storages", "key")


# --- list, show-key


@subcommand
@with_cluster_argument
@options.json_option
async def list_command(*, connect: str, as_json: bool) -> int:
    """List the clusters in a ZooKeeper ensemble, or below one of its znodes."""
    connect_string, below = _split_search_path(connect)
    rows: list[dict[str, object]] = []
    async with open_command_session(connect_string) as session:
        for root, params in await session.find_clusters(below):
            row: dict[str, object] = {
                "root": root,
                "name": params.name,
                "partitions": params.partition_count,
            }
            try:
                rows.append({**row, **await _read_details(session.for_root(root))})
            except WaltzError as error:  # the list contains other clusters despite this error
                rows.append({**row, **dict.fromkeys(DETAIL_COLUMNS)})
                print_error(f"{root}: {error}")
    if as_json:
        print_json(rows)
    elif rows:
        cells = [["-" if cell is None else cell for cell in row.values()] for row in rows]
        print_table(tuple(rows[0]), cells)
    else:
        print_result(f"there is no cluster at {below} or below it")
    return 0


async def _read_details(cluster: Coordinator) -> dict[str, object]:
    """Return the number of servers and storages of a cluster, and its key."""
    view = await cluster.read_cluster()
    servers = (await cluster.read_servers()).servers
    storages = (await cluster.storages.read_layout()).assignment.partitions
    values = (len(servers), len(storages), str(view.store.cluster_key))
    return dict(zip(DETAIL_COLUMNS, values, strict=True))


def _split_search_path(text: str) -> tuple[str, str]:
    """Return a connect string with a root, and the znode below which to search for clusters."""
    address, question, query = text.partition("?")
    hosts, _, path = address.partition("/")
    if path.strip("/"):
        return text, "/" + path.strip("/")
    return f"{hosts}{ROOT_FOR_CONNECTING}{question}{query}", "/"


@subcommand
@with_cluster_argument
@options.json_option
async def show_key(*, connect: str, as_json: bool) -> int:
    """Print the cluster key."""
    async with open_command_session(connect) as coordinator:
        key = str((await coordinator.read_cluster()).store.cluster_key)
    if as_json:
        print_json({"cluster_key": key})
    else:
        print_result(key)
    return 0


# --- delete


@subcommand
@options.argument("name", "NAME", "the name of the cluster, as `cluster show` prints it")
@click.option(
    "--force",
    is_flag=True,
    help="delete the znodes even while servers or storages run, or after an interrupted deletion",
)
@change_command()
async def delete(command: ChangeCommand, *, name: str, force: bool) -> ChangeResult:
    """Delete a cluster's znodes from ZooKeeper; the storages keep their files."""
    coordinator = command.coordinator
    key = None
    try:
        view = await coordinator.read_cluster()
    except BadConfig:
        if not force:
            raise
        command.note_step(
            f"there is no complete cluster at {coordinator.connect_string}; the command deletes "
            "the remains of a cluster"
        )
    else:
        key = str(view.store.cluster_key)
        if view.params.name != name:
            raise BadRequest(
                f"nothing was deleted: expected {view.params.name}, the name of the cluster at "
                f"{coordinator.connect_string}, found {name}"
            )
        if not force:
            await _check_all_stopped(command)

    def show_progress(done_count: int, count: int) -> None:
        command.report_wait(
            f"the znodes of {coordinator.connect_string} to be deleted", done_count, count
        )

    count = await coordinator.delete_cluster(show_progress)
    if not count:
        raise BadRequest(f"there is no cluster at {coordinator.connect_string} to delete")
    cluster_text = f"{name}, cluster key {key}" if key else "remains of a cluster"
    return {
        "name": name,
        "cluster_key": key,
        "nodes": count,
        "summary": f"deleted {count} znodes of {cluster_text}. The storages' directories are "
        "unchanged",
    }


async def _check_all_stopped(command: ChangeCommand) -> None:
    """Raise BadRequest if a server is registered or a storage answers."""
    coordinator = command.coordinator
    servers = (await coordinator.read_servers()).servers
    running = [f"server {each.address}" for each in servers.values()]
    storages = list((await coordinator.storages.read_layout()).assignment.partitions)
    command.report_wait("the storages")
    async with asyncio.TaskGroup() as tasks:
        queried = {
            each: tasks.create_task(is_answering(WireProtocol.STORAGE, each), name=f"query {each}")
            for each in storages
        }
    running += [f"storage {each}" for each, task in queried.items() if task.result()]
    if running:
        raise BadRequest(
            f"nothing was deleted, because servers or storages still run: {', '.join(running)}. "
            "Hint: stop them, or use --force to delete the cluster nevertheless."
        )
