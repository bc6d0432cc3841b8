"""Single requests to servers, and checks whether any process answers at an address.

Commands that change, check and list servers use the messages of Waltz 0.13, so that 0.13 servers
answer them, too.
"""

from collections.abc import Callable
from typing import TypeVar

from waltz_core.cli import command_connections
from waltz_core.errors import WaltzError
from waltz_core.records.record import ReqId
from waltz_core.wire.messages import ClientMessage, WireProtocol

ANSWER_S = 10.0
DIAL_TIMEOUT_S = 3.0
# The client ID in requests of 0.13 tools, which allocate none.
NO_CLIENT_ID = -1

AnswerT = TypeVar("AnswerT", bound=ClientMessage)


async def query(
    address: str, answer: type[AnswerT], make: Callable[[ReqId], ClientMessage]
) -> AnswerT:
    """Send a request to a server; raises the error that it answers, or Unreachable."""
    from waltz_core.client.links.connections import ServerLinks  # noqa: PLC0415 - loads Arrow

    links = ServerLinks(dial_timeout_s=ANSWER_S, late_answers_s=0.0, ssl=command_connections.ssl())
    try:
        link = await links.get(address)
        return await link.request(
            answer, make, client_id=NO_CLIENT_ID, partition_id=0, timeout_s=ANSWER_S
        )
    finally:
        await links.close("answered")


async def is_answering(protocol: WireProtocol, address: str) -> bool:
    """Return whether a process at the address completes the hello."""
    return await name_at(protocol, address) is not None


async def name_at(protocol: WireProtocol, address: str) -> str | None:
    """Return the text of the hello at an address; None if no process listens there.

    Every port of Waltz completes the hello; the text distinguishes them
    (`WireProtocol.listener_text`).
    """
    try:
        link = await command_connections.dial(protocol, address, timeout_s=DIAL_TIMEOUT_S)
    except WaltzError:
        return None
    name = "" if link.peer is None else link.peer.text
    link.abort("answered")
    return name
