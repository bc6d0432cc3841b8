"""Ends a process's session with ZooKeeper when its event loop hangs.

Without the watchdog, kazoo's threads would keep the session alive while the event loop hangs, and
the hanging server would keep its partitions. The simulator runs the watchdog, too.

Rules:
    1. The event loop calls `beat` regularly. Before each heartbeat to ZooKeeper, the thread that
       keeps the session alive queries the watchdog.
    2. The thread may not send a heartbeat if the loop has not called `beat` for a session timeout.
       Then the session expires, and the partitions move. This happens between 5/3 and 7/3 of a
       session timeout after the last call of `beat`.
    3. A process that was stopped as a whole, by SIGSTOP or in a paused virtual machine, does not
       count as hanging. A long gap between two checks of the thread shows that the thread itself
       was stopped. After such a gap, the thread may send one heartbeat, and the loop must call
       `beat` before the next check.
"""

from typing import Final

# The number of calls of `beat` in one session timeout. The thread checks about three times in this
# time.
BEATS_PER_TIMEOUT: Final = 10
# A longer gap between two checks, as a share of the session timeout, means that the thread itself
# did not run (rule 3).
PAUSED_GAP_SHARE: Final = 0.75


class Watchdog:
    """Decides whether a session may continue; see the module's rules.

    Two threads use a watchdog, and each attribute is written by only one of them. Times are
    milliseconds of any monotonic clock.
    """

    def __init__(self, timeout_ms: int, now_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._last_beat_ms = now_ms  # written by the event loop
        self._last_check_ms = now_ms  # written by the thread that keeps the session

    def beat(self, now_ms: int) -> None:
        """Note that the event loop runs."""
        self._last_beat_ms = now_ms

    def silent_ms(self, now_ms: int) -> int:
        """Return the time since the loop's last beat, in ms."""
        return now_ms - self._last_beat_ms

    def may_keep_session(self, now_ms: int) -> bool:
        """Return whether ZooKeeper may receive a heartbeat now (rules 2 and 3)."""
        gap_ms, self._last_check_ms = now_ms - self._last_check_ms, now_ms
        if self.silent_ms(now_ms) <= self.timeout_ms:
            return True
        return gap_ms > PAUSED_GAP_SHARE * self.timeout_ms
