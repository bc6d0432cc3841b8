"""Disk faults: errors, full, slow or lying disks, rot, and old, empty or swapped disks.

The rules of `kinds.py` apply here. A fault that destroys promised data first checks the budget
(`data_loss_budget.py`).
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from waltz_core.records.lock_blocks import LogEnd, encode
from waltz_core.records.record import BEFORE_FIRST, Chain, TransactionId
from waltz_core.storage.files.control_file import CONTROL_FILE_NAME, SLOTS_FILE_NAME
from waltz_core.storage.files.format import SLOT_BLOCK_BYTES
from waltz_core.storage.files.lock_block_file import LOCKS_FILE_NAME
from waltz_core.storage.service.storage_engine import STORAGE_ID_FILE_NAME
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.cluster.simulated_storages import (
    EMPTY_CONTENTS,
    STORAGE_DIRECTORY,
    DiskBackup,
    SimStorage,
)
from waltz_sim.faults.injection import (
    choose_storage,
    count_callback,
    keep_down,
    restore_trust_later,
)
from waltz_sim.world.inode import SECTOR_BYTES
from waltz_sim.world.simulated_disk import Contents, DiskFault, SimDisk, Survival

if TYPE_CHECKING:
    from random import Random

SNAPSHOTS_MAX: Final = 3
PAGE_BYTES: Final = 4_096
# A function that damages a file. Its argument is the size of the file in bytes, which is not 0.
DamageFile = Callable[[SimStorage, Path, int], None]


# ---- errors and speed. If a second fault occurs while the replica handles the first one, the
# replica may lose its promises and become suspect. So a disk has one fault at a time, unless the
# world has no budget.


def _healthy_disk(cluster: SimCluster, rng: "Random") -> SimDisk | None:
    disk = choose_storage(cluster, rng).disk
    return disk if cluster.setup.is_unbounded or not disk.has_fault else None


def failing_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Let one of the next calls that change a disk fail."""
    disk = _healthy_disk(cluster, rng)
    if disk is None:
        return False
    on_injected = count_callback(cluster, "failing_disk")
    disk.plan_fault(disk.step_count + rng.randint(1, 12), DiskFault.IO_ERROR, on_injected)
    return False


def failing_call(cluster: SimCluster, rng: "Random") -> bool:
    """Let the next call of a rare kind fail, or cut the power at this call."""
    name = rng.choice(("create", "rename", "truncate", "unlink", "syncdir", "allocate"))
    fault = rng.choice((DiskFault.IO_ERROR, DiskFault.POWER_LOSS))
    disk = _healthy_disk(cluster, rng)
    if disk is None:
        return False
    disk.plan_fault_at_call((name,), fault, count_callback(cluster, "failing_call"))
    return False


def failing_read(cluster: SimCluster, rng: "Random") -> bool:
    """Let one of the next reads from a disk fail."""
    disk = _healthy_disk(cluster, rng)
    if disk is None:
        return False
    disk.plan_read_failure(rng.randint(1, 30), count_callback(cluster, "failing_read"))
    return False


def full_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Fill a disk for a while; perhaps restart the storage while the disk is full."""
    storage = choose_storage(cluster, rng)
    disk = storage.disk
    if disk.has_fault:
        return False
    used = sum(len(content) for content in disk.files().values())
    disk.capacity_bytes = used + rng.choice((0, 100, 2_000))
    disk.on_full = count_callback(cluster, "full_disk")

    def free_space() -> None:
        disk.capacity_bytes = disk.on_full = None

    empty_after_ms = rng.randrange(100, 2_000)
    cluster.world.call_after_us(empty_after_ms * US_PER_MS, free_space)
    if rng.random() < 0.4:
        cluster.world.call_after_us(
            rng.randrange(empty_after_ms) * US_PER_MS, lambda: cluster.kill(storage)
        )
    return False


def slow_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Change the duration of a disk's syncs."""
    choose_storage(cluster, rng).fsync_us = rng.choice((100, 500, 5_000, 100_000))
    return True


def hanging_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Make a disk's syncs so slow that peers may time out, while the process is healthy."""
    storage = choose_storage(cluster, rng)
    storage.fsync_us = hung_us = rng.randrange(300, 5_000) * US_PER_MS

    def recover() -> None:
        if storage.fsync_us == hung_us:
            storage.fsync_us = 500

    cluster.world.call_after_us(rng.randrange(500, 6_000) * US_PER_MS, recover)
    return True


# ---- losses within the budget


