"""Encrypted payloads: AES-256-GCM in an envelope that names its key.

An envelope replaces the payload in a record; the log treats it like any other payload. All integers
are big-endian.

    bytes  field
    4      magic "WZE" and format 1
    1, n   length and text of the key ID, ASCII
    16     salt
    4      row number within the call
    rest   ciphertext, with 16 bytes of tag

Rules (docs/decisions/064):
    1. A call encrypts one payload, or the payloads of a column. For each key ID, the call reads a
       random salt from the operating system. From the key and the salt, the call derives an AES-GCM
       key. The nonce is the row number. So no nonce repeats under one AES-GCM key, even after a
       fork.
    2. The associated data is magic, key ID, partition and application header. It does not contain
       the cluster key, because a restored cluster has another cluster key.
    3. A payload that cannot be decrypted is returned as null, with a reason. An error is raised
       only if the key provider does not answer.
    4. A payload that does not begin with the magic was not encrypted. If encryption is not
       required, such a payload is returned unchanged.
"""

import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from waltz_core import errors
from waltz_core.encryption.key_ids import check_key_id, is_key_id
from waltz_core.encryption.keys import KeyCache, key_cache_for
from waltz_core.records.record import TRANSACTION_BYTES_MAX

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC: Final = b"WZE\x01"
SALT_BYTES: Final = 16
_ROW_NUMBER: Final = struct.Struct(">I")
_PARTITION_AND_HEADER: Final = struct.Struct(">ii")  # partition and application header
_TAG_BYTES: Final = 16
# The nonce of AES-GCM has 12 bytes; the row number is the last four.
_NONCE_PREFIX: Final = bytes(12 - _ROW_NUMBER.size)
# The bytes that an envelope adds to the payload and the key ID.
ENVELOPE_OVERHEAD_BYTES: Final = len(MAGIC) + 1 + SALT_BYTES + _ROW_NUMBER.size + _TAG_BYTES

_NOT_ENCRYPTED: Final = "the payload is not encrypted"


class DecryptedPayload(NamedTuple):
    """A decrypted payload; or None, and the reason why it could not be decrypted."""

    data: bytes | None
    error: str | None = None


class EnvelopeSummary(NamedTuple):
    """The parts of an envelope that are readable without its key."""

    key_id: str
    payload_bytes: int  # the size before the encryption


class DecryptedColumn(NamedTuple):
    """A column of decrypted payloads and a column of errors; in each row, one of them is null."""

    data: pa.Array
    errors: pa.Array


