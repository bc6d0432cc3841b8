"""Reading and following the nodes of one cluster: the few moves that every other file makes.

A missing node, bytes that cannot be decoded and a connection that breaks are met everywhere; what
is said and done about each is settled once.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Never, TypeVar

from waltz_core import errors
from waltz_core.cluster.nodes.contact import Contact
from waltz_core.cluster.nodes.paths import ClusterPaths
from waltz_core.cluster.nodes.znodes import CreateNode, Delete, Node, Operation, Set, Signal, Znodes

T = TypeVar("T")

_NUMBER: Final = re.compile("[0-9]{1,19}")


class ClusterNodes:
    """The nodes below one root, through one session."""

    def __init__(self, znodes: Znodes, root: str) -> None:
        self.znodes = znodes
        self.contact = Contact(znodes)
        self.paths = ClusterPaths(root)

    @property
    def where(self) -> str:
        """The cluster's connect string, for messages."""
        return f"{self.znodes.where}{self.paths.root}"

    async def require(self, path: str, signal: Signal | None = None) -> Node:
        """Read a node that every cluster has; raises BadConfig where there is none."""
        node = await self.znodes.get(path, signal)
        if node is None:
            raise self.no_cluster()
        return node

    async def read(
        self, path: str, decode: Callable[[bytes], T], signal: Signal | None = None
    ) -> T:
        """Read and decode a node that every cluster has."""
        return decode_node(path, await self.require(path, signal), decode)

    async def ensure(self, paths: Sequence[str]) -> None:
        """Create nodes without data where they are missing, parents before children."""
        for path in paths:
            if await self.znodes.get(path) is None:
                # A conflict here means that somebody else was quicker.
                with suppress(errors.CoordinatorConflict):
                    await self.znodes.write([CreateNode(path)])

    async def put_own(self, path: str, data: bytes, parent: str) -> None:
        """Write a node that lives as long as this session.

        Raises CoordinatorConflict and CoordinatorOutcomeUnknown, after which it is to be repeated.
        """
        node = await self.znodes.get(path)
        steps: list[Operation] = []
        if node is None:
            await self.ensure((self.paths.ours, parent))
            steps.append(CreateNode(path, data, ephemeral=True))
        elif node.stat.owner == self.znodes.session_number:
            steps.append(Set(path, data, node.stat.version))
        else:  # It is an earlier session's of ours, and would go with that.
            steps += [Delete(path, node.stat.version), CreateNode(path, data, ephemeral=True)]
        await self.znodes.write(steps)

    async def remove(self, path: str) -> None:
        """Delete a node if it is there; raises as `put_own` does."""
        node = await self.znodes.get(path)
        if node is not None:
            await self.znodes.write([Delete(path, node.stat.version)])

    async def follow(self, look: Callable[[Signal], Awaitable[None]]) -> Never:
        """Look now, and again after each signal, until cancelled; ZooKeeper may come and go."""
        signal = self.znodes.new_signal()
        try:
            while True:
                signal.clear()
                try:
                    await look(signal)
                except errors.CoordinatorOutcomeUnknown:
                    continue  # It may never have been written, and then nothing will signal.
                except (errors.Unavailable, errors.CoordinatorConflict):
                    pass  # What is away comes back, what was in conflict has changed: both signal.
                await signal.wait()
        finally:
            self.znodes.drop_signal(signal)

    def no_cluster(self) -> errors.NoCluster:
        """Return the error for a root without a cluster."""
        return errors.NoCluster(
            f"no cluster at root {self.paths.root} of ZooKeeper {self.znodes.where}: "
            f"`waltz-core cluster list {self.znodes.where}` shows which there are, "
            "`waltz-core cluster create` makes one"
        )


def is_number(text: str) -> bool:
    """Whether a text of a node is a number; `int` raises for one of over 4,300 digits."""
    return _NUMBER.fullmatch(text) is not None


def decode_node(path: str, node: Node, decode: Callable[[bytes], T]) -> T:
    """Decode a node; the BadFormat it may raise names the path."""
    try:
        return decode(node.data)
    except errors.BadFormat as error:
        raise errors.BadFormat(f"{path}: {error}") from error
