"""One simulated file: its visible content, and its durable content."""

from hypothesis import given
from hypothesis import strategies as st

from waltz_sim.world.inode import SECTOR_BYTES, Inode


def synced_inode(content):
    """A file that was written and synced."""
    return Inode(bytearray(content), bytearray(content))


def test_unsynced_data_is_never_dropped():
    inode = synced_inode(b"a" * 2 * SECTOR_BYTES)
    inode.visible[3:5] = b"bb"
    inode.mark_written(3, 5)
    inode.drop_cached(0, 2 * SECTOR_BYTES)
    assert inode.visible[3:5] == b"bb"


def test_after_a_failed_sync_dropped_pages_read_as_old_bytes_then_as_zeros():
    inode = synced_inode(b"a" * 10)
    inode.visible[:] = b"b" * 700
    inode.dirty_sectors.clear()
    inode.drop_cached(0, 10_000)
    assert inode.visible == b"a" * 10 + bytes(690)


@given(
    old=st.binary(max_size=1_500),
    new=st.binary(max_size=1_500),
    offset=st.integers(0, 1_500),
    size=st.integers(0, 3_000),
)
def test_only_dropped_sectors_show_their_synced_bytes(old, new, offset, size):
    inode = Inode(bytearray(new), bytearray(old))
    inode.drop_cached(offset, size)
    assert len(inode.visible) == len(new)
    durable = old[: len(new)].ljust(len(new), b"\0")
    end = min(offset + size, len(new))
    sectors = set(range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))) if end > offset else set()
    for index, found in enumerate(inode.visible):
        assert found == (durable if index // SECTOR_BYTES in sectors else new)[index]
