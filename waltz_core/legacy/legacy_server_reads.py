"""Reads ranges at a 0.13 server: headers from a feed, data with one request per transaction.

The protocol of 0.13 has no requests for ranges. A current server returns a range in one answer
(`ranges.py`), which is faster. A range from a 0.13 server contains no session, commit stamps or
hash chain, because 0.13 does not store them.

Rules:
    1. To read headers, a reader mounts the partition at a mark: a 0.13 server then feeds all
       transactions after this mark. Each reader has its own connection with its own client ID. No
       other connection uses this client ID, and the reader writes nothing. While the reader pauses,
       unread messages of the feed wait in the kernel's buffers.
    2. The data of a transaction is requested only if the feed has delivered its header, or if the
       caller knows that the transaction is committed. If a 0.13 server gets the request too early,
       it reports the transaction as missing, even later (docs/design/wire-format.md 2.6).
    3. Several requests for data are in flight, so that round trips cost little. The number of these
       requests is limited, because other requests use the same connection.
    4. A connection sequence is never used twice, because a 0.13 server drops messages with an old
       connection sequence.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from waltz_core import errors
from waltz_core.legacy.interfaces import (
    ClientIds,
    LegacyRecords,
    Links,
    LinkToOwner,
    OwnerAddress,
    Query,
)
from waltz_core.legacy.legacy_server_stream import VERSION_MAX
from waltz_core.parallel import run_parallel
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import encode_record
from waltz_core.records.record import (
    RECORD_HEADER,
    ClientId,
    PartitionId,
    RecordHeader,
    ReqId,
    TransactionId,
)
from waltz_core.wire import messages
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.transport import net

# The maximum number of data requests in flight (rule 3).
CONCURRENT_REQUESTS_MAX = 64
# The maximum number of headers in one chunk, for reads of data and for reads of headers. The
# headers of one chunk fit into one frame.
WHOLE_COUNT_MAX = 4_096
HEADERS_COUNT_MAX = 65_536
# The maximum number of open feeds of one partition that wait for their readers to continue.
FEEDS_MAX = 4

_UNKNOWN_REQ_ID = ReqId(ClientId(0), 0, PartitionId(0), 0)  # type: ignore[arg-type]


class LegacyServerReads:
    """The reads of one client at 0.13 servers."""

    def __init__(self, client_ids: ClientIds, links: Links, client_id: int) -> None:
        self._client_ids = client_ids
        self._links = links
        self._data_client_id = client_id  # for requests of data
        self._idle_ids: list[int] = []  # for feeds
        self._sequences = count()
        # The open feeds that a reader may continue, the oldest first.
        self._feeds: dict[PartitionId, list[HeaderFeed]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Close all idle feeds. A feed that is being read closes when this read ends."""
        self._is_closed = True
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.close()

    async def read_range(self, reader: LinkToOwner, query: Query) -> LegacyRecords:
        """Read a range of the log; empty if the log ends before it.

        Raises Unavailable, like a read at a current server.
        """
        record_headers = await self._read_headers(reader, query)
        last = record_headers[-1].transaction_id if record_headers else query.first - 1
        matching_ids = [
            each
            for each in record_headers
            if not query.header_values or each.header in query.header_values
        ]
        if query.form is RangeForm.WHOLE:
            return await self._fetch_data(reader, query, matching_ids, TransactionId(last))
        records = b"".join(
            RECORD_HEADER.pack(each.transaction_id, each.req_id.to_bytes(), each.header)
            for each in matching_ids
        )
        return LegacyRecords(TransactionId(last), [], records)

    async def read_data(self, reader: LinkToOwner, query: Query) -> LegacyRecords:
        """Read a range that is known to be committed; only its IDs and data are valid.

        The records have no request IDs. If the query has a filter, only the first transaction is
        returned. The caller knows that the first transaction passes the filter.
        """
        last = min(query.last, query.first + WHOLE_COUNT_MAX - 1)
        if query.header_values:
            last = query.first
        record_headers = [
            RecordHeader(TransactionId(transaction_id), _UNKNOWN_REQ_ID, 0)
            for transaction_id in range(query.first, last + 1)
        ]
        return await self._fetch_data(reader, query, record_headers, TransactionId(last))

    async def _read_headers(self, reader: LinkToOwner, query: Query) -> list[RecordHeader]:
        count_max = WHOLE_COUNT_MAX if query.form is RangeForm.WHOLE else HEADERS_COUNT_MAX
        feed = await self._feed_at(reader, query.first)
        is_finished = True
        try:
            async with asyncio.timeout(reader.timeout_s):
                headers = await feed.read(query.first, query.last, count_max)
            is_finished = feed.is_closed or headers[-1].transaction_id == query.last
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{reader.owner.address} sent no feed of partition {reader.partition_id} "
                f"within {reader.timeout_s:.3g} s"
            ) from error
        finally:  # also if the caller is cancelled
            self._release_feed(reader.partition_id, feed, is_finished=is_finished)
        return headers

    async def _feed_at(self, reader: LinkToOwner, first: TransactionId) -> "HeaderFeed":
        """Return the feed that continues at a transaction, or a new feed."""
        feeds = self._feeds.setdefault(reader.partition_id, [])
        for open_feed in feeds:
            if open_feed.continues_at(reader.owner, first):
                feeds.remove(open_feed)
                return open_feed
        idle = self._idle_ids
        client_id = idle.pop() if idle else await self._client_ids.next_client_id()
        feed = HeaderFeed(reader.owner, reader.partition_id, client_id)
        try:
            await feed.open(self._links, next(self._sequences), first)
        except BaseException:  # also if the caller is cancelled
            idle.append(client_id)
            raise
        return feed

    def _release_feed(
        self, partition_id: PartitionId, feed: "HeaderFeed", *, is_finished: bool
    ) -> None:
        feeds = self._feeds[partition_id]
        if not is_finished and not self._is_closed:
            feeds.append(feed)
            if len(feeds) <= FEEDS_MAX:
                return
            feed = feeds.pop(0)  # the feed whose reader has paused for the longest time
        feed.close()
        self._idle_ids.append(feed.client_id)

    async def _fetch_data(
        self,
        reader: LinkToOwner,
        query: Query,
        record_headers: Sequence[RecordHeader],
        last: TransactionId,
    ) -> LegacyRecords:
        """Fetch the data of transactions in order, up to the size limit of the query."""
        records, lengths = bytearray(), list[int]()
        for start in range(0, len(record_headers), CONCURRENT_REQUESTS_MAX):
            part = record_headers[start : start + CONCURRENT_REQUESTS_MAX]
            payloads = await run_parallel(
                self._request_data(reader, head.transaction_id) for head in part
            )
            for head, data in zip(part, payloads, strict=True):
                # The CRC of the data was checked when the data arrived.
                record = encode_record(
                    head.transaction_id, head.req_id, head.header, data, crc32(data)
                )
                records += record
                lengths.append(len(record))
            if len(records) >= query.bytes_max and start + CONCURRENT_REQUESTS_MAX < len(
                record_headers
            ):
                last = part[-1].transaction_id
                break
        return LegacyRecords(last, lengths, bytes(records))

    async def _request_data(self, reader: LinkToOwner, transaction_id: TransactionId) -> bytes:
        answer = await reader.link.request(
            messages.TransactionDataResponse,
            lambda req_id: messages.TransactionDataRequest(req_id, transaction_id),
            client_id=self._data_client_id,
            partition_id=reader.partition_id,
            timeout_s=reader.timeout_s,
        )
        data, fault = answer.result
        if data is None:
            raise errors.Unavailable(
                f"{reader.owner.address}, partition {reader.partition_id}, transaction "
                f"{transaction_id}: {fault}"
            )
        return bytes(data)


