"""All decoders of the fuzzer, in the order of their files."""

from tests.fuzz import (
    archive_decoders,
    disk_decoders,
    schema_decoders,
    text_decoders,
    wire_decoders,
    zookeeper_decoders,
)

_FILES = (
    wire_decoders,
    disk_decoders,
    zookeeper_decoders,
    archive_decoders,
    schema_decoders,
    text_decoders,
)
DECODERS = tuple(decoder for file in _FILES for decoder in file.DECODERS)
BY_NAME = {each.name: each for each in DECODERS}
assert len(BY_NAME) == len(DECODERS), "two decoders have one name"
