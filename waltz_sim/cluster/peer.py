"""A program that sends a few requests to a storage, such as a command or an intruder.

During a session, servers follow the protocol. Any other program that can reach a storage may send
any request, once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from waltz_core.wire.messages import Message, StorageMessage
from waltz_sim.world.network import NEAR, Handlers, SimLink
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_storages import SimStorage

PeerAnswers: TypeAlias = list[StorageMessage]


class SimPeer(Process):
    """One foreign program on its own machine."""

    def __init__(self, cluster: "SimCluster", name: str) -> None:
        super().__init__(cluster.world, name)
        self._network = cluster.network

    def request(
        self,
        storage: "SimStorage",
        requests: Sequence[StorageMessage],
        on_answer: "Callable[[PeerAnswers], None]",
    ) -> None:
        """Connect and send requests; `on_answer` receives their answers, fewer if the link ends."""
        answers: PeerAnswers = []
        is_over = False

        def end(answered: SimLink | None) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                if answered is not None:
                    self._network.close(answered, NEAR)
                on_answer(answers)

        def opened(link: SimLink) -> None:
            for request in requests:
                self._network.send(link, NEAR, request)

        def received(link: SimLink, message: Message) -> None:
            assert isinstance(message, StorageMessage)
            answers.append(message)
            if len(answers) == len(requests):
                end(link)

        self._network.dial(
            self,
            storage,
            Handlers(received, lambda _link, _reason: end(None)),
            on_opened=opened,
            on_failed=lambda _reason: end(None),
            accept=storage.accept,
        )
