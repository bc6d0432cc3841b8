"""A simulated cluster: clients, servers, storages and ZooKeeper in one world.

Faults, workloads, checkers and scenarios share this object, and use its operations on the whole
cluster.

Rules:
    1. There is one partition, because the guarantees of the log apply to each partition separately.
       Other tests cover the resources that the partitions of a process share, such as the disk of a
       storage or the memory of a server.
    2. A run has two phases. In the first phase faults occur. In the second phase all faults are
       repaired, and the cluster must recover within a limited time. Without a budget
       (`data_loss_budget.py`), the cluster need not recover, but must not break a guarantee.
    3. An operator makes the repairs that the cluster cannot make by itself. The operator swaps
       exchanged disks back, and scrubs logs. If the disk of a storage is foreign or unreadable, the
       operator gives the storage an empty directory and a new identity. The operator never accepts
       a log of unknown content.
"""

from typing import TYPE_CHECKING, Final

from waltz_core.errors import (
    BadFormat,
    ChecksumMismatch,
    ClusterKeyMismatch,
    MissingSegment,
    StorageIdMismatch,
    WaltzError,
)
from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.replication import session_events
from waltz_core.replication.replica_session import ReplicaStage
from waltz_sim.cluster.checkers import Checks
from waltz_sim.cluster.disaster_recovery import DisasterRecovery
from waltz_sim.cluster.restored_log import restore_lost_log
from waltz_sim.cluster.simulated_archive import SimArchive
from waltz_sim.cluster.simulated_clients import SimClient
from waltz_sim.cluster.simulated_contexts import ContextClient
from waltz_sim.cluster.simulated_coordinator import SimCoordinator
from waltz_sim.cluster.simulated_servers import SimServer
from waltz_sim.cluster.simulated_storages import RESTART_MS, SimStorage
from waltz_sim.cluster.workload import Workload
from waltz_sim.guarantees.data_loss_budget import DataLossBudget, read_whole_log
from waltz_sim.schedule import Schedule
from waltz_sim.world.network import Network
from waltz_sim.world.process import Process
from waltz_sim.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

US_PER_MS: Final = 1_000
ENGAGE_MS_MAX: Final = 90_000
EQUAL_MS_MAX: Final = 60_000
EXTRA_WORK_MS: Final = 20
OPERATOR_INTERVAL_MS: Final = 3_000
RUN_WITHOUT_RECOVERY_MS: Final = 8_000
# Errors that a retry does not resolve.
UNREADABLE_ERRORS: Final = (
    BadFormat,
    ChecksumMismatch,
    ClusterKeyMismatch,
    MissingSegment,
    StorageIdMismatch,
)