def take_snapshot(cluster: SimCluster, rng: "Random") -> bool:
    """Take a backup of a disk, which is harmless; `roll_back_disk` restores it."""
    storage = choose_storage(cluster, rng)
    log = storage.log
    if log is None or storage.disk.is_lying:
        return False
    snapshot = DiskBackup(storage.disk.durable_contents(), log.last_session)
    storage.snapshots = [*storage.snapshots, snapshot][-SNAPSHOTS_MAX:]
    return True


def roll_back_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Restore a disk from a backup."""
    storages = [each for each in cluster.storages.values() if each.snapshots]
    if not storages:
        return False
    storage = rng.choice(storages)
    snapshot = rng.choice(storage.snapshots)
    is_silent = snapshot.last_session >= cluster.budget.session_of(storage)
    if not cluster.budget.may_lose_data(storage, is_silent=is_silent):
        return False
    cluster.checks.count("rolled back within a session" if is_silent else "rolled back")
    _replace_disk(cluster, storage, snapshot.contents, rng)
    return True


def empty_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Replace a disk by an empty disk, which has another storage ID until an operator acts."""
    storage = choose_storage(cluster, rng)
    if not cluster.budget.may_lose_data(storage):
        return False
    _replace_disk(cluster, storage, EMPTY_CONTENTS, rng)
    storage.storage_id = rng.randbytes(16)
    _run_operator_later(cluster, rng)
    return True


def clone_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Overwrite a disk with a copy of another storage's disk."""
    storage, other = choose_storage(cluster, rng), choose_storage(cluster, rng)
    if (
        storage is other
        or _is_own_copy(cluster, other, storage)
        or not cluster.budget.may_lose_data(storage)
    ):
        return False
    _replace_disk(cluster, storage, other.disk.durable_contents(), rng)
    _run_operator_later(cluster, rng)
    return True


def _is_own_copy(cluster: SimCluster, other: SimStorage, storage: SimStorage) -> bool:
    """Whether a disk is an older copy of the storage's own disk (data_loss_budget.py, rule 2)."""
    path, own_id = (
        STORAGE_DIRECTORY / STORAGE_ID_FILE_NAME,
        cluster.coordinator.storage_ids.get(storage.replica),
    )
    return own_id is None or (
        other.disk.exists(path) and own_id in other.disk.visible_content(path)
    )


def swap_disks(cluster: SimCluster, rng: "Random") -> bool:
    """Swap the disks of two machines until an operator notices; no data is lost."""
    storage, other = choose_storage(cluster, rng), choose_storage(cluster, rng)
    if storage is other:
        return False
    if any(
        each.name in cluster.swapped_disks or cluster.budget.has_lost_data(each)
        for each in (storage, other)
    ):
        return False
    cluster.swap_disks(storage, other)
    _run_operator_later(cluster, rng)
    return True


def lying_disk(cluster: SimCluster, rng: "Random") -> bool:
    """Report false syncs, and then cut the power; the settings may declare the disk untrusted."""
    storage = choose_storage(cluster, rng)
    disk = storage.disk
    if disk.has_fault:
        return False
    disk.is_lying = True
    is_known = rng.random() < 0.5

    def lose_power() -> None:
        if disk is not storage.disk or not disk.is_lying:
            return
        if storage.is_up and cluster.budget.may_lose_data(storage, is_silent=not is_known):
            cluster.budget.record_loss(storage)
            cluster.checks.count("fault lying_disk")
            storage.trusts_fsync = not is_known
            storage.lose_power(Survival.NOTHING, loses_ignored_syncs=True)
        disk.stop_lying()

    lies_ms = rng.randrange(5, 800)
    cluster.world.call_after_us(lies_ms * US_PER_MS, lose_power)
    restore_trust_later(cluster, storage, after_ms=lies_ms + 1_000)
    return False


def rot(cluster: SimCluster, rng: "Random") -> bool:
    """Flip bits in a file, while its storage runs or while it is down."""

    def flip_bits(storage: SimStorage, path: Path, size: int) -> None:
        for _ in range(rng.choice((1, 1, 3))):
            storage.disk.flip_bits(path, rng.randrange(size), 1 << rng.randrange(8))

    return _damage_file(cluster, rng, flip_bits)


def unseen_rot(cluster: SimCluster, rng: "Random") -> bool:
    """Flip a bit on the disk, while the page cache still has the correct data."""

    def flip_bit_on_disk(storage: SimStorage, path: Path, size: int) -> None:
        storage.disk.flip_bits_unseen(path, rng.randrange(size), 1 << rng.randrange(8))

    return _damage_file(cluster, rng, flip_bit_on_disk)


