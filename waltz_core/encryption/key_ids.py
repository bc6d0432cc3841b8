"""The IDs of encryption keys, as they appear in options and in envelopes."""

import re
from typing import Final

from waltz_core import errors

KEY_ID_BYTES_MAX: Final = 64
_KEY_ID_PATTERN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{KEY_ID_BYTES_MAX - 1}}}")


def is_key_id(key_id: str) -> bool:
    """Whether a text has the form of a key ID.

    A key ID has 1 to 64 characters of A-Z a-z 0-9 . _ - and begins with a letter or a digit.
    """
    return _KEY_ID_PATTERN.fullmatch(key_id) is not None


def check_key_id(key_id: object, source: str) -> str:
    """Return a valid key ID; raises BadConfig, with its `source`, for any other value."""
    if not isinstance(key_id, str) or not is_key_id(key_id):
        raise errors.BadConfig(
            f"{source}: expected a key ID of 1 to {KEY_ID_BYTES_MAX} letters, digits, '.', "
            f"'_' and '-' that begins with a letter or a digit; found {str(key_id)[:200]!r}"
        )
    return key_id
