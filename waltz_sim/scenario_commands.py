"""The commands of scenarios, and their actions in a simulated world without randomness.

`scenario.py` has the format of scenarios. `_COMMANDS` in this module lists all commands.

Rules:
    1. The commands of a step run immediately, in the order of the scenario, without waiting in
       between.
    2. A killed process stays down until the scenario starts it again.
    3. The first command is always `begin`. It runs before the rest of its step. Its milestones are
       listed only for `begin slowly`.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from waltz_core.client.stream import stream_events as client_events
from waltz_core.cluster.change.rebuilding import RebuildDecision
from waltz_core.cluster.znodes.model import PartitionMetadata
from waltz_core.errors import BadFormat
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, RECORD_PREFIX, ReplicaId
from waltz_core.replication import session_events
from waltz_core.replication.session_recovery import NO_STORAGE_ID
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES
from waltz_core.wire.admin_messages import (
    AdminMessage,
    AdminRejected,
    MarkSuspect,
    ReSeed,
    SetAvailable,
)
from waltz_core.wire.messages import AppendRaw, Nack, Prepare, RowOutcomeCode, StorageMessage
from waltz_sim.cluster.administration import Operator
from waltz_sim.cluster.disaster_recovery import DisasterRecovery
from waltz_sim.cluster.peer import PeerAnswers, SimPeer
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.cluster.simulated_servers import SimServer
from waltz_sim.cluster.simulated_storages import SimStorage
from waltz_sim.milestones import MilestoneRecorder
from waltz_sim.schedule import Schedule, Setup
from waltz_sim.world.simulated_disk import DiskFault, SimDisk, Survival

if TYPE_CHECKING:
    from waltz_sim.cluster.workload import Locks
    from waltz_sim.world.network import SimLink

QUIET_MS: Final = 1_200
_TICK_MS: Final = 50
STEP_MS_MAX: Final = 30_000
WRITE_INTERVAL_MS: Final = 50
_NO_LOCKS: "Final[Locks]" = ((), (), ())
_INDEX_OF_NAME: Final = {"A": 0, "B": 1, "C": 2, "D": 3, "E": 4, "S": 0, "T": 1, "U": 2}


class ScenarioRunner:
    """Runs the commands of one scenario on its simulated cluster."""

    def __init__(self, opening: str) -> None:
        found = re.fullmatch(
            r"begin(?: slowly)? with ([A-E ]+?)(?:, spare ([A-E ]+?))?(?:, servers ([STU ]+))?",
            opening.strip(),
        )
        if found is None:
            raise BadFormat(
                f"scenario: expected a first command such as 'begin with A B C', found {opening!r}"
            )
        replicas, spare, servers = ((group or "").split() for group in found.groups())
        setup = Setup(
            replicas=len(replicas),
            spare_storages=len(spare),
            servers=max(1, len(servers)),
            clients=1,
            segment_bytes_max=1 << 20,
            checkpoint_interval_count=1 << 30,
            lag_bytes_max=1 << 16,
            range_bytes_max=1 << 16,
            is_calm=True,
        )
        self.recorder: MilestoneRecorder
        self.cluster = SimCluster(Schedule(0, setup), checks=self._make_recorder)
        self.is_left_broken = False
        self._triggers: list[tuple[str, str]] = []
        self._held_link: SimLink | None = None
        self._disks: dict[str, SimDisk] = {}
        self._copied_nodes = self.cluster.coordinator.metadata, self.cluster.coordinator.marker
        self._client = self.cluster.clients[0]
        self._client.on_settled = self._on_submission_settled
        self._client.on_rejected = self._on_submission_rejected
        self._client.on_started()
        self._client.subscribe(BEFORE_FIRST)
        self._is_writing = False
        self._tick()
        if not opening.startswith("begin slowly"):
            self.run_step("")

    def _tick(self) -> None:
        """Add an event every `_TICK_MS`, so that time also passes without other events."""
        self.cluster.world.call_after_us(_TICK_MS * US_PER_MS, self._tick)

    def _make_recorder(self, cluster: SimCluster) -> MilestoneRecorder:
        self.recorder = MilestoneRecorder(cluster)
        self.recorder.on_milestone = self._on_milestone
        return self.recorder

    # ---- a step

    def run_step(self, commands: str) -> list[str]:
        """Run a step's commands until the world is quiet; return its milestones as lines."""
        recorder, world = self.recorder, self.cluster.world
        for command in commands.split(";"):
            if command and not command.startswith("begin "):
                self.run_command(command.strip())
        recorder.last_added_us = world.now_us
        quiet_us = QUIET_MS * US_PER_MS
        world.run(
            STEP_MS_MAX * US_PER_MS, until=lambda: world.now_us - recorder.last_added_us > quiet_us
        )
        return recorder.take_lines()

    def run_command(self, command: str) -> None:
        """Run one command; raise BadFormat if it is unknown."""
        for pattern, action in _COMMANDS.items():
            found = re.fullmatch(pattern, command)
            if found is not None:
                action(self, *found.groups())
                return
        raise BadFormat(f"scenario: expected a command, found {command!r}")

    def _on_milestone(self, line: str) -> None:
        for milestone, command in list(self._triggers):
            if milestone in line:
                self._triggers.remove((milestone, command))
                # The caller is in the middle of a machine's step, so the command runs after this
                # step.
                self.cluster.world.call_after_us(0, partial(self.run_command, command))

    def run_when(self, milestone: str, command: str) -> None:
        """Run a command as soon as the line of a milestone contains a text."""
        self._triggers.append((milestone, command))

    def run_for(self, duration_ms: str) -> None:
        """Run the world for some milliseconds of virtual time."""
        self.cluster.world.run(int(duration_ms) * US_PER_MS)

    def leave_broken(self) -> None:
        """Require no recovery at the end of this scenario: an operator would have to decide."""
        self.is_left_broken = True

    # ---- processes

    def _process(self, name: str) -> SimServer | SimStorage:
        return self.cluster.servers[_INDEX_OF_NAME[name]] if name in "STU" else self._storage(name)

    def _storage(self, name: str) -> SimStorage:
        return self.cluster.storages[_replica(name)]

    def kill(self, name: str) -> None:
        """Kill a process as with SIGKILL; it stays down until `start`."""
        process = self._process(name)
        self.cluster.kept_down[process.name] = None
        process.kill()

    def power_off(self, name: str) -> None:
        """Cut a storage's power until `start`: the storage stays down, and loses unsynced data."""
        storage = self._storage(name)
        self.cluster.kept_down[storage.name] = None
        storage.lose_power(Survival.NOTHING, loses_ignored_syncs=True)

    def start(self, name: str) -> None:
        """Start a process that was killed or lost its power."""
        process = self._process(name)
        self.cluster.kept_down.pop(process.name, None)
        process.start()

    def pause(self, name: str) -> None:
        """Stop a process as with SIGSTOP; the ZooKeeper session of a paused server may expire."""
        process = self._process(name)
        process.pause()
        if isinstance(process, SimServer):
            self.cluster.coordinator.watch_server(process)

    def resume(self, name: str) -> None:
        """Continue a paused process as with SIGCONT."""
        self._process(name).resume()

    def cut_off(self, name: str, others: str) -> None:
        """Drop all messages between a machine and several others, without closing their links."""
        network, machine = self.cluster.network, self._process(name).name
        for other in (self._process(each).name for each in others.split()):
            network.block(machine, other)
            network.block(other, machine)
            for link in list(network.links.values()):
                if {end.name for end in link.ends} == {machine, other}:
                    network.mute(link)

    def cut_one_way(self, name: str, other: str) -> None:
        """Drop all messages from one machine to another; the other direction works."""
        self.cluster.network.block(self._process(name).name, self._process(other).name)

    def cut_from_zookeeper(self, name: str) -> None:
        """Cut a server off from ZooKeeper only; its ZooKeeper session expires after a while."""
        server = self._process(name)
        assert isinstance(server, SimServer)
        self.cluster.coordinator.cut_off_servers[server.name] = None
        self.cluster.coordinator.watch_server(server)

    def hold_messages(self) -> None:
        """Delay the messages on the application's newest link to a server."""
        self._held_link = next(reversed(self._client.links.values()))
        self.cluster.network.hold(
            self._held_link, lambda: self.recorder.add_milestone("the held messages arrive")
        )

    def abandon_link(self) -> None:
        """Close the application's end of the delayed link; the server does not notice this."""
        assert self._held_link is not None
        self.cluster.network.abandon(self._held_link, "abandoned")

    def release_messages(self) -> None:
        """Deliver the delayed messages, and then the end of their link."""
        assert self._held_link is not None
        self.cluster.network.release(self._held_link, "abandoned", 50 * US_PER_MS)

    def repair_network(self) -> None:
        """Remove all blocks in the network, also those from ZooKeeper."""
        self.cluster.network.repair()
        self.cluster.coordinator.cut_off_servers.clear()

    def set_clock(self, name: str, sign: str) -> None:
        """Move the wall clock of a process by one hour, "back" or "forward"."""
        self._process(name).wall_offset_ms += 3_600_000 * (-1 if sign == "back" else 1)

    # ---- disks

    def copy_disk(self, name: str) -> None:
        """Keep a copy of the durable files on the disk of a storage."""
        disk = SimDisk(is_traced=False)
        for path, content in self._storage(name).disk.files().items():
            disk.write_durably(path, content)
        self._disks[name] = disk

    def restore_disk(self, name: str) -> None:
        """Replace the disk of a stopped storage by the kept copy."""
        storage = self._storage(name)
        storage.disk = self._disks.pop(name)
        self.recorder.on_disk_rolled_back(storage)

    def insert_empty_disk(self, name: str, registered: str | None) -> None:
        """Insert an empty disk; if `registered`, register its storage ID (`cluster replace`)."""
        storage = self._storage(name)
        storage.disk = SimDisk(is_traced=False)
        storage.storage_id = bytes(reversed(storage.storage_id))
        if registered:
            self.cluster.coordinator.storage_ids[storage.replica] = storage.storage_id
        self.recorder.on_disk_rolled_back(storage)

    def swap_disks(self, name: str, other: str) -> None:
        """Swap the disks of two stopped storages."""
        first, second = self._storage(name), self._storage(other)
        first.disk, second.disk = second.disk, first.disk
        for each in (first, second):
            self.recorder.on_disk_rolled_back(each)

    def fill_disk(self, name: str) -> None:
        """Limit a disk's capacity to the bytes that it has now."""
        disk = self._storage(name).disk
        disk.capacity_bytes = sum(len(content) for content in disk.files().values())

    def remove_capacity_limit(self, name: str) -> None:
        """Remove the limit of a disk's capacity."""
        self._storage(name).disk.capacity_bytes = None

    def fail_sync(self, name: str) -> None:
        """Let the next sync of a disk fail, so that the data written before it is not durable."""
        disk = self._storage(name).disk
        # An append writes records, offsets and lineage (three steps), and then syncs (the fourth).
        disk.plan_fault(disk.step_count + 4, DiskFault.IO_ERROR)

    def corrupt_record(self, name: str, transaction_id: str) -> None:
        """Flip a bit in the data of one transaction on the disk of a storage."""
        disk = self._storage(name).disk
        path = min(file for file in disk.files() if file.suffix == ".seg")
        content, offset = disk.visible_content(path), SEGMENT_HEADER_BYTES
        for _ in range(int(transaction_id)):
            offset += RECORD_PREFIX.size + 4 + RECORD_PREFIX.unpack_from(content, offset)[3]
        assert RECORD_PREFIX.unpack_from(content, offset)[0] == int(transaction_id)
        disk.flip_bits(path, offset + RECORD_PREFIX.size)

    def start_lying(self, name: str) -> None:
        """Let a disk from now on report syncs as successful without doing them."""
        self._storage(name).disk.is_lying = True

    def trust_no_syncs(self, name: str) -> None:
        """Let a storage distrust the syncs of earlier runs, from its next start on."""
        self._storage(name).trusts_fsync = False

    def scrub(self, name: str) -> None:
        """Start a scrub pass over all records of a storage."""
        self._storage(name).scrub_now()

    # ---- administration

    def administer(self, name: str, message: AdminMessage) -> None:
        """Send a request to the administration port of a storage; record a rejection."""

        def on_answer(answer: AdminMessage) -> None:
            if isinstance(answer, AdminRejected):
                self.recorder.add_milestone(f"{name} rejects the request: {answer.text}")

        Operator(self.cluster, self._storage(name), on_answer).request(message)

    def mark_suspect(self, name: str) -> None:
        """Run `storage mark-suspect`."""
        self.administer(name, MarkSuspect(1, self.cluster.partition_id, is_forced=False))

    def set_available(self, name: str, availability: str) -> None:
        """Run `storage availability`; `availability` is "online" or "offline"."""
        is_online = availability == "online"
        self.administer(name, SetAvailable(1, (self.cluster.partition_id,), is_online))

    def re_seed(self, name: str) -> None:
        """Run `storage re-seed`, which empties a replica."""
        self.administer(name, ReSeed(1, self.cluster.partition_id, is_forced=False))

    def rebuild_metadata(self) -> None:
        """Rebuild the partition's metadata in ZooKeeper from the logs of the storages."""

        def on_answer(verdict: RebuildDecision | None) -> None:
            assert verdict is not None
            log = self.recorder.format_ids(0, verdict.log.last_synced_id)
            self.recorder.add_milestone(f"the log of {verdict.source} is declared: {log}")

        DisasterRecovery(self.cluster, on_answer)

    def outsider_requests(self, name: str, session_id: str) -> None:
        """Let a process that does not own the partition request a session from a storage."""
        identity = (bytes(16), NO_STORAGE_ID, self.cluster.key, 1)
        self._send_as_outsider(
            name, Prepare(int(session_id), 1, self.cluster.partition_id, *identity)
        )

    def outsider_appends(self, name: str, session_id: str) -> None:
        """Let a process append to a storage in a session that it has not requested."""
        nothing = (0, b"", b"", 0, GENESIS_CHAIN, ())
        self._send_as_outsider(
            name, AppendRaw(int(session_id), 1, self.cluster.partition_id, *nothing)
        )

    def _send_as_outsider(self, name: str, request: StorageMessage) -> None:
        def on_answer(answers: PeerAnswers) -> None:
            for answer in answers:
                what = answer.message if isinstance(answer, Nack) else "promised"
                self.recorder.add_milestone(f"{name} answers the unauthorized peer: {what}")

        SimPeer(self.cluster, "outsider").request(self._storage(name), [request], on_answer)

    # ---- the application

    def append(self, count: str, at_once: str | None) -> None:
        """Append rows: one batch if `at_once`, otherwise single appends without waiting."""
        if at_once:
            self._append(int(count))
            return
        for _ in range(int(count)):
            self._append(1)

    def _append(self, count: int) -> None:
        client, mark = self._client, self._client.mark
        client.append(self.cluster.workload.create_submission(client, [_NO_LOCKS] * count, mark))

    def start_writing(self) -> None:
        """Append a row every `WRITE_INTERVAL_MS`, and append lost rows again."""
        self._is_writing = self.recorder.names_ids = True
        self._write()

    def stop_writing(self) -> None:
        """Stop appending, wait for all outcomes, and record them in one line."""
        self._is_writing = False
        is_done = self.cluster.world.run(
            STEP_MS_MAX * US_PER_MS, until=lambda: not self.cluster.workload.pending_count
        )
        self.recorder.add_write_outcomes(is_complete=is_done)

    def _write(self) -> None:
        if self._is_writing:
            self._append(1)
            self.cluster.world.call_after_us(WRITE_INTERVAL_MS * US_PER_MS, self._write)

    def _on_submission_settled(self, effect: client_events.SubmissionSettled) -> None:
        count = len(self.cluster.workload.remove_submission(effect.token))
        if not self.recorder.names_ids:
            self.recorder.last_added_us = self.cluster.world.now_us
        elif (effect.outcome.reasons == RowOutcomeCode.LOST).any():
            self._append(count)

    def _on_submission_rejected(self, effect: client_events.SubmissionRejected) -> None:
        self.cluster.workload.remove_submission(effect.token)
        self.recorder.last_added_us = self.cluster.world.now_us

    # ---- ZooKeeper and operators

    def assign_replicas(self, names: str) -> None:
        """Assign the partition to the named storages."""
        self.cluster.reassign(tuple(_replica(each) for each in names.split()))

    def move_partition(self, name: str) -> None:
        """Move the partition to a server."""
        self.cluster.coordinator.set_owner(self._process(name).name)

    def expire_session(self, name: str) -> None:
        """Expire the ZooKeeper session of a server."""
        server = self._process(name)
        assert isinstance(server, SimServer)
        self.cluster.coordinator.expire(server)

    def checkpoint(self) -> None:
        """Let the owner of the partition replace its session, as at a checkpoint."""
        owner = self.cluster.owner
        assert owner is not None
        owner.step(session_events.Checkpoint())

    def set_zookeeper_state(self, state: str) -> None:
        """Let ZooKeeper not answer, or lose its answers, or answer normally again."""
        self.cluster.coordinator.is_unavailable = state == "is unavailable"
        self.cluster.coordinator.lost_answer_share = 1.0 if state == "loses answers" else 0.0

    def copy_nodes(self) -> None:
        """Keep a copy of the partition's nodes in ZooKeeper."""
        coordinator = self.cluster.coordinator
        self._copied_nodes = coordinator.metadata, coordinator.marker

    def restore_nodes(self) -> None:
        """Restore the kept copy of the partition's nodes in ZooKeeper."""
        coordinator = self.cluster.coordinator
        coordinator.metadata, coordinator.marker = self._copied_nodes
        self.recorder.on_zookeeper_rewritten()

    def forget_states(self) -> None:
        """Remove all replica states of the opened partition from ZooKeeper."""
        coordinator = self.cluster.coordinator
        assert coordinator.metadata is not None
        coordinator.metadata = PartitionMetadata(
            coordinator.metadata.generation, coordinator.metadata.session_id, {}
        )


