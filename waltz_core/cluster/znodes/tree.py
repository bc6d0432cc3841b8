"""Lists the clusters below a path, and deletes a cluster with all its nodes.

The tree may also contain nodes of unfinished clusters, and nodes with unknown names from later
versions.

Rules:
    1. The root's data is deleted first. So if the deletion stops early, the root is not a cluster
       any more.
    2. Nodes are deleted deepest first, each at the version that was read. Nodes that were created
       or changed meanwhile are read again and deleted. If nodes keep reappearing, the deletion
       fails.
    3. Neither nodes outside of the root nor other clusters below the root are deleted. A root that
       is not a cluster is deleted only if the root has no data, and has only the children of an
       unfinished cluster.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.cluster.znodes.interface import DeleteNode, SetNode, Znodes
from waltz_core.cluster.znodes.model import ClusterParams

# ZooKeeper's own nodes.
ZOOKEEPER_NODE: Final = "/zookeeper"
# If more nodes than this belong to other programs, the user must name a path.
NODES_MAX: Final = 10_000
ATTEMPTS_MAX: Final = 20
# The deletion of a node takes about 100 bytes, and a request has at most 1 MiB.
STEP_NODES_MAX: Final = 1_000
# The nodes directly below a root (paths.py).
TOP_NAMES: Final = ("ids", "serverDescriptors", "store", "x")


class FoundCluster(NamedTuple):
    """A cluster that was found: its root and the data of the root."""

    root: str
    params: ClusterParams


async def find_clusters(znodes: Znodes, parent_path: str) -> list[FoundCluster]:
    """Return the clusters whose root is `parent_path` or under it, sorted by root.

    Raises BadRequest if there are too many other nodes.
    """
    await znodes.sync()
    clusters: list[FoundCluster] = []
    paths, seen_count = [parent_path], 0
    while paths:
        path = paths.pop(0)
        seen_count += 1
        if seen_count > NODES_MAX:
            raise errors.BadRequest(
                f"there are more than {NODES_MAX} znodes below {parent_path} of ZooKeeper "
                f"{znodes.hosts}. Hint: name a path further down."
            )
        try:
            node = await znodes.get(path)
            params = None if node is None else _decode_params(node.data)
            listing = None if params is not None else await znodes.children(path)
        except errors.BadConfig:
            continue  # A node that this user may not read is not a usable cluster.
        if params is not None:
            clusters.append(FoundCluster(path, params))
        elif listing is not None:
            paths += [child for child in _children(path, listing.names) if child != ZOOKEEPER_NODE]
    return sorted(clusters)


async def delete_tree(
    znodes: Znodes, root: str, on_progress: Callable[[int, int], None] = lambda _done, _count: None
) -> int:
    """Delete a root and all nodes below it; return the number of deleted nodes.

    `on_progress` receives the number of deleted nodes and the total number. Raises BadRequest if
    the root contains nodes of another program, and CoordinatorConflict if nodes keep reappearing.
    """
    await _check_nodes(znodes, root)
    done_count = 0
    for _ in range(ATTEMPTS_MAX):
        await znodes.sync()
        node = await znodes.get(root)
        if node is None:
            return done_count
        try:
            if node.data:
                await znodes.write([SetNode(root, b"", node.stat.version)])  # rule 1
            deletions = await _deletions(znodes, root)
            for start in range(0, len(deletions), STEP_NODES_MAX):
                on_progress(done_count, done_count + len(deletions) - start)
                step = deletions[start : start + STEP_NODES_MAX]
                await znodes.write(step)
                done_count += len(step)
        except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
            continue  # rule 2
    raise errors.CoordinatorConflict(
        f"{root} of ZooKeeper {znodes.hosts} could not be deleted completely, because processes "
        "still write to it. Hint: stop these processes, then run the command again."
    )


async def _check_nodes(znodes: Znodes, root: str) -> None:
    """Raise BadRequest if the root has nodes that must not be deleted (rule 3)."""
    node, listing = await znodes.get(root), await znodes.children(root)
    if node is None:
        return
    names = () if listing is None else listing.names
    foreign_names = [name for name in names if name not in TOP_NAMES]
    for path in _children(root, tuple(foreign_names)):
        for other in await find_clusters(znodes, path):
            raise errors.BadRequest(
                f"cannot delete {root} of ZooKeeper {znodes.hosts}: another cluster is below "
                f"it, {other.params.name} at {other.root}. Hint: delete that cluster first."
            )
    if _decode_params(node.data) is not None:
        return
    if node.data or foreign_names:
        description = (
            f"a znode {foreign_names[0]}"
            if foreign_names
            else f"{len(node.data)} bytes of another program"
        )
        raise errors.BadRequest(
            f"cannot delete {root} of ZooKeeper {znodes.hosts}: expected a cluster or its "
            f"remains, found {description}"
        )


async def _deletions(znodes: Znodes, root: str) -> list[DeleteNode]:
    """Return the deletion of each node, children before parents."""
    deletions: list[DeleteNode] = []
    paths = [root]
    while paths:
        path = paths.pop(0)
        node, listing = await znodes.get(path), await znodes.children(path)
        if node is not None and listing is not None:
            deletions.append(DeleteNode(path, node.stat.version))
            paths += _children(path, listing.names)
    return deletions[::-1]


def _children(path: str, names: tuple[str, ...]) -> list[str]:
    return [f"{path.rstrip('/')}/{name}" for name in names]


def _decode_params(data: bytes) -> ClusterParams | None:
    try:
        return ClusterParams.from_bytes(data)
    except errors.BadFormat:
        return None
