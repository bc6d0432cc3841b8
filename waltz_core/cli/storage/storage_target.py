"""The options with which the `storage` subcommands select storages and partitions.

A storage has two addresses: the address of its admin port, and the address of its data port, to
which servers connect. All subcommands accept both addresses.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import audit_change, open_command_session
from waltz_core.cli.subcommands import SubcommandFunction
from waltz_core.cluster.coordinator import ClusterView
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.config.connect_string import split_address
from waltz_core.errors import BadConfig
from waltz_core.records.record import ReplicaId

PARTITION_COUNT_MAX: Final = 1 << 20


class ClusterStorages(NamedTuple):
    """The storages of a cluster, as ZooKeeper records them."""

    view: ClusterView
    assignments: ReplicaAssignments
    admin_ports: dict[ReplicaId, int]
    storage_ids: dict[ReplicaId, bytes]

    def admin_address(self, storage: str) -> str:
        """Return the address of a storage's admin port; raises BadConfig if unknown."""
        port = self.admin_ports.get(ReplicaId(storage))
        if port is None:
            known_text = ", ".join(self.admin_ports) or "none"
            raise BadConfig(
                f"--storage: expected a storage of this cluster ({known_text}), found {storage!r}"
            )
        return f"{split_address(storage)[0]}:{port}"


class StorageTarget(NamedTuple):
    """A storage: the address of its admin port and, if known, its name in the cluster."""

    admin_address: str
    name: str | None

    def __str__(self) -> str:
        return self.name or self.admin_address


class StorageChoice(NamedTuple):
    """The options with which a subcommand selects its storages."""

    connect: str | None
    storage: str | None
    as_json: bool
    wait_s: float = options.CONNECT_TIMEOUT_S
    admin: str | None = None
    tls: str | None = None  # for `member_connections`

    @property
    def cluster_connect(self) -> str | None:
        """The connect string; without `--connect` and `--admin`, the value of $WALTZ_CONNECT."""
        if self.connect is None and self.admin is None:
            return os.environ.get(options.CONNECT_VARIABLE)
        return self.connect


partitions_option = click.option(
    "--partition",
    "--partitions",
    "partitions",
    required=True,
    metavar="PARTITIONS",
    help="the partitions, for example 3 or 0-6,9",
)


def with_storage_options(
    *, works_on_cluster: bool = False, has_timeout: bool = False
) -> Callable[[SubcommandFunction], SubcommandFunction]:
    """Declare the options that select storages, and pass them as one `StorageChoice`."""
    connect = click.option(
        "--connect",
        metavar="CONNECT",
        help=f"connect string, for example {options.CONNECT_EXAMPLE} "
        f"[default without --admin: ${options.CONNECT_VARIABLE}]",
    )
    storage_help = (
        "the storage, by its address [default: all]"
        if works_on_cluster
        else "address of the storage, as `cluster show` prints it"
    )
    storage = click.option("--storage", metavar="HOST:PORT", help=storage_help)
    admin = click.option(
        "--admin",
        metavar="HOST:ADMIN_PORT",
        help="address of the storage's admin port; replaces --connect and --storage",
    )
    # A hidden option of earlier versions: the timeout for ZooKeeper only.
    hidden_option = click.option(
        "--wait-s", type=float, default=options.CONNECT_TIMEOUT_S, hidden=True
    )
    wait_s = hidden_option if has_timeout else options.zookeeper_timeout_option
    option_decorators = [
        options.gather_options(StorageChoice),
        options.json_option,
        wait_s,
        storage,
    ]
    option_decorators += (
        [options.connect_option] if works_on_cluster else [connect, options.tls_option, admin]
    )

    def decorate(function: SubcommandFunction) -> SubcommandFunction:
        for declare in option_decorators:
            function = declare(function)
        return function

    return decorate


@asynccontextmanager
async def audit_storage_change(choice: StorageChoice) -> AsyncIterator[None]:
    """Write an audit entry for the block, unless the options name only an admin port."""
    if choice.cluster_connect is None:
        yield
        return
    async with (
        open_command_session(choice.cluster_connect, choice.wait_s) as coordinator,
        audit_change(coordinator),
    ):
        yield


def parse_partition_numbers(text: str) -> tuple[int, ...]:
    """Parse `--partition` into numbers in the given order, each once; raises BadConfig."""
    numbers: list[int] = []
    for part in text.split(","):
        first, separator, last = part.strip().partition("-")
        last = last if separator else first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise BadConfig(
                f"--partition: expected partitions or ranges such as 0-6,7, found {part.strip()!r}"
            )
        if not int(first) <= int(last) < PARTITION_COUNT_MAX:
            raise BadConfig(
                "--partition: expected a range from a lower to a higher number, found "
                f"{part.strip()!r}"
            )
        numbers += range(int(first), int(last) + 1)
    return tuple(dict.fromkeys(numbers))


async def read_cluster_storages(choice: StorageChoice) -> ClusterStorages:
    """Read a cluster's storages from ZooKeeper; raises CoordinatorUnavailable, BadConfig."""
    async with open_command_session(choice.cluster_connect or "", choice.wait_s) as coordinator:
        ids = {
            address: storage_id.bytes
            for address, storage_id in (await coordinator.read_storage_ids()).items()
        }
        return ClusterStorages(
            await coordinator.read_cluster(),
            await coordinator.read_replica_assignment(),
            dict((await coordinator.read_connections()).admin_ports),
            ids,
        )


async def find_storages(choice: StorageChoice) -> tuple[StorageTarget, ...]:
    """Return the chosen storage, or all of a cluster; raises BadConfig if neither is chosen."""
    if choice.admin is not None and (choice.connect is not None or choice.storage is not None):
        raise BadConfig("expected either --admin or --connect with --storage, found both")
    if choice.admin is not None:
        split_address(choice.admin)
        return (StorageTarget(choice.admin, None),)
    if choice.cluster_connect is None:
        raise BadConfig(
            "expected --admin HOST:ADMIN_PORT, or --connect with --storage HOST:PORT; found neither"
        )
    return choose_storages(await read_cluster_storages(choice), choice)


def choose_storages(storages: ClusterStorages, choice: StorageChoice) -> tuple[StorageTarget, ...]:
    """Return the chosen storage of a cluster, or all of its storages."""
    names = storages.admin_ports if choice.storage is None else (choice.storage,)
    return tuple(StorageTarget(storages.admin_address(name), str(name)) for name in names)


async def find_one_storage(choice: StorageChoice) -> StorageTarget:
    """Return the chosen storage; raises BadConfig unless exactly one storage is chosen."""
    if choice.admin is None and choice.cluster_connect is not None and choice.storage is None:
        raise BadConfig(
            "this command works on one storage: expected --storage HOST:PORT in addition to "
            "--connect, found none"
        )
    (target,) = await find_storages(choice)
    return target