class SimCluster:
    """All processes, links and checkers of one world; see the module's rules."""

    partition_id: Final = PartitionId(0)
    key: Final = b"cluster-key-16-b"

    def __init__(
        self,
        schedule: Schedule,
        *,
        is_traced: bool = False,
        checks: "Callable[[SimCluster], Checks]" = Checks,
    ) -> None:
        self.schedule = schedule
        self.setup = setup = schedule.setup
        self.limits, self.store_limits = setup.limits(), setup.store_limits()
        self.world = World(schedule.seed, is_traced=is_traced, is_calm=setup.is_calm)
        self.rng = self.world.stream("cluster")
        self.network = Network(self.world, is_bytes=setup.is_bytes)
        self.checks = checks(self)
        self.storages: dict[ReplicaId, SimStorage] = {}
        self.servers: list[SimServer] = []
        replicas = tuple(ReplicaId(f"storage{n}:1") for n in range(setup.replicas))
        self.coordinator = SimCoordinator(self, replicas)
        self.archive = SimArchive(self)
        self.budget = DataLossBudget(self)
        self.swapped_disks: dict[str, SimStorage] = {}  # storage's name -> the owner of its disk
        self.kept_down: dict[str, None] = {}  # names of machines that must stay down for a while
        self.is_recovering = False
        # The replica whose log an unfinished command has accepted (disaster_recovery.py).
        self.unfinished_recovery: ReplicaId | None = None
        self.disaster_recovery_count = 0
        # By storage: how often its log could not be read completely.
        self._unreadable_counts: dict[str, int] = {}
        for n in range(setup.replicas + setup.spare_storages):
            replica = ReplicaId(f"storage{n}:1")
            self.storages[replica] = SimStorage(self, replica)
        self.servers += [SimServer(self, f"server{n}") for n in range(setup.servers)]
        self.workload = Workload(self)
        self.clients = [SimClient(self, f"client{n}") for n in range(setup.clients)]
        # Faults do not choose these processes: they restart and pause by themselves.
        self.context_clients = [
            ContextClient(self, f"context-client{n}") for n in range(setup.context_clients)
        ]
        if setup.restored_count:
            restore_lost_log(self)
        for server in self.servers:
            server.on_started()

    # ---- the processes

    @property
    def processes(self) -> "Sequence[Process]":
        """The processes that faults may choose, in a fixed order."""
        return [*self.storages.values(), *self.servers, *self.clients]

    def server_named(self, name: str | None) -> SimServer | None:
        """Return the server with a name; None if there is none."""
        return next((server for server in self.servers if server.name == name), None)

    @property
    def owner(self) -> SimServer | None:
        """The server that the assignment names; None without an owner."""
        return self.server_named(self.coordinator.assignment.owner)

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The assigned replicas."""
        return self.coordinator.assignment.replicas

    @property
    def is_zookeeper_unavailable(self) -> bool:
        """Whether no process can reach ZooKeeper."""
        return self.coordinator.is_unavailable

    def register_storage(self, replica: ReplicaId, storage_id: bytes) -> bytes:
        """Register a storage's ID if its address has none; return the registered ID."""
        return self.coordinator.storage_ids.setdefault(replica, storage_id)

    def start_clients(self) -> None:
        """Start all clients and their workload."""
        for client in self.clients:
            self.start_client(client)
        for context_client in self.context_clients:
            context_client.on_started()

    def close(self) -> None:
        """Close event loops now, so that the garbage collector does not do it at a random time."""
        for context_client in self.context_clients:
            context_client.loop.close()

    def start_client(self, client: SimClient) -> None:
        """Start a client again, and its workload."""
        self.workload.drop_submissions(client)
        client.is_up = True
        client.incarnation += 1
        client.on_started()
        self.workload.begin(client)

    def restart_later(self, process: Process) -> None:
        """Restart a process after a while, as its supervisor does, unless it must stay down."""
        delay_us = self.rng.randrange(*RESTART_MS) * US_PER_MS

        def start() -> None:
            if process.name not in self.kept_down:
                process.start()

        self.world.call_after_us(delay_us, start)

    def reassign(self, replicas: "tuple[ReplicaId, ...]") -> None:
        """Change the assigned replicas, and notify the storages, as a `cluster` command does."""
        self.coordinator.reassign(replicas)
        for storage in self.storages.values():
            storage.call_after_us(
                self.coordinator.draw_watch_delay_us(), storage.receive_assignment
            )

    def kill(self, process: "SimStorage | SimServer") -> None:
        """Kill a process as with SIGKILL; its supervisor starts it again."""
        if process.is_up and not self.is_recovering:
            process.kill()
            self.restart_later(process)

    # ---- the operator (rule 3)

    def swap_disks(self, storage: SimStorage, other: SimStorage) -> None:
        """Swap the disks of two machines, without a loss of data; both machines restart."""
        for each in (storage, other):
            each.kill()
        storage.disk, other.disk = other.disk, storage.disk
        storage.start_error = other.start_error = None
        for each, its in ((storage, other), (other, storage)):
            if each.name in self.swapped_disks:
                del self.swapped_disks[each.name]
            else:
                self.swapped_disks[each.name] = its
            self.restart_later(each)

    def run_operator(self, *, may_replace: bool = False) -> None:
        """Repair faults that do not end by themselves; if `may_replace`, also replace replicas."""
        for name in list(self.swapped_disks):
            if name in self.swapped_disks:
                storage = next(each for each in self.storages.values() if each.name == name)
                self.swap_disks(storage, self.swapped_disks[name])
        for storage in self.storages.values():
            if storage.name in self.kept_down:
                continue
            if isinstance(storage.start_error, UNREADABLE_ERRORS):
                if not self.budget.has_lost_data(storage):
                    self.checks.fail("Converged", f"{storage.name} rejects: {storage.start_error}")
                self.replace_storage(storage)
            elif may_replace and self._cannot_be_repaired(storage):
                self.replace_storage(storage)
        if self.unfinished_recovery is not None:
            DisasterRecovery(self, lambda _: None, accepted=self.unfinished_recovery)
        if may_replace:
            self.read_all_logs()
            self._checkpoint()

    def _cannot_be_repaired(self, storage: SimStorage) -> bool:
        """Whether a replica that has lost data cannot recover by itself."""
        owner = self.owner
        session = None if owner is None or owner.store is None else owner.store.store.session
        if session is None or storage.replica not in self.replicas:
            return False
        # After the end of the log is decided, only engaged replicas are needed.
        is_needed = session.repairs.goal is None or self.budget.is_engaged(storage)
        if not self.budget.has_lost_data(storage) or (
            is_needed and not self.budget.may_lose_data(storage)
        ):
            return False
        return not any(
            replica.replica == storage.replica
            and replica.stage in {ReplicaStage.READY, ReplicaStage.ENGAGED}
            for replica in session.replicas.values()
        )

    def _checkpoint(self) -> None:
        """Request a new session, which repairs known damage."""
        owner = self.owner
        if owner is not None and owner.partition is not None and owner.partition.is_open:
            owner.step(session_events.Checkpoint())

    def replace_storage(self, storage: SimStorage) -> None:
        """Give a storage an empty directory, and register its new identity for its address."""
        self.checks.count("storage replaced")
        self.world.note(f"{storage.name} is replaced")
        storage.kill()
        self.budget.record_loss(storage)
        former = self.coordinator.storage_ids.get(storage.replica)
        if former is not None:
            self.coordinator.former_ids.setdefault(storage.replica, []).append(former)
        storage.re_seed()
        self.coordinator.storage_ids[storage.replica] = storage.storage_id
        self.restart_later(storage)

    def read_all_logs(self) -> None:
        """Read every log completely, so that its damage is known.

        An unreadable log may become readable when it is opened again. If it does not, the storage
        is replaced.
        """
        for storage in self.storages.values():
            if storage.log is not None:
                try:
                    read_whole_log(storage.log)
                except WaltzError as error:
                    self.world.note(f"{storage.name} cannot be read completely: {error}")
                    if self._unreadable_counts.setdefault(
                        storage.name, 0
                    ) and self.budget.may_lose_data(storage):
                        self.replace_storage(storage)
                    else:
                        storage.kill()
                        self.restart_later(storage)
                    self._unreadable_counts[storage.name] += 1

    # ---- recovery

    def end_faults(self) -> None:
        """End all faults, and inject no more.

        A hanging server continues to hang until the other servers have recovered the partition.
        """
        self.is_recovering = True
        self.world.note("heal")
        self.network.repair()
        self.kept_down.clear()
        coordinator = self.coordinator
        coordinator.is_unavailable, coordinator.lost_answer_share = False, 0.0
        coordinator.cut_off_servers.clear()
        coordinator.watch_delay_ms_max = 20
        coordinator.lost_watch_share = coordinator.stale_read_share = 0.0
        self.archive.repair()
        for storage in self.storages.values():
            storage.repair()
        for server in self.servers:
            server.planned_death = None
        for process in self.processes:
            process.slow_us = 0
            process.set_clock_rate(1.0)
            if not (isinstance(process, SimServer) and process.is_hanging):
                process.resume()
            if not process.is_up and not isinstance(process, SimClient):
                process.start()
        for client in self.clients:
            if not client.is_up:
                self.start_client(client)

    def has_all_engaged(self) -> bool:
        """Whether the partition is served in a session in which all of its replicas are engaged."""
        owner = self.owner
        if owner is None or owner.partition is None or owner.store is None:
            return False
        session = owner.store.store.session
        return (
            owner.partition.is_open
            and session is not None
            and session.is_settled
            and len(session.engaged) == len(self.coordinator.assignment.replicas)
            and set(session.claim.assigned) == set(self.coordinator.assignment.replicas)
        )

    def are_replicas_equal(self) -> bool:
        """Whether no work is in progress, and all replicas hold the whole log."""
        if self.workload.pending_count or not self.has_all_engaged():
            return False
        if any(context_client.running_count for context_client in self.context_clients):
            return False
        if not self.checks.outcomes.have_all_feeds_ended():
            return False
        last = self.checks.history.last
        logs = [self.storages[replica].log for replica in self.coordinator.assignment.replicas]
        return all(log is not None and log.synced_max == last for log in logs)

    def is_repaired(self) -> bool:
        """Whether the partition is whole, and no replica is suspect or damaged."""
        logs = [self.storages[replica].log for replica in self.replicas]
        return self.has_all_engaged() and all(
            log is not None and not log.damaged and not log.suspect for log in logs
        )

    def unrecovered_reasons(self) -> str:
        """Describe why the cluster has not recovered."""
        owner = self.owner
        stages = []
        if owner is not None and owner.store is not None:
            session = owner.store.store.session
            if session is not None:
                stages = [
                    f"{replica.replica}:{replica.stage.name}"
                    for replica in session.replicas.values()
                ]
        damaged = {
            name: (storage.log.suspect, storage.log.damaged)
            for name, storage in self.storages.items()
            if storage.log is not None and (storage.log.suspect or storage.log.damaged)
        }
        lasts = {
            name: "down" if storage.log is None else storage.log.max_id
            for name, storage in self.storages.items()
        }
        rejected = {
            name: str(storage.start_error)
            for name, storage in self.storages.items()
            if storage.start_error
        }
        return (
            f"owner {owner and owner.name}, {stages}, replicas end at {lasts}, the log at "
            f"{self.checks.history.last}, rejected {rejected}, suspect or damaged {damaged}, "
            f"{self.workload.pending_count} submissions wait"
        )

    def run_until_recovered(self) -> None:
        """Run until the cluster has recovered; fail with the reasons if it does not (rule 2)."""
        self.end_faults()
        if self.setup.is_unbounded:
            self._run_without_recovery()
            return
        world, checks = self.world, self.checks
        self._run_until_engaged()
        for server in self.servers:
            server.resume()
        self._run_until_repaired()
        # First some more work, and then a pause.
        world.run(EXTRA_WORK_MS * US_PER_MS)
        self.workload.is_over = True
        self._run_until_equal()
        checks.check_final_state()

    def _run_until_engaged(self) -> None:
        """Run until all replicas are engaged; the operator makes repairs every few seconds."""
        for again in range(ENGAGE_MS_MAX // OPERATOR_INTERVAL_MS):
            if self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS, until=self.has_all_engaged):
                return
            self.run_operator(may_replace=again % 4 == 3)
        self.checks.fail("Converged", f"not all engaged: {self.unrecovered_reasons()}")

    def _run_until_repaired(self) -> None:
        """Read all logs repeatedly, until sessions have repaired all damage."""
        for again in range(ENGAGE_MS_MAX // OPERATOR_INTERVAL_MS):
            self._scrub_all()
            self.read_all_logs()
            if self.is_repaired():
                return
            self.checks.count("damage to be repaired at the end")
            self._checkpoint()
            self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS, until=self.is_repaired)
            self.run_operator(may_replace=again % 4 == 3)
        self.checks.fail("Converged", f"not repaired: {self.unrecovered_reasons()}")

    def _run_until_equal(self) -> None:
        """Run until replicas are equal; the operator replaces storages with unreadable files."""
        for _ in range(EQUAL_MS_MAX // OPERATOR_INTERVAL_MS):
            if self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS, until=self.are_replicas_equal):
                return
            self.run_operator()
        self.checks.fail("Converged", f"not equal: {self.unrecovered_reasons()}")

    def _scrub_all(self) -> None:
        """Scrub every log by its own storage, and give the owner time for repairs."""
        for storage in self.storages.values():
            if storage.log is not None:
                storage.scrub_now()

        def is_done() -> bool:
            return self.is_repaired() and not any(
                storage.is_scrubbing for storage in self.storages.values()
            )

        self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS, until=is_done)

    def _run_without_recovery(self) -> None:
        """Run for a while; recovery is not required, and only the guarantees are checked."""
        for _ in range(RUN_WITHOUT_RECOVERY_MS // OPERATOR_INTERVAL_MS):
            self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS)
            self.run_operator()
        self.world.run(OPERATOR_INTERVAL_MS * US_PER_MS)
        self.checks.count(
            "recovered after more faults than tolerated"
            if self.has_all_engaged()
            else "quorum lost without a wrong answer"
        )
