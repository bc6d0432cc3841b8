"""The client ID of a client: issued by a server, and shared by its partitions.

Rules (decision 048, AC 9):
    1. The client requests the ID on the connection of its first mount, from the server of that
       partition. So the ID belongs to the principal of this connection.
    2. If this server is older than L 8, another server issues the ID. If no server can issue IDs,
       the client takes an ID from ZooKeeper, and needs write access to ZooKeeper.
    3. If a server denies an ID, the client uses a new ID for all partitions that mount from then
       on. But the client does not replace an ID that the application has set, because the
       application relies on this ID. An ID whose sequence numbers are used up is always replaced.
    4. Requests to the same server wait for each other and share the answer. Requests to different
       servers do not wait for each other, because a server may be frozen.
"""

import asyncio
from collections import defaultdict

from waltz_core import errors
from waltz_core.access.client_ids import ClientIdentity
from waltz_core.client.links.connections import ServerLink, ServerLinks
from waltz_core.client.links.directory import Directory
from waltz_core.wire.messages import ClientIdRequest, ClientIdResponse

# Requests without appends need no client ID (docs/design/wire-format.md 2.1).
_NO_CLIENT_ID = -1


class ClientIdentities:
    """Finds the client ID, by the rules above; the application may set `fixed_identity`."""

    def __init__(
        self,
        directory: Directory,
        links: ServerLinks,
        *,
        timeout_s: float,
        fixed_identity: ClientIdentity | None = None,
    ) -> None:
        self.current = self._fixed_identity = fixed_identity
        self._directory = directory
        self._links = links
        self._timeout_s = timeout_s
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def set_identity(self, identity: ClientIdentity) -> None:
        """Use this client ID, and never another one."""
        self.current = self._fixed_identity = identity

    async def get(
        self, link: ServerLink, *, replaced_id: int, is_used_up: bool = False
    ) -> ClientIdentity:
        """Return a client ID for a mount on this connection, other than `replaced_id`.

        With `is_used_up`, `replaced_id` has no sequence numbers left; otherwise a server has denied
        it. Raises the errors of the server or of ZooKeeper, and ClientIdDenied by rule 3.
        """
        is_set_by_application = (
            self._fixed_identity is not None and self._fixed_identity.client_id == replaced_id
        )
        if is_set_by_application and not is_used_up:
            raise errors.ClientIdDenied(
                f"argument client_id: the server at {link.address} rejects ID {replaced_id}, "
                "because it does not belong to the principal of this client"
            )
        async with self._locks[link.address]:  # rule 4
            if self._is_usable(replaced_id):
                assert self.current is not None
                return self.current
            new_identity = await self._obtain_identity(link)
            if not self._is_usable(replaced_id):
                self.current = new_identity
            assert self.current is not None
            return self.current

    def _is_usable(self, replaced_id: int) -> bool:
        return self.current is not None and self.current.client_id != replaced_id

    async def _obtain_identity(self, link: ServerLink) -> ClientIdentity:
        if link.issues_client_ids:
            return await self._request_from(link)
        other_addresses = {owner.address for owner in self._directory.owners.values()} - {
            link.address
        }
        for address in sorted(other_addresses):  # rule 2
            try:
                other_link = await self._links.get(address)
            except (errors.Unavailable, errors.ProtocolError):
                continue
            if other_link.issues_client_ids:
                return await self._request_from(other_link)
        return ClientIdentity(await self._directory.next_client_id())

    async def _request_from(self, link: ServerLink) -> ClientIdentity:
        answer = await link.request(
            ClientIdResponse,
            ClientIdRequest,
            client_id=_NO_CLIENT_ID,
            partition_id=_NO_CLIENT_ID,
            timeout_s=self._timeout_s,
        )
        return ClientIdentity(answer.client_id, bytes(answer.proof))


class ClientIdentitiesInMemory(ClientIdentities):
    """Allocates client IDs from the directory, for clusters in memory."""

    async def _obtain_identity(self, link: ServerLink) -> ClientIdentity:
        return ClientIdentity(await self._directory.next_client_id())
