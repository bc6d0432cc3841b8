"""A connection to the administration port of one storage.

Commands, the doctor and tests administer storages through this connection. A 0.13 storage supports
fewer messages; this code detects such a storage.

Rules:
    1. There is one request at a time. An answer of an unexpected kind is a protocol error.
    2. If a storage of version A 0 does not support a request, the request fails here with a clear
       error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Final, TypeVar

from waltz_core.errors import (
    BadConfig,
    BadRequest,
    RemoteProtocolError,
    Unreachable,
    WaltzError,
    error_from_code,
)
from waltz_core.transport import net
from waltz_core.transport.net import Link
from waltz_core.wire.admin_messages import (
    AdminFailure,
    AdminMessage,
    AdminRejected,
    Copied,
    Copy,
    CopyRequest,
    Done,
)
from waltz_core.wire.messages import WireProtocol

# In seconds; long, because a storage answers a removal only after it has deleted all files of a
# partition.
ANSWER_S_MAX: Final = 120.0
DIAL_S_MAX: Final = 5.0
COPY_BYTES_MAX: Final = 4 * 1024 * 1024
AnswerT = TypeVar("AnswerT", bound=AdminMessage)


class StorageAdmin:
    """The administration of one storage; `address` is the address of its admin port."""

    def __init__(self, link: Link, address: str) -> None:
        self.address = address
        self._link = link
        self._sequence = -1

    @property
    def is_current(self) -> bool:
        """Whether the storage uses version A 1 or later; otherwise it answers like 0.13."""
        return self._link.version != 0

    async def request(
        self, expected: type[AnswerT], kind: Callable[..., AdminMessage], *fields: object
    ) -> AnswerT:
        """Send the request `kind(sequence number, *fields)`; return the answer.

        Raises:
            Unreachable: the storage did not answer in time.
            WaltzError: the error that the storage returned.
        """
        self._sequence += 1
        message = kind(self._sequence, *fields)
        if message.since > 0 and not self.is_current:
            raise BadRequest(
                f"{self.address}: {type(message).__name__} requires admin protocol "
                f"A {message.since} or later, found A 0, the protocol of Waltz 0.13"
            )
        self._link.send(message)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                answer, *other_messages = await self._link.receive()
        except TimeoutError:
            raise Unreachable(
                f"{self.address} did not answer within {ANSWER_S_MAX:.0f} s"
            ) from None
        assert isinstance(answer, AdminMessage)
        # A storage of 0.13 always answers OPEN with sequence number -1.
        is_answer_to_open = (
            not self.is_current and isinstance(answer, Done) and answer.sequence == -1
        )
        if other_messages or (answer.sequence != message.sequence and not is_answer_to_open):
            raise RemoteProtocolError(
                f"{self.address}: expected an answer to request {message.sequence}, found {answer}"
            )
        if isinstance(answer, expected):
            return answer
        if isinstance(answer, AdminRejected):
            raise error_from_code(answer.error_code, answer.text)
        if isinstance(answer, AdminFailure):
            reason = answer.text or "the request failed, and the storage gave no reason"
            raise WaltzError(f"{self.address}: {reason}")
        raise RemoteProtocolError(
            f"{self.address}: expected message {expected.__name__}, found {type(answer).__name__}"
        )


@asynccontextmanager
async def admin_connection(
    address: str, *, ssl: SSLContext | None = None
) -> AsyncIterator[StorageAdmin]:
    """Connect to an admin port; raises Unreachable, or BadConfig if it is another kind of port."""
    link = await net.dial(WireProtocol.ADMIN, address, timeout_s=DIAL_S_MAX, ssl=ssl)
    try:
        peer_text = "" if link.peer is None else link.peer.text
        # A storage's two ports are easily mixed up.
        if peer_text != WireProtocol.ADMIN.listener_text:
            raise BadConfig(
                f"{address}: expected the admin port of a storage, found a {peer_text[:80]!r}"
            )
        yield StorageAdmin(link, address)
    finally:
        link.close("done")
        await link.wait_closed()


async def copy_partition(
    source: StorageAdmin,
    target: StorageAdmin,
    partition_id: int,
    first: int,
    *,
    bytes_max: int = COPY_BYTES_MAX,
) -> int:
    """Append a source's settled transactions to a target's log; return the target's last ID.

    `first` is the ID after the target's last one. The target must be offline, and its log must be a
    prefix of the source's log: the target rejects data that differs, and truncates nothing.
    """
    last = first - 1
    while True:
        copy = await source.request(Copy, CopyRequest, partition_id, last + 1, bytes_max)
        if not copy.lineage:
            return last
        fields = (copy.first, copy.lengths, copy.records, copy.records_crc)
        answer = await target.request(
            Copied, Copy, partition_id, *fields, copy.chain_before, copy.lineage
        )
        last = answer.synced_max
