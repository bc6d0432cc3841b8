"""Parses the auth file: the process's user at ZooKeeper, and the permissions of its nodes.

A connect string appears in process lists, logs, Spark plans and configuration files. Therefore the
connect string contains no secret, but the path of the auth file. Error messages name a line of this
file, and never show the content of the line.

    digest:waltz:a long password       the first line: scheme, user, password of this process
    members:digest:waltz:a password    in an administrator's file: the members' user
    administrators:digest:admin:HASH   in a member's file: the administrators' user
    world:anyone:r                     each further line: permissions of others, as in ZooKeeper,
                                       scheme:id:permissions (of c, d, r, w, a)

HASH is the base64 text of the SHA-1 of USER:PASSWORD, as in ZooKeeper's access lists. A member must
name the administrators' user in the nodes that it creates, but must not know the password.

Rules:
    1. Without a line for members or administrators, all processes use the same user. This user has
       all permissions for the nodes that it creates; further lines only add permissions for others.
    2. With two users, administrators have all permissions. The table of nodes (`znodes/paths.py`)
       states the permissions of members and of all others, whichever user creates a node. A further
       line with permission "a" names another administrator, except for "world". All other lines
       grant at most the permissions of members.
    3. A line for "world" never applies to R/x/access and R/x/audit, because these nodes contain
       permissions, keys and the audit log.
    4. An administrator's session also logs in as the members' user. So this session may also change
       nodes that this user created while it was the only user.
    5. Empty lines, and lines that begin with "#", are ignored.
"""

import base64
import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.cluster.znodes.paths import NodeReaders, Znode

DIGEST_SCHEME = "digest"
PERMISSIONS = "cdrwa"
GRANT_SCHEMES = ("world", "digest", "ip", "sasl", "x509")
_MEMBERS: Final = "members"
_ADMINISTRATORS: Final = "administrators"
_FIRST_LINE_FORM: Final = f"{DIGEST_SCHEME}:USER:PASSWORD"
_HASH_PATTERN: Final = re.compile("[A-Za-z0-9+/]{27}=")  # of 20 bytes


class NodePermission(NamedTuple):
    """The permissions of one identity."""

    scheme: str
    identity: str
    permissions: str


# ZooKeeper's notation for the user that creates the node.
_CREATOR: Final = NodePermission("auth", "", PERMISSIONS)
_PUBLIC: Final = NodePermission("world", "anyone", "r")


@dataclass(frozen=True, slots=True)
class User:
    """A user with its password."""

    name: str
    password: str = field(repr=False)

    @property
    def identity(self) -> str:
        """The user in access lists: USER:HASH."""
        digest = hashlib.sha1(f"{self.name}:{self.password}".encode(), usedforsecurity=False)
        return f"{self.name}:{base64.b64encode(digest.digest()).decode()}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The content of an auth file; with two users, the file also names the other user."""

    user: User
    grants: tuple[NodePermission, ...] = ()
    members: User | None = None
    administrators: str = ""  # USER:HASH
    where: str = field(default="", compare=False)  # the file, for errors

    @property
    def is_member(self) -> bool:
        """Whether this is a member's file: administrators have another user."""
        return bool(self.administrators)

    @property
    def has_one_user(self) -> bool:
        """Whether the file names neither members nor administrators."""
        return self.members is None and not self.administrators

    @property
    def users(self) -> tuple[User, ...]:
        """The users as which a session logs in (rule 4)."""
        return (self.user,) if self.members is None else (self.user, self.members)

    def access_list_of(self, row: Znode) -> tuple[NodePermission, ...]:
        """Return the access list of a new node (rules 1 to 3)."""
        grants = tuple(
            grant
            for grant in self.grants
            if not (row.is_restricted and grant.scheme == _PUBLIC.scheme)
        )
        if self.has_one_user:
            return (_CREATOR, *grants)
        members = (self.members or self.user).identity
        access_list = [
            NodePermission(DIGEST_SCHEME, self.administrators or self.user.identity, PERMISSIONS),
            NodePermission(DIGEST_SCHEME, members, row.members),
            *(grant._replace(permissions=_limit_permissions(grant, row)) for grant in grants),
        ]
        if row.readers is NodeReaders.PUBLIC:
            access_list.append(_PUBLIC)
        return tuple(grant for grant in access_list if grant.permissions)


def parse_credentials(text: str, where: str) -> Credentials:
    """Parse an auth file; raises BadConfig with the file and the line."""
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise errors.BadConfig(f"{where}: expected {_FIRST_LINE_FORM}, found an empty file")
    (number, first), *others = lines
    credentials = Credentials(
        _parse_user(first, _FIRST_LINE_FORM, f"{where}, line {number}"), where=where
    )
    for number, line in others:
        credentials = _add_line(credentials, line, f"{where}, line {number}")
    return credentials


def _add_line(credentials: Credentials, line: str, where: str) -> Credentials:
    role, _, value_text = line.partition(":")
    if role not in {_MEMBERS, _ADMINISTRATORS}:
        return replace(credentials, grants=(*credentials.grants, _parse_grant(line, where)))
    if credentials.members is not None or credentials.administrators:
        raise errors.BadConfig(
            f"{where}: expected one line with {_MEMBERS} or {_ADMINISTRATORS}, found a second one"
        )
    if role == _MEMBERS:
        other = _parse_user(value_text, f"{_MEMBERS}:{_FIRST_LINE_FORM}", where)
        credentials, name = replace(credentials, members=other), other.name
    else:
        scheme, _, identity = value_text.partition(":")
        name, _, hashed = identity.partition(":")
        if scheme != DIGEST_SCHEME or not name or _HASH_PATTERN.fullmatch(hashed) is None:
            raise errors.BadConfig(
                f"{where}: expected {_ADMINISTRATORS}:{DIGEST_SCHEME}:USER:HASH, with the base64 "
                "text of the SHA-1 of USER:PASSWORD as HASH"
            )
        credentials = replace(credentials, administrators=identity)
    if name == credentials.user.name:
        raise errors.BadConfig(
            f"{where}: expected a different user in the second line, found the user of the first "
            "line"
        )
    return credentials


def _parse_user(text: str, expected: str, where: str) -> User:
    scheme, _, rest = text.partition(":")
    user, _, password = rest.partition(":")
    if scheme != DIGEST_SCHEME or not user or not password:
        raise errors.BadConfig(f"{where}: expected {expected}")
    return User(user, password)


def _parse_grant(line: str, where: str) -> NodePermission:
    scheme, _, rest = line.partition(":")
    identity, _, permissions = rest.rpartition(":")
    is_good = scheme in GRANT_SCHEMES and identity and permissions
    if scheme == "world" and identity != "anyone":
        is_good = False
    if not is_good or set(permissions) - set(PERMISSIONS):
        raise errors.BadConfig(
            f"{where}: expected DIGEST_SCHEME:ID:PERMISSIONS, such as world:anyone:r, with "
            f"a scheme of {', '.join(GRANT_SCHEMES)} and permissions of {PERMISSIONS}"
        )
    return NodePermission(scheme, identity, permissions)


def _limit_permissions(grant: NodePermission, row: Znode) -> str:
    """Return the permissions that a further line grants if there are two users (rule 2)."""
    if grant.scheme != _PUBLIC.scheme and "a" in grant.permissions:
        return grant.permissions
    return "".join(letter for letter in grant.permissions if letter in row.members)
