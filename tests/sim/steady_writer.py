"""A client that appends a row every few milliseconds of virtual time, also during faults."""

from waltz_core.records.record import BEFORE_FIRST
from waltz_core.wire.messages import RowOutcomeCode
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster

NO_LOCKS = ((), (), ())


class SteadyWriter:
    """Appends until a time, and records the time and outcome of each answer."""

    def __init__(self, cluster: SimCluster, *, every_ms: int, until_ms: int) -> None:
        self.cluster, self.every_ms, self.until_ms = cluster, every_ms, until_ms
        self.client = cluster.clients[0]
        self.sent_us: dict[int, int] = {}
        self.answered_us: list[int] = []
        self.took_us: list[int] = []
        self.ids: list[int] = []
        self.others: list[str] = []  # outcomes other than a commit
        self.client.on_settled = self.on_settled
        self.client.on_rejected = lambda effect: self.others.append(str(effect.error))
        self.client.on_started()
        self.client.subscribe(BEFORE_FIRST)

    def append(self) -> None:
        world, workload = self.cluster.world, self.cluster.workload
        if world.now_ms < self.until_ms:
            submission = workload.create_submission(self.client, [NO_LOCKS], self.client.mark)
            self.sent_us[submission.token] = world.now_us
            self.client.append(submission)
            world.call_after_us(self.every_ms * US_PER_MS, self.append)

    def on_settled(self, effect) -> None:
        self.cluster.workload.remove_submission(effect.token)
        now_us = self.cluster.world.now_us
        self.answered_us.append(now_us)
        self.took_us.append(now_us - self.sent_us[effect.token])
        (number,), (reason,) = effect.outcome.transaction_ids, effect.outcome.reasons
        if reason == RowOutcomeCode.COMMITTED:
            self.ids.append(int(number))
        else:
            self.others.append(RowOutcomeCode(reason).name)
