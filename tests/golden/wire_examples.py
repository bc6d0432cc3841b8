"""Examples of all messages: `python -m tests.golden.wire_examples` adds missing ones.

Examples of released versions are never edited: they show what a peer of that release sends.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

from waltz_core.records.record import LineageEntry, Record, ReqId
from waltz_core.wire import codec, fields
from waltz_core.wire.messages import FieldKind, Message, WireProtocol

EXAMPLES_FILE = Path(__file__).parent / "wire" / "waltz_0_2.json"
# Versions that Waltz 0.13 lacks; the latest versions of release 0.2.0.
RELEASED_VERSIONS = {
    WireProtocol.CLIENT: (5, 6),
    WireProtocol.STORAGE: (1, 2),
    WireProtocol.ADMIN: (1,),
}
FIELD_VALUES: dict[FieldKind, object] = {
    FieldKind.BOOL: True,
    FieldKind.INT8: 3,
    FieldKind.INT32: -70_001,
    FieldKind.INT64: 1 << 40,
    FieldKind.CRC32: 0xFEDCBA98,
    FieldKind.RAW16: bytes(range(16)),
    FieldKind.RAW32: bytes(range(32)),
    FieldKind.REQ_ID: ReqId(1, 2, 3, 4),
    FieldKind.BLOB: b"abc",
    FieldKind.TEXT: "storage ü",
    FieldKind.TEXT_OR_NULL: None,
    FieldKind.INT32S: (7, -8),
    FieldKind.PACKED_INT32S: bytes.fromhex("00000007fffffff8"),
    FieldKind.PACKED_INT64S: bytes.fromhex("0000000000000007fffffffffffffff8"),
    FieldKind.TEXTS: ("a", "b"),
    FieldKind.LINEAGE: (LineageEntry(5, 9, 2, 1_700_000_000_000, bytes(range(16))),),
    FieldKind.RECORDS: (Record(9, ReqId(1, 2, 3, 4), 5, b"abc"),),
    FieldKind.TEXT_BOOL_MAP: (("a", True),),
    FieldKind.INT32_BOOL_MAP: ((1, False),),
    FieldKind.DATA_OR_ERROR: (b"abc", None),
    FieldKind.STACK: (("class", "method", None, 7),),
}


def message_classes(protocol: WireProtocol, version: int) -> list[type[Message]]:
    """Return the classes of all messages that exist in a version."""
    return [layout.make for layout in codec._layouts(protocol, version).values()]


def to_json_value(value: object) -> Any:
    """Return a value as JSON has it: bytes in hex, tuples as lists."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, tuple | list):
        return [to_json_value(item) for item in value]
    return (
        [to_json_value(each) for each in dataclasses.astuple(value)]
        if is_dataclass_instance(value)
        else value
    )


def is_dataclass_instance(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def json_fields(message: Message) -> dict[str, Any]:
    """Return the values of a message's fields as JSON has them."""
    return {
        field.name: to_json_value(getattr(message, field.name))
        for field in dataclasses.fields(type(message))
    }


def make_example(message_class: type[Message], version: int) -> dict[str, Any]:
    """Return an example with a value in every field that the version has."""
    hints = get_type_hints(message_class, include_extras=True)
    values = {}
    for field in dataclasses.fields(message_class):
        kind = hints[field.name].__metadata__[0]
        is_extra = field.metadata.get("is_extra", False)
        absent = field.default if is_extra else fields.EMPTY_VALUES.get(kind)
        is_there = field.metadata.get("since", 0) <= version
        values[field.name] = FIELD_VALUES[kind] if is_there else absent
    message = message_class(**values)
    return {
        "message": message_class.__name__,
        "version": version,
        "frame_hex": b"".join(codec.encode(message, version)).hex(),
        "fields": json_fields(message),
    }


def add_missing_examples() -> None:
    """Add missing examples of the messages of released versions."""
    found = json.loads(EXAMPLES_FILE.read_text(encoding="utf-8")) if EXAMPLES_FILE.exists() else []
    known = {(each["message"], each["version"]) for each in found}
    for protocol, versions in RELEASED_VERSIONS.items():
        for version in versions:
            for message_class in message_classes(protocol, version):
                if (message_class.__name__, version) not in known:
                    found.append(make_example(message_class, version))
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in found)
    EXAMPLES_FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    add_missing_examples()
