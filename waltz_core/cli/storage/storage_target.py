"""Which storages a command means, and which partitions: what the verbs of `storage` share.

A storage has two names, the address of its admin port and, within a cluster, the address that
servers know it by. Both are understood wherever one is asked for.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeAlias

from waltz_core.cli.changing import CONNECT_WAIT_S, add_wait, recorded
from waltz_core.cli.own_transport import add_tls
from waltz_core.cluster.coordinator import ClusterView
from waltz_core.cluster.nodes.model import ReplicaAssignments
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.connect_string import split_address
from waltz_core.errors import BadConfig
from waltz_core.records.record import ReplicaId

PARTITIONS_MAX: Final = 1 << 20


class ClusterStorages(NamedTuple):
    """What ZooKeeper says of a cluster's storages."""

    view: ClusterView
    assignments: ReplicaAssignments
    admin_ports: dict[ReplicaId, int]
    storage_ids: dict[ReplicaId, bytes]

    def admin_address(self, storage: str) -> str:
        """Return the address of a storage's admin port; raises BadConfig for no storage of it."""
        port = self.admin_ports.get(ReplicaId(storage))
        if port is None:
            known = ", ".join(self.admin_ports) or "none"
            raise BadConfig(
                f"--storage: expected a storage of this cluster ({known}), found {storage!r}"
            )
        return f"{split_address(storage)[0]}:{port}"


class Target(NamedTuple):
    """A storage: where its admin port is, and its name in the cluster, where one was given."""

    admin: str
    name: str | None

    def __str__(self) -> str:
        return self.name or self.admin


Verb: TypeAlias = Callable[[argparse.Namespace], Awaitable[int]]


def add_target(
    verb: argparse.ArgumentParser,
    call: Verb,
    *,
    is_cluster: bool = False,
    has_timeout: bool = False,
) -> None:
    """Declare how a verb is told its storage; `is_cluster`: it needs a cluster, and means all."""
    if not is_cluster:
        verb.add_argument("--admin", metavar="HOST:ADMIN_PORT", help="the storage's admin port")
        add_tls(verb)
    verb.add_argument(
        "--connect",
        metavar="CONNECT",
        default=os.environ.get("WALTZ_CONNECT") if is_cluster else None,
        required=is_cluster and "WALTZ_CONNECT" not in os.environ,
        help="the cluster, zk1:2181,zk2:2181/waltz/payments "
        + ("(default $WALTZ_CONNECT)" if is_cluster else "(without --admin $WALTZ_CONNECT)"),
    )
    verb.add_argument(
        "--storage", metavar="HOST:PORT", help="the storage, by the name that its cluster has"
    )
    if has_timeout:
        # Of a command that waits for more, ZooKeeper's share; an option of earlier versions.
        verb.add_argument("--wait-s", type=float, default=CONNECT_WAIT_S, help=argparse.SUPPRESS)
    else:
        add_wait(verb)
    verb.add_argument("--json", action="store_true", help="one JSON value on standard output")
    verb.set_defaults(verb=lambda arguments: asyncio.run(_awaited(call, arguments)))


async def _awaited(call: Verb, arguments: argparse.Namespace) -> int:
    if arguments.connect is None and getattr(arguments, "admin", None) is None:
        arguments.connect = os.environ.get("WALTZ_CONNECT")
    return await call(arguments)


@asynccontextmanager
async def on_record(arguments: argparse.Namespace) -> AsyncIterator[None]:
    """Have the block on record in the cluster; who names only an admin port names no cluster."""
    if arguments.connect is None:
        yield
        return
    timeout_ms = round(arguments.wait_s * 1000)
    connected = zookeeper_session.connected(arguments.connect, connect_timeout_ms=timeout_ms)
    async with connected as coordinator, recorded(coordinator):
        yield


def add_partitions(verb: argparse.ArgumentParser) -> None:
    """Declare how a verb is told its partitions."""
    verb.add_argument(
        "--partition",
        "--partitions",
        required=True,
        metavar="PARTITIONS",
        help="like 3 or 0-6,9",
    )


def partitions_of(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the partitions of `--partition`, each once, in their order; raises BadConfig."""
    found: list[int] = []
    for part in arguments.partition.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise BadConfig(f"--partition: expected ranges such as 0-6,7, found {part.strip()!r}")
        if not int(first) <= int(last) < PARTITIONS_MAX:
            raise BadConfig(f"--partition: expected a range that rises, found {part.strip()!r}")
        found += range(int(first), int(last) + 1)
    return tuple(dict.fromkeys(found))


async def read_facts(arguments: argparse.Namespace) -> ClusterStorages:
    """Ask ZooKeeper about a cluster's storages; raises CoordinatorUnavailable, BadConfig."""
    timeout_ms = round(arguments.wait_s * 1000)
    async with zookeeper_session.connected(
        arguments.connect, connect_timeout_ms=timeout_ms
    ) as found:
        ids = {address: one.bytes for address, one in (await found.read_storage_ids()).items()}
        return ClusterStorages(
            await found.read_cluster(),
            await found.read_replica_assignment(),
            dict((await found.read_connections()).admin_ports),
            ids,
        )


async def targets_of(arguments: argparse.Namespace) -> tuple[Target, ...]:
    """Return the storage that is meant, or all of a cluster; raises BadConfig for neither."""
    admin, connect, storage = arguments.admin, arguments.connect, arguments.storage
    if admin is not None and (connect is not None or storage is not None):
        raise BadConfig("expected either --admin or --connect with --storage, found both")
    if admin is not None:
        split_address(admin)
        return (Target(admin, None),)
    if connect is None:
        raise BadConfig("expected --admin HOST:ADMIN_PORT, or --connect with --storage HOST:PORT")
    facts = await read_facts(arguments)
    names = facts.admin_ports if storage is None else (storage,)
    return tuple(Target(facts.admin_address(name), str(name)) for name in names)


async def target_of(arguments: argparse.Namespace) -> Target:
    """Return the one storage that is meant; raises BadConfig where it is not one."""
    if arguments.admin is None and arguments.connect is not None and arguments.storage is None:
        raise BadConfig("expected --storage HOST:PORT beside --connect: this is for one storage")
    (target,) = await targets_of(arguments)
    return target
