"""The input of a run: a set-up and a list of faults, drawn from a seed or read from a file.

When the code that draws schedules changes, a seed gets another run. A schedule in a file identifies
a run permanently, and can be shortened.

Rules:
    1. All random numbers are drawn here, before the run. The target of a fault depends on its own
       `chance`, so the target does not change when other faults are removed.
    2. Swarm testing: each seed has its own set-up and only some kinds of faults, each kind at its
       own rate. A world with all kinds of faults at once explores little.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from waltz_core.errors import BadFormat
from waltz_core.replication.limits import SessionLimits
from waltz_core.server.locking.pending_appends import LARGE_REQUEST_BYTES_MIN
from waltz_core.server.partition_events import PartitionLimits
from waltz_sim.world.world import random_of_number

if TYPE_CHECKING:
    from random import Random

FORMAT: Final = 1
DURATION_MS: Final = 6_000
DEFAULT_STEPS_MAX: Final = 2_000
ARCHIVE_SHARE: Final = 0.25
UNBOUNDED_ARCHIVE_SHARE: Final = 0.08


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its time, its kind, and a number that decides the rest of it (rule 1)."""

    at_us: int
    kind: str
    chance: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes, limits and features of one world. All times are in ms."""

    replicas: int = 3
    spare_storages: int = 1
    servers: int = 2
    clients: int = 3
    is_bytes: bool = False
    think_ms: int = 10  # between two actions of a client; the longest pause is about twice this
    batch_share: float = 0.1  # the share of a client's appends that are batches
    keys: int = 6  # the number of different locks
    lock_slot_count: int = 1009
    segment_bytes_max: int = 4_096
    reserve_bytes: int = 8_192
    checkpoint_interval_count: int = 200
    slice_rows_max: int = 64
    lag_bytes_max: int = 4_096
    range_bytes_max: int = 1_024
    scrub_interval_ms: int = 0  # the interval of scrub passes; 0: only a fault starts one
    archive_interval_ms: int = 0  # from one attempt to archive a range to the next; 0: no archive
    archive_object_bytes: int = 1
    archive_age_ms: int = 0
    archived_bytes_max: int = 1 << 20  # above the confirmed mark, before a checkpoint is needed
    collection_interval_ms: int = 3_600_000  # between collections of the archive's garbage
    local_retention_bytes: int = 0  # the size of a local log; 0: no segment is removed
    restored_count: int = 0  # how many IDs of a lost cluster's log the partition begins with
    expires: bool = False  # whether operators let archived objects expire
    archive_retention_ms: int = 0  # the age at which archived objects expire; 0: never
    has_large_batches: bool = False  # whether every batch may be sent in pieces
    quorum_ms_max: int = 4_000  # the time without a quorum until the partition is released
    followers: int = 0  # the number of clients that follow appends in flight
    context_clients: int = 0  # the number of further clients; they run contexts with their own view
    has_new_owner_ids: bool = False  # a restarted server has a new owner ID, as in production
    duration_ms: int = DURATION_MS
    steps_max: int = DEFAULT_STEPS_MAX
    # Whether losses may affect any number of replicas, and ZooKeeper (data_loss_budget.py).
    is_unbounded: bool = False
    is_calm: bool = False  # whether every draw is the middle one of its range, for scenarios

    def limits(self) -> PartitionLimits:
        """Return the limits of a served partition."""
        return PartitionLimits(
            lock_slot_count=self.lock_slot_count,
            queue_bytes_max=8 * LARGE_REQUEST_BYTES_MIN if self.has_large_batches else 64 * 1024,
            in_flight_batches_max=8,
            slice_rows_max=self.slice_rows_max,
            feed_frame_count_max=8,
            feed_request_count_min=16,
            concurrent_fetches_max=2,
            high_water_mark_staleness_ms_max=400,
            session_wait_ms_max=2_000,
            checkpoint_interval_count=self.checkpoint_interval_count,
            checkpoint_interval_ms=200,
            lock_tail_bytes_max=8 * 1024,
        )

    def store_limits(self) -> SessionLimits:
        """Return the limits of replication."""
        return SessionLimits(
            redial_ms_min=20,
            redial_ms_max=500,
            rejected_retry_ms=1_500,
            answer_ms_max=1_000,
            quorum_ms_max=self.quorum_ms_max,
            proof_ms_max=500,
            stable_session_ms=2_000,
            rejoin_session_age_ms_min=300,
            exclusion_ms_min=200,
            exclusion_ms_max=2_000,
            lag_bytes_max=self.lag_bytes_max,
            range_bytes_max=self.range_bytes_max,
            archive_interval_ms=self.archive_interval_ms,
            archived_bytes_max=self.archived_bytes_max,
            archive_retention_ms=self.archive_retention_ms,
            collection_interval_ms=self.collection_interval_ms,
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The input of one run: its seed, its set-up, and its faults sorted by time."""

    seed: int
    setup: Setup = field(default_factory=Setup)
    faults: tuple[Fault, ...] = ()

    def with_faults(self, faults: Iterable[Fault]) -> "Schedule":
        """Return a copy of this schedule with other faults."""
        return dataclasses.replace(self, faults=tuple(faults))

    def with_setup(self, **changes: float) -> "Schedule":
        """Return a copy of this schedule with changes to its set-up."""
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, **changes))  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return this schedule as JSON, which `from_json` reads."""
        shown = {
            "format": FORMAT,
            "seed": self.seed,
            "setup": dataclasses.asdict(self.setup),
            "faults": [[fault.at_us, fault.kind, fault.chance] for fault in self.faults],
        }
        return json.dumps(shown, indent=1)

    @staticmethod
    def from_json(text: str) -> "Schedule":
        """Parse a schedule from JSON; raise BadFormat if the text is not a schedule."""
        try:
            shown: dict[str, Any] = json.loads(text)
            if shown["format"] != FORMAT:
                raise BadFormat(f"schedule: expected format {FORMAT}, found {shown['format']!r}")
            setup = Setup(**shown["setup"])
            faults = tuple(Fault(int(at), str(kind), int(no)) for at, kind, no in shown["faults"])
            return Schedule(int(shown["seed"]), setup, faults)
        except (KeyError, TypeError, ValueError) as error:
            raise BadFormat(f"schedule: expected a file of the simulator: {error}") from error


def schedule_of(
    seed: int, weights: Mapping[str, int], *, allowed_kinds: Iterable[str] | None = None
) -> Schedule:
    """Draw a schedule from a seed. `weights` has the kinds of faults and their frequencies.

    `allowed_kinds` limits the kinds that the schedule may contain.
    """
    rng = random_of_number(seed ^ 0x5EED)
    replicas = rng.choice((1, 3, 3, 3, 3, 3, 5))
    setup = Setup(
        replicas=replicas,
        spare_storages=rng.choice((0, 1, 2)),
        servers=rng.choice((1, 2, 2, 3)),
        clients=rng.choice((2, 3, 4)),
        is_bytes=rng.random() < 0.03,
        think_ms=rng.choice((2, 10, 40)),
        batch_share=rng.choice((0.0, 0.05, 0.3)),
        keys=rng.choice((2, 6, 40)),
        lock_slot_count=rng.choice((13, 1009)),
        segment_bytes_max=rng.choice((2_048, 4_096, 65_536)),
        checkpoint_interval_count=rng.choice((20, 100, 100_000)),
        slice_rows_max=rng.choice((2, 64)),
        lag_bytes_max=rng.choice((600, 4_096, 65_536)),
        range_bytes_max=rng.choice((300, 1_024)),
        is_unbounded=rng.random() < 0.05,
        # Each of these settings has its own random stream, so older seeds keep their schedules.
        has_large_batches=random_of_number(seed ^ 0x1A26E).random() < 0.2,
        scrub_interval_ms=random_of_number(seed ^ 0x5C12B).choice((0, 0, 300, 1_500)),
        followers=random_of_number(seed ^ 0xF078E).choice((0, 0, 2, 4)),
        context_clients=random_of_number(seed ^ 0xC0417).choice((0, 0, 0, 0, 0, 0, 1, 2)),
        has_new_owner_ids=random_of_number(seed ^ 0x1D5).random() < 0.5,
        quorum_ms_max=random_of_number(seed ^ 0x9007).choice((4_000, 4_000, 4_000, 700)),
    )
    setup = _with_archive(seed, setup)
    share = rng.choice((0.3, 0.6, 0.9))
    allowed = set(weights if allowed_kinds is None else allowed_kinds)
    kinds = [kind for kind in weights if kind not in LATER_KINDS and rng.random() < share]
    kinds = [kind for kind in kinds if kind in allowed]
    gap_us = rng.choice((30, 100, 300)) * 1_000
    faults: list[Fault] = []
    at_us = gap_us
    while kinds and at_us < setup.duration_ms * 1_000:
        (kind,) = rng.choices(kinds, [weights[each] for each in kinds])
        faults.append(Fault(at_us, kind, rng.getrandbits(32)))
        at_us += rng.randrange(1, 2 * gap_us)
    later = [kind for kind in LATER_KINDS if kind in weights and kind in allowed]
    faults += _later_faults(seed, setup, later)
    return Schedule(seed, setup, tuple(sorted(faults, key=lambda fault: fault.at_us)))


def _with_archive(seed: int, setup: Setup) -> Setup:
    """Give some worlds an archive, with small segments and short sessions, to remove segments."""
    rng = random_of_number(seed ^ 0xA2C41)
    if rng.random() >= ARCHIVE_SHARE:
        return setup
    setup = dataclasses.replace(
        setup,
        archive_interval_ms=rng.choice((10, 50, 200)),
        archive_object_bytes=rng.choice((1, 300, 1_500)),
        archive_age_ms=rng.choice((0, 50, 300)),
        archived_bytes_max=rng.choice((200, 1_000, 1 << 20)),
        local_retention_bytes=rng.choice((0, 1, 1, 1, 2_000)),
        segment_bytes_max=rng.choice((300, 600, 1_200)),
        checkpoint_interval_count=rng.choice((10, 20, 50, 100_000)),
        restored_count=rng.choice((0, 0, 1, 20)),
        expires=rng.random() < 0.5,
        is_unbounded=rng.random() < UNBOUNDED_ARCHIVE_SHARE or setup.is_unbounded,
        collection_interval_ms=random_of_number(seed ^ 0xA2CB).choice(
            (3_600_000, 3_600_000, 300, 30)
        ),
    )
    if not setup.expires:
        return setup
    # A context with its own view needs the whole log.
    retention_ms = rng.choice((0, 0, 50, 500))
    return dataclasses.replace(setup, archive_retention_ms=retention_ms, context_clients=0)


def _later_faults(seed: int, setup: Setup, kinds: Sequence[str]) -> list[Fault]:
    """Draw each later kind from its own stream, so that older seeds keep their schedules."""
    faults: list[Fault] = []
    for kind in kinds:
        number, times, needs_archive = LATER_KINDS[kind]
        if needs_archive and not setup.archive_interval_ms:
            continue
        rng = random_of_number(seed ^ number)
        faults += [
            Fault(at_us, kind, rng.getrandbits(32))
            for at_us in times(rng, setup.duration_ms * 1_000)
        ]
    return faults


def _draw_few_times(rng: "Random", duration_us: int) -> Iterator[int]:
    for _ in range(rng.choice((0, 0, 2, 8))):
        yield rng.randrange(duration_us)


def _draw_times(*gaps_ms: int) -> "Callable[[Random, int], Iterator[int]]":
    """Return a function that draws times. They begin near 0: most worlds are repaired early."""

    def times(rng: "Random", duration_us: int) -> Iterator[int]:
        gap_us = rng.choice(gaps_ms) * 1_000
        at_us = 0
        while gap_us and (at_us := at_us + rng.randrange(1, 2 * gap_us)) < duration_us:
            yield at_us

    return times


class LaterFault(NamedTuple):
    """How to draw a kind of fault that was added later.

    The fields are the seed of its stream, its times, and whether it needs an archive.
    """

    number: int
    times: "Callable[[Random, int], Iterator[int]]"
    needs_archive: bool = False


LATER_KINDS: Final[Mapping[str, LaterFault]] = {
    "spoiled_locks": LaterFault(0x10CC5, _draw_few_times),
    "outlived_link": LaterFault(0x1A7E5, _draw_times(0, 0, 50, 150, 450)),
    "hanging_disk": LaterFault(0x4A26, _draw_times(0, 0, 0, 400, 1_500)),
    "unseen_rot": LaterFault(0x207, _draw_times(0, 0, 150, 450)),
    "two_attempts": LaterFault(0x2A77, _draw_times(0, 0, 300, 1_500)),
    "hanging_server": LaterFault(0x4A65, _draw_times(0, 0, 0, 400, 1_500)),
    "accept_replicas": LaterFault(0xACCE7, _draw_times(0, 0, 0, 0, 400, 1_500)),
    "memory_pressure": LaterFault(0x9E55, _draw_times(0, 0, 100, 400)),
    "revoke_replicate": LaterFault(0x2E70, _draw_times(0, 0, 0, 400, 1_500)),
    "archive_away": LaterFault(0xA2C0, _draw_times(0, 0, 400, 1_500), needs_archive=True),
    "archive_throttles": LaterFault(0xA2C1, _draw_times(0, 0, 400, 1_500), needs_archive=True),
    "archive_loses_answers": LaterFault(0xA2C2, _draw_times(0, 200, 600), needs_archive=True),
    "slow_archive": LaterFault(0xA2C3, _draw_times(0, 0, 400, 1_500), needs_archive=True),
    "corrupt_object": LaterFault(0xA2C4, _draw_times(0, 0, 300, 1_500), needs_archive=True),
    "kill_uploader": LaterFault(0xA2C5, _draw_times(0, 100, 400), needs_archive=True),
    "expire_objects": LaterFault(0xA2C6, _draw_times(0, 50, 200, 800), needs_archive=True),
    "power_loss_at_removal": LaterFault(0xA2C7, _draw_times(0, 0, 200, 800), needs_archive=True),
    "crash_at_a_reset": LaterFault(0xA2C8, _draw_times(0, 0, 200, 800), needs_archive=True),
    "accept_a_shorter_log": LaterFault(0xA2C9, _draw_times(0, 400), needs_archive=True),
    "damage_objects": LaterFault(0xA2CC, _draw_times(0, 150, 600), needs_archive=True),
    "lose_marks": LaterFault(0xA2CD, _draw_times(60, 200), needs_archive=True),
    "expire_rows_in_doubt": LaterFault(0xA2CE, _draw_times(0, 0, 500, 1_500), needs_archive=True),
    "lose_a_reset_replica": LaterFault(0xA2CF, _draw_times(0, 0, 400, 1_500), needs_archive=True),
}
