"""Encryption keys by ID, from a directory of files or from a function of the application.

Options and settings contain a reference to the keys, never a key.

Rules (docs/decisions/064):
    1. A key is used for at most `KEY_LIFETIME_S` after the provider has returned it. So after this
       time, a key that the provider has destroyed is not used any more.
    2. For `KEY_LIFETIME_S`, the cache also stores that a key is missing. The cache contains at most
       `CACHED_KEYS_MAX` IDs, because the IDs come from the log, and writers choose these IDs.
    3. A key counts as missing only if the provider answers that it does not exist. If the provider
       does not answer, the call fails: a reader must not treat an outage as a destroyed key.
"""

import importlib
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from waltz_core import errors
from waltz_core.user_functions import is_function_name, load_function

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
KEY_LIFETIME_S: Final = 60.0
CACHED_KEYS_MAX: Final = 10_000
# The maximum number of cached AES-GCM keys for each key. Each batch that is read at the same time
# needs one AES-GCM key.
_DERIVED_KEYS_MAX: Final = 16
_HKDF_INFO: Final = b"waltz payload 1"

# A function from a key ID to the 32 bytes of the key, or None if the key does not exist.
KeyProvider = Callable[[str], bytes | None]


class Key:
    """One key, and a cache of the AES-GCM keys that are derived from it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._derived_keys: OrderedDict[bytes, AESGCM] = OrderedDict()

    def derive_key(self, salt: bytes) -> "AESGCM":
        """Return the AES-256-GCM key that HKDF-SHA-256 (RFC 5869) derives from key and salt."""
        derived_key = self._derived_keys.get(salt)
        if derived_key is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - optional
            from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415 - optional
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415 - optional

            derived_key = AESGCM(HKDF(SHA256(), KEY_BYTES, salt, _HKDF_INFO).derive(self._secret))
            self._derived_keys[salt] = derived_key
            if len(self._derived_keys) > _DERIVED_KEYS_MAX:
                with suppress(KeyError):  # another thread has removed it
                    self._derived_keys.popitem(last=False)
        return derived_key


class _CachedKey(NamedTuple):
    key: Key | None
    expires_s: float


class KeyCache:
    """Caches the keys of one provider; several threads may use it (rules 1 and 2).

    Args:
        provider: returns keys by ID; it may block.
        name: the name of the provider in errors.
        clock: returns the time in seconds.
    """

    def __init__(
        self, provider: KeyProvider, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._provider = provider
        self._clock = clock
        # NB: there is no lock, because a fork could copy it in a locked state. Each access is one
        # atomic operation.
        self._cached_keys: OrderedDict[str, _CachedKey] = OrderedDict()

    def __reduce__(self) -> NoReturn:
        raise errors.UsageError(
            "encryption keys cannot be sent to another process. Hint: load them in the "
            "other process, from the same value of the setting encryption_keys."
        )

    def is_cached(self, key_id: str) -> bool:
        """Whether `find` needs no call of the provider, which may block."""
        return self._cached_key(key_id) is not None

    def find(self, key_id: str) -> Key | None:
        """Return the key with an ID, which must be valid; None if the provider has no such key.

        Raises:
            BadConfig: the provider returned a value other than 32 bytes.
            Unavailable: the directory cannot be read.
            Any error that the application's provider raises.
        """
        cached_key = self._cached_key(key_id)
        if cached_key is None:
            secret = self._provider(key_id)
            key = None if secret is None else Key(_check_secret(secret, key_id, self.name))
            cached_key = _CachedKey(key, self._clock() + KEY_LIFETIME_S)
            self._cached_keys[key_id] = cached_key
            self._cached_keys.move_to_end(key_id)
            if len(self._cached_keys) > CACHED_KEYS_MAX:
                with suppress(KeyError):  # another thread has removed it
                    self._cached_keys.popitem(last=False)
        return cached_key.key

    def _cached_key(self, key_id: str) -> _CachedKey | None:
        cached_key = self._cached_keys.get(key_id)
        return (
            cached_key if cached_key is not None and self._clock() < cached_key.expires_s else None
        )


def _check_secret(secret: object, key_id: str, name: str) -> bytes:
    # NB: an error must not contain the key.
    if not isinstance(secret, bytes):
        raise errors.BadConfig(
            f"{name}, key {key_id!r}: expected bytes, found {type(secret).__name__}"
        )
    if len(secret) != KEY_BYTES:
        raise errors.BadConfig(
            f"{name}, key {key_id!r}: expected {KEY_BYTES} bytes, found {len(secret)}"
        )
    return secret


@lru_cache(maxsize=16)
def key_cache_for(reference: str) -> KeyCache:
    """Return the cache for the keys at a reference; a process has one cache per reference.

    `reference` has one of two forms:

        - A directory with one file for each key: the file name is the key ID, and the content is 64
          hexadecimal digits.
        - "module:function": a function that takes a key ID and returns 32 bytes, or None if the key
          does not exist.

    Raises:
        BadConfig: the directory or function does not exist, or the package `cryptography` is
            missing.
    """
    try:
        importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError as error:
        raise errors.BadConfig(
            f"payload encryption needs the package cryptography: {error}. Hint: "
            "run pip install 'waltz-spark[encryption]'."
        ) from error
    if is_function_name(reference):
        hint = "Hint: it must be a function in a module that each process can import."
        provider: KeyProvider = load_function(reference, "encryption keys", hint)
        return KeyCache(provider, reference)
    directory = Path(reference)
    if not directory.is_dir():
        raise errors.BadConfig(
            f"encryption keys: the directory {reference!r} does not exist. Hint: to name a "
            "function that returns keys, use 'module:function'."
        )
    return KeyCache(KeyDirectory(directory), reference)


class KeyDirectory:
    """A key provider that reads keys from a directory with one file for each key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, key_id: str) -> bytes | None:
        """Read the key with an ID; return None if its file does not exist or is not readable."""
        path = self._directory / key_id
        try:
            text = path.read_bytes()
        except (FileNotFoundError, PermissionError) as error:
            if not self._directory.is_dir():  # rule 3
                raise errors.Unavailable(
                    f"encryption keys: the directory {str(self._directory)!r} no longer exists"
                ) from error
            return None
        except OSError as error:
            raise errors.Unavailable(
                f"encryption key {str(path)!r} cannot be read: {error}"
            ) from error
        try:
            return bytes.fromhex(text.decode("ascii").strip())
        except ValueError:
            raise errors.BadConfig(
                f"encryption key {str(path)!r}: expected {2 * KEY_BYTES} hexadecimal digits. "
                f"Hint: create a key with: openssl rand -hex {KEY_BYTES}"
            ) from None
