"""The revision of the permissions that each daemon uses (decision 048, AC 6).

Rules:
    1. A daemon publishes the revision that it uses in its ephemeral node `R/x/applied/NAME`. In
       each new session with ZooKeeper, it publishes the revision again. A daemon without access
       control publishes no revision.
    2. NAME is `server-ID` or `storage-HOST:PORT`, so a server and a storage never have the same
       name. An address contains no "/". A restarted server has a new ID.
"""

from typing import Final

from waltz_core import errors
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.records import strict_json
from waltz_core.records.record import ReplicaId, ServerId

WRITE_ATTEMPTS_MAX: Final = 20
SERVER_PREFIX: Final = "server-"
_FORMAT: Final = 1


def server_node_name(server_id: ServerId) -> str:
    """Return the node name for a server (rule 2)."""
    return f"{SERVER_PREFIX}{server_id}"


def storage_node_name(address: ReplicaId) -> str:
    """Return the node name for a storage (rule 2)."""
    return f"storage-{address}"


def encode_applied_revision(revision: int) -> bytes:
    """Return the bytes of a node, as JSON."""
    return strict_json.to_json({"format": _FORMAT, "revision": revision})


def decode_applied_revision(data: bytes) -> int:
    """Decode the bytes of `encode_applied_revision`; raises BadFormat for any other bytes."""
    try:
        values = strict_json.from_json(data)
    except ValueError as error:
        raise errors.BadFormat(
            f"applied revision of permissions is not valid JSON: {error!s:.200}"
        ) from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise errors.BadFormat(
            f"applied revision of permissions: expected format 1, found {data!r:.200}"
        )
    revision = values.get("revision")
    if type(revision) is not int or revision < 1:
        raise errors.BadFormat(
            f"applied revision of permissions: expected 1 or more, found {revision!r:.80}"
        )
    return revision


class AppliedRevisions:
    """Publishes the applied revision of one daemon, and reads the revisions of all (rule 1)."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._target: tuple[str, int] | None = None
        self._published: tuple[int, tuple[str, int]] | None = None  # with the session number

    def set_revision(self, name: str, revision: int) -> None:
        """Set the name and the revision that the next `publish` publishes."""
        self._target = name, revision

    async def publish(self) -> None:
        """Publish the revision in use, unless this session has published it already.

        Raises CoordinatorConflict, CoordinatorOutcomeUnknown and CoordinatorUnavailable; the next
        call tries again.
        """
        if self._target is None:
            return
        name, revision = self._target
        paths = self._nodes.paths
        for attempts_left in reversed(range(WRITE_ATTEMPTS_MAX)):
            target = self._nodes.znodes.session_number, (name, revision)
            if target == self._published:
                return
            self._published = None  # a write that fails may still arrive
            try:
                await self._nodes.put_ephemeral(
                    paths.applied_revision(name),
                    encode_applied_revision(revision),
                    paths.applied_revisions,
                )
            except errors.CoordinatorConflict:  # the node of an earlier session has just ended
                if not attempts_left:
                    raise
            else:
                self._published = target

    async def read(self) -> dict[str, int]:
        """Return the revision of each NAME; nodes that cannot be decoded are left out."""
        paths = self._nodes.paths
        await self._nodes.znodes.sync()
        listing = await self._nodes.znodes.children(paths.applied_revisions)
        revisions: dict[str, int] = {}
        for name in () if listing is None else listing.names:
            node = await self._nodes.znodes.get(paths.applied_revision(name))
            if node is None:
                continue
            try:
                revisions[name] = decode_node(
                    paths.applied_revision(name), node, decode_applied_revision
                )
            except errors.BadFormat:
                continue  # a daemon of another version, or damage
        return revisions
