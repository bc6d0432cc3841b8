"""What the reads at a 0.13 server need of the client, and what they return."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from waltz_core.records.record import Generation, PartitionId, ReqId, TransactionId
from waltz_core.transport import net
from waltz_core.wire.messages import ClientMessage, RangeForm

AnswerT = TypeVar("AnswerT", bound=ClientMessage)


class OwnerAddress(Protocol):
    """The server of a partition, and its generation of it."""

    @property
    def address(self) -> str:
        """HOST:PORT."""

    @property
    def generation(self) -> Generation:
        """Grows with each change of owner."""


class SharedLink(Protocol):
    """A connection to a server that many share."""

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


class OwnerLinkLike(Protocol):
    """A partition, its owner, and a link to it."""

    @property
    def link(self) -> SharedLink:
        """To the owner."""

    @property
    def owner(self) -> OwnerAddress:
        """Of the partition."""

    @property
    def partition_id(self) -> PartitionId:
        """The partition."""

    @property
    def timeout_s(self) -> float:
        """How long an answer may take."""


class Links(Protocol):
    """Makes connections."""

    async def dial_apart(self, address: str) -> net.Link:
        """Return a connection that nobody shares; raises Unreachable, RemoteProtocolError."""


class ClientIds(Protocol):
    """Makes client ids that nobody else has."""

    async def next_client_id(self) -> int:
        """Return a new one."""


class Query(Protocol):
    """What to read: `first` to `last` (closed), about `bytes_max` of it, under a filter."""

    @property
    def first(self) -> TransactionId:
        """The first transaction."""

    @property
    def last(self) -> TransactionId:
        """The last one."""

    @property
    def form(self) -> RangeForm:
        """Whole records, or headers."""

    @property
    def header_values(self) -> tuple[int, ...]:
        """The application headers that are wanted; all without any."""

    @property
    def bytes_max(self) -> int:
        """Where to stop."""


class OldRecords(NamedTuple):
    """What was read up to `last`; `lengths` are those of whole records, empty for headers."""

    last: TransactionId
    lengths: list[int]
    records: bytes
