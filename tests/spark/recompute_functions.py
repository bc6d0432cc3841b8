"""Functions for option `recompute`; the tests pass this file to Spark."""

import pyarrow as pa
import pyarrow.compute as pc


def add_to_newest(refused: pa.Table, since: pa.Table) -> pa.Table:
    """Add each rejected row's `more` to the newest value of its key; all rows have one key."""
    (key,) = set(refused.column("key").to_pylist())
    newest = since.filter(pc.equal(since.column("key"), key))
    assert newest.num_rows, "the transaction that won is among them"
    value = pc.max(newest.column("value")).as_py()
    place = refused.column_names.index("value")
    values = pc.cast(pc.add(refused.column("more"), value), pa.int32())
    return refused.set_column(place, "value", values)


def drop_all(refused: pa.Table, since: pa.Table) -> pa.Table:
    """Return no rows, so that all are rejected."""
    assert since.num_rows
    return refused.slice(0, 0)


def return_unchanged(refused: pa.Table, _since: pa.Table) -> pa.Table:
    """Return the rows unchanged: correct for rows that only must see what came before them."""
    return refused


def return_list(_refused: pa.Table, _since: pa.Table) -> object:
    """Return something that is no table."""
    return [1, 2]


def count_since(refused: pa.Table, since: pa.Table) -> pa.Table:
    """Return the number of transactions of the rows' key in `since`."""
    (key,) = set(refused.column("key").to_pylist())
    seen = since.filter(pc.equal(since.column("key"), key)).num_rows
    place = refused.column_names.index("value")
    values = pa.array([seen] * refused.num_rows, pa.int32())
    return refused.set_column(place, "value", values)


def change_identity(refused: pa.Table, _since: pa.Table) -> pa.Table:
    """Change what distinguishes one row from another."""
    place = refused.column_names.index("row")
    rows = pc.add(refused.column("row"), 100)
    return refused.set_column(place, "row", pc.cast(rows, pa.int32()))


def raise_error(_refused: pa.Table, _since: pa.Table) -> pa.Table:
    """Raise an error."""
    raise ZeroDivisionError("the shop's own")
