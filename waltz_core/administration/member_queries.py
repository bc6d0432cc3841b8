"""Sends single requests to servers, and checks whether a process answers at an address.

The commands that change, check or list servers use the messages of Waltz 0.13. Therefore 0.13
servers also answer these messages.
"""

from collections.abc import Callable
from typing import TypeVar

from waltz_core.administration import member_connections
from waltz_core.errors import WaltzError
from waltz_core.records.record import ReqId
from waltz_core.wire.admin_messages import ReplicaResponse
from waltz_core.wire.messages import ClientMessage, WireProtocol

ANSWER_TIMEOUT_S = 10.0
DIAL_TIMEOUT_S = 3.0
# The client ID in requests of 0.13 tools, which allocate no client ID.
NO_CLIENT_ID = -1

AnswerT = TypeVar("AnswerT", bound=ClientMessage)


async def query_server(
    address: str, answer_type: type[AnswerT], make_request: Callable[[ReqId], ClientMessage]
) -> AnswerT:
    """Send a request to a server, and return its answer; raises the error in the answer."""
    from waltz_core.client.links.connections import ServerLinks  # noqa: PLC0415 - loads Arrow

    links = ServerLinks(
        dial_timeout_s=ANSWER_TIMEOUT_S, late_answers_s=0.0, ssl=member_connections.ssl_context()
    )
    try:
        link = await links.get(address)
        return await link.request(
            answer_type,
            make_request,
            client_id=NO_CLIENT_ID,
            partition_id=0,
            timeout_s=ANSWER_TIMEOUT_S,
        )
    finally:
        await links.close("answered")


async def is_answering(protocol: WireProtocol, address: str) -> bool:
    """Return whether a process at the address completes the handshake of the protocol."""
    return await hello_text_at(protocol, address) is not None


async def hello_text_at(protocol: WireProtocol, address: str) -> str | None:
    """Return the text in the hello message of a process; None if no process answers.

    Every port of Waltz answers a hello. The text distinguishes the kinds of ports
    (`WireProtocol.listener_text`).
    """
    try:
        link = await member_connections.dial(protocol, address, timeout_s=DIAL_TIMEOUT_S)
    except WaltzError:
        return None
    name = "" if link.peer is None else link.peer.text
    link.abort("answered")
    return name


def damaged_record_count(replica: ReplicaResponse) -> int:
    """Return the number of records that the replica cannot read."""
    pairs = memoryview(replica.damaged)
    ids = [int.from_bytes(pairs[offset : offset + 8], "big") for offset in range(0, len(pairs), 8)]
    return sum(last - first + 1 for first, last in zip(ids[::2], ids[1::2], strict=True))
