"""A storage in memory with a real socket. It has the part of protocol S that the tests need."""

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np

from tests.ports import free_port
from waltz_core import errors
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, Chain, LineageEntry, TransactionId, next_chain
from waltz_core.transport import net
from waltz_core.transport.listening import Listener, listen
from waltz_core.wire import messages
from waltz_core.wire.messages import Message, RangeForm, StorageMessage, WireProtocol


@dataclass
class ReplicaLog:
    records: list[bytes] = field(default_factory=list)
    lineage: list[LineageEntry] = field(default_factory=list)
    promised: int = -1
    last_session: int = -1
    mark: int = -1
    is_confirmed: bool = False

    @property
    def last(self) -> TransactionId:
        return TransactionId(len(self.records) - 1)

    @property
    def chain(self) -> Chain:
        return self.lineage[-1].chain if self.lineage else GENESIS_CHAIN

    def truncate(self, last: int) -> None:
        del self.records[last + 1 :]
        while self.lineage and self.lineage[-1].first > last:
            self.lineage.pop()
        if self.lineage and self.lineage[-1].last > last:
            cut = self.lineage.pop()
            crcs = b"".join(record[-4:] for record in self.records[cut.first :])
            chain = next_chain(self.chain, cut.first, TransactionId(last), cut.session_id, crcs)
            self.lineage.append(cut._replace(last=TransactionId(last), chain=chain))

    def records_between(self, first: int, last: int) -> tuple[bytes, bytes]:
        records = self.records[first : last + 1]
        return np.array([len(record) for record in records], ">i4").tobytes(), b"".join(records)


class MemoryStorage:
    """Answers like a storage; `hold` keeps appends unanswered, and `counts` counts requests."""

    def __init__(self, number: int) -> None:
        self.logs: dict[int, ReplicaLog] = {}
        self.storage_id: UUID = UUID(int=number)
        self.counts: Counter[str] = Counter()
        self.holds_appends = False
        self._held_answers: list[tuple[net.Link, StorageMessage]] = []
        self._listener: Listener | None = None
        self.port = free_port()  # no other process gets this port while this storage is stopped

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._listener = await listen(WireProtocol.STORAGE, "127.0.0.1", self.port, self._accept)

    async def stop(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    def release(self) -> None:
        self.holds_appends = False
        held, self._held_answers = self._held_answers, []
        for link, answer in held:
            link.send(answer)

    def _accept(self, link: net.Link) -> None:
        def take_messages(received: list[Message]) -> None:
            for message in received:
                assert isinstance(message, StorageMessage)
                self._take(link, message)

        link.start(take_messages, lambda _reason: None)

    def _take(self, link: net.Link, message: StorageMessage) -> None:
        self.counts[type(message).__name__] += 1
        prefix = (message.session_id, message.sequence, message.partition_id)
        if isinstance(message, messages.OpenRequest):
            link.send(messages.SuccessResponse(*prefix))
            return
        log = self.logs.setdefault(message.partition_id, ReplicaLog())
        is_reader = isinstance(message, messages.RangeRaw) and message.reader
        if isinstance(message, messages.Prepare):
            fenced = message.session_id < log.promised
            log.promised = max(log.promised, message.session_id)
        else:
            fenced = message.session_id != log.promised
        if fenced or (is_reader and message.session_id != log.last_session):
            code = errors.SessionFenced.code
            link.send(messages.Nack(*prefix, code, log.promised, "a later session"))
            return
        answer = self._answer(log, message, prefix)
        if self.holds_appends and isinstance(message, messages.AppendRaw):
            self._held_answers.append((link, answer))
        else:
            link.send(answer)

    def _answer(
        self, log: ReplicaLog, message: StorageMessage, prefix: tuple[int, int, int]
    ) -> StorageMessage:
        match message:
            case messages.Prepare():
                return messages.Prepared(
                    *prefix,
                    self.storage_id.bytes,
                    log.last_session,
                    log.mark,
                    log.is_confirmed,
                    log.last,
                    log.chain,
                    suspect=False,
                    damaged=b"",
                )
            case messages.SetLowWaterMark():
                assert (message.mark, message.chain) == (log.last, log.chain)
                log.mark, log.last_session = message.mark, message.session_id
                log.is_confirmed = False
            case messages.Engage():
                log.is_confirmed = True
            case messages.Truncate():
                log.truncate(message.last_to_keep)
            case messages.AppendRaw():
                return self._append(log, message, prefix)
            case messages.RangeRaw():
                return self._range(log, message, prefix)
            case messages.LineageRequest():
                before = [entry for entry in log.lineage if entry.last < message.first]
                rest = log.lineage[len(before) :]
                found = tuple(entry for entry in rest if entry.first <= message.last)
                chain = before[-1].chain if before else GENESIS_CHAIN
                return messages.LineageResponse(*prefix, chain, found)
            case messages.LockBlocksRequest():
                return messages.LockBlocks(*prefix, b"")
            case messages.Heartbeat():
                return messages.HeartbeatResponse(*prefix)
            case _:
                raise AssertionError(message)
        return messages.ReplicaEnd(*prefix, log.last, log.chain)

    def _append(
        self, log: ReplicaLog, message: messages.AppendRaw, prefix: tuple[int, int, int]
    ) -> StorageMessage:
        assert message.first == log.last + 1
        assert message.chain_before == log.chain
        assert crc32(message.records) == message.records_crc
        lengths = raw_records.lengths_from_wire(message.lengths, len(message.records))
        assert raw_records.first_bad_record(message.records, lengths) is None
        assert raw_records.first_gap(message.records, lengths, TransactionId(message.first)) is None
        for start, length in zip(
            raw_records.offsets_of(lengths).tolist(), lengths.tolist(), strict=False
        ):
            log.records.append(bytes(message.records[start : start + length]))
        log.lineage.extend(message.lineage)
        assert log.lineage[-1].last == log.last
        return messages.Appended(*prefix, log.last)

    def _range(
        self, log: ReplicaLog, message: messages.RangeRaw, prefix: tuple[int, int, int]
    ) -> StorageMessage:
        last = min(message.last, log.last)
        if message.first > last:
            return messages.Nack(*prefix, errors.BadRequest.code, log.promised, "not there yet")
        end, size = message.first, len(log.records[message.first])
        while end < last and size + len(log.records[end + 1]) <= message.bytes_max:
            end += 1
            size += len(log.records[end])
        lineage = tuple(
            entry for entry in log.lineage if entry.last >= message.first and entry.first <= end
        )
        if message.whole_batches:
            end = lineage[-1].last
        lengths, records = log.records_between(message.first, end)
        if message.form == RangeForm.HEADERS:
            records = b"".join(record[:28] for record in log.records[message.first : end + 1])
            lengths = b""
        before = [entry for entry in log.lineage if entry.last < message.first]
        return messages.RangeBytes(
            *prefix,
            message.first,
            end - message.first + 1,
            message.form,
            lengths,
            records,
            crc32(records),
            before[-1].chain if before else GENESIS_CHAIN,
            lineage,
        )
