"""A model of an original's server, as the storages and ZooKeeper meet it: S 0 and its recovery.

Written from interop.md 1, 3.1 and 4.7 and behaviour.md 2.9 with `struct` and sockets alone: it
shares no code with what it is to find mistakes in.
"""

import socket
import struct
import zlib
from typing import NamedTuple

from tests.patience import HANG_S

UNRESOLVED = -(1 << 63)
HEAD = struct.Struct(">cHi")
PREFIX = struct.Struct(">bqqi")
RECORD = struct.Struct(">q16sii")
OPEN, LAST_SESSION_INFO, SET_LOW_WATER_MARK, TRUNCATE, APPEND = 1, 2, 4, 5, 6
SUCCESS, FAILURE, MAX_TRANSACTION_ID, RECORD_LIST = 7, 8, 13, 17
CATCH_UP = 20


class Refused(Exception):
    """A FAILURE_RESPONSE, by its text."""


class Closed(Exception):
    """The storage has closed the connection, or cannot be reached."""


def record_of(number, data, *, header=7, client=1):
    """The bytes of a record on the wire."""
    request = struct.pack(">iiii", client, 1, 0, number)
    plain = RECORD.pack(number, request, header, len(data)) + data
    return plain + zlib.crc32(data).to_bytes(4, "big")


def split_records(payload):
    """The records of a RECORD_LIST_RESPONSE."""
    (count,) = struct.unpack_from(">i", payload)
    at, found = 4, []
    for _ in range(count):
        length = RECORD.unpack_from(payload, at)[3]
        end = at + RECORD.size + length + 4
        assert (
            zlib.crc32(payload[at + RECORD.size : end - 4]).to_bytes(4, "big")
            == (payload[end - 4 : end])
        )
        found.append(payload[at:end])
        at = end
    assert at == len(payload)
    return found


