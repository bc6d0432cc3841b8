"""Encrypts and decrypts the payloads of a client on its event loop.

If a key is not cached, a separate thread requests it, because the key provider may block.
"""

import asyncio
from typing import TYPE_CHECKING

from waltz_core import errors
from waltz_core.encryption.envelopes import DecryptedPayload, Encryption

if TYPE_CHECKING:
    from waltz_core.config.declarations import ClientConfig


def encryption_of(config: "ClientConfig") -> Encryption | None:
    """Return the encryption that the settings of a client declare; None if they declare no keys.

    Raises:
        BadConfig: see `Encryption.from_reference`.
    """
    if not config.encryption_keys:
        return None
    return Encryption.from_reference(
        config.encryption_keys,
        key_id=config.encryption_key_id,
        is_required=config.encryption_required,
    )


async def encrypt_payload(
    encryption: Encryption | None, data: bytes, *, partition: int, header: int, key_id: str | None
) -> bytes:
    """Return the payload to append: encrypted if the client's settings or `key_id` name a key.

    Raises:
        BadConfig: `key_id` names a key, but the client has no keys.
        The errors of `Encryption.encrypt`.
    """
    if encryption is None:
        if key_id is None:
            return data
        raise errors.BadConfig(
            f"setting encryption_key_id is {key_id!r}, but setting encryption_keys, which "
            "locates the keys, is not set"
        )
    if encryption.keys.is_cached(encryption.key_id if key_id is None else key_id):
        return encryption.encrypt(data, partition=partition, header=header, key_id=key_id)
    return await asyncio.to_thread(
        encryption.encrypt, data, partition=partition, header=header, key_id=key_id
    )


async def decrypt_payload(
    encryption: Encryption, data: bytes, *, partition: int, header: int
) -> DecryptedPayload:
    """Decrypt a payload that was read; raises the errors of `Encryption.decrypt`."""
    if encryption.has_cached_key(data):
        return encryption.decrypt(data, partition=partition, header=header)
    return await asyncio.to_thread(encryption.decrypt, data, partition=partition, header=header)
