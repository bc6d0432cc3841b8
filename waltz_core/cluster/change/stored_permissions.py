"""Reads and changes the permissions in ZooKeeper, for commands (decision 048).

Rules:
    1. Each change is one compare-and-set with the next revision, its author and its time. If
       another change was concurrent, the later change is computed again from the new permissions.
    2. If the outcome of a write is unknown, the node of the permissions is read again. If the node
       contains exactly the written bytes, the write has succeeded. If the node still has the
       version from before the write, the write has failed. In all other cases, the caller gets the
       error.
    3. Another user of ZooKeeper may have created the node of the permissions or of the audit log
       earlier, and may have given itself access to this node. Therefore `create` and `replace`
       first set the access lists of both nodes, and only then read the nodes.
    4. The first permissions of a cluster get a new key for proofs of client IDs. Reason: after a
       rebuilding, the counter of client IDs may start below IDs that have been issued
       (`rebuilding.py`, rule 5). The proofs of these IDs must not be valid any more.
"""

import dataclasses
from collections.abc import Callable
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.access.permission_changes import with_revision
from waltz_core.access.permissions import Permissions
from waltz_core.cluster.znodes import access_node
from waltz_core.cluster.znodes.interface import NO_NODE, CreateNode, Node, SetNode
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node

WRITE_ATTEMPTS_MAX: Final = 20


class Author(NamedTuple):
    """The author of a change, and its time in UTC milliseconds."""

    name: str
    now_ms: int


class PermissionsChange(NamedTuple):
    """The permissions before and after a change; without an effect, both are the same."""

    before: Permissions | None
    after: Permissions


class StoredPermissions:
    """Reads and changes the permissions of one cluster."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._znodes = nodes.znodes
        self._path = nodes.paths.access

    async def read(self) -> Permissions | None:
        """Return the permissions, not older than the call; None: the cluster has none."""
        await self._znodes.sync()
        node = await self._znodes.get(self._path)
        return None if node is None else self._decode(node)

    async def read_existing(self) -> Permissions:
        """Return the permissions; raises BadRequest if the cluster has none."""
        permissions = await self.read()
        if permissions is None:
            raise self._missing_error()
        return permissions

    async def create(self, permissions: Permissions, author: Author) -> Permissions:
        """Write the first permissions; raises BadRequest if the cluster has permissions already."""
        await self._reset_access_lists()
        new_permissions = with_revision(permissions, permissions.revision, *author)
        for _ in range(WRITE_ATTEMPTS_MAX):
            node = await self._get_node()
            if node is not None:
                raise errors.BadRequest(
                    f"nothing was changed: the cluster at {self._nodes.connect_string} has "
                    "permissions already. Hint: `access list` shows them and their author, "
                    "`access import` replaces them."
                )
            if await self._try_write(new_permissions, None):
                return new_permissions
        raise self._conflict_error()

    async def change(
        self, change: Callable[[Permissions], Permissions], author: Author
    ) -> PermissionsChange:
        """Replace the permissions by the result of `change` (rule 1).

        Raises the exceptions of `change`, and BadRequest if the cluster has no permissions. After
        these exceptions, nothing has changed. Raises BadConfig if the result is too large.
        """
        for _ in range(WRITE_ATTEMPTS_MAX):
            node = await self._get_node()
            if node is None:
                raise self._missing_error()
            before = self._decode(node)
            changed = change(before)
            if changed == before:
                return PermissionsChange(before, before)
            revised = with_revision(changed, before.revision + 1, *author)
            if await self._try_write(revised, node):
                return PermissionsChange(before, revised)
        raise self._conflict_error()

    async def replace(
        self,
        permissions: Permissions,
        author: Author,
        check: Callable[[Permissions, Permissions], None],
        *,
        new_key: bytes,
    ) -> PermissionsChange:
        """Write permissions from a file, even if the node is missing or unreadable.

        The new revision is above the revisions of the file and of the node. If the old permissions
        can be read, `check` receives the old and the new permissions, and may raise an error.
        `new_key` is the key of rule 4.
        """
        await self._reset_access_lists()
        first = dataclasses.replace(permissions, client_key=new_key)
        for _ in range(WRITE_ATTEMPTS_MAX):
            node, before = await self._get_node(), None
            if node is not None:
                try:
                    before = self._decode(node)
                except errors.BadFormat:
                    before = None  # The unreadable permissions are replaced.
            newest = max(permissions.revision, before.revision if before else 0)
            new = first if node is None else permissions  # rule 4
            after = with_revision(new, newest + 1, *author)
            if before is not None:
                check(before, after)
            if await self._try_write(after, node):
                return PermissionsChange(before, after)
        raise self._conflict_error()

    async def was_revision_published(self) -> bool:
        """Whether any daemon has ever published its applied revision."""
        return await self._znodes.get(self._nodes.paths.applied_revisions) is not None

    async def _reset_access_lists(self) -> None:
        for path in (self._path, self._nodes.paths.audit):
            await self._znodes.reset_access_list(path)

    async def _get_node(self) -> Node | None:
        await self._znodes.sync()
        return await self._znodes.get(self._path)

    def _decode(self, node: Node) -> Permissions:
        return decode_node(self._path, node, access_node.decode_permissions)

    async def _try_write(self, permissions: Permissions, old_node: Node | None) -> bool:
        """Write the permissions; return False if they must be read again (rules 1 and 2)."""
        data = access_node.encode_permissions(permissions)
        if old_node is None:
            await self._nodes.create_missing((self._nodes.paths.extensions,))
        step = (
            CreateNode(self._path, data)
            if old_node is None
            else SetNode(self._path, data, old_node.stat.version)
        )
        try:
            await self._znodes.write([step])
        except errors.CoordinatorConflict:
            return False
        except errors.CoordinatorOutcomeUnknown as unknown:
            try:
                node = await self._get_node()
            except errors.CoordinatorUnavailable:
                raise unknown from None
            if node is not None and node.data == data:
                return True
            if _node_version(node) == _node_version(old_node):
                return False
            raise
        return True

    def _missing_error(self) -> errors.BadRequest:
        return errors.BadRequest(
            f"the cluster at {self._nodes.connect_string} has no permissions. Hint: `access init` "
            "creates permissions, `access import` restores exported ones."
        )

    def _conflict_error(self) -> errors.CoordinatorUnavailable:
        return errors.CoordinatorUnavailable(
            f"the change to the permissions in {self._path} was not made, because other "
            "processes changed them during each attempt"
        )


def _node_version(node: Node | None) -> int:
    return NO_NODE if node is None else node.stat.version
