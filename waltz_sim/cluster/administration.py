"""A simulated operator that uses the storages' administration commands.

The production machine (`admin.py`) accepts or rejects a request, and the production engine changes
the disk. This module only connects the two, in virtual time.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from waltz_core.cluster.znodes.model import UNRESOLVED
from waltz_core.errors import BadRequest, CoordinatorUnavailable, WaltzError
from waltz_core.machine import Report
from waltz_core.records.record import NO_SESSION
from waltz_core.storage.service import admin_execution, admin_tasks
from waltz_core.storage.service.admin import (
    AdminRequest,
    AdminService,
    AdminTaskDone,
    Effect,
    RunAdminTask,
    SendAdminResponse,
)
from waltz_core.storage.service.admin_tasks import AdminTask, ZooKeeperState
from waltz_core.storage.service.service import StorageIdentity
from waltz_core.storage.service.work import ConnectionId
from waltz_core.wire.admin_messages import AdminMessage, Done

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_storages import SimStorage

ADMIN_VERSION = 1
AnswerCallback = Callable[[AdminMessage], None]


class Operator:
    """Sends a request to a running storage; `on_answer` gets the answer unless the storage dies."""

    def __init__(
        self, cluster: "SimCluster", storage: "SimStorage", on_answer: AnswerCallback
    ) -> None:
        assert storage.engine is not None
        self._cluster = cluster
        self._storage = storage
        self._engine = storage.engine
        self._on_answer = on_answer
        identity = StorageIdentity(cluster.key, 1, storage.storage_id)
        self._machine = AdminService(identity, address=storage.replica)

    def request(self, message: AdminMessage) -> None:
        """Send the request to the storage's administration machine."""
        self._step(AdminRequest(ConnectionId(1), ADMIN_VERSION, message))

    def _step(self, event: AdminRequest | AdminTaskDone) -> None:
        for effect in self._machine.step(event, self._storage.now_ms):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendAdminResponse():
                is_done = isinstance(effect.message, Done)
                self._cluster.checks.count("administered" if is_done else "administration rejected")
                self._on_answer(effect.message)
            case RunAdminTask():
                self._run_task(effect.task_id, effect.task)
            case Report():
                pass

    def _run_task(self, task_id: int, task: AdminTask) -> None:
        if isinstance(task, admin_tasks.AdminQuery):
            self._deliver_result(task_id, lambda: self._answer_query(task))
            return

        def change() -> None:
            if self._storage.engine is self._engine:
                self._deliver_result(task_id, lambda: self._execute_change(task))

        self._storage.run_exclusively(change)

    def _deliver_result(self, task_id: int, call: Callable[[], object]) -> None:
        value: object
        try:
            value = call()
        except WaltzError as error:
            value = error
        self._step(AdminTaskDone(task_id, value))

    def _execute_change(self, task: admin_tasks.ReplicaChange) -> object:
        self._cluster.world.note(f"{self._storage.name}: {task}")
        if isinstance(task, admin_tasks.ReSeedTask | admin_tasks.Unassign):
            self._cluster.budget.record_loss(self._storage)
        return admin_execution.execute_change(self._engine, task)

    def _answer_query(self, task: admin_tasks.AdminQuery) -> object:
        match task:
            case admin_tasks.InspectReplica():
                service = self._storage.service
                is_served = service is not None and task.partition_id in service.partitions
                return admin_execution.replica_status_of(
                    self._engine, task.partition_id, is_served=is_served
                )
            case admin_tasks.FindZooKeeperState():
                return self._zookeeper_state()
            case _:
                raise BadRequest(f"the simulator's operator does not support {task}")

    def _zookeeper_state(self) -> ZooKeeperState:
        if self._cluster.is_zookeeper_unavailable:
            raise CoordinatorUnavailable("ZooKeeper is unavailable")
        metadata = self._cluster.coordinator.metadata
        states = {} if metadata is None else metadata.states
        engaged = tuple(
            str(replica)
            for replica, state in states.items()
            if state.closing_high_water_mark == UNRESOLVED
        )
        return ZooKeeperState(
            self._storage.replica in self._cluster.replicas,
            self._storage.replica in engaged,
            NO_SESSION if metadata is None else metadata.session_id,
            engaged,
            len(states),
        )