def _replica(name: str) -> ReplicaId:
    return ReplicaId(f"storage{_INDEX_OF_NAME[name]}:1")


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    r"when ([^:]+): (.+)": ScenarioRunner.run_when,
    r"wait (\d+) ms": ScenarioRunner.run_for,
    r"leave the cluster broken": ScenarioRunner.leave_broken,
    r"kill ([A-ES-U])": ScenarioRunner.kill,
    r"power off ([A-E])": ScenarioRunner.power_off,
    r"start ([A-ES-U])": ScenarioRunner.start,
    r"pause ([A-ES-U])": ScenarioRunner.pause,
    r"resume ([A-ES-U])": ScenarioRunner.resume,
    r"cut ([A-ES-U]) off from ([A-ES-U ]+)": ScenarioRunner.cut_off,
    r"drop messages from ([A-ES-U]) to ([A-ES-U])": ScenarioRunner.cut_one_way,
    r"cut ([STU]) off from ZooKeeper": ScenarioRunner.cut_from_zookeeper,
    r"hold messages of the application": ScenarioRunner.hold_messages,
    r"let the application abandon its link": ScenarioRunner.abandon_link,
    r"deliver held messages": ScenarioRunner.release_messages,
    r"repair the network": ScenarioRunner.repair_network,
    r"set the clock of ([A-ES-U]) an hour (back|forward)": ScenarioRunner.set_clock,
    r"copy the disk of ([A-E])": ScenarioRunner.copy_disk,
    r"restore the copied disk of ([A-E])": ScenarioRunner.restore_disk,
    r"put a new disk in ([A-E])( and register it)?": ScenarioRunner.insert_empty_disk,
    r"swap the disks of ([A-E]) and ([A-E])": ScenarioRunner.swap_disks,
    r"fill the disk of ([A-E])": ScenarioRunner.fill_disk,
    r"free the disk of ([A-E])": ScenarioRunner.remove_capacity_limit,
    r"let a sync fail in ([A-E])": ScenarioRunner.fail_sync,
    r"corrupt ([A-E]) at (\d+)": ScenarioRunner.corrupt_record,
    r"ignore syncs of the disk of ([A-E])": ScenarioRunner.start_lying,
    r"declare the disk of ([A-E]) volatile": ScenarioRunner.trust_no_syncs,
    r"scrub ([A-E])": ScenarioRunner.scrub,
    r"mark ([A-E]) suspect": ScenarioRunner.mark_suspect,
    r"take ([A-E]) (offline|online)": ScenarioRunner.set_available,
    r"re-seed ([A-E])": ScenarioRunner.re_seed,
    r"rebuild ZooKeeper from the storages": ScenarioRunner.rebuild_metadata,
    r"let an unauthorized peer ask ([A-E]) for session (\d+)": ScenarioRunner.outsider_requests,
    r"let an unauthorized peer append to ([A-E]) in session (\d+)": ScenarioRunner.outsider_appends,
    r"append (\d+)( at once)?": ScenarioRunner.append,
    r"start writes": ScenarioRunner.start_writing,
    r"stop writes": ScenarioRunner.stop_writing,
    r"replicas ([A-E ]+)": ScenarioRunner.assign_replicas,
    r"move the partition to ([STU])": ScenarioRunner.move_partition,
    r"expire the session of ([STU])": ScenarioRunner.expire_session,
    r"checkpoint": ScenarioRunner.checkpoint,
    r"copy ZooKeeper": ScenarioRunner.copy_nodes,
    r"restore the copy of ZooKeeper": ScenarioRunner.restore_nodes,
    r"remove the replicas from ZooKeeper": ScenarioRunner.forget_states,
    r"ZooKeeper (is unavailable|loses answers|works)": ScenarioRunner.set_zookeeper_state,
}
