"""Reads, writes and follows the nodes of one cluster.

This module handles missing nodes, undecodable bytes and broken connections for all its callers.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Never, TypeVar

from waltz_core import errors
from waltz_core.cluster.znodes.connection_history import ConnectionHistory
from waltz_core.cluster.znodes.interface import (
    CreateNode,
    DeleteNode,
    Node,
    Operation,
    SetNode,
    Signal,
    Znodes,
)
from waltz_core.cluster.znodes.paths import ClusterPaths

T = TypeVar("T")

_NUMBER: Final = re.compile("[0-9]{1,19}")


class ClusterNodes:
    """The nodes below one root, through one session."""

    def __init__(self, znodes: Znodes, root: str) -> None:
        self.znodes = znodes
        self.connection_history = ConnectionHistory(znodes)
        self.paths = ClusterPaths(root)

    @property
    def connect_string(self) -> str:
        """The cluster's connect string, for messages to users."""
        return f"{self.znodes.hosts}{self.paths.root}"

    async def get_required(self, path: str, signal: Signal | None = None) -> Node:
        """Read a node that every cluster has; raises ClusterNotFound if it does not exist."""
        node = await self.znodes.get(path, signal)
        if node is None:
            raise self.no_cluster_error()
        return node

    async def read(
        self, path: str, decode: Callable[[bytes], T], signal: Signal | None = None
    ) -> T:
        """Read and decode a node that every cluster has."""
        return decode_node(path, await self.get_required(path, signal), decode)

    async def create_missing(self, paths: Sequence[str]) -> None:
        """Create those nodes that do not exist, without data, parents before children."""
        for path in paths:
            if await self.znodes.get(path) is None:
                # A conflict means that another process has just created the node.
                with suppress(errors.CoordinatorConflict):
                    await self.znodes.write([CreateNode(path)])

    async def put_ephemeral(self, path: str, data: bytes, parent: str) -> None:
        """Write a node that exists as long as this session.

        Raises CoordinatorConflict and CoordinatorOutcomeUnknown; the caller must then repeat the
        call.
        """
        node = await self.znodes.get(path)
        steps: list[Operation] = []
        if node is None:
            await self.create_missing((self.paths.extensions, parent))
            steps.append(CreateNode(path, data, is_ephemeral=True))
        elif node.stat.owner == self.znodes.session_number:
            steps.append(SetNode(path, data, node.stat.version))
        else:  # The node belongs to an earlier session of this process, and would end with it.
            steps += [
                DeleteNode(path, node.stat.version),
                CreateNode(path, data, is_ephemeral=True),
            ]
        await self.znodes.write(steps)

    async def delete_if_exists(self, path: str) -> None:
        """Delete a node if it exists; raises like `put_ephemeral`."""
        node = await self.znodes.get(path)
        if node is not None:
            await self.znodes.write([DeleteNode(path, node.stat.version)])

    async def follow(self, check: Callable[[Signal], Awaitable[None]]) -> Never:
        """Call `check` now and after each signal, until cancelled; continues after outages."""
        signal = self.znodes.new_signal()
        try:
            while True:
                signal.clear()
                try:
                    await check(signal)
                except errors.CoordinatorOutcomeUnknown:
                    continue  # If the write never arrived, no signal will follow.
                except (errors.Unavailable, errors.CoordinatorConflict):
                    pass  # The end of the outage, or the conflicting change, sets the signal.
                await signal.wait()
        finally:
            self.znodes.drop_signal(signal)

    def no_cluster_error(self) -> errors.ClusterNotFound:
        """Return the error for a root without a cluster."""
        return errors.ClusterNotFound(
            f"there is no cluster at {self.paths.root} of ZooKeeper {self.znodes.hosts}. "
            f"Hint: `waltz-core cluster list {self.znodes.hosts}` lists the existing "
            "clusters, `waltz-core cluster create` creates one."
        )


def is_number(text: str) -> bool:
    """Whether a text is a number of at most 19 digits; `int` raises for very long numbers."""
    return _NUMBER.fullmatch(text) is not None


def decode_node(path: str, node: Node, decode: Callable[[bytes], T]) -> T:
    """Decode a node; raises BadFormat with the path of the node."""
    try:
        return decode(node.data)
    except errors.BadFormat as error:
        raise errors.BadFormat(f"{path}: {error}") from error
