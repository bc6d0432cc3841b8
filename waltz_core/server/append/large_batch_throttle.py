"""Limits how often large batches may start while other clients send small requests.

A batch of a thousand rows occupies every process on its path for as long as hundreds of single
appends. On a machine with few CPUs, a client that sends only such batches would multiply the
latency of all other appends. The limit applies to the whole server, over all its partitions.

Rules:
    1. If all clients send large batches, or all send small requests, the throttle delays nothing.
    2. If a small request of one client is taken shortly after a large request of another client,
       the server is *shared* for the next `SHARED_PERIOD_MS`. While the server is shared, large
       requests are sent in pieces, one piece at a time. After each piece there is a pause: the time
       that the piece took, multiplied by a factor.
    3. The factor is adjusted so that small requests stay nearly as fast as without large batches.
       The *baseline* is the 99th percentile of their latency while the server is not shared. If a
       small request coincides with a piece and takes more than a fifth longer than the baseline,
       the factor rises. Any other small request that coincides with a piece lowers the factor a
       little. In equilibrium, one such request in two hundred makes the factor rise. With idle CPUs
       the factor falls to its minimum.
    4. Every wait has a limit, and so has each pause. If the session of a piece ends, the piece
       never becomes final. The throttle then forgets the piece, together with the other appends in
       flight of its partition.
    5. The throttle can be disabled. Then the client that sends most gets most of the throughput.
"""

import math
from typing import Final

from waltz_core.server.partition_events import ConnectionId

# The size of the pieces of a large batch while the server is shared. With half this size, the
# additional quorum rounds would cost as much as the smaller pieces save. With twice this size, a
# piece noticeably delays small requests.
PIECE_BYTES: Final = 64 * 1024
# How long the server is shared after a small request has coincided with large requests (rule 2).
SHARED_PERIOD_MS: Final = 1_000
# The pause after a piece, as a multiple of the time that the piece took (rule 3).
PAUSE_FACTOR_FIRST, PAUSE_FACTOR_MIN, PAUSE_FACTOR_MAX = 4.0, 0.25, 16.0
PAUSE_FACTOR_INCREASE: Final = 1.5
PAUSE_FACTOR_DECREASE: Final = PAUSE_FACTOR_INCREASE ** (-1 / 199)
# The accepted latency of a small request that coincides with a piece, as a multiple of the
# baseline. The client's latency grows more, because the client also waits for the answer. With this
# factor, the client's latency stays below twice its normal value.
SLOWDOWN_FACTOR: Final = 1.2
# How long a baseline stays valid. After this time, requests that coincide with no piece update it,
# even while the server is shared.
BASELINE_KEPT_MS: Final = 60_000
# The factors by which the baseline rises and falls: a 99th percentile falls 99 times as often as it
# rises.
BASELINE_INCREASE: Final = 1.2
BASELINE_DECREASE: Final = BASELINE_INCREASE ** (-1 / 99)
PAUSE_MS_MAX: Final = 100
# How long other large batches wait at most until a piece is final.
PIECE_WAIT_MS_MAX: Final = 1_000
# The interval of checks while a piece of another partition is in flight.
RECHECK_MS: Final = 2


class LargeBatchThrottle:
    """Throttles the large batches of all partitions of a server, by the module's rules."""

    __slots__ = (
        "_baseline_kept_until_ms",
        "_baseline_ms",
        "_free_at_ms",
        "_in_flight",
        "_is_enabled",
        "_large_sender",
        "_large_started_ms",
        "_last_piece_ms",
        "_shared_until_ms",
        "pause_factor",
    )

    def __init__(self, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._in_flight = 0
        # The sender of the last large batch that started.
        self._large_sender: ConnectionId | None = None
        self._large_started_ms = 0
        self._free_at_ms = 0
        self._shared_until_ms = 0
        self._last_piece_ms = -1  # the last known time at which a piece was in flight
        self._baseline_ms: float | None = None  # the baseline latency (rule 3)
        self._baseline_kept_until_ms = 0
        self.pause_factor = PAUSE_FACTOR_FIRST

    def on_small_request_started(self, connection: ConnectionId, now_ms: int) -> None:
        """Record that a small request takes its turn (rule 2)."""
        is_other_client = self._large_sender not in {None, connection}
        if (
            self._is_enabled
            and is_other_client
            and now_ms - self._large_started_ms < SHARED_PERIOD_MS
        ):
            self._shared_until_ms = now_ms + SHARED_PERIOD_MS

    def on_small_request_finished(self, received_ms: int, now_ms: int) -> None:
        """Record the latency of a small request, from its arrival until it was final (rule 3)."""
        took_ms = now_ms - received_ms
        if not self._in_flight and self._last_piece_ms < received_ms:
            self._update_baseline(took_ms, now_ms)
        elif self._baseline_ms is not None and took_ms > SLOWDOWN_FACTOR * self._baseline_ms:
            self.pause_factor = min(self.pause_factor * PAUSE_FACTOR_INCREASE, PAUSE_FACTOR_MAX)
        else:
            self.pause_factor = max(self.pause_factor * PAUSE_FACTOR_DECREASE, PAUSE_FACTOR_MIN)

    def _update_baseline(self, took_ms: int, now_ms: int) -> None:
        """Update the baseline (rule 3), unless the server is shared and the old baseline is valid.

        While the server is shared, all requests are slower.
        """
        if now_ms >= self._shared_until_ms:
            self._baseline_kept_until_ms = now_ms + BASELINE_KEPT_MS
        elif now_ms < self._baseline_kept_until_ms:
            return
        baseline_ms = self._baseline_ms or 2.0 * max(1, took_ms)
        self._baseline_ms = max(
            1.0, baseline_ms * (BASELINE_INCREASE if took_ms > baseline_ms else BASELINE_DECREASE)
        )

    def large_allowed_at_ms(self, now_ms: int) -> int:
        """Return when a large batch may start, or when to call this function again."""
        if now_ms >= self._shared_until_ms:
            return now_ms
        if self._in_flight and now_ms - self._large_started_ms < PIECE_WAIT_MS_MAX:
            return now_ms + RECHECK_MS
        return max(now_ms, self._free_at_ms)

    def piece_bytes(self, now_ms: int) -> int | None:
        """Return the present size of a piece of a large batch; None if batches are not split."""
        return PIECE_BYTES if now_ms < self._shared_until_ms else None

    def on_large_batch_started(self, connection: ConnectionId, now_ms: int) -> None:
        """A large batch, or a piece of one, was submitted.

        The caller must call `on_large_batch_finished` or `on_large_batches_forgotten` for it later.
        """
        self._in_flight += 1
        self._large_sender, self._large_started_ms = connection, now_ms
        self._last_piece_ms = now_ms

    def on_large_batch_finished(self, started_ms: int, now_ms: int) -> None:
        """A large batch, or a piece of one, is final: start the pause (rule 2)."""
        self.on_large_batches_forgotten()
        self._last_piece_ms = now_ms
        pause_ms = min(self.pause_factor * max(1, now_ms - started_ms), PAUSE_MS_MAX)
        self._free_at_ms = now_ms + math.ceil(pause_ms)

    def on_large_batches_forgotten(self, count: int = 1) -> None:
        """Stop counting `count` batches as in flight, because their session has ended (rule 4)."""
        self._in_flight -= count
        assert self._in_flight >= 0
