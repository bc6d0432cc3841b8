"""The bytes of `R/x/access`: the permissions of a cluster as strict JSON (decision 048).

Rules:
    1. The node is unreadable if a key is unknown, missing or duplicate, if a value has another
       type, or if a name or range is outside of its limits. A daemon that cannot read the node
       keeps its permissions (AC 6). Reason: if an older version ignored a part that it does not
       understand, it could grant too much.
    2. Two principals are reserved: `anonymous` may have grants and limits, and `other` is only a
       label of metrics. Neither of them may have a token.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from waltz_core.access.permissions import (
    DEFAULT_LIMITS_KEY,
    Grant,
    Permissions,
    PrincipalLimits,
    StoredToken,
)
from waltz_core.access.principals import (
    ANONYMOUS,
    PRINCIPAL_NAME_FORM,
    RESERVED_NAMES,
    is_principal_name,
)
from waltz_core.access.requirements import AccessVerb
from waltz_core.cluster.znodes.model import INT32_MAX
from waltz_core.errors import BadConfig, BadFormat
from waltz_core.records import strict_json

NODE_BYTES_MAX: Final = 512 * 1024
_FORMAT: Final = 1
_INT64_MAX: Final = (1 << 63) - 1
_HEX_32_BYTES: Final = re.compile("[0-9a-f]{64}")
_RANGE_PATTERN: Final = re.compile("(0|[1-9][0-9]{0,9})(?:-([1-9][0-9]{0,9}))?")
_LIMIT_NAMES: Final = ("bytes_per_s", "appends_per_s", "connections", "feeds")
ValueT = TypeVar("ValueT")


def encode_permissions(permissions: Permissions) -> bytes:
    """Return the bytes of the node; raises BadConfig if they exceed the limit."""
    data = strict_json.to_json(
        {
            "format": _FORMAT,
            "revision": permissions.revision,
            "changed_by": permissions.changed_by,
            "changed_ms": permissions.changed_ms,
            "client_key": permissions.client_key.hex(),
            "accepts_0_13": permissions.accepts_0_13,
            "groups": {name: list(members) for name, members in permissions.groups.items()},
            "grants": [_encode_grant(grant) for grant in permissions.grants],
            "limits": {name: _encode_limits(limits) for name, limits in permissions.limits.items()},
            "tokens": {
                token_hash: {
                    "id": token.token_id,
                    "principal": token.principal,
                    "expires_ms": token.expires_ms,
                }
                for token_hash, token in permissions.tokens.items()
            },
        }
    )
    if len(data) > NODE_BYTES_MAX:
        raise BadConfig(
            "the permissions are too large for their znode: expected at most "
            f"{NODE_BYTES_MAX} bytes, found {len(data)}. Hint: use groups, and revoke tokens "
            "that have expired."
        )
    assert decode_permissions(data) == permissions
    return data


def decode_permissions(data: bytes) -> Permissions:
    """Decode the bytes of the node (rules 1 and 2); raises BadFormat."""
    if len(data) > NODE_BYTES_MAX:
        raise BadFormat(f"permissions: expected at most {NODE_BYTES_MAX} bytes, found {len(data)}")
    try:
        return _parse_permissions(_DECODER.decode(data.decode("utf-8")))
    except RecursionError as error:
        raise BadFormat(f"permissions: {strict_json.TOO_DEEP_TEXT}") from error
    except ValueError as error:
        raise BadFormat(f"permissions: {error}") from error


def _parse_permissions(value: object) -> Permissions:
    if type(value) is dict and value.get("format") != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, found {value.get('format')!r:.80}")
    node = _parse_object(value, "the node", _NODE_KEYS)
    groups = _parse_mapping(node["groups"], "groups", _parse_group)
    grants = tuple(_parse_grant(each, groups) for each in _parse_list(node["grants"], "grants"))
    limits = _parse_mapping(node["limits"], "limits", _parse_limits)
    tokens = _parse_mapping(node["tokens"], "tokens", _parse_token)
    ids = [each.token_id for each in tokens.values()]
    _expect(len(set(ids)) == len(ids), "distinct token IDs", ids)
    key = node["client_key"]
    if (
        type(key) is not str or _HEX_32_BYTES.fullmatch(key) is None
    ):  # NB: the error does not show it
        raise ValueError("expected 64 hexadecimal digits in field client_key")
    return Permissions(
        revision=_parse_integer(node["revision"], "revision", minimum=1),
        changed_by=_parse_text(node["changed_by"], "changed_by"),
        changed_ms=_parse_integer(node["changed_ms"], "changed_ms"),
        client_key=bytes.fromhex(key),
        accepts_0_13=_parse_bool(node["accepts_0_13"], "accepts_0_13"),
        groups=groups,
        grants=grants,
        limits=limits,
        tokens=tokens,
    )


_NODE_KEYS: Final = (
    *("format", "revision", "changed_by", "changed_ms", "client_key", "accepts_0_13"),
    *("groups", "grants", "limits", "tokens"),
)


def _parse_group(name: str, value: object) -> tuple[str, ...]:
    _expect(is_principal_name(name), f"a group name of {PRINCIPAL_NAME_FORM}", name)
    members = tuple(_parse_principal(member) for member in _parse_list(value, f"group {name}"))
    _expect(len(set(members)) == len(members), f"distinct members of group {name}", members)
    return members


def _parse_grant(value: object, groups: Mapping[str, tuple[str, ...]]) -> Grant:
    is_group = type(value) is dict and "group" in value
    grantee_key = "group" if is_group else "principal"
    node = _parse_object(value, "a grant", (grantee_key, "verb", "partitions"))
    if is_group:
        grantee = _parse_text(node["group"], "group")
        _expect(grantee in groups, "a grant to a group that exists", grantee)
    else:
        grantee = _parse_principal(node["principal"])
    verb = _parse_text(node["verb"], "verb")
    verbs = [access_verb.value for access_verb in AccessVerb]
    _expect(verb in verbs, f"one of the verbs {', '.join(verbs)}", verb)
    return Grant(grantee, is_group, AccessVerb(verb), _parse_partitions(node["partitions"]))


def _parse_partitions(value: object) -> tuple[tuple[int, int], ...] | None:
    """Return the ranges in a text like "0-3,7"; None for "all"."""
    text = _parse_text(value, "partitions")
    if text == "all":
        return None
    ranges = []
    next_min = 0
    for part in text.split(","):
        match = _RANGE_PATTERN.fullmatch(part)
        first = int(match[1]) if match else -1
        last = int(match[2] or first) if match else -1
        is_range = match is not None and next_min <= first <= last <= INT32_MAX
        is_range = is_range and (match is None or match[2] is None or first < last)
        _expect(is_range, 'ascending partitions like "0-3,7", or "all"', text)
        ranges.append((first, last))
        next_min = last + 1
    return tuple(ranges)


def _parse_limits(name: str, node_value: object) -> PrincipalLimits:
    if name != DEFAULT_LIMITS_KEY:
        _parse_principal(name)
    node = _parse_object(node_value, f"limits of {name}", None)
    expected = f"only the limits {', '.join(_LIMIT_NAMES)}"
    _expect(set(node) <= set(_LIMIT_NAMES), expected, sorted(node))
    return PrincipalLimits(
        **{key: _parse_integer(value, key, minimum=1) for key, value in node.items()}
    )


def _parse_token(token_hash: str, value: object) -> StoredToken:
    _expect(_HEX_32_BYTES.fullmatch(token_hash), "a hash of 64 hexadecimal digits", token_hash)
    node = _parse_object(value, "a token", ("id", "principal", "expires_ms"))
    token_id, principal = _parse_text(node["id"], "id"), _parse_principal(node["principal"])
    _expect(is_principal_name(token_id), f"a token ID of {PRINCIPAL_NAME_FORM}", token_id)
    _expect(principal not in RESERVED_NAMES, "a principal that is not reserved", principal)
    return StoredToken(token_id, principal, _parse_integer(node["expires_ms"], "expires_ms"))


def _parse_principal(value: object) -> str:
    name = _parse_text(value, "principal")
    is_allowed = is_principal_name(name) and (name == ANONYMOUS or name not in RESERVED_NAMES)
    _expect(is_allowed, f"a principal of {PRINCIPAL_NAME_FORM}, not reserved", name)
    return name


# --- the parts of JSON


def _expect(is_met: object, expected: str, found: object) -> None:
    if not is_met:
        raise ValueError(f"expected {expected}, found {found!r:.80}")


def _parse_object(value: object, where: str, keys: tuple[str, ...] | None) -> dict[str, object]:
    """Return a JSON object; with `keys`, the object must have exactly these keys."""
    if type(value) is not dict:
        raise ValueError(f"expected an object as {where}, found {type(value).__name__}")
    _expect(keys is None or set(value) == set(keys), f"{where} with the keys {keys}", sorted(value))
    return value


def _parse_mapping(
    node_value: object, where: str, decode_one: Callable[[str, object], ValueT]
) -> dict[str, ValueT]:
    return {
        key: decode_one(key, value) for key, value in _parse_object(node_value, where, None).items()
    }


def _parse_list(value: object, where: str) -> list[object]:
    if type(value) is not list:
        raise ValueError(f"expected a list as {where}, found {type(value).__name__}")
    return value


def _parse_text(value: object, where: str) -> str:
    if type(value) is not str or not value.isprintable():
        raise ValueError(f"expected a printable text as {where}, found {value!r:.80}")
    return value


def _parse_bool(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false as {where}, found {value!r:.80}")
    return value


def _parse_integer(value: object, where: str, *, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value <= _INT64_MAX:
        raise ValueError(f"expected {minimum}..{_INT64_MAX} as {where}, found {value!r:.80}")
    return value


def _encode_grant(grant: Grant) -> dict[str, str]:
    partitions = "all"
    if grant.partitions is not None:
        partitions = ",".join(
            f"{first}" if first == last else f"{first}-{last}" for first, last in grant.partitions
        )
    grantee = "group" if grant.is_group else "principal"
    return {grantee: grant.grantee, "verb": grant.verb.value, "partitions": partitions}


def _encode_limits(limits: PrincipalLimits) -> dict[str, int]:
    values = {name: getattr(limits, name) for name in _LIMIT_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    _expect(len(values) == len(pairs), "distinct keys", [key for key, _ in pairs])
    return values


def _reject_number(word: str) -> NoReturn:
    raise ValueError(f"expected integers only, found {word:.80}")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_keys,
    parse_constant=_reject_number,
    parse_float=_reject_number,
)