def memory_pressure(cluster: SimCluster, rng: "Random") -> bool:
    """Drop the clean data of a storage's disk from the page cache."""
    choose_storage(cluster, rng).disk.drop_all_cached()
    return True


def zeroed_page(cluster: SimCluster, rng: "Random") -> bool:
    """Zero a page of a file; a page of old records or of their index may also become unreadable."""

    def wipe(storage: SimStorage, path: Path, size: int) -> None:
        page = rng.randrange(size) // PAGE_BYTES * PAGE_BYTES
        stems = (
            damageable_file.stem
            for damageable_file in _damageable_files(storage)
            if damageable_file.suffix == ".seg"
        )
        newest = max(stems, default="")  # empty if the storage has no segment
        is_old = path.suffix in {".seg", ".idx"} and path.stem != newest
        if not is_old or size % 2:
            storage.disk.overwrite(path, page, bytes(PAGE_BYTES))
            return
        # The header of a segment stays readable; otherwise no storage would open the segment.
        start = max(page, SECTOR_BYTES) if path.suffix == ".seg" else page
        end = min(page + PAGE_BYTES, size)
        if start < end:
            storage.disk.overwrite(path, start, bytes(end - start))
            storage.disk.make_unreadable(path, start, end - 1)
            cluster.checks.count("sectors lost")

    return _damage_file(cluster, rng, wipe)


def misdirected_write(cluster: SimCluster, rng: "Random") -> bool:
    """Write a page to a wrong place, in its own file or in another file."""

    def misdirect(storage: SimStorage, path: Path, size: int) -> None:
        source = storage.disk.visible_content(rng.choice(_damageable_files(storage)))
        start = rng.randrange(max(1, len(source))) // PAGE_BYTES * PAGE_BYTES
        page = rng.randrange(size) // PAGE_BYTES * PAGE_BYTES
        storage.disk.overwrite(path, page, source[start : start + PAGE_BYTES])

    return _damage_file(cluster, rng, misdirect, is_plausible=True)


def stale_page(cluster: SimCluster, rng: "Random") -> bool:
    """Revert a page to an older state, as if the disk had acknowledged later writes falsely."""

    def revert_page(storage: SimStorage, path: Path, size: int) -> None:
        old = next((each.contents.files.get(path, b"") for each in storage.snapshots), b"")
        page = rng.randrange(size) // PAGE_BYTES * PAGE_BYTES
        storage.disk.overwrite(path, page, old[page : page + PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))

    return _damage_file(cluster, rng, revert_page, is_plausible=True)


def cut_file(cluster: SimCluster, rng: "Random") -> bool:
    """Shorten or remove a file of a stopped storage."""

    def shorten_or_remove(storage: SimStorage, path: Path, size: int) -> None:
        if rng.random() < 0.2:
            storage.disk.remove(path)
        else:
            storage.disk.shorten_file(path, rng.choice((0, rng.randrange(size), size - 1)))

    return _damage_file(cluster, rng, shorten_or_remove, is_at_rest=True)


def spoiled_slot(cluster: SimCluster, rng: "Random") -> bool:
    """Make one of a partition's two slots unreadable."""

    def corrupt_slot(storage: SimStorage, path: Path, size: int) -> None:
        at = SLOT_BLOCK_BYTES * rng.randrange(2) + rng.randrange(200)
        storage.disk.flip_bits(path, min(at, size - 1))

    return _damage_file(cluster, rng, corrupt_slot, names=(SLOTS_FILE_NAME,))


def spoiled_locks(cluster: SimCluster, rng: "Random") -> bool:
    """Lose, cut, mix up, revert or replace the lock files; this must do no harm."""
    storage = choose_storage(cluster, rng)
    disk = storage.disk
    paths = [path for path in sorted(disk.files()) if path.name.startswith(LOCKS_FILE_NAME)]
    paths = [path for path in paths if disk.visible_content(path)]
    if not paths:
        return False
    path = rng.choice(paths)
    content = disk.visible_content(path)
    damage = rng.choice(("lost", "cut", "old", "mixed", "foreign"))
    if damage in ("lost", "foreign"):
        last = storage.log.max_id if storage.log is not None else BEFORE_FIRST
        storage.kill()
        keep_down(cluster, storage, rng.randrange(1, 300))
        disk.remove(path)
        if damage == "foreign":
            disk.write_durably(path.with_name(LOCKS_FILE_NAME), _foreign_blocks(last, rng))
    elif damage == "cut":
        disk.shorten_file(path, rng.randrange(len(content)))
    elif damage == "old":
        after_us = rng.randrange(50, 1_000) * US_PER_MS
        cluster.world.call_after_us(after_us, lambda: _restore(disk, path, content))
    else:
        start = rng.randrange(len(content))
        disk.overwrite(path, rng.randrange(len(content)), content[start : start + 200])
    cluster.checks.count(f"locks {damage}")
    return True