class Encryption:
    """Encrypts and decrypts payloads with the keys of one provider.

    Args:
        keys: the cache through which the provider's keys are read.
        key_id: the key for calls of `encrypt` that name no key. If it is empty, these calls do not
            encrypt.
        is_required: whether `decrypt` treats an unencrypted payload like a payload that cannot be
            decrypted.

    Raises:
        BadConfig: `key_id` is not a valid ID.
    """

    def __init__(self, keys: KeyCache, *, key_id: str = "", is_required: bool = False) -> None:
        self.keys = keys
        self.key_id = check_key_id(key_id, "encryption key") if key_id else ""
        self._is_required = is_required

    @staticmethod
    def from_reference(
        reference: str, *, key_id: str = "", is_required: bool = False
    ) -> "Encryption":
        """Return an `Encryption` with the keys at a reference.

        See `keys.key_cache_for`, also for errors.
        """
        return Encryption(key_cache_for(reference), key_id=key_id, is_required=is_required)

    # --- writing

    def encrypt(
        self, data: bytes, *, partition: int, header: int, key_id: str | None = None
    ) -> bytes:
        """Encrypt a payload and return the envelope.

        Return the payload itself if there is no key ID.

        Raises:
            BadConfig: the provider does not have the key.
            TooLarge: the envelope exceeds the maximum size of a transaction.
            Unavailable, or an error of the application's provider: see `KeyCache.find`.
        """
        chosen_id = self.key_id if key_id is None else check_key_id(key_id, "encryption key")
        if not chosen_id:
            return data
        size = len(data) + ENVELOPE_OVERHEAD_BYTES + len(chosen_id)
        if size > TRANSACTION_BYTES_MAX:
            raise errors.TooLarge(
                "transaction data is too large after encryption, which adds "
                f"{size - len(data)} bytes: expected at most {TRANSACTION_BYTES_MAX} bytes, "
                f"found {size}"
            )
        return _PayloadEncryptor(self.keys, chosen_id, partition).encrypt(data, header)

    def encrypt_column(
        self, data: pa.Array, *, partition: int, headers: Sequence[int], key_ids: Sequence[str]
    ) -> pa.Array:
        """Encrypt a column of payloads of one partition, each with its own key.

        Return the envelopes.

        Args:
            data: binary, without nulls.
            partition: the partition of all payloads.
            headers: the application header of each payload.
            key_ids: the key ID for each payload.

        Raises:
            BadConfig: the provider does not have a key, or a key ID is not valid.
            Unavailable, or an error of the application's provider: see `KeyCache.find`.
        """
        calls = {
            payload: _PayloadEncryptor(
                self.keys, check_key_id(payload, "encryption key"), partition
            )
            for payload in dict.fromkeys(key_ids)
        }
        rows = zip(data.to_pylist(), headers, key_ids, strict=True)
        return pa.array(
            [calls[key].encrypt(payload, header) for payload, header, key in rows], data.type
        )

    # --- reading

    def has_cached_key(self, data: bytes) -> bool:
        """Whether `decrypt` needs no call of the key provider, which may block."""
        if not is_envelope(data):
            return True
        key_id = _key_id_of(data[: _head_size_bytes(data) - SALT_BYTES])
        return not is_key_id(key_id) or self.keys.is_cached(key_id)

    def decrypt(self, data: bytes, *, partition: int, header: int) -> DecryptedPayload:
        """Decrypt an envelope and return its payload (rules 3 and 4).

        Raises:
            BadConfig, Unavailable, or an error of the application's provider: see `KeyCache.find`.
        """
        return _PayloadDecryptor(self.keys, partition, is_required=self._is_required).decrypt(
            data, header
        )

    def decrypt_column(
        self, data: pa.Array, *, partition: int, headers: Sequence[int]
    ) -> DecryptedColumn:
        """Decrypt a column of payloads of one partition (rules 3 and 4).

        The column `data` of archived objects contains the same envelopes, so this method decrypts
        it.

        Args:
            data: binary, without nulls: envelopes, or payloads that are not encrypted.
            partition: the partition of all payloads.
            headers: the application header of each payload.

        Raises:
            BadConfig, Unavailable, or an error of the application's provider: see `KeyCache.find`.
        """
        call = _PayloadDecryptor(self.keys, partition, is_required=self._is_required)
        rows = zip(data.to_pylist(), headers, strict=True)
        payloads = [call.decrypt(payload, header) for payload, header in rows]
        return DecryptedColumn(
            pa.array([payload.data for payload in payloads], data.type),
            pa.array([payload.error for payload in payloads], pa.string()),
        )


def is_envelope(data: bytes) -> bool:
    """Whether a payload begins with the magic of an envelope (rule 4)."""
    return data[: len(MAGIC)] == MAGIC


def read_envelope(data: bytes) -> EnvelopeSummary | None:
    """Return the readable parts of an envelope; None if the envelope is damaged."""
    assert is_envelope(data)
    head_bytes = _head_size_bytes(data)
    payload_bytes = len(data) - head_bytes - _ROW_NUMBER.size - _TAG_BYTES
    key_id = _key_id_of(data[: head_bytes - SALT_BYTES])
    if payload_bytes < 0 or not is_key_id(key_id):
        return None
    return EnvelopeSummary(key_id, payload_bytes)


