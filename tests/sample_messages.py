"""One valid message of each class, with the fewest values."""

import dataclasses
from typing import Any, get_type_hints

from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.wire.messages import FieldKind, Message

_MINIMAL_VALUES: dict[FieldKind, object] = {
    FieldKind.BOOL: False,
    FieldKind.INT8: 0,
    FieldKind.INT32: 0,
    FieldKind.INT64: 0,
    FieldKind.CRC32: 0,
    FieldKind.RAW16: bytes(16),
    FieldKind.RAW32: bytes(32),
    FieldKind.BLOB: b"",
    FieldKind.TEXT: "",
    FieldKind.TEXT_OR_NULL: None,
    FieldKind.PACKED_INT32S: b"",
    FieldKind.PACKED_INT64S: b"",
}


def sample_message(message_class: type[Message], partition: int, **changes: object) -> Message:
    """Return a message about a partition, or about a list with this one."""
    hints = get_type_hints(message_class, include_extras=True)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(message_class):
        kind = hints[field.name].__metadata__[0]
        if field.name == "partition_id":
            values[field.name] = partition
        elif field.name == "partitions":
            values[field.name] = (partition,)
        elif kind is FieldKind.REQ_ID:
            values[field.name] = ReqId(ClientId(1), Generation(1), PartitionId(partition), 1)
        else:
            values[field.name] = _MINIMAL_VALUES.get(kind, ())
    return message_class(**values | changes)
