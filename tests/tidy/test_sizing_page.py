"""docs/sizing.md has the sizes of the format and the defaults of the settings."""

import re
from dataclasses import fields

import pytest

from tests.tidy.sources import PROJECT_ROOT
from waltz_core.config import CONFIG_TYPES_BY_KIND
from waltz_core.records.lock_blocks import TRAILER_BYTES
from waltz_core.records.raw_records import RECORD_OVERHEAD_BYTES
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    OFFSET_BYTES,
    SEGMENT_HEADER_BYTES,
)
from waltz_core.storage.files.lock_block_file import FILE_BYTES_MAX

PAGE = (PROJECT_ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
MIB = 1 << 20
DEFAULTS = {
    "reserve_bytes": 64 * MIB,
    "queue_bytes_max": 64 * MIB,
    "archive_object_bytes": 64 * MIB,
    "page_cache_bytes_max": 16 * MIB,
    "memory_bytes_max": 1024 * MIB,
    "lock_table_bytes_max": 256 * MIB,
    "feed_cache_bytes": 64 * MIB,
    "transaction_cache_bytes": 128 * MIB,
    "lock_slot_count": 1_048_573,
    "segment_bytes_max": 1_000_000_000,
    "checkpoint_interval_count": 250_000,
}


def test_the_formula_of_the_page_uses_the_sizes_in_the_code() -> None:
    per_transaction = RECORD_OVERHEAD_BYTES + OFFSET_BYTES
    assert f"payload + {per_transaction} + {LINEAGE_ENTRY_BYTES} / batch" in PAGE
    assert f"{2 * FILE_BYTES_MAX // MIB} MiB x (replicas on the storage)" in PAGE
    assert f"`4 x locks + {TRAILER_BYTES} / batch`" in PAGE


def test_the_measured_log_has_the_size_that_the_formula_gives() -> None:
    records = 487_000 * (512 + RECORD_OVERHEAD_BYTES + OFFSET_BYTES) + 487 * LINEAGE_ENTRY_BYTES
    headers = 4 * (2 * SEGMENT_HEADER_BYTES + LINEAGE_HEADER_BYTES)
    assert f"The formula gives {records:,} bytes" in PAGE
    assert f"took {records + headers:,} bytes" in PAGE


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_example_uses_the_defaults(name: str) -> None:
    found = {
        field.default
        for kind in (CONFIG_TYPES_BY_KIND["server"], CONFIG_TYPES_BY_KIND["storage"])
        for field in fields(kind)
        if field.name == name
    }
    assert found == {DEFAULTS[name]}


def test_the_page_names_only_settings_whose_defaults_are_checked() -> None:
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", PAGE)) & {
        field.name
        for kind in (CONFIG_TYPES_BY_KIND["server"], CONFIG_TYPES_BY_KIND["storage"])
        for field in fields(kind)
    }
    assert names - {"local_retention_bytes"} <= set(DEFAULTS)
