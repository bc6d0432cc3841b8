"""Tokens: random secrets that identify a principal (decision 048, AC 3).

Rules:
    1. The bytes of a token never appear in a `repr`, an error or a log line. An object that
       contains them cannot be pickled.
    2. ZooKeeper stores only the SHA-256 hash. Passwords need a slow hash, but tokens do not,
       because a token consists of random bytes.
"""

import hashlib
import re
from typing import Final, Never

from waltz_core.errors import BadConfig

TOKEN_BYTES: Final = 32
_TOKEN_PATTERN: Final = re.compile(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")


class Token:
    """The secret bytes of a token."""

    __slots__ = ("secret",)

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == TOKEN_BYTES
        self.secret = secret

    @staticmethod
    def parse(text: str, source: str) -> "Token":
        """Parse a token from a file or a variable: 64 lower-case hexadecimal digits.

        Raises BadConfig, whose message contains `source` but not the text.
        """
        text = text.strip()
        if _TOKEN_PATTERN.fullmatch(text) is None:
            raise BadConfig(
                f"{source}: expected a token of {2 * TOKEN_BYTES} lower-case hexadecimal "
                f"digits, found a text of {len(text)} characters"
            )
        return Token(bytes.fromhex(text))

    @property
    def text(self) -> str:
        """The secret as hexadecimal digits, for a token file."""
        return self.secret.hex()

    def __reduce__(self) -> Never:
        raise TypeError("a token is a secret and cannot be pickled")


def hash_of(secret: bytes) -> str:
    """Return the SHA-256 hash of a secret in hexadecimal digits, as ZooKeeper stores it."""
    return hashlib.sha256(secret).hexdigest()
