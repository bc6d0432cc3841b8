"""Functions for option `recompute`; the tests pass this file to Spark."""

import pyarrow as pa
import pyarrow.compute as pc


def add_to_newest(rejected: pa.Table, since: pa.Table) -> pa.Table:
    """Add each rejected row's `more` to the newest value of its key; all rows have one key."""
    (key,) = set(rejected.column("key").to_pylist())
    newest = since.filter(pc.equal(since.column("key"), key))
    assert newest.num_rows, "`since` must have the conflicting transaction"
    value = pc.max(newest.column("value")).as_py()
    column_index = rejected.column_names.index("value")
    values = pc.cast(pc.add(rejected.column("more"), value), pa.int32())
    return rejected.set_column(column_index, "value", values)


def drop_all(rejected: pa.Table, since: pa.Table) -> pa.Table:
    """Return no rows, so that all are rejected."""
    assert since.num_rows
    return rejected.slice(0, 0)


def return_unchanged(rejected: pa.Table, _since: pa.Table) -> pa.Table:
    """Return the rows unchanged, for rows that do not depend on earlier transactions."""
    return rejected


def return_list(_rejected: pa.Table, _since: pa.Table) -> object:
    """Return an invalid result, which is no table."""
    return [1, 2]


def count_since(rejected: pa.Table, since: pa.Table) -> pa.Table:
    """Return the number of transactions of the rows' key in `since`."""
    (key,) = set(rejected.column("key").to_pylist())
    row_count = since.filter(pc.equal(since.column("key"), key)).num_rows
    column_index = rejected.column_names.index("value")
    values = pa.array([row_count] * rejected.num_rows, pa.int32())
    return rejected.set_column(column_index, "value", values)


def change_identity(rejected: pa.Table, _since: pa.Table) -> pa.Table:
    """Change the identity column of the rows."""
    column_index = rejected.column_names.index("row")
    rows = pc.add(rejected.column("row"), 100)
    return rejected.set_column(column_index, "row", pc.cast(rows, pa.int32()))


def raise_error(_refused: pa.Table, _since: pa.Table) -> pa.Table:
    """Raise an error."""
    raise ZeroDivisionError("the shop's own")
