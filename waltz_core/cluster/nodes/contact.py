"""Since when ZooKeeper is away, or back again after an absence that others have felt too.

What health tells of ZooKeeper and how long the lead server waits for those who may be about to
register again rest on the same two moments.

Rules:
    1. A connection that is replaced within `ABSENCE_MS_MIN` was no absence: one node of the
       ensemble has gone, and nobody's session ends by that.
    2. The first connection of a process is no return: nothing that is missing was seen before.
"""

from waltz_core.cluster.nodes.znodes import SessionState, Znodes

ABSENCE_MS_MIN = 500


class Contact:
    """Follows one session with ZooKeeper."""

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        is_connected = znodes.state is SessionState.CONNECTED
        self._away_since_ms = None if is_connected else znodes.now_ms
        self._back_since_ms: int | None = None
        znodes.on_state(self._changed)

    @property
    def away_ms(self) -> int:
        """For how long there has been no connection; 0 while there is one."""
        return 0 if self._away_since_ms is None else self._znodes.now_ms - self._away_since_ms

    @property
    def back_ms(self) -> int | None:
        """For how long ZooKeeper has been back after its last absence; None without any."""
        return None if self._back_since_ms is None else self._znodes.now_ms - self._back_since_ms

    def _changed(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            if self._away_since_ms is None:
                self._away_since_ms = self._znodes.now_ms
        elif self._away_since_ms is not None:
            if self.away_ms >= ABSENCE_MS_MIN:  # rule 1
                self._back_since_ms = self._znodes.now_ms
            self._away_since_ms = None
