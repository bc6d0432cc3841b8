"""Records when ZooKeeper became unavailable, and when it became available again.

Health checks use this history. The leader uses this history, too: after an outage, the leader waits
for servers that may register again.

Rules:
    1. If a lost connection is replaced within `OUTAGE_MS_MIN`, this is not an outage. In this case,
       only one ZooKeeper server has failed, and this failure ends no session.
    2. The first connection of a process does not end an outage.
"""

from waltz_core.cluster.znodes.interface import SessionState, Znodes

OUTAGE_MS_MIN = 500


class ConnectionHistory:
    """The times of outages in one session with ZooKeeper."""

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        is_connected = znodes.state is SessionState.CONNECTED
        self._disconnected_since_ms = None if is_connected else znodes.now_ms
        self._reconnected_since_ms: int | None = None
        znodes.on_state(self._on_state)

    @property
    def disconnected_ms(self) -> int:
        """The time without a connection until now, in ms; 0 while there is a connection."""
        return (
            0
            if self._disconnected_since_ms is None
            else self._znodes.now_ms - self._disconnected_since_ms
        )

    @property
    def reconnected_ms(self) -> int | None:
        """The time since the end of the last outage, in ms; None if there was no outage."""
        return (
            None
            if self._reconnected_since_ms is None
            else self._znodes.now_ms - self._reconnected_since_ms
        )

    def _on_state(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            if self._disconnected_since_ms is None:
                self._disconnected_since_ms = self._znodes.now_ms
        elif self._disconnected_since_ms is not None:
            if self.disconnected_ms >= OUTAGE_MS_MIN:  # rule 1
                self._reconnected_since_ms = self._znodes.now_ms
            self._disconnected_since_ms = None
