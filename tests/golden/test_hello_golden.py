"""Captured hello frames are decoded and encoded again."""

import json
from pathlib import Path

from waltz_core.wire import codec
from waltz_core.wire.connection import Connection
from waltz_core.wire.messages import Hello, WireProtocol

EXAMPLES = json.loads((Path(__file__).parent / "wire" / "hello.json").read_text(encoding="utf-8"))


def test_captured_hellos_are_decoded_correctly_and_encoded_to_the_same_bytes():
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        data = bytes.fromhex(example["frame_hex"])
        assert codec.decode_frame_header(data) == (ord("H"), 0, len(data) - 7)
        hello = codec.decode_hello(data[7:])
        assert list(hello.versions) == example["decoded"]["versions"]
        assert hello.text == example["decoded"]["message"]
        assert codec.encode_hello(hello) == data


def test_the_clients_hello_has_the_bytes_of_the_specification():
    expected = (
        "48 0000 0000001e 00000005 0000 0001 0002 0003 0004 0000000c 57616c747a20436c69656e74"
    )
    hello = Hello((0, 1, 2, 3, 4), "Waltz Client")
    assert codec.encode_hello(hello) == bytes.fromhex(expected)


def test_hellos_have_the_texts_of_waltz_0_13():
    texts = {example["decoded"]["message"] for example in EXAMPLES}
    for protocol in (WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN):
        hello = codec.decode_hello(Connection(protocol, is_listener=True).first_bytes()[7:])
        assert hello.text in texts