class _PayloadEncryptor:
    """Encrypts payloads of one key and one partition with one salt (rule 1)."""

    def __init__(self, keys: KeyCache, key_id: str, partition: int) -> None:
        key = keys.find(key_id)
        if key is None:
            raise errors.BadConfig(
                f"encryption key {key_id!r}: {keys.name} has no such key. Hint: create the "
                "key before you use it."
            )
        encoded_key_id = _encoded_key_id(key_id)
        salt = os.urandom(SALT_BYTES)
        self._head = encoded_key_id + salt
        self._associated_data = encoded_key_id
        self._partition = partition
        self._aead = key.derive_key(salt)
        self._row_count = 0

    def encrypt(self, data: bytes, header: int) -> bytes:
        row = _ROW_NUMBER.pack(self._row_count)  # raises struct.error before a number repeats
        self._row_count += 1
        associated = self._associated_data + _PARTITION_AND_HEADER.pack(self._partition, header)
        return self._head + row + self._aead.encrypt(_NONCE_PREFIX + row, data, associated)


class _PayloadDecryptor:
    """Decrypts payloads of one partition.

    Caches the cipher for each head (magic, key ID and salt).
    """

    def __init__(self, keys: KeyCache, partition: int, *, is_required: bool) -> None:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - optional

        self._invalid_tag = InvalidTag
        self._keys = keys
        self._partition = partition
        self._is_required = is_required
        self._ciphers_by_head: dict[bytes, _EnvelopeCipher | str] = {}

    def decrypt(self, data: bytes, header: int) -> DecryptedPayload:
        if not is_envelope(data):
            if self._is_required:
                return DecryptedPayload(None, _NOT_ENCRYPTED)
            return DecryptedPayload(data)
        head_bytes = _head_size_bytes(data)
        expected = head_bytes + _ROW_NUMBER.size + _TAG_BYTES
        if len(data) < expected:
            return DecryptedPayload(
                None,
                f"the encrypted payload is damaged: expected at least {expected} bytes, "
                f"found {len(data)}",
            )
        cipher = self._cipher_for(data[:head_bytes])
        if isinstance(cipher, str):
            return DecryptedPayload(None, cipher)
        row_number_end = head_bytes + _ROW_NUMBER.size
        nonce = _NONCE_PREFIX + data[head_bytes:row_number_end]
        associated = cipher.encoded_key_id + _PARTITION_AND_HEADER.pack(self._partition, header)
        try:
            return DecryptedPayload(cipher.aead.decrypt(nonce, data[row_number_end:], associated))
        except self._invalid_tag:
            return DecryptedPayload(None, cipher.wrong_tag_reason)

    def _cipher_for(self, head: bytes) -> "_EnvelopeCipher | str":
        cipher = self._ciphers_by_head.get(head)
        if cipher is None:
            cipher = self._ciphers_by_head[head] = self._derive_cipher(head)
        return cipher

    def _derive_cipher(self, head: bytes) -> "_EnvelopeCipher | str":
        """Return the cipher for envelopes with this head, or the reason why there is no cipher."""
        encoded_key_id, salt = head[:-SALT_BYTES], head[-SALT_BYTES:]
        key_id = _key_id_of(encoded_key_id)
        if not is_key_id(key_id):
            return f"the encrypted payload is damaged: {key_id!r} is not a key ID"
        key = self._keys.find(key_id)
        if key is None:
            return f"the key {key_id!r} does not exist"
        wrong_tag_reason = (
            f"the payload cannot be decrypted with key {key_id!r}: the payload was changed "
            "or copied from another transaction, or the key was replaced"
        )
        return _EnvelopeCipher(key.derive_key(salt), encoded_key_id, wrong_tag_reason)


class _EnvelopeCipher(NamedTuple):
    """The cipher for the envelopes of one call.

    `wrong_tag_reason` is the reason reported for a wrong tag.
    """

    aead: "AESGCM"
    encoded_key_id: bytes
    wrong_tag_reason: str


def _encoded_key_id(key_id: str) -> bytes:
    """Return the first bytes of an envelope: magic, length of the key ID, and key ID."""
    return MAGIC + bytes((len(key_id),)) + key_id.encode("ascii")


def _key_id_of(encoded_key_id: bytes) -> str:
    return encoded_key_id[len(MAGIC) + 1 :].decode("ascii", "replace")


def _head_size_bytes(data: bytes) -> int:
    """Return the number of bytes before the row number; the envelope may be damaged."""
    id_bytes = data[len(MAGIC)] if len(data) > len(MAGIC) else 0
    return len(MAGIC) + 1 + id_bytes + SALT_BYTES