def _foreign_blocks(last: TransactionId, rng: "Random") -> bytes:
    """Return the lock blocks of another log, whose transactions have no locks."""
    ends = [
        LogEnd(TransactionId(number), Chain(rng.randbytes(16))) for number in range(-1, last + 1)
    ]
    return b"".join(encode(end.last, end, before.chain, b"") for before, end in pairwise(ends))


def _restore(disk: SimDisk, path: Path, content: bytes) -> None:
    """Restore the old content of a file: later writes are lost, and truncated data reappears."""
    if disk.exists(path):
        disk.shorten_file(path, len(content))
        disk.overwrite(path, 0, content)


def scrub(cluster: SimCluster, rng: "Random") -> bool:
    """Request a scrub pass over the log of a storage."""
    storage = choose_storage(cluster, rng)
    if storage.log is None:
        return False
    storage.scrub_now()
    return True


# ---- helpers


def _replace_disk(
    cluster: SimCluster, storage: SimStorage, contents: Contents, rng: "Random"
) -> None:
    storage.kill(is_silent=rng.random() < 0.3)
    cluster.budget.record_loss(storage)
    storage.disk.replace_contents(contents)
    storage.snapshots.clear()
    storage.start_error = None
    keep_down(cluster, storage, rng.randrange(1, 1_000))


def _run_operator_later(cluster: SimCluster, rng: "Random") -> None:
    cluster.world.call_after_us(rng.randrange(100, 3_000) * US_PER_MS, cluster.run_operator)


def _damageable_files(storage: SimStorage, names: tuple[str, ...] = ()) -> list[Path]:
    """Return the damageable files in order, repeated so that kinds are about equally frequent."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(storage.disk.files()):
        if path.parent not in {STORAGE_DIRECTORY, STORAGE_DIRECTORY / "0"} or path.name.endswith(
            ".reserve"
        ):
            continue
        if path.name.startswith(LOCKS_FILE_NAME):
            continue  # No promise depends on the lock files; see `spoiled_locks`.
        if not names or path.name in names:
            kinds.setdefault(
                path.suffix if path.parent != STORAGE_DIRECTORY else CONTROL_FILE_NAME, []
            ).append(path)
    most = max((len(paths) for paths in kinds.values()), default=0)
    return [path for paths in kinds.values() for path in paths * (most // len(paths))]


def _damage_file(
    cluster: SimCluster,
    rng: "Random",
    damage: DamageFile,
    *,
    names: tuple[str, ...] = (),
    is_at_rest: bool = False,
    is_plausible: bool = False,
) -> bool:
    """Damage a file of a storage with `damage`; return whether the budget has allowed it.

    With `is_plausible`, the damaged data is valid but old. No component can detect such data, or a
    loss at the end of a log.
    """
    storage = choose_storage(cluster, rng)
    files = [
        path for path in _damageable_files(storage, names) if storage.disk.visible_content(path)
    ]
    if storage.disk.is_lying or not files:
        return False
    path = rng.choice(files)
    segments = [file.stem for file in storage.disk.files() if file.suffix == ".seg"]
    is_silent = is_plausible or path.stem == max(segments, default="")
    if not cluster.budget.may_lose_data(storage, is_silent=is_silent):
        return False
    if is_at_rest or rng.random() < 0.5:
        storage.kill(is_silent=rng.random() < 0.2)
        keep_down(cluster, storage, rng.randrange(1, 500))
    cluster.budget.record_loss(storage)
    cluster.checks.on_disk_corrupted(storage)
    cluster.world.note(f"{storage.name}: {path} is spoiled")
    damage(storage, path, len(storage.disk.visible_content(path)))
    cluster.checks.count(
        f"spoiled {path.suffix if path.parent != STORAGE_DIRECTORY else path.name}"
    )
    _run_operator_later(cluster, rng)
    return True
