"""Formats times, keys and payloads as text for `waltz-core disk`."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from uuid import UUID

from waltz_core.cli.output import to_one_line
from waltz_core.errors import BadConfig
from waltz_core.offline.layout import BatchEntry, ControlInfo, ControlSlot

Deserializer = Callable[[bytes], object]


def utc_text(milliseconds: int) -> str:
    """Return a time in milliseconds since 1970 as UTC text; an invalid time as a number."""
    try:
        time = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fields_json(value: BatchEntry | ControlInfo | ControlSlot) -> dict[str, object]:
    """Return the fields of a structure for JSON; `errors` is renamed to "wrong"."""
    fields: dict[str, object] = value._asdict()
    return {
        "wrong" if name == "errors" else name: field_value for name, field_value in fields.items()
    }


def uuid_text(key: bytes) -> str:
    """Return 16 bytes in the usual notation of UUIDs."""
    return str(UUID(bytes=key))


def find_deserializer(name: str) -> Deserializer:
    """Return the deserializer that `--deserializer` names.

    Raises:
        BadConfig: the deserializer does not exist, or cannot be called.
    """
    if name == "bytes":
        return bytes
    if name in {"msgpack", "json"}:
        from waltz_core.client.model.serializers import JSON, MSGPACK  # noqa: PLC0415 - only then needed

        return (MSGPACK if name == "msgpack" else JSON).deserialize
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise BadConfig(
            f"--deserializer: expected bytes, msgpack, json or module:name, found {name!r}"
        )
    # As for `python -m`, modules in the current directory can be imported.
    sys.path.insert(0, str(Path.cwd()))
    try:
        deserializer = attrgetter(path)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"--deserializer {name}: {error}") from error
    finally:
        sys.path.pop(0)
    if isinstance(deserializer, type) and hasattr(deserializer, "deserialize"):
        deserializer = deserializer()
    read = getattr(deserializer, "deserialize", deserializer)
    if not callable(read):
        raise BadConfig(
            f"--deserializer {name}: expected a function that takes bytes, or an object with "
            f"a method `deserialize`, found {type(deserializer).__name__}"
        )
    return read  # type: ignore[no-any-return]  # the user states that it takes bytes


def payload_json(deserializer: Deserializer, data: bytes) -> dict[str, object]:
    """Deserialize a payload for JSON: bytes become hexadecimal digits, an error becomes text."""
    try:
        value = deserializer(data)
    except Exception as error:  # noqa: BLE001 - the user's code; the dump continues
        return {"data_error": f"{type(error).__name__}: {error}"}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"data_hex": bytes(value).hex()}
    return {"data": value}


def payload_text(deserializer: Deserializer, data: bytes) -> str:
    """Deserialize a payload, and return it as one line of text."""
    value = payload_json(deserializer, data)
    if "data_error" in value:
        return f"({value['data_error']})"
    if "data_hex" in value:
        return to_one_line(bytes.fromhex(str(value["data_hex"])))
    return json.dumps(value["data"], default=str, ensure_ascii=False)
