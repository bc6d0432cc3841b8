"""Principals: the names of peers, and the principal of a certificate (decision 048, AC 2).

The certificate is the dictionary that `SSLSocket.getpeercert` returns after verification.

Rules:
    1. The pattern must match a whole name of the certificate: `CN=..`, `SUBJECT=..`, `URI=..` or
       `DNS=..`. Its first group is the principal.
    2. A certificate can contain several names, and the result must not depend on their order. So
       the certificate has no principal if its names yield no principal, or different principals. It
       also has no principal if the result does not have the form of a principal, or is a reserved
       name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from waltz_core.errors import BadConfig

# The principal of a connection that has neither a token nor a certificate with a principal.
ANONYMOUS: Final = "anonymous"
RESERVED_NAMES: Final = (ANONYMOUS, "other")
PRINCIPAL_NAME_FORM: Final = "1 to 128 characters of A-Z a-z 0-9 . _ : / @ + -"
_PRINCIPAL_PATTERN: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")

Certificate: TypeAlias = Mapping[str, Any]

# Maps the attribute names of OpenSSL to those of RFC 4514; other attributes keep OpenSSL's name.
_SHORT_NAMES: Final = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
_ESCAPED_CHARACTERS: Final = re.compile(r'[,+"\\<>;\x00]|^[ #]| $')


def is_principal_name(text: str) -> bool:
    """Whether `text` has the form of a principal name (`PRINCIPAL_NAME_FORM`)."""
    return _PRINCIPAL_PATTERN.fullmatch(text) is not None


def compile_principal_pattern(pattern: str) -> "re.Pattern[str]":
    """Compile the setting `principal_pattern`.

    Raises BadConfig if it is invalid or has no group.
    """
    expected = "setting principal_pattern: expected a regular expression with a group"
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadConfig(f"{expected}, found {pattern!r} ({error})") from error
    if not compiled.groups:
        raise BadConfig(f'{expected}, such as "CN=(.+)", found {pattern!r}, which has none')
    return compiled


def principal_of(certificate: Certificate | None, pattern: "re.Pattern[str]") -> str | None:
    """Return the principal of a verified certificate; None if it has none (rules 1 and 2)."""
    matches = [pattern.fullmatch(name) for name in _certificate_names(certificate or {})]
    principal_names = {match.group(1) for match in matches if match and match.group(1) is not None}
    if len(principal_names) != 1:
        return None
    (name,) = principal_names
    return name if is_principal_name(name) and name not in RESERVED_NAMES else None


def _certificate_names(certificate: Certificate) -> Iterator[str]:
    """Yield the names in a certificate; the pattern is compared with them (rule 1)."""
    subject = certificate.get("subject", ())
    for part in subject:
        for kind, value in part:
            if kind == "commonName":
                yield f"CN={value}"
    if subject:
        yield f"SUBJECT={_rfc4514_name(subject)}"
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in ("URI", "DNS"):
            yield f"{kind}={value}"


def _rfc4514_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    """Format a subject as RFC 4514 specifies: the last part comes first."""
    return ",".join(
        "+".join(f"{_SHORT_NAMES.get(kind, kind)}={_escape_value(value)}" for kind, value in part)
        for part in reversed(subject)
    )


def _escape_value(value: str) -> str:
    return _ESCAPED_CHARACTERS.sub(
        lambda match: "\\00" if match[0] == "\0" else f"\\{match[0]}", value
    )
