"""The interfaces that reads at a 0.13 server need, and the results of these reads."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from waltz_core.records.record import Generation, PartitionId, ReqId, TransactionId
from waltz_core.transport import net
from waltz_core.wire.messages import ClientMessage, RangeForm

AnswerT = TypeVar("AnswerT", bound=ClientMessage)


class OwnerAddress(Protocol):
    """The server that owns a partition, and the generation."""

    @property
    def address(self) -> str:
        """The address of the server, as HOST:PORT."""

    @property
    def generation(self) -> Generation:
        """The generation, which increases with each change of owner."""


class SharedLink(Protocol):
    """A shared connection to a server."""

    async def request(
        self,
        answer: type[AnswerT],
        make: Callable[[ReqId], ClientMessage],
        *,
        client_id: int,
        partition_id: int,
        timeout_s: float,
    ) -> AnswerT:
        """Send a request and return its answer."""


class LinkToOwner(Protocol):
    """A partition, its owner, and a link to the owner."""

    @property
    def link(self) -> SharedLink:
        """The link to the owner."""

    @property
    def owner(self) -> OwnerAddress:
        """The owner of the partition."""

    @property
    def partition_id(self) -> PartitionId:
        """The ID of the partition."""

    @property
    def timeout_s(self) -> float:
        """The timeout of an answer, in seconds."""


class Links(Protocol):
    """Opens connections to servers."""

    async def dial_unshared(self, address: str) -> net.Link:
        """Return a new connection that is not shared; raises Unreachable or RemoteProtocolError."""


class ClientIds(Protocol):
    """Allocates client IDs."""

    async def next_client_id(self) -> int:
        """Return a client ID that was never used before."""


class Query(Protocol):
    """The range to read, `first`..`last` (inclusive), with a size limit and a filter."""

    @property
    def first(self) -> TransactionId:
        """The first transaction to read."""

    @property
    def last(self) -> TransactionId:
        """The last transaction to read."""

    @property
    def form(self) -> RangeForm:
        """Whether to read whole records, or headers."""

    @property
    def header_values(self) -> tuple[int, ...]:
        """The wanted application headers; empty for all."""

    @property
    def bytes_max(self) -> int:
        """The approximate limit of the result, in bytes."""


class LegacyRecords(NamedTuple):
    """The records up to ID `last`.

    `lengths` are the lengths of whole records; empty for headers.
    """

    last: TransactionId
    lengths: list[int]
    records: bytes
