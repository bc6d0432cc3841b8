"""Builds Arrow arrays over existing memory, without copying the values.

`pa.array` and `pa.scalar` import pandas at their first call. This import takes longer than all
other imports of a daemon, and would interrupt a daemon that already serves requests. The functions
of this module import nothing.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from waltz_core.records import raw_records
from waltz_core.records.raw_records import I64, Buffer


def fixed_width_binary(rows: npt.NDArray[Any], width: int) -> pa.BinaryArray:
    """Return a (row count, `width`) array of bytes as a binary array over the same memory."""
    count = rows.shape[0]
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    return pa.BinaryArray.from_buffers(pa.binary(), count, buffers)


def as_binary(run: Buffer, lengths: I64) -> pa.BinaryArray:
    """Split a buffer into parts with these lengths; return them as a binary array.

    The array uses the memory of the buffer.
    """
    offsets = raw_records.offsets_of(lengths).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(run)]
    return pa.BinaryArray.from_buffers(pa.binary(), lengths.size, buffers)


def as_numbers(
    values: npt.NDArray[Any], kind: pa.DataType, *, is_present: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return numbers as an Arrow array over the same memory.

    `kind` is an Arrow type with the width of the numbers. Values for which `is_present` is false
    are null.
    """
    assert values.flags.c_contiguous
    assert values.itemsize * 8 == kind.bit_width
    nulls = None if is_present is None else pa.py_buffer(np.packbits(is_present, bitorder="little"))
    return pa.Array.from_buffers(kind, values.size, [nulls, pa.py_buffer(values)])


def as_booleans(mask: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """Return a mask as an Arrow boolean array, as `filter` expects it."""
    buffers = [None, pa.py_buffer(np.packbits(mask, bitorder="little"))]
    return pa.BooleanArray.from_buffers(pa.bool_(), mask.size, buffers)


EMPTY_BINARY: Final = as_binary(b"", np.zeros(1, dtype=np.int64))[0]
