"""Encryption envelopes: damage, foreign payloads, missing or destroyed keys, forked processes."""

import multiprocessing

import pyarrow as pa
import pytest

from waltz_core import errors
from waltz_core.encryption.envelopes import ENVELOPE_OVERHEAD_BYTES, DecryptedPayload, Encryption
from waltz_core.encryption.keys import KEY_LIFETIME_S, KeyCache
from waltz_core.records.record import TRANSACTION_BYTES_MAX

KEYS = {"a": b"a" * 32, "b": b"b" * 32}
FIELDS = {"partition": 3, "header": 7}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def encryption(
    keys: dict[str, bytes] = KEYS, *, key_id: str = "a", is_required: bool = False
) -> Encryption:
    return Encryption(KeyCache(keys.get, "a test"), key_id=key_id, is_required=is_required)


def error_of(found: DecryptedPayload) -> str:
    assert found.data is None
    assert found.error is not None
    return found.error


@pytest.mark.parametrize("payload", [b"", b"x", b"WZE\x01", bytes(100_000)])
def test_a_payload_is_encrypted_and_decrypted(payload: bytes) -> None:
    envelope = encryption().encrypt(payload, **FIELDS)
    assert len(envelope) == len(payload) + ENVELOPE_OVERHEAD_BYTES + 1
    if len(payload) >= 4:  # shorter payloads occur in a ciphertext by chance
        assert payload not in envelope[4:]
    assert encryption().decrypt(envelope, **FIELDS) == DecryptedPayload(payload, None)


def test_the_key_id_of_a_call_overrides_the_key_id_of_the_client() -> None:
    envelope = encryption().encrypt(b"x", **FIELDS, key_id="b")
    only_a = {"a": KEYS["a"]}
    assert encryption().decrypt(envelope, **FIELDS).data == b"x"
    assert error_of(encryption(only_a).decrypt(envelope, **FIELDS)) == "the key 'b' does not exist"


def test_without_a_key_id_a_payload_is_not_encrypted() -> None:
    assert encryption(key_id="").encrypt(b"x", **FIELDS) == b"x"


def test_equal_payloads_have_different_envelopes() -> None:
    assert len({encryption().encrypt(b"x", **FIELDS) for _ in range(100)}) == 100