class HeaderFeed:
    """The feed of one partition after a mark, read on demand (rule 1)."""

    def __init__(self, owner: OwnerAddress, partition_id: PartitionId, client_id: int) -> None:
        self._owner = owner
        self._partition_id = partition_id
        self.client_id = client_id
        self._link: net.Link | None = None
        self._next_id = 0
        self._received_messages: list[messages.ClientMessage] = []

    async def open(self, links: Links, connection_sequence: int, first: TransactionId) -> None:
        """Start a feed with transaction `first`; raises Unreachable."""
        address = self._owner.address
        try:
            link = await links.dial_unshared(address)
        except errors.RemoteProtocolError as error:
            raise errors.Unreachable(str(error)) from error
        if (link.version or 0) > VERSION_MAX:
            link.abort("it is not a Waltz 0.13 server")
            raise errors.Unreachable(
                f"{address}: expected a Waltz 0.13 server, found a later version"
            )
        self._link, self._next_id = link, first
        req_id = ReqId(ClientId(self.client_id), self._owner.generation, self._partition_id, 1)
        link.send(messages.MountRequest(req_id, first - 1, connection_sequence))

    def continues_at(self, owner: OwnerAddress, first: TransactionId) -> bool:
        """Whether the feed continues at a transaction of this owner."""
        return not self.is_closed and self._owner == owner and self._next_id == first

    @property
    def is_closed(self) -> bool:
        """Whether no more messages will arrive."""
        return self._link is None or self._link.is_closed

    def close(self) -> None:
        """Close the connection of the feed."""
        if self._link is not None:
            self._link.abort("read")
            self._link = None

    async def read(
        self, first: TransactionId, last: TransactionId, count_max: int
    ) -> list[RecordHeader]:
        """Return headers from `first` up to at most `last`; empty if the log ends before `first`.

        Raises NotOwned, Unreachable, RemoteProtocolError.
        """
        link = self._link
        assert link is not None
        assert self._next_id == first
        headers: list[RecordHeader] = []
        while len(headers) < count_max and self._next_id <= last:
            if not self._received_messages:
                self._received_messages = [*reversed(await link.receive())]  # type: ignore[list-item]
            message = self._received_messages.pop()
            match message:
                case messages.FeedData() if message.transaction_id == self._next_id:
                    transaction_id = TransactionId(message.transaction_id)
                    headers.append(RecordHeader(transaction_id, message.req_id, message.header))
                    self._next_id += 1
                case messages.MountResponse(state=messages.MountState.NOT_READY):
                    raise errors.NotOwned(
                        f"server {self._owner.address} is not ready for partition "
                        f"{self._partition_id}"
                    )
                case messages.MountResponse():  # the end of the log, or a position before it
                    self.close()
                    return headers
                case _:
                    raise errors.RemoteProtocolError(
                        f"server {self._owner.address}: expected transaction {self._next_id} of "
                        f"partition {self._partition_id}, found {message!r:.200}"
                    )
        return headers