class Link:
    """A connection to a storage, for all partitions; one request at a time."""

    def __init__(self, address, *, key=None, partition_count=0):
        host, port = address.rsplit(":", 1)
        self.sequence = 0
        try:
            self.socket = socket.create_connection((host, int(port)), HANG_S)
        except OSError as error:
            raise Closed(str(error)) from error
        text = b"Waltz Storage Client"
        hello = struct.pack(">ihi", 1, 0, len(text)) + text
        self.write(HEAD.pack(b"H", 0, len(hello)) + hello)
        magic, version, payload = self.read_frame()
        assert (magic, version) == (b"H", 0)
        (count,) = struct.unpack_from(">i", payload)
        assert 0 in struct.unpack_from(f">{count}h", payload, 4)
        if key is not None:
            body = PREFIX.pack(OPEN, -1, -1, -1) + key + struct.pack(">i", partition_count)
            answer = self.exchange(body)
            assert answer == PREFIX.pack(SUCCESS, -1, -1, -1), answer

    def write(self, data):
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Closed(str(error)) from error

    def read(self, size):
        parts = []
        while size:
            try:
                part = self.socket.recv(size)
            except OSError as error:
                raise Closed(str(error)) from error
            if not part:
                raise Closed("end")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def read_frame(self):
        magic, version, size = HEAD.unpack(self.read(HEAD.size))
        return magic, version, self.read(size)

    def send(self, payload):
        self.write(HEAD.pack(b"S", 0, len(payload)) + payload)

    def exchange(self, payload):
        """Send a payload, return that of the answer."""
        self.send(payload)
        magic, version, answer = self.read_frame()
        assert (magic, version) == (b"S", 0)
        return answer

    def ask(self, kind, session, partition, body=b""):
        """Return the type of the answer and what follows its prefix; raises Refused."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        answer = self.exchange(PREFIX.pack(kind, session, sequence, partition) + body)
        found, *echoed = PREFIX.unpack_from(answer)
        body = answer[PREFIX.size :]
        if found == FAILURE:
            (size,) = struct.unpack_from(">i", body)
            raise Refused(body[4 : 4 + size].decode())
        assert echoed == [session, sequence, partition]
        return found, body

    # ---- by name

    def info(self, session, partition, *, offline=False):
        kind, body = self.ask(LAST_SESSION_INFO, session, partition, bytes([offline]))
        assert kind == LAST_SESSION_INFO + 1
        return struct.unpack(">qqq", body)

    def max_id(self, session, partition):
        kind, body = self.ask(MAX_TRANSACTION_ID, session, partition, b"\0")
        assert kind == MAX_TRANSACTION_ID + 1
        return struct.unpack(">q", body)[0]

    def truncate(self, session, partition, last):
        kind, body = self.ask(TRUNCATE, session, partition, struct.pack(">qb", last, 0))
        assert kind == MAX_TRANSACTION_ID + 1
        return struct.unpack(">q", body)[0]

    def set_mark(self, session, partition, mark):
        assert self.ask(SET_LOW_WATER_MARK, session, partition, struct.pack(">qb", mark, 0)) == (
            SUCCESS,
            b"",
        )

    def append(self, session, partition, records):
        body = struct.pack(">i", len(records)) + b"".join(records) + b"\0"
        assert self.ask(APPEND, session, partition, body) == (SUCCESS, b"")

    def records(self, session, partition, first, count):
        kind, body = self.ask(RECORD_LIST, session, partition, struct.pack(">qi", first, count))
        assert kind == RECORD_LIST + 1
        return split_records(body)

    def close(self):
        self.socket.close()


class State(NamedTuple):
    """What ZooKeeper says of a replica."""

    session: int
    closing: int = UNRESOLVED


class Metadata(NamedTuple):
    """What ZooKeeper says of a partition."""

    generation: int = -1
    session: int = -1
    states: dict = {}  # noqa: RUF012 - nobody changes it

    def encode(self, partition):
        parts = [struct.pack(">biqi", 1, self.generation, self.session, len(self.states))]
        for address, state in self.states.items():
            name = address.encode()
            replica = struct.pack(">biH", 1, partition, len(name)) + name
            parts.append(b"\1" + replica + struct.pack(">qq", *state))
        return b"".join(parts)

    @classmethod
    def decode(cls, data):
        version, generation, session, count = struct.unpack_from(">biqi", data)
        assert version == 1
        at, states = 17, {}
        for _ in range(count):
            size = struct.unpack_from(">bbiH", data, at)[3]
            at += 8
            address = data[at : at + size].decode()
            at += size
            states[address] = State(*struct.unpack_from(">qq", data, at))
            at += 16
        assert at == len(data)
        return cls(generation, session, states)


class Session:
    """One store session of one partition, from its opening on."""

    def __init__(self, key, partition_count, partition, addresses, metadata):
        self.partition = partition
        self.number = metadata.session + 1
        self.generation = metadata.generation
        self.states = metadata.states
        self.addresses = addresses
        self.links = {}
        self.maxes = {}
        self.votes = {}
        for address in addresses:
            try:
                self.links[address] = Link(address, key=key, partition_count=partition_count)
                self._look(address)
            except (Closed, Refused):
                self._drop(address)
        self.mark = self._resolve()
        self.ready = []
        for address in list(self.links):
            try:
                self._recover(address)
                self.ready.append(address)
            except (Closed, Refused):
                self._drop(address)
        assert len(self.ready) >= self.quorum, "no quorum"
        self.next_id = self.mark + 1

    @property
    def quorum(self):
        return len(self.addresses) // 2 + 1

    @property
    def metadata(self):
        """What is written to ZooKeeper when a quorum has recovered."""
        return Metadata(self.generation, self.number, {a: self._state(a) for a in self.addresses})

    def _state(self, address):
        if address in self.ready:
            return State(self.number)
        old = self.states.get(address)
        if old is None:
            return State(-1, self.mark)
        return State(old.session, self.mark) if old.closing == UNRESOLVED else old

    def _drop(self, address):
        link = self.links.pop(address, None)
        if link is not None:
            link.close()

    def _look(self, address):
        """Steps 1 and 2 of the original's recovery."""
        link = self.links[address]
        is_new = bool(self.states) and address not in self.states
        state = self.states.get(address, State(-1))
        session, low_water_mark, _ = link.info(self.number, self.partition)
        if session < state.session or is_new:
            self.maxes[address] = link.truncate(self.number, self.partition, low_water_mark)
        elif state.closing != UNRESOLVED:
            self.maxes[address] = link.truncate(self.number, self.partition, state.closing)
        else:
            self.maxes[address] = link.max_id(self.number, self.partition)
            if self.maxes[address] >= low_water_mark:
                self.votes[address] = self.maxes[address]

    def _resolve(self):
        """Step 4: the highest id that a quorum of the last session can have had."""
        if not self.states:
            return -1
        quorum = len(self.states) // 2 + 1
        known = {a: m for a, m in self.maxes.items() if a in self.states}
        absent = len(self.states) - len(known)
        lowest = min(self.votes.values())
        for high in sorted(set(known.values()), reverse=True):
            supports = sum(one >= high for one in known.values()) if high >= lowest else 0
            if supports >= quorum:
                return high
            assert supports + absent < quorum, "undecidable"
        raise AssertionError("nothing is resolved")

    def _recover(self, address):
        link, session, partition = self.links[address], self.number, self.partition
        if self.maxes[address] >= self.mark:
            link.truncate(session, partition, self.mark)
            link.set_mark(session, partition, self.mark)
            return
        # The original does so before it has filled the log up.
        link.set_mark(session, partition, self.mark)
        usher = next(a for a, m in self.maxes.items() if m >= self.mark and a in self.links)
        self.catch_up(address, usher, self.mark)

    def catch_up(self, address, usher, last):
        """Copy what a replica lacks from another one, in the original's portions."""
        link, session, partition = self.links[address], self.number, self.partition
        first = self.maxes[address] + 1
        while first <= last:
            count = min(CATCH_UP, last - first + 1)
            found = self.links[usher].records(session, partition, first, count)
            link.append(session, partition, found)
            first += len(found)
        self.maxes[address] = last

    def append(self, records):
        """Append by all that are ready; one that fails is left out, as a new session would."""
        for address in list(self.ready):
            try:
                self.links[address].append(self.number, self.partition, records)
            except (Closed, Refused):
                self.ready.remove(address)
                self._drop(address)
        assert len(self.ready) >= self.quorum
        self.next_id += len(records)

    def close(self):
        for address in list(self.links):
            self._drop(address)
