"""Parses and checks requests: the bodies of appends, and query parameters.

Rules:
    1. An unknown field or parameter is an error, because its name may be misspelled. Duplicate
       fields and non-canonical Base64 are errors, because different decoders treat these inputs
       differently.
    2. A transaction with write locks or read locks requires `mark`. Only the caller knows the mark
       of the state from which it has computed the transaction.
    3. The partition of a transaction is the partition that it names, or else the partition of its
       first lock. A transaction with neither gets the default partition of the request. This
       partition is the same in each retry with the same idempotency key.
    4. All bodies in memory together have at most `memory_bytes_max` bytes.
    5. A request has at most `LOCKS_MAX` locks, because the event loop hashes all of them in one
       step.
"""

import base64
import binascii
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from waltz_core import errors
from waltz_core.client import lock, partition_of
from waltz_core.client.model.transaction import check_header, check_locks
from waltz_core.errors import RequestRejected
from waltz_core.records import strict_json
from waltz_core.records.record import BEFORE_FIRST, LOCKS_MAX, TRANSACTION_BYTES_MAX

TRANSACTIONS_MAX: Final = 256
HEADERS_MAX: Final = 64
_TRANSACTION_FIELDS: Final = (
    "data",
    "header",
    "partition",
    "write_locks",
    "read_locks",
    "append_locks",
    "mark",
)
_INT64_MAX: Final = (1 << 63) - 1


class NewTransaction(NamedTuple):
    """One transaction of an append request; `partition` is -1 if it names none (rule 3)."""

    data: bytes
    header: int
    partition: int
    write_locks: tuple[int, ...]
    read_locks: tuple[int, ...]
    append_locks: tuple[int, ...]
    mark: int | None


