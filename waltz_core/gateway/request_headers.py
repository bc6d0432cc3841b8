"""Checks request headers, to protect a gateway on loopback from malicious web pages.

Rules:
    1. A body must have `Content-Type: application/json`. A browser sends this header to another
       origin only after a preflight request that the gateway would have to permit. The gateway
       permits none.
    2. On loopback without TLS, `Host` must be an IP address or `localhost`. Without this rule, a
       web page could send requests to the gateway under the page's own host name (DNS rebinding).
       On other addresses without TLS, this rule applies only to changes of the cluster by callers
       without a token.
    3. The gateway rejects compressed bodies, and requests with two idempotency keys.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from waltz_core.config.host_names import is_ip_address
from waltz_core.errors import RequestRejected, UnsupportedMediaType

JSON_TYPE: Final = "application/json"
KEY_CHARACTERS_MAX: Final = 128
_KEY_CHARACTERS: Final = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~"
)


class RequestHeaders(Protocol):
    """The headers of a request; a header can occur more than once."""

    def getlist(self, key: str) -> list[str]:
        """Return all values of a header."""


def check_content_headers(headers: RequestHeaders) -> None:
    """Check the type and the encoding of a body; raises UnsupportedMediaType (rules 1 and 3)."""
    kinds = headers.getlist("content-type")
    if [media_type.partition(";")[0].strip().lower() for media_type in kinds] != [JSON_TYPE]:
        raise UnsupportedMediaType(
            "header Content-Type", expected=JSON_TYPE, found=", ".join(kinds) or None
        )
    encodings = ", ".join(headers.getlist("content-encoding"))
    if encodings.lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            "header Content-Encoding", expected="no such header, or identity", found=encodings
        )


def check_local_host(
    headers: Mapping[str, str], reason: str = "the gateway listens on loopback"
) -> None:
    """Check that the host is not the name of a web page; raises RequestRejected (rule 2)."""
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_ip_address(name) and name.lower() != "localhost":
        raise RequestRejected(
            "header Host",
            expected=f"an IP address or localhost, because {reason}",
            found=host,
            hint="A proxy must set this header to the address of the gateway.",
        )


def content_length(headers: Mapping[str, str]) -> int:
    """Return the stated length of the body; 0 if the request does not state it."""
    return int(headers.get("content-length", "0"))


def idempotency_key_in(headers: RequestHeaders) -> str | None:
    """Return the idempotency key of a request, if any; raises RequestRejected (rule 3)."""
    keys = headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise RequestRejected("header Idempotency-Key", expected="one key", found=keys)
    return check_idempotency_key(keys[0] if keys else None)


def check_idempotency_key(key: str | None) -> str | None:
    """Return an idempotency key unchanged; raises RequestRejected if its form is not valid."""
    if key is None or (0 < len(key) <= KEY_CHARACTERS_MAX and _KEY_CHARACTERS.issuperset(key)):
        return key
    raise RequestRejected(
        "header Idempotency-Key",
        expected=f"1 to {KEY_CHARACTERS_MAX} letters, digits, '-', '_', '.' and '~'",
        found=key,
        hint="Use a UUID.",
    )
