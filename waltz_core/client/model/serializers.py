"""Serializers: convert an application's values to transaction data and back.

Feeds, reads and predecessors all use serializers, so these depend on no other part of the client.
"""

from typing import Any, Protocol, TypeVar

import msgpack

from waltz_core import errors
from waltz_core.records import strict_json

T = TypeVar("T")


class Serializer(Protocol[T]):
    """Converts an application's values to transaction data and back."""

    def serialize(self, value: T) -> bytes:
        """Return the bytes of a value."""

    def deserialize(self, data: bytes) -> T:
        """Return the value that the bytes encode."""


class BytesSerializer:
    """Passes bytes on, unchanged."""

    def serialize(self, value: bytes) -> bytes:
        """Return the bytes; raises BadRequest for any other object."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise errors.BadRequest(
                f"transaction data: expected bytes, found {type(value).__name__}"
            )
        return bytes(value)

    def deserialize(self, data: bytes) -> bytes:
        """Return the bytes, unchanged."""
        return data


class MsgpackSerializer:
    """Uses msgpack, the default: for numbers, strings, bytes, lists and maps."""

    def serialize(self, value: Any) -> bytes:  # noqa: ANN401 - any msgpack value
        """Return the packed value; raises BadRequest for a type that msgpack does not support."""
        try:
            packed: bytes = msgpack.packb(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.BadRequest(
                f"transaction data cannot be packed with msgpack: {error}"
            ) from error
        return packed

    def deserialize(self, data: bytes) -> Any:  # noqa: ANN401
        """Return the value; raises BadFormat for invalid msgpack."""
        try:
            return msgpack.unpackb(data, strict_map_key=False)
        except (msgpack.UnpackException, ValueError, TypeError) as error:
            raise errors.BadFormat(f"transaction data is not valid msgpack: {error}") from error


class JsonSerializer:
    """Uses compact JSON in UTF-8."""

    def serialize(self, value: Any) -> bytes:  # noqa: ANN401
        """Return the value as JSON; raises BadRequest for values that JSON lacks, such as NaN."""
        try:
            return strict_json.to_json(value)
        except (TypeError, ValueError) as error:
            raise errors.BadRequest(
                f"transaction data cannot be written as JSON: {error}"
            ) from error

    def deserialize(self, data: bytes) -> Any:  # noqa: ANN401
        """Return the value; raises BadFormat for invalid JSON, which includes NaN."""
        try:
            return strict_json.from_json(data)
        except ValueError as error:
            raise errors.BadFormat(f"transaction data is not valid JSON: {error}") from error


BYTES = BytesSerializer()
MSGPACK = MsgpackSerializer()
JSON = JsonSerializer()
