"""Envelopes of encrypted payloads, compared with stored envelopes (docs/encryption.md)."""

import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from waltz_core.encryption import envelopes
from waltz_core.encryption.envelopes import DecryptedPayload, Encryption
from waltz_core.encryption.keys import KeyCache

EXAMPLES = json.loads((Path(__file__).parent / "envelopes.json").read_text(encoding="utf-8"))
examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["key_id"])


def encryption_of(example: dict[str, Any]) -> Encryption:
    keys = {example["key_id"]: bytes.fromhex(example["key"])}
    return Encryption(KeyCache(keys.get, "the example"))


@examples
def test_a_stored_envelope_is_decrypted(example: dict[str, Any]) -> None:
    envelope = bytes.fromhex(example["envelope"])
    decrypted = encryption_of(example).decrypt(
        envelope, partition=example["partition"], header=example["header"]
    )
    assert decrypted == DecryptedPayload(bytes.fromhex(example["payload"]), None)


@examples
def test_the_same_salt_and_row_give_the_stored_envelope(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envelopes.os, "urandom", lambda _count: bytes.fromhex(example["salt"]))
    rows = [b"another"] * example["row"] + [bytes.fromhex(example["payload"])]
    column = encryption_of(example).encrypt_column(
        pa.array(rows, pa.binary()),
        partition=example["partition"],
        headers=[example["header"]] * len(rows),
        key_ids=[example["key_id"]] * len(rows),
    )
    assert column[-1].as_py().hex() == example["envelope"]


@examples
def test_the_envelope_is_composed_as_documented(example: dict[str, Any]) -> None:
    """Composes the envelope with HKDF of the standard library, and another interface of AES-GCM."""
    salt, key_id = bytes.fromhex(example["salt"]), example["key_id"].encode()
    extracted = hmac.digest(salt, bytes.fromhex(example["key"]), hashlib.sha256)
    derived = hmac.digest(extracted, b"waltz payload 1\x01", hashlib.sha256)
    named = b"WZE\x01" + bytes((len(key_id),)) + key_id
    row = example["row"].to_bytes(4, "big")
    cipher = Cipher(algorithms.AES(derived), modes.GCM(bytes(8) + row)).encryptor()
    partition_and_header = struct.pack(">ii", example["partition"], example["header"])
    cipher.authenticate_additional_data(named + partition_and_header)
    ciphertext = cipher.update(bytes.fromhex(example["payload"])) + cipher.finalize()
    assert (named + salt + row + ciphertext + cipher.tag).hex() == example["envelope"]
