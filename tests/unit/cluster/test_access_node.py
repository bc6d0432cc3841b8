"""The node with the permissions: its encoding, and the errors for unreadable nodes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.cluster.znodes import access_node
from waltz_core.errors import BadConfig, BadFormat

KEY, HASH = bytes(range(32)), "ab" * 32
PERMISSIONS = Permissions(
    revision=17,
    changed_by="ops-anna",
    changed_ms=1_795_867_200_000,
    client_key=KEY,
    accepts_0_13=True,
    groups={"servers": ("s1.example", "s2.example"), "empty": ()},
    grants=(
        Grant("servers", True, AccessVerb.REPLICATE, None),
        Grant("spark-etl", False, AccessVerb.APPEND, ((0, 3), (7, 7))),
        Grant("anonymous", False, AccessVerb.READ, ((5, 5),)),
    ),
    limits={
        "spark-etl": PrincipalLimits(50_000_000, 20_000, 200, 50),
        "*": PrincipalLimits(connections=100),
    },
    tokens={HASH: StoredToken("t3", "spark-etl", 1_803_643_200_000)},
)


def node_with(**parts):
    """Return the node with these parts changed; a part that is None is omitted."""
    node = json.loads(access_node.encode_permissions(PERMISSIONS)) | parts
    return json.dumps({key: each for key, each in node.items() if each is not None}).encode()


def test_the_access_node_is_encoded_as_decision_048_specifies():
    node = json.loads(access_node.encode_permissions(PERMISSIONS))
    assert node == {
        "format": 1,
        "revision": 17,
        "changed_by": "ops-anna",
        "changed_ms": 1_795_867_200_000,
        "client_key": KEY.hex(),
        "accepts_0_13": True,
        "groups": {"servers": ["s1.example", "s2.example"], "empty": []},
        "grants": [
            {"group": "servers", "verb": "replicate", "partitions": "all"},
            {"principal": "spark-etl", "verb": "append", "partitions": "0-3,7"},
            {"principal": "anonymous", "verb": "read", "partitions": "5"},
        ],
        "limits": {
            "spark-etl": {
                "bytes_per_s": 50_000_000,
                "appends_per_s": 20_000,
                "connections": 200,
                "feeds": 50,
            },
            "*": {"connections": 100},
        },
        "tokens": {HASH: {"id": "t3", "principal": "spark-etl", "expires_ms": 1_803_643_200_000}},
    }
    assert access_node.decode_permissions(node_with()) == PERMISSIONS


def grant(**parts):
    return [{"principal": "ann", "verb": "read", "partitions": "all"} | parts]


def token(**parts):
    return {HASH: {"id": "t1", "principal": "ann", "expires_ms": 1} | parts}


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"format": 2}, "expected format 1, found 2"),
        ({"format": None}, "expected format 1, found None"),
        ({"surplus": 1}, "the node with the keys"),
        ({"tokens": None}, "the node with the keys"),
        ({"revision": 0}, "as revision, found"),
        ({"revision": True}, "as revision, found"),
        ({"revision": "17"}, "as revision, found"),
        ({"revision": 1 << 63}, "as revision, found"),
        ({"revision": 17.0}, "expected integers only"),
        ({"changed_ms": -1}, "as changed_ms, found"),
        ({"changed_by": "a\nb"}, "expected a printable text as changed_by"),
        ({"accepts_0_13": 1}, "expected true or false as accepts_0_13"),
        ({"client_key": "00"}, "expected 64 hexadecimal digits in field client_key"),
        ({"client_key": KEY.hex().upper()}, "expected 64 hexadecimal digits in field client_key"),
        ({"client_key": 7}, "expected 64 hexadecimal digits in field client_key"),
        ({"groups": []}, "expected an object as groups"),
        ({"groups": {"two words": []}}, "expected a group name"),
        ({"groups": {"a": "ann"}}, "expected a list as group a"),
        ({"groups": {"a": ["ann", "ann"]}}, "distinct members of group a"),
        ({"groups": {"a": ["other"]}}, "expected a principal"),
        ({"groups": {"a": ["a" * 129]}}, "expected a principal"),
        ({"grants": grant(group="a")}, "a grant with the keys"),
        ({"grants": [{"group": "x", "verb": "read", "partitions": "all"}]}, "group that exists"),
        ({"grants": grant(verb="write")}, "one of the verbs read, append, administer, replicate"),
        ({"grants": grant(principal="other")}, "expected a principal"),
        ({"grants": grant(principal=None)}, "expected a printable text as principal"),
        ({"grants": ["ann"]}, "expected an object as a grant"),
        *(
            ({"grants": grant(partitions=text)}, "ascending partitions")
            for text in ("", "3-1", "3-3", "1,1", "2,1", "0-3,3", "-1", "1-", "01", "1, 2", "a")
        ),
        ({"grants": grant(partitions="2147483648")}, "ascending partitions"),
        ({"grants": grant(partitions=[1])}, "expected a printable text as partitions"),
        ({"limits": {"ann": {"bytes": 1}}}, "only the limits bytes_per_s"),
        ({"limits": {"ann": {"feeds": 0}}}, "as feeds, found"),
        ({"limits": {"two words": {}}}, "expected a principal"),
        ({"tokens": {"ab": token()[HASH]}}, "a hash of 64 hexadecimal digits"),
        ({"tokens": token(principal="anonymous")}, "a principal that is not reserved"),
        ({"tokens": token(id="")}, "a token ID"),
        ({"tokens": token(expires_ms=None)}, "as expires_ms, found"),
        ({"tokens": token() | {"cd" * 32: token()[HASH]}}, "distinct token IDs"),
    ],
)
def test_an_invalid_part_makes_the_access_node_unreadable(parts, error):
    with pytest.raises(BadFormat, match=error):
        access_node.decode_permissions(node_with(**parts))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "permissions"),
        (b"\xff", "permissions"),
        (b"[]", "expected an object as the node"),
        (b'{"format": 1, "format": 1}', "distinct keys"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "permissions"),
        (b" " * (512 * 1024 + 1), "at most 524288 bytes"),
    ],
)
def test_invalid_bytes_are_unreadable(data, error):
    with pytest.raises(BadFormat, match=error):
        access_node.decode_permissions(data)


@given(
    st.binary()
    | st.text().map(str.encode)
    | st.sampled_from(range(300)).map(lambda at: node_with()[:at])
)
def test_any_bytes_decode_or_raise_bad_format(data):
    with pytest.raises(BadFormat):
        access_node.decode_permissions(data)


def test_the_error_for_an_unreadable_key_does_not_show_the_key():
    with pytest.raises(BadFormat) as caught:
        access_node.decode_permissions(node_with(client_key=[KEY.hex()]))
    assert "0102" not in str(caught.value)
    assert "0102" not in repr(PERMISSIONS)


def test_permissions_over_the_limit_are_not_written():
    many = {f"{number:064x}": StoredToken(f"t{number}", "ann", 1) for number in range(6_000)}
    full = Permissions(1, "ann", 0, KEY, tokens=many)
    with pytest.raises(BadConfig, match="expected at most 524288"):
        access_node.encode_permissions(full)


def test_a_token_is_rejected_from_its_expiry_on():
    expires_ms = PERMISSIONS.tokens[HASH].expires_ms
    assert PERMISSIONS.valid_token(HASH, expires_ms - 1).principal == "spark-etl"
    assert PERMISSIONS.valid_token(HASH, expires_ms) is None
    assert PERMISSIONS.valid_token("cd" * 32, 0) is None
