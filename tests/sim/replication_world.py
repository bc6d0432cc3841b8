"""Real `PartitionStore` machines in a small world of model storages and a model ZooKeeper.

One seed is one run: a phase with faults, in which every promise is checked as things happen, then
a phase in which everything heals, at the end of which all must be equal again.

Checked: AckUnique, AckQuorum, EngagedOnly, DecisionCovers, GateCAS2, NoCutCommitted, LwmFull (the
storage refuses, and a refusal is counted), OutcomeTruth, Dense, MetaShape, LogMatching, HwmMono,
and Converged at the end.
"""

import struct
import sys
import zlib
from collections import Counter, deque

from tests.sim.model_storage import ModelStorage, crcs_of, make_record, payload_of
from waltz_core.cluster.model import (
    UNRESOLVED,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.machine import Report, Wakeup
from waltz_core.record import BEFORE_FIRST, NO_SESSION
from waltz_core.replication import events
from waltz_core.replication.invariants import check
from waltz_core.replication.limits import Limits
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.replication.quorum import quorum_size
from waltz_core.sim.world import World
from waltz_core.wire import messages as wire

KEY = b"cluster-key-16-b"
MS = 1000
LIMITS = Limits(lag_bytes_max=600, range_bytes_max=400, quorum_ms_max=6_000, refused_retry_ms=1_500)


class Violation(Exception):
    """A promise was broken."""


class Checker:
    """What the world knows to be true, whoever may believe otherwise."""

    def __init__(self, world):
        self.world = world
        self.acked = {}  # id -> (payload, session)
        self.fixed = {}  # id -> payload, once exposed as committed
        self.points = set()  # (last id, chain) of every batch once exposed as committed
        self.failed = {}  # payload -> session in which it was told failed
        self.decided = {}  # session -> mark
        self.opened = set()  # sessions whose second compare-and-set is applied
        self.engaged = {}  # session -> names ever engaged
        self.synced_ever = {}  # (name, id) -> payloads that were ever synced there
        self.counts = Counter()

    def fail(self, rule, text):
        raise Violation(f"{rule}: {text}")

    # --- storages

    def synced(self, storage, entry):
        for place, record in enumerate(entry.records, entry.lineage.first):
            self.synced_ever.setdefault((storage.name, place), set()).add(payload_of(record))

    def appending(self, storage, message):
        for line in message.lineage:
            if line.session_id == message.session_id and line.session_id not in self.opened:
                self.fail("GateCAS2", f"append of {line.session_id} before it is open")

    def cutting(self, storage, keep):
        # A torn piece of a batch, whose replica never voted for it, is no copy of that batch.
        for entry in reversed(storage.disk.entries):
            line = entry.lineage
            if line.last <= keep:
                break
            if (line.last, line.chain) in self.points:
                for place in range(max(keep + 1, line.first), line.last + 1):
                    if place in self.acked:
                        self.fail("NoCutCommitted", f"{storage.name} cuts {place}, keeps {keep}")

    # --- the coordinator

    def wrote(self, before, after):
        if after.session_id < before.session_id:
            self.fail("MetaShape", "session went back")
        engaged = [n for n, s in after.states.items() if s.closing_high_water_mark == UNRESOLVED]
        sessions = {after.states[name].session_id for name in engaged}
        if after.states and (len(sessions) != 1 or len(engaged) < quorum_size(len(after.states))):
            self.fail("MetaShape", f"{after}")
        if engaged and sessions == {after.session_id}:
            self.opened.add(after.session_id)
            self.engaged.setdefault(after.session_id, set()).update(engaged)

    # --- servers

    def decide(self, session, mark):
        self.decided[session] = mark
        for place, (_, acked_in) in self.acked.items():
            if acked_in < session and place > mark:
                self.fail(
                    "DecisionCovers", f"{place} acked in {acked_in}, {session} decides {mark}"
                )

    def gate(self, session):
        if session not in self.opened:
            self.fail("GateCAS2", f"an answer of {session} before it is open")

    def expose(self, place, payload, session):
        old = self.fixed.setdefault(place, payload)
        if old != payload:
            self.fail("Fork", f"id {place}: {old}, then {payload} in session {session}")
        if payload in self.failed:
            self.fail("OutcomeTruth", f"{payload} was told failed, is in the log at {place}")

    def ack(self, place, payload, session, quorum):
        self.expose(place, payload, session)
        if self.acked.get(place, (payload,))[0] != payload:
            self.fail("AckUnique", f"id {place}")
        self.acked.setdefault(place, (payload, session))
        holders = [
            name
            for name in self.engaged.get(session, ())
            if payload in self.synced_ever.get((name, place), ())
        ]
        if len(holders) < quorum:
            self.fail("AckQuorum", f"id {place} of session {session} is on {holders} only")
        for later, mark in self.decided.items():
            if later > session and place > mark:
                self.fail("DecisionCovers", f"{place} acked in {session}, {later} decided {mark}")
        self.counts["acked"] += 1

    def tell_failed(self, payload, session):
        if payload in self.fixed.values():
            self.fail("OutcomeTruth", f"{payload} is in the log and told failed")
        self.failed[payload] = session
        self.counts["failed"] += 1


class Zk:
    """Both nodes of the partition, at one version each."""

    def __init__(self, world, checker, origin):
        self.world, self.rng, self.checker = world, world.rng, checker
        self.metadata, self.metadata_version = None, -1
        self.marker, self.marker_version = None, -1
        self.is_away = False
        self.loses = 0.0
        if origin == "new":
            self.marker = PartitionMarker(MarkerState.NEW)
            self.marker_version = 0
            self.metadata, self.metadata_version = PartitionMetadata(), 0

    def read(self, server, attempt):
        def do():
            if self.is_away or self.rng.random() < self.loses:
                server.hear_later(events.MetadataUnknown(attempt, "no answer"))
            else:
                view = self.metadata, self.metadata_version, self.marker, self.marker_version
                server.hear_later(events.MetadataRead(attempt, *view))

        self.world.after(self.rng.randint(200, 2000), do)

    def write(self, server, effect):
        # A request of unknown outcome may also be carried out much later.
        late = self.loses and self.rng.random() < self.loses
        delay_us = self.rng.randint(200, 2000)
        if late:
            self.world.after(delay_us, lambda: server.hear_later(_unknown(effect)))
            if self.rng.random() < 0.5:
                delay_us += self.rng.randint(0, 50_000)
        self.world.after(delay_us, lambda: self._apply(server, effect, tell=not late))

    def _apply(self, server, effect, *, tell):
        if self.is_away and self.rng.random() < 0.9:
            if tell:
                server.hear_later(_unknown(effect))
            return
        if (effect.metadata_version, effect.marker_version) != (
            self.metadata_version,
            self.marker_version,
        ):
            if tell:
                server.hear_later(events.MetadataConflict(effect.attempt))
            return
        before = self.metadata or PartitionMetadata()
        self.checker.wrote(before, effect.metadata)
        self.metadata, self.marker = effect.metadata, effect.marker
        self.metadata_version += 1
        self.marker_version += 1
        self.world.note(f"zk {effect.metadata.session_id} {_short(effect.metadata)}")
        if not tell:
            return
        if self.is_away:
            server.hear_later(_unknown(effect))
            return
        versions = self.metadata_version, self.marker_version
        server.hear_later(events.MetadataWritten(effect.attempt, *versions))


def _unknown(effect):
    return events.MetadataUnknown(effect.attempt, "connection loss")


def _short(metadata):
    return " ".join(
        f"{name}:{state.session_id}" + ("" if state[1] == UNRESOLVED else f"<{state[1]}")
        for name, state in metadata.states.items()
    )


class Link:
    """One connection of one session: first in, first out, both ways."""

    def __init__(self, server, replica, session):
        self.server, self.replica, self.session = server, replica, session
        self.is_open = False  # the server has been told
        self.is_cut = False  # the server hears nothing any more
        self.is_dead = False  # nothing gets through, and nobody knows yet
        self.up_us = self.down_us = 0


class Storage:
    """A model storage with its queue, its disk's pace and its connections."""

    def __init__(self, sim, name):
        self.sim, self.world, self.rng = sim, sim.world, sim.world.rng
        self.model = ModelStorage(sim.world, name, sim.checker)
        self.name = name
        self.queue = deque()
        self.is_busy = False
        self.is_paused = False
        self.unsynced = []
        self.sync_planned = None
        self.fsync_us = sim.world.rng.choice((200, 1000, 5000))

    @property
    def is_up(self):
        return self.model.is_up

    def arrive(self, link, message):
        if self.is_up:
            self.queue.append((link, message))
            self.work()

    def work(self):
        if self.queue and not self.is_busy and not self.is_paused and self.is_up:
            self.is_busy = True
            self.world.after(self.rng.randint(20, 200), self._serve)

    def _serve(self):
        self.is_busy = False
        if not self.is_up or self.is_paused or not self.queue:
            return
        link, message = self.queue.popleft()
        answer = self.model.handle(message)
        self.world.note(f"{self.name} {_name(message)} -> {_name(answer)}")
        if isinstance(answer, wire.Nack):
            self.sim.checker.counts[f"nack {type(message).__name__}"] += 1
        if isinstance(answer, wire.Appended):
            self.unsynced.append((link, answer))
            if self.sync_planned is None:
                delay_us = self.rng.randint(self.fsync_us // 2, self.fsync_us)
                self.sync_planned = self.world.after(delay_us, self._sync)
        else:
            self.sim.reply(link, answer)
        self.work()

    def _sync(self):
        self.sync_planned = None
        if not self.is_up:
            return
        if self.is_paused:
            self.sync_planned = self.world.after(1000, self._sync)
            return
        self.model.sync()
        answers, self.unsynced = self.unsynced, []
        for link, answer in answers:
            self.sim.reply(link, answer)

    def stop(self):
        if self.sync_planned is not None:
            self.sync_planned.cancel()
        self.sync_planned = None
        self.queue.clear()
        self.unsynced = []


def _name(message):
    return f"{type(message).__name__}" + "".join(
        f" {getattr(message, field)}"
        for field in ("session_id", "first", "mark", "last_to_keep", "synced_max", "message")
        if hasattr(message, field)
    )


class Server:
    """A process with one machine, and an application that appends to it."""

    def __init__(self, sim, number):
        self.sim, self.world, self.rng = sim, sim.world, sim.world.rng
        self.number = number
        self.is_paused = False
        self.held_back = []
        self.wake = None
        self.incarnation = 0
        self.owns = None
        self.boot()

    def boot(self):
        self.incarnation += 1
        self.machine = PartitionStore(0, KEY, 1, self.sim.storage_ids, rng=self.rng, limits=LIMITS)
        self.links = {}
        self.pending = deque()  # (first, last, payloads, session)
        self.session = None
        self.is_settled = False
        self.chain_ok = True
        self.mark = BEFORE_FIRST
        self.opened_at_us = 0
        self.proofs = {}

    # --- events in

    def hear_later(self, event):
        """An event from outside, after a short while; dropped if the process died meanwhile."""
        incarnation = self.incarnation

        def arrive():
            if self.incarnation == incarnation:
                self.hear(event)

        self.world.after(self.rng.randint(50, 1000), arrive)

    def hear(self, event):
        if self.is_paused:
            self.held_back.append(event)
            return
        self.world.note(f"server{self.number} < {_describe(event)}")
        effects = self.machine.step(event, self.world.now_ms)
        check(self.machine)
        for effect in effects:
            self.perform(effect)
        self._set_wake()

    def _set_wake(self):
        if self.wake is not None:
            self.wake.cancel()
            self.wake = None
        at_ms = self.machine.wake_at_ms
        if at_ms is not None:
            delay_us = max(1, at_ms * 1000 - self.world.now_us)
            incarnation = self.incarnation

            def ring():
                if self.incarnation == incarnation:
                    self.wake = None
                    self.hear(Wakeup())

            self.wake = self.world.after(delay_us, ring)

    # --- effects out

    def perform(self, effect):  # noqa: C901 - one case for each effect
        checker = self.sim.checker
        match effect:
            case events.ReadMetadata():
                self.sim.zk.read(self, effect.attempt)
            case events.WriteMetadata():
                self.sim.zk.write(self, effect)
            case events.OpenReplica():
                self.sim.dial(self, effect.session_id, effect.replica)
            case events.SendToReplica():
                # A link that broke while this process was paused: it is told in a moment.
                if effect.replica in self.links:
                    self.sim.send(self.links[effect.replica], effect.message)
            case events.CloseReplica():
                link = self.links.pop(effect.replica, None)
                if link is not None:
                    self.sim.close(link)
            case events.SessionOpened():
                checker.gate(effect.session_id)
                self._opened(effect)
            case events.Settled():
                checker.gate(effect.session_id)
                self._settled(effect)
            case events.Committed():
                checker.gate(effect.session_id)
                self._committed(effect)
            case events.SessionClosed():
                assert self.session == effect.session_id
                self.session = None
                self.is_settled = False
                checker.counts["session closed"] += 1
            case events.MarkProved():
                self._proved(effect)
            case events.MarkUnproved():
                self.proofs.pop(effect.token)
                checker.counts["mark unproved"] += 1
            case events.Released():
                checker.counts["released"] += 1
                self.owns = None
            case Report():
                self._report(effect)

    def _report(self, report):
        fields = dict(report.fields)
        self.world.note(f"server{self.number} ! {report.name} {fields}")
        self.sim.checker.counts[report.name] += 1
        if report.name == "partition.refused":
            self.sim.checker.counts["refused: " + fields["reason"][:60]] += 1
        if report.name == "recovery.decided":
            self.sim.checker.decide(fields["session"], fields["mark"])

    def _opened(self, effect):
        checker = self.sim.checker
        assert self.session is None
        self.world.note(
            f"server{self.number} opens {effect.session_id} at {effect.high_water_mark}"
        )
        self.session = effect.session_id
        self.opened_at_us = self.world.now_us
        checker.counts["session opened"] += 1
        if effect.high_water_mark < self.mark:
            checker.fail("HwmMono", f"{self.mark} then {effect.high_water_mark}")
        self.mark = effect.high_water_mark
        # The exposed log is that of any replica engaged in the session, as far as the mark.
        for name in checker.engaged[effect.session_id]:
            storage = self.sim.storages[name].model
            if storage.disk.promised > effect.session_id or storage.last < self.mark:
                continue
            for place, payload in enumerate(storage.payloads()[: self.mark + 1]):
                checker.expose(place, payload, effect.session_id)
            for entry in storage.disk.entries:
                if entry.lineage.last <= self.mark:
                    checker.points.add((entry.lineage.last, entry.lineage.chain))

    def _settled(self, effect):
        assert effect.session_id == self.session
        assert not self.is_settled
        self.is_settled = True
        checker = self.sim.checker
        while self.pending:
            first, last, payloads, session = self.pending.popleft()
            for place, payload in zip(range(first, last + 1), payloads, strict=True):
                if place <= effect.committed_last:
                    if checker.fixed.get(place) != payload:
                        checker.fail("OutcomeTruth", f"{payload} told ok, not at {place}")
                    checker.counts["settled ok"] += 1
                else:
                    checker.tell_failed(payload, session)
        self._later()

    def _committed(self, effect):
        assert effect.session_id == self.session
        if effect.last <= self.mark:
            self.sim.checker.fail("Dense", f"mark {self.mark} then {effect.last}")
        quorum = quorum_size(len(self.machine.session.claim.assigned))
        while self.pending and self.pending[0][1] <= effect.last:
            first, last, payloads, session = self.pending.popleft()
            if first != self.mark + 1:
                self.sim.checker.fail("Dense", f"{first} after {self.mark}")
            for place, payload in zip(range(first, last + 1), payloads, strict=True):
                self.sim.checker.ack(place, payload, session, quorum)
            self.mark = last
        assert self.mark == effect.last
        self.sim.checker.points.add((effect.last, effect.chain))

    def _proved(self, effect):
        _asked_us, _mark, floor = self.proofs.pop(effect.token)
        if effect.high_water_mark < floor:
            self.sim.checker.fail("StaleMark", f"{effect.high_water_mark} after {floor} was acked")
        self.sim.checker.counts["mark proved"] += 1

    # --- the application

    def _later(self):
        session, incarnation = self.session, self.incarnation

        def go():
            if self.incarnation == incarnation and self.session == session:
                self.append()

        self.world.after(self.rng.randint(100, 8000), go)

    def append(self):
        """Submit a small batch now and then, ask for proofs, ask for checkpoints."""
        if self.is_paused:
            self._later()
            return
        roll = self.rng.random()
        if roll < 0.04:
            token = self.sim.next_number()
            floor = max(self.sim.checker.acked, default=BEFORE_FIRST)
            self.proofs[token] = self.world.now_us, self.mark, floor
            self.hear(events.ProveMark(token))
        elif roll < 0.045 and not self.sim.is_healing:
            self.hear(events.Checkpoint())
        elif len(self.pending) < 8 and self.machine.open_session is not None:
            first = self.machine.next_transaction_id
            payloads = [self.sim.next_number() for _ in range(self.rng.randint(1, 4))]
            last = first + len(payloads) - 1
            self.pending.append((first, last, payloads, self.session))
            batch = make_batch(first, payloads, self.world.now_ms)
            self.hear(events.Submit(self.session, batch))
        if self.session is not None and not self.sim.is_quiet:
            self._later()


def make_batch(first, payloads, stamp_ms):
    records = [make_record(first + i, payload) for i, payload in enumerate(payloads)]
    data = b"".join(records)
    lengths = struct.pack(f">{len(records)}i", *map(len, records))
    last = first + len(records) - 1
    return events.Batch(first, last, lengths, data, crcs_of(records), zlib.crc32(data), stamp_ms)


def _describe(event):
    match event:
        case events.ReplicaAnswered():
            return f"{event.replica} {_name(event.message)}"
        case events.MetadataRead():
            return f"MetadataRead {event.attempt}"
        case events.Submit():
            return f"Submit {event.batch.first}..{event.batch.last}"
        case _:
            return str(event)


class Sim:
    """The world: storages, a coordinator, servers, faults."""

    def __init__(self, seed, *, replicas=3, servers=2, faults=None, storage_class=None):
        self.world = World(seed)
        self.rng = self.world.rng
        self.checker = Checker(self.world)
        self.numbers = 0
        self.is_healing = self.is_quiet = False
        origin = self.rng.choice(("new", "new", "new", "absent"))
        self.zk = Zk(self.world, self.checker, origin)
        self.storages = {}
        self.storage_ids = {}
        self.storage_class = storage_class or Storage
        self.assigned = [f"storage{n}:1" for n in range(replicas)]
        for name in self.assigned:
            self._add_storage(name)
        self.links = []
        self.generation = 0
        self.servers = [Server(self, n) for n in range(servers)]
        self.owner = None
        self.faults = dict(FAULTS)
        if faults is None:
            # Swarm testing: each seed has some of the faults, at its own rate.
            faults = {name: self.rng.random() < 0.6 for name in FAULTS}
        self.faults = {name: weight for name, weight in FAULTS.items() if faults.get(name)}
        self.fault_gap_us = self.rng.choice((20, 60, 200)) * MS

    def next_number(self):
        self.numbers += 1
        return self.numbers

    def _add_storage(self, name):
        self.storages[name] = self.storage_class(self, name)
        if self.rng.random() < 0.9:
            self.storage_ids[name] = self.storages[name].model.disk.storage_id

    # --- connections

    def dial(self, server, session, replica):
        link = Link(server, replica, session)
        assert replica not in server.links
        server.links[replica] = link
        self.links.append(link)
        storage = self.storages.get(replica)

        def connected():
            if link.is_cut:
                return
            if storage is None or not storage.is_up or storage.is_paused or link.is_dead:
                self.break_link(link, "connection refused")
                return
            link.is_open = True
            self._to_server(link, events.ReplicaOpened(session, replica))

        self.world.after(self.rng.randint(100, 2000), connected)

    def send(self, link, message):
        if link.is_dead:
            return
        storage = self.storages[link.replica]
        link.up_us = max(link.up_us, self.world.now_us + self.rng.randint(50, 800))
        # NB: cutting a link does not stop what was sent on it.
        self.world.after(link.up_us - self.world.now_us, lambda: storage.arrive(link, message))

    def reply(self, link, answer):
        if link.is_cut or link.is_dead:
            return
        event = events.ReplicaAnswered(link.session, link.replica, answer)
        self._to_server(link, event)

    def _to_server(self, link, event):
        server, incarnation = link.server, link.server.incarnation
        link.down_us = max(link.down_us, self.world.now_us + self.rng.randint(50, 800))

        def arrive():
            if not link.is_cut and server.incarnation == incarnation:
                server.hear(event)

        self.world.after(link.down_us - self.world.now_us, arrive)

    def close(self, link):
        """The server drops it."""
        link.is_cut = True
        if link in self.links:
            self.links.remove(link)

    def break_link(self, link, reason):
        """It breaks: the server is told, once."""
        if link.is_cut:
            return
        server, incarnation = link.server, link.server.incarnation
        session, replica = link.session, link.replica
        self.close(link)

        def arrive():
            if server.incarnation == incarnation and server.links.get(replica) is link:
                del server.links[replica]
                server.hear(events.ReplicaLost(session, replica, reason))

        self.world.after(self.rng.randint(50, 1000), arrive)

    # --- faults

    def fault(self):
        if self.is_healing:
            return
        if self.faults:
            name = self.rng.choices(list(self.faults), list(self.faults.values()))[0]
            self.checker.counts[f"fault {name}"] += 1
            self.world.note(f"fault {name}")
            getattr(self, f"fault_{name}")()
        self.world.after(self.rng.randint(1, 2 * self.fault_gap_us), self.fault)

    def _any_storage(self):
        return self.rng.choice(list(self.storages.values()))

    def _stop(self, storage, how):
        getattr(storage.model, how)()
        storage.stop()
        for link in [link for link in self.links if link.replica == storage.name]:
            if self.rng.random() < 0.15:
                self._silence(link)
            else:
                self.break_link(link, "reset")
        self.world.after(self.rng.randint(1, 400) * MS, lambda: self._start(storage))

    def _start(self, storage):
        storage.model.is_up = True
        storage.is_busy = False
        storage.work()

    def _silence(self, link):
        link.is_dead = True
        delay_us = self.rng.randint(10, 3000) * MS
        self.world.after(delay_us, lambda: self.break_link(link, "no answer to pings"))

    def fault_crash(self):
        self._stop(self._any_storage(), "crash")

    def fault_power(self):
        self._stop(self._any_storage(), "lose_power")

    def fault_all_power(self):
        for storage in list(self.storages.values()):
            self._stop(storage, "lose_power")

    def fault_link(self):
        if self.links:
            self.break_link(self.rng.choice(self.links), "cut")

    def fault_silence(self):
        if self.links:
            self._silence(self.rng.choice(self.links))

    def fault_pause_server(self):
        server = self.rng.choice(self.servers)
        if not server.is_paused:
            server.is_paused = True
            delay_us = self.rng.choice((5, 50, 500, 3000)) * MS
            self.world.after(delay_us, lambda: self._resume(server))

    def _resume(self, server):
        server.is_paused = False
        held, server.held_back = server.held_back, []
        incarnation = server.incarnation
        for event in held:
            if server.incarnation == incarnation:
                server.hear(event)

    def fault_pause_storage(self):
        storage = self._any_storage()
        if not storage.is_paused:
            storage.is_paused = True

            def resume():
                storage.is_paused = False
                storage.work()

            self.world.after(self.rng.choice((5, 50, 500, 8000)) * MS, resume)

    def fault_kill_server(self):
        server = self.rng.choice(self.servers)
        for link in list(server.links.values()):
            self.close(link)
        server.is_paused = False
        server.held_back = []
        server.boot()
        if server is self.owner:
            self.owner = None

    def fault_fsync(self):
        self._any_storage().model.fails_next_sync = True

    def fault_roll_back(self):
        """Only while every other engaged replica can be believed: a budget of one."""
        if not self._all_healthy():
            return
        candidates = [one for one in self.storages.values() if one.model.snapshots]
        if candidates:
            self._stop(self.rng.choice(candidates), "roll_back")

    def fault_rot(self):
        if self._all_healthy():
            self._any_storage().model.rot()

    def _all_healthy(self):
        states = {} if self.zk.metadata is None else self.zk.metadata.states
        for name, storage in self.storages.items():
            disk, state = storage.model.disk, states.get(name)
            if disk.suspect or disk.damaged:
                return False
            if state and state[1] == UNRESOLVED and disk.last_session < state.session_id:
                return False
            payloads = storage.model.payloads()
            engaged = state is not None and state[1] == UNRESOLVED
            if not engaged:
                continue
            for place, (payload, _) in self.checker.acked.items():
                if place < len(payloads) and payloads[place] != payload:
                    return False
        return True

    def fault_lost_cas(self):
        self.zk.loses = 0.3
        self.world.after(self.rng.randint(1, 300) * MS, self._zk_back)

    def fault_zk_away(self):
        self.zk.is_away = True
        self.world.after(self.rng.randint(1, 1500) * MS, self._zk_back)

    def _zk_back(self):
        self.zk.is_away, self.zk.loses = False, 0.0

    def fault_slow(self):
        storage = self._any_storage()
        storage.fsync_us = self.rng.choice((200, 1000, 5000, 100_000))

    def fault_bounce(self):
        """The assignment moves, maybe to a second server at once."""
        self._assign(self.rng.choice(self.servers), tell_others=self.rng.random() < 0.5)

    def fault_reassign(self):
        """One replica more or less, or one in the place of another."""
        spare = [name for name in self.storages if name not in self.assigned]
        held = {} if self.zk.metadata is None else self.zk.metadata.states
        if set(held) != set(self.assigned):
            return  # One step at a time.
        roll = self.rng.random()
        if roll < 0.4 and len(self.assigned) > 2:
            self.assigned.remove(self.rng.choice(self.assigned))
        elif len(self.assigned) < 5:
            if not spare:
                name = f"storage{len(self.storages)}:1"
                self._add_storage(name)
                spare = [name]
            if roll > 0.8 and len(self.assigned) > 2:
                self.assigned.remove(self.rng.choice(self.assigned))
            self.assigned.append(self.rng.choice(spare))
        for server in self.servers:
            if server.owns is not None:
                server.hear(events.Reassign(tuple(self.assigned)))

    # --- who owns

    def _assign(self, server, *, tell_others):
        self.generation += 1
        self.owner = server
        for other in self.servers:
            if other is not server and other.owns is not None and tell_others:
                other.owns = None
                other.hear(events.Disown())
        server.owns = self.generation
        server.hear(events.Own(self.generation, tuple(self.assigned)))

    def follow(self):
        """The assignment: somebody owns the partition, sooner or later."""
        if self.owner is None or self.owner.owns is None or self.is_healing:
            servers = self.servers[:1] if self.is_healing else self.servers
            if self.owner not in servers or self.owner.owns is None:
                self._assign(self.rng.choice(servers), tell_others=True)
        self.world.after(self.rng.randint(50, 400) * MS, self.follow)

    # --- a run

    def run(self, duration_ms=4_000):
        self.follow()
        self.world.after(self.fault_gap_us, self.fault)
        self.world.run(duration_ms * MS)
        self.heal()
        return self

    def heal(self):
        """End all faults; within bounded time everything is equal again."""
        self.is_healing = True
        self.world.note("heal")
        self._zk_back()
        for storage in self.storages.values():
            storage.is_paused = False
            storage.model.fails_next_sync = False
            storage.fsync_us = 1000
            if not storage.is_up:
                self._start(storage)
            storage.work()
        for link in list(self.links):
            if link.is_dead:
                self.break_link(link, "healed")
        for server in self.servers:
            if server.is_paused:
                self._resume(server)
        if not self.world.run(90_000 * MS, until=self._is_open_everywhere):
            self.checker.fail("Converged", f"not open with all replicas: {self._why()}")
        # Rot is mended when a session begins.
        self.servers[0].hear(events.Checkpoint())
        self.world.run(300 * MS)
        self.is_quiet = True
        if not self.world.run(60_000 * MS, until=self._is_equal):
            self.checker.fail("Converged", f"not equal: {self._why()}")
        self.check_end()

    def _is_open_everywhere(self):
        server = self.servers[0]
        session = server.machine.session
        return (
            self.owner is server
            and server.is_settled
            and session is not None
            and session.is_open
            and len(session.engaged) == len(self.assigned)
            and len(session.claim.assigned) == len(self.assigned)
        )

    def _is_equal(self):
        server = self.servers[0]
        if not self._is_open_everywhere() or server.pending:
            return False
        logs = [self.storages[name].model.payloads() for name in self.assigned]
        return all(log == logs[0] for log in logs)

    def _why(self):
        server = self.servers[0]
        session = server.machine.session
        stages = (
            []
            if session is None
            else [
                f"{one.replica}:{one.stage.name}:{one.synced_last}"
                for one in session.replicas.values()
            ]
        )
        lasts = {name: one.model.last for name, one in self.storages.items()}
        owner = self.owner and self.owner.number
        return f"{stages} {lasts} owner={owner} pending={len(server.pending)}"

    def check_end(self):
        checker = self.checker
        models = [self.storages[name].model for name in self.assigned]
        log = models[0].payloads()
        chains = {model.chain for model in models}
        if len(chains) != 1:
            checker.fail("LogMatching", "equal records, different chains")
        for place, (payload, _) in checker.acked.items():
            if place >= len(log) or log[place] != payload:
                checker.fail("AckLost", f"id {place}")
        for place, payload in checker.fixed.items():
            if place >= len(log) or log[place] != payload:
                checker.fail("Fixed", f"id {place}")
        if len(set(log)) != len(log):
            checker.fail("AtMostOnce", "a payload is twice in the log")
        told = [payload for payload in log if payload in checker.failed]
        if told:
            checker.fail("OutcomeTruth", f"told failed, in the log: {told}")
        for model in models:
            if model.disk.suspect or model.disk.damaged:
                checker.fail("Converged", f"{model.name} is suspect or damaged")


FAULTS = {
    "crash": 3,
    "power": 3,
    "all_power": 1,
    "link": 4,
    "silence": 2,
    "pause_server": 2,
    "pause_storage": 2,
    "kill_server": 2,
    "fsync": 2,
    "roll_back": 3,
    "rot": 2,
    "lost_cas": 3,
    "zk_away": 1,
    "slow": 1,
    "bounce": 2,
    "reassign": 1,
}
assert NO_SESSION == -1


def run_seed(seed, **options):
    """Run one seed; raises what it finds."""
    return Sim(seed, **options).run()


def main(seed):
    """Run a seed and print how it ended, with the end of its trace."""
    sim = Sim(seed)
    try:
        sim.run()
    finally:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
