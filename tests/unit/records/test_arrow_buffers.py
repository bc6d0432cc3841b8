"""Tests of `waltz_core.records.arrow_buffers`."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.records import arrow_buffers


@given(parts=st.lists(st.binary(max_size=9)))
def test_the_parts_of_a_run_are_what_they_were(parts: list[bytes]):
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    assert arrow_buffers.as_binary(b"".join(parts), lengths).to_pylist() == parts


def test_rows_of_one_width_are_values_of_that_width():
    rows = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert arrow_buffers.rows_of_one_width(rows, 3).to_pylist() == [b"\0\1\2", b"\3\4\5"]


@given(rows=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_numbers_are_what_they_were_and_where_they_are_not_is_null(rows: list[int | None]):
    values = np.array([row or 0 for row in rows], dtype=np.int64)
    is_present = np.array([row is not None for row in rows], dtype=np.bool_)
    made = arrow_buffers.numbers(values, pa.int64(), is_present=is_present)
    made.validate(full=True)
    assert made.to_pylist() == rows
    assert made.null_count == rows.count(None)
    stamps = arrow_buffers.numbers(values[is_present], pa.timestamp("us"))
    assert stamps.cast(pa.int64()).to_pylist() == values[is_present].tolist()


@given(mask=st.lists(st.booleans()))
def test_a_mask_filters_as_it_would_in_numpy(mask: list[bool]):
    values = np.arange(len(mask))
    kept = pa.array(values).filter(arrow_buffers.booleans(np.array(mask, dtype=np.bool_)))
    assert kept.to_pylist() == values[np.array(mask, dtype=np.bool_)].tolist()


def test_the_constant_for_no_bytes_is_one_empty_value():
    assert pa.scalar(b"", pa.binary()) == arrow_buffers.NOTHING


@pytest.mark.parametrize("module", ["server", "storage"])
def test_no_daemon_imports_pandas(module: str):
    daemon = f"waltz_core.{module}.process.{module}_daemon"
    code = f"import {daemon}, sys; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_task_that_reads_imports_no_pandas():
    code = """if True:
        import sys
        import numpy as np
        from tests.unit.records.test_raw_records import run_of
        from waltz_core.records.batches import READ_SCHEMA, range_to_arrow
        records, lengths = run_of([b"", b"data"])
        made = range_to_arrow(records, lengths, [(0, 0, 5)], READ_SCHEMA.names, partition_id=0)
        made[0].validate(full=True)
        sys.exit('pandas' in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
