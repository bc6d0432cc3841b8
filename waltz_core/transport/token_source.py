"""The source of a client's token that a connect string names: a file or an environment variable.

The token is read for each connection, so that it can be replaced while the process runs. A process
that acts for callers, such as the gateway, keeps each caller's token in memory.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from waltz_core.access.tokens import Token
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.errors import BadConfig


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The file of a token or, if `file` is empty, the environment variable."""

    file: str
    variable: str

    def __str__(self) -> str:
        return f"token_file {self.file!r}" if self.file else f"token_env {self.variable}"

    def read(self) -> Token:
        """Read the token.

        Raises BadConfig, which names the source but does not contain the token.
        """
        if not self.file:
            if self.variable not in os.environ:
                raise BadConfig(f"{self}: expected a token, but the variable is not set")
            return Token.parse(os.environ[self.variable], str(self))
        try:
            text = Path(self.file).read_text(encoding="ascii")
        except OSError as error:
            raise BadConfig(f"{self} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise BadConfig(f"{self}: expected a token in ASCII, found other bytes") from None
        return Token.parse(text, str(self))


@dataclass(frozen=True, slots=True)
class ForwardedToken:
    """The token of a caller, on whose behalf this process connects."""

    token: Token

    def __str__(self) -> str:
        return "the token of the caller"

    def read(self) -> Token:
        """Return the token."""
        return self.token


def token_source_in(connect: str) -> TokenSource | None:
    """Return the token source that a connect string names; None if it names none.

    A string without a token source is not checked, as in `tls.tls_value_in`.
    """
    if "token_" not in connect:
        return None
    parsed = parse_connect_string(connect)
    if not parsed.token_file and not parsed.token_env:
        return None
    return TokenSource(parsed.token_file, parsed.token_env)
