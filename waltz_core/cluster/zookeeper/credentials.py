"""Parses the auth file: the process's user at ZooKeeper, and the permissions of its nodes.

A connect string appears in process lists, logs, Spark plans and configuration files, so it names a
file and contains no secret. Error messages name the line, never its content.

    digest:waltz:a long password       the first line: scheme, user, password
    world:anyone:r                     each further line: permissions of others, as in ZooKeeper,
                                       scheme:id:permissions (of c, d, r, w, a)

Rules:
    1. The creator of a node has all permissions; further lines only add to that.
    2. Empty lines, and lines that begin with "#", are ignored.
    3. All processes of a cluster have the same user: each must read what the others write.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from waltz_core import errors

SCHEME = "digest"
PERMISSIONS = "cdrwa"
OTHER_SCHEMES = ("world", "digest", "ip", "sasl", "x509")


class NodePermission(NamedTuple):
    """The permissions of one identity."""

    scheme: str
    identity: str
    permissions: str


@dataclass(frozen=True, slots=True)
class Credentials:
    """The content of an auth file."""

    user: str
    password: str = field(repr=False)
    grants: tuple[NodePermission, ...] = ()


def parse_credentials(text: str, where: str) -> Credentials:
    """Parse an auth file; raises BadConfig that names the file and the line."""
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise errors.BadConfig(f"{where}: expected {SCHEME}:USER:PASSWORD, found nothing")
    (number, first), *others = lines
    scheme, _, rest = first.partition(":")
    user, _, password = rest.partition(":")
    if scheme != SCHEME or not user or not password:
        raise errors.BadConfig(f"{where}, line {number}: expected {SCHEME}:USER:PASSWORD")
    return Credentials(user, password, tuple(_grant(line, where, at) for at, line in others))


def _grant(line: str, where: str, number: int) -> NodePermission:
    scheme, _, rest = line.partition(":")
    identity, _, permissions = rest.rpartition(":")
    is_good = scheme in OTHER_SCHEMES and identity and permissions
    if scheme == "world" and identity != "anyone":
        is_good = False
    if not is_good or set(permissions) - set(PERMISSIONS):
        raise errors.BadConfig(
            f"{where}, line {number}: expected SCHEME:ID:PERMISSIONS, such as world:anyone:r, with "
            f"a scheme of {', '.join(OTHER_SCHEMES)} and permissions of {PERMISSIONS}"
        )
    return NodePermission(scheme, identity, permissions)