class BodyReader:
    """Reads request bodies, and limits the memory of all of them together (rule 4)."""

    def __init__(self, *, body_bytes_max: int, memory_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._memory_bytes_max = memory_bytes_max
        self._bytes_in_memory = 0

    @contextlib.asynccontextmanager
    async def body(self, parts: AsyncIterator[bytes], length: int = 0) -> AsyncIterator[bytes]:
        """Yield a complete body; its bytes count towards the limit until the block ends.

        `length` is the length that the request states, 0 if it states none.

        Raises:
            TooLarge: the body is too large.
            Unavailable: the bodies of all requests exceed the limit.
        """
        body = bytearray()
        self._check_length(length)
        try:
            async for part in parts:
                body += part
                self._bytes_in_memory += len(part)
                self._check_length(len(body))
                if self._bytes_in_memory > self._memory_bytes_max:
                    raise errors.Unavailable(
                        "the bodies of all requests in progress have more than "
                        f"{self._memory_bytes_max} bytes (memory_bytes_max). Hint: send the "
                        "request again later."
                    )
            yield bytes(body)
        finally:
            self._bytes_in_memory -= len(body)

    def _check_length(self, length: int) -> None:
        if length > self._body_bytes_max:
            raise errors.TooLarge(
                f"the body has more than {self._body_bytes_max} bytes (body_bytes_max). "
                "Hint: send fewer transactions in a request."
            )


def parse_transactions(body: bytes, partition_count: int) -> list[NewTransaction]:
    """Return the transactions of a request; raises RequestRejected or another UsageError."""
    try:
        values = strict_json.from_json(body)
        json.loads(body, object_pairs_hook=_check_unique_fields)  # rule 1
    except ValueError as error:
        raise RequestRejected(
            "the body is not valid JSON", expected="a JSON object", found=str(error)
        ) from None
    if not isinstance(values, dict) or values.keys() != {"transactions"}:
        found_value = list(itertools.islice(values, 5)) if isinstance(values, dict) else values
        raise RequestRejected(
            "the body", expected="an object with the field `transactions` only", found=found_value
        )
    rows = values["transactions"]
    if not isinstance(rows, list) or not 0 < len(rows) <= TRANSACTIONS_MAX:
        found_value = f"{len(rows)} transactions" if isinstance(rows, list) else rows
        raise RequestRejected(
            "field transactions",
            expected=f"a list of 1 to {TRANSACTIONS_MAX} transactions",
            found=found_value,
        )
    transactions: list[NewTransaction] = []
    lock_count = 0
    for position, row in enumerate(rows):
        transaction = _parse_transaction(row, f"transactions[{position}]", partition_count)
        lock_count += sum(map(len, transaction[3:6]))
        if lock_count > LOCKS_MAX:  # rule 5
            raise errors.TooLarge(
                f"the request has more than {LOCKS_MAX} locks. Hint: send fewer transactions in a "
                "request."
            )
        transactions.append(transaction)
    return transactions


def _check_unique_fields(fields: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in fields]
    if len(set(names)) != len(names):
        raise RequestRejected(
            "an object in the body has the same field twice",
            expected="each field once",
            found=next(name for name in names if names.count(name) > 1),
        )


def with_default_partition(rows: Sequence[NewTransaction], partition: int) -> list[NewTransaction]:
    """Return the transactions; those without a partition get the given one (rule 3)."""
    return [row._replace(partition=partition) if row.partition < 0 else row for row in rows]


def _parse_transaction(row: object, field_name: str, partition_count: int) -> NewTransaction:
    if not isinstance(row, dict):
        raise RequestRejected(field_name, expected="an object", found=row)
    unknown_field = next((name for name in row if name not in _TRANSACTION_FIELDS), None)
    if unknown_field is not None:
        raise RequestRejected(
            f"{field_name} has an unknown field",
            expected=", ".join(_TRANSACTION_FIELDS),
            found=unknown_field,
        )
    locks = {
        name: _parse_locks(row.get(name, []), f"{field_name}.{name}")
        for name in _TRANSACTION_FIELDS[3:6]
    }
    write, read, append_locks = locks.values()
    partition = row.get("partition")
    if partition is not None:
        partition = check_partition(partition, f"{field_name}.partition", partition_count)
    elif first := (write or read or append_locks):
        partition = partition_of(first[0], partition_count)
    mark = row.get("mark")
    if mark is not None:
        mark = check_integer(mark, f"{field_name}.mark", minimum=BEFORE_FIRST)
    elif write or read:
        raise RequestRejected(
            f"{field_name}.mark is missing",
            expected="the high-water mark of the state from which the transaction was computed",
            found=None,
            hint="Write locks and read locks require it; docs/gateway.md describes marks.",
        )
    header = check_integer(
        row.get("header", 0), f"{field_name}.header", minimum=-(1 << 31), maximum=(1 << 31) - 1
    )
    return NewTransaction(
        _parse_data(row.get("data"), f"{field_name}.data"),
        check_header(header),
        -1 if partition is None else int(partition),
        write,
        read,
        append_locks,
        mark,
    )


def _parse_data(value: object, field_name: str) -> bytes:
    try:
        if isinstance(value, str):
            data = base64.b64decode(value, validate=True)
            if len(data) > TRANSACTION_BYTES_MAX:
                raise errors.TooLarge(
                    f"{field_name}: expected at most {TRANSACTION_BYTES_MAX} bytes, found "
                    f"{len(data)}"
                )
            if base64.b64encode(data).decode("ascii") == value:
                return data
    except (binascii.Error, ValueError):
        pass
    raise RequestRejected(
        field_name, expected="bytes in canonical Base64 with padding", found=value
    )


def _parse_locks(value: object, field_name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > LOCKS_MAX:
        raise RequestRejected(
            field_name,
            expected=f"a list of at most {LOCKS_MAX} locks",
            found=f"{len(value)} locks" if isinstance(value, list) else value,
        )
    return check_locks(
        field_name,
        [_parse_lock(lock, f"{field_name}[{position}]") for position, lock in enumerate(value)],
    )


def _parse_lock(value: object, field_name: str) -> int:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        name, key = value
        if isinstance(key, str) or (
            isinstance(key, int) and not isinstance(key, bool) and abs(key) <= _INT64_MAX
        ):
            return lock(name, key)
    raise RequestRejected(
        field_name,
        expected="[name, key]: a text as name, and a text or a 64-bit integer as key",
        found=value,
    )


def check_integer(
    value: object, field_name: str, *, minimum: int = 0, maximum: int = _INT64_MAX
) -> int:
    """Return the value if it is an integer within the bounds; otherwise raise RequestRejected."""
    if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
        return value
    raise RequestRejected(
        field_name, expected=f"an integer from {minimum} to {maximum}", found=value
    )


def check_partition(value: object, field_name: str, partition_count: int) -> int:
    """Return the number of a partition; raises RequestRejected or UnknownPartition."""
    if isinstance(value, int) and partition_count <= value <= _INT64_MAX and value is not True:
        raise errors.UnknownPartition(
            f"{field_name}: there is no partition {value}: expected 0 to {partition_count - 1}"
        )
    return check_integer(value, field_name, maximum=partition_count - 1)


class UrlParameters:
    """The query parameters of a request (rule 1)."""

    def __init__(self, pairs: Sequence[tuple[str, str]], known_names: Collection[str]) -> None:
        self._values: Mapping[str, str] = dict(pairs)
        for name, value in pairs:
            if name not in known_names:
                raise RequestRejected(
                    f"unknown query parameter {name[:50]}",
                    expected=", ".join(known_names) or "none",
                    found=value,
                )
        if len(self._values) != len(pairs):
            raise RequestRejected(
                "a query parameter is given twice", expected="each once", found=str(pairs)
            )

    def integer(self, name: str, *, minimum: int = 0) -> int | None:
        """Return an integer parameter; None if it is not given."""
        text = self._values.get(name)
        if text is None:
            return None
        return check_integer(parse_integer(text), f"query parameter {name}", minimum=minimum)

    def flag(self, name: str) -> bool:
        """Return a boolean parameter; false if it is not given."""
        text = self._values.get(name, "false")
        if text not in ("true", "false"):
            raise RequestRejected(f"query parameter {name}", expected="true or false", found=text)
        return text == "true"

    def partitions(self, partition_count: int) -> tuple[int, ...]:
        """Return the parameter `partition`, such as `0,3`; empty if it is not given."""
        text = self._values.get("partition")
        return tuple(
            check_partition(
                parse_integer(number_text), "query parameter partition", partition_count
            )
            for number_text in (() if text is None else text.split(","))
        )

    def headers(self) -> tuple[int, ...]:
        """Return the parameter `header`, a filter such as `7,8`; empty if it is not given."""
        text = self._values.get("header")
        parts = [] if text is None else text.split(",")
        field_name, limit = "query parameter header", 1 << 31
        if len(parts) > HEADERS_MAX:
            raise RequestRejected(field_name, expected=f"at most {HEADERS_MAX} headers", found=text)
        return tuple(
            check_integer(parse_integer(number_text), field_name, minimum=-limit, maximum=limit - 1)
            for number_text in parts
        )


def parse_integer(text: str) -> int | str:
    """Parse a decimal integer; return the text itself if it is not one."""
    is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20
    return int(text) if is_number else text
