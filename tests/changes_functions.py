"""Changes functions for tests, and the changes that they return for one transaction of `Written`.

The workers of Spark import this file without the other test modules.
"""

import pyarrow as pa

PAIRS_FUNCTION = "tests.changes_functions:return_pairs"
_CHANGES_SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("transaction_id", pa.int64()),
        ("id", pa.int64()),
        ("value", pa.int64()),
        ("_deleted", pa.bool_()),
    ]
)


def pair_changes(_header: int, row: dict) -> list[tuple[int, int | None]]:
    """Return up to three changes of a transaction: keys with a value, or None for a delete.

    If there are three changes, the last two have the same key.
    """
    if row.get("id") is None:  # of another kind
        return []
    key = 10 * row["id"]
    if row.get("op") != "U":
        return [(key, None), (key + 1, None)]
    value = row["value"]
    return [(key, value), (key + 1, None), (key + 1, -value)][: 1 + value % 3]


def return_pairs(rows: pa.Table) -> pa.Table:
    """Return the changes of transactions."""
    found = [
        {
            "partition": row["partition"],
            "transaction_id": row["transaction_id"],
            "id": key,
            "value": value,
            "_deleted": value is None,
        }
        for row in rows.to_pylist()
        for key, value in pair_changes(row["header"], row)
    ]
    return pa.Table.from_pylist(found, _CHANGES_SCHEMA)


def raise_key_error(rows: pa.Table) -> pa.Table:
    """Raise an error for each transaction."""
    return return_pairs(rows) if not rows.num_rows else {}["none"]