def test_every_flipped_bit_is_detected() -> None:
    envelope = encryption().encrypt(b"a payload", **FIELDS)
    required = encryption(is_required=True)
    for index in range(8 * len(envelope)):
        changed = bytearray(envelope)
        changed[index // 8] ^= 1 << index % 8
        assert error_of(required.decrypt(bytes(changed), **FIELDS))


def test_every_truncated_envelope_is_rejected() -> None:
    envelope = encryption().encrypt(b"", **FIELDS)
    for size in range(4, len(envelope)):
        assert "the encrypted payload is damaged:" in error_of(
            encryption().decrypt(envelope[:size], **FIELDS)
        )


@pytest.mark.parametrize(
    "other_fields", [{"partition": 4, "header": 7}, {"partition": 3, "header": 8}]
)
def test_an_envelope_of_another_transaction_is_rejected(other_fields: dict[str, int]) -> None:
    envelope = encryption().encrypt(b"x", **FIELDS)
    assert "payload was changed or" in error_of(encryption().decrypt(envelope, **other_fields))


def test_an_invalid_key_id_is_never_sent_to_the_provider() -> None:
    def provider(key_id: str) -> bytes:
        raise AssertionError(key_id)

    reader = Encryption(KeyCache(provider, "a test"))
    for name in (b"..", b"../../etc", b"", b"\xff\xff", b"a\x00"):
        envelope = b"WZE\x01" + bytes((len(name),)) + name + bytes(50)
        assert "is not a key ID" in error_of(reader.decrypt(envelope, **FIELDS))
        assert reader.has_cached_key(envelope)


def test_the_error_reports_a_replaced_key() -> None:
    envelope = encryption().encrypt(b"x", **FIELDS)
    decrypted = encryption({"a": bytes(32)}).decrypt(envelope, **FIELDS)
    assert "the key was replaced" in error_of(decrypted)


def test_a_destroyed_key_makes_its_payloads_unreadable() -> None:
    keys, clock = dict(KEYS), Clock()
    both = Encryption(KeyCache(keys.get, "a test", clock), key_id="a")
    envelope = both.encrypt(b"x", **FIELDS)
    del keys["a"]
    assert both.decrypt(envelope, **FIELDS).data == b"x"  # it is cached
    clock.now_s = KEY_LIFETIME_S
    assert error_of(both.decrypt(envelope, **FIELDS)) == "the key 'a' does not exist"
    with pytest.raises(errors.BadConfig, match=r"a test has no such key. Hint: create"):
        both.encrypt(b"x", **FIELDS)


def test_a_plain_payload_is_returned_unless_encryption_is_required() -> None:
    assert encryption().decrypt(b"plain", **FIELDS) == DecryptedPayload(b"plain")
    assert encryption().decrypt(b"", **FIELDS) == DecryptedPayload(b"")
    required = encryption(is_required=True)
    assert error_of(required.decrypt(b"plain", **FIELDS)) == "the payload is not encrypted"


def test_an_outage_of_the_provider_is_an_error_and_not_a_missing_key() -> None:
    envelope = encryption().encrypt(b"x", **FIELDS)

    def provider(_key_id: str) -> bytes:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        Encryption(KeyCache(provider, "a test")).decrypt(envelope, **FIELDS)


def test_the_payload_limit_includes_the_envelope() -> None:
    largest = bytes(TRANSACTION_BYTES_MAX - ENVELOPE_OVERHEAD_BYTES - 1)
    assert len(encryption().encrypt(largest, **FIELDS)) == TRANSACTION_BYTES_MAX
    with pytest.raises(errors.TooLarge, match="bytes, found 4194305"):
        encryption().encrypt(largest + b"x", **FIELDS)


def test_function_has_cached_key_is_true_if_no_provider_call_is_needed() -> None:
    both = encryption()
    envelope = both.encrypt(b"x", **FIELDS)
    assert both.has_cached_key(envelope)
    assert both.has_cached_key(b"plain")
    assert not encryption().has_cached_key(envelope)


def test_rows_of_a_column_may_be_encrypted_with_different_keys() -> None:
    rows, headers, key_ids = [b"1", b"", b"3", b"1"], [0, -1, 5, 0], ["a", "b", "a", "a"]
    sealed = encryption().encrypt_column(
        pa.array(rows, pa.binary()), partition=3, headers=headers, key_ids=key_ids
    )
    assert sealed.type == pa.binary()
    assert sealed[0] != sealed[3]
    # The salt is drawn once for each key, and the row numbers differ.
    heads = [row[4:22] for row in sealed.to_pylist()]
    assert heads[0] == heads[2] == heads[3] != heads[1]
    assert [row[22:26] for row in sealed.to_pylist()] == [
        number.to_bytes(4, "big") for number in (0, 0, 1, 2)
    ]
    decrypted = encryption({"a": KEYS["a"]}).decrypt_column(sealed, partition=3, headers=headers)
    assert decrypted.data.to_pylist() == [b"1", None, b"3", b"1"]
    assert decrypted.errors.to_pylist() == [None, "the key 'b' does not exist", None, None]


def test_a_column_may_have_plain_and_damaged_payloads() -> None:
    sealed = encryption().encrypt(b"x", **FIELDS)
    column = pa.array([b"plain", sealed, sealed[:-1], b"WZE\x01"], pa.binary())
    decrypted = encryption().decrypt_column(column.slice(1), partition=3, headers=[7] * 3)
    assert decrypted.data.to_pylist() == [b"x", None, None]
    assert decrypted.errors.is_null().to_pylist() == [True, False, False]
    decrypted = encryption().decrypt_column(column[:1], partition=3, headers=[7])
    assert decrypted.data.to_pylist() == [b"plain"]


def test_a_missing_or_invalid_key_of_a_column_is_an_error() -> None:
    for key_id, text in (("c", "encryption key 'c':"), ("a/b", "expected a key ID")):
        with pytest.raises(errors.BadConfig, match=text):
            encryption().encrypt_column(
                pa.array([b"x"], pa.binary()), partition=0, headers=[0], key_ids=[key_id]
            )


INHERITED = encryption()  # forked processes have its cached keys


def encrypt_inherited(_number: int) -> bytes:
    return INHERITED.encrypt(b"x", **FIELDS)


def test_salts_differ_after_a_fork() -> None:
    envelopes = [encrypt_inherited(0)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        envelopes += pool.map(encrypt_inherited, range(8), chunksize=1)
    envelopes.append(encrypt_inherited(0))
    salts = [envelope[6:22] for envelope in envelopes]
    assert len(set(salts)) == len(salts)
    assert all(INHERITED.decrypt(envelope, **FIELDS).data == b"x" for envelope in envelopes)
