"""What the settings become: limits that fit together, and refusals at the start."""

import pytest

from waltz_core import errors
from waltz_core.config import ServerConfig
from waltz_core.record import FRAME_BYTES_MAX
from waltz_core.server.daemon import limits_of, store_limits_of

MIB = 1024 * 1024


def config(**settings: int) -> ServerConfig:
    return ServerConfig(connect="localhost:2181/waltz/test", **settings)


def test_lock_tables_share_a_budget() -> None:
    assert limits_of(config(), 4).lock_slot_count == 1_048_573
    many = limits_of(config(), 1_000)
    assert many.lock_slot_count * 8 * 1_000 <= config().lock_table_bytes_max


def test_what_is_joined_in_one_turn_fits_into_a_frame_to_a_storage() -> None:
    for batch_bytes in (5 * MIB, 8 * MIB, 12 * MIB):
        limits = limits_of(config(batch_bytes_max=batch_bytes, batch_rows_max=1_000_000), 4)
        rows = limits.batch_rows_max + limits.slice_rows_max
        assert limits.batch_bytes_max + limits.slice_bytes_max + 48 * rows < FRAME_BYTES_MAX


def test_batches_that_could_never_be_stored_are_refused_at_the_start() -> None:
    with pytest.raises(errors.BadConfig, match="batch_bytes_max"):
        limits_of(config(batch_bytes_max=15 * MIB), 4)


def test_settings_reach_replication() -> None:
    limits = store_limits_of(config(replica_lag_bytes_max=20 * MIB, quorum_timeout_ms=700))
    assert (limits.lag_bytes_max, limits.answer_ms_max) == (20 * MIB, 700)
