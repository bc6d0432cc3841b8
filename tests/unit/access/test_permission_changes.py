"""Changes of the permissions: merged grants, revocations, groups, limits, tokens, and errors."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.access import permission_changes as changes
from waltz_core.access.permission_changes import Grantee
from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.cluster.znodes import access_node
from waltz_core.errors import BadConfig, BadRequest

READ, APPEND, REPLICATE = AccessVerb.READ, AccessVerb.APPEND, AccessVerb.REPLICATE
COUNT = 10
EMPTY = Permissions(1, "ops", 0, bytes(32))
GRANTEE_ANN, GROUP_SERVERS = Grantee("ann", is_group=False), Grantee("servers", is_group=True)
TOKEN = StoredToken("t1", "ann", 5)


def revoke(old, grantee, verbs, partitions):
    return changes.revoke(old, grantee, verbs, partitions, partition_count=COUNT)


def test_several_verbs_are_granted_at_once_and_merged_with_earlier_grants():
    first = changes.grant(EMPTY, GRANTEE_ANN, [READ, APPEND], ((0, 3),))
    assert first.grants == (
        Grant("ann", False, READ, ((0, 3),)),
        Grant("ann", False, APPEND, ((0, 3),)),
    )
    second = changes.grant(first, GRANTEE_ANN, [READ], ((2, 5), (7, 7)))
    assert second.grants == (Grant("ann", False, READ, ((0, 5), (7, 7))), first.grants[1])
    assert changes.grant(second, GRANTEE_ANN, [READ], ((6, 6),)).grants[0].partitions == ((0, 7),)
    every = changes.grant(second, GRANTEE_ANN, [READ], None)
    assert every.grants[0].partitions is None
    assert changes.grant(every, GRANTEE_ANN, [READ], ((0, 1),)) == every


def test_two_grants_of_one_verb_to_one_grantee_are_merged():
    written = replace(
        EMPTY,
        grants=(
            Grant("ann", False, READ, ((0, 0),)),
            Grant("bob", False, READ, None),
            Grant("ann", False, READ, ((5, 5),)),
        ),
    )
    assert changes.grant(written, GRANTEE_ANN, [READ], ((1, 1),)).grants == (
        Grant("ann", False, READ, ((0, 1), (5, 5))),
        Grant("bob", False, READ, None),
    )


def test_a_group_and_a_principal_with_the_same_name_have_separate_grants():
    old = changes.add_to_group(EMPTY, "ann", ["bob"])
    permissions = changes.grant(
        changes.grant(old, GRANTEE_ANN, [READ], None), Grantee("ann", is_group=True), [APPEND], None
    )
    assert changes.granted_partitions(permissions, "ann", READ, COUNT) == set(range(COUNT))
    assert changes.granted_partitions(permissions, "ann", APPEND, COUNT) == set()
    assert changes.granted_partitions(permissions, "bob", APPEND, COUNT) == set(range(COUNT))


def test_a_revocation_for_some_partitions_keeps_the_grants_for_the_others():
    every = changes.grant(EMPTY, GRANTEE_ANN, [READ, APPEND], None)
    some = revoke(every, GRANTEE_ANN, [READ], ((2, 3), (9, 9)))
    assert some.grants[0].partitions == ((0, 1), (4, 8))
    assert some.grants[1] == every.grants[1]
    assert revoke(some, GRANTEE_ANN, [READ], None).grants == (every.grants[1],)
    assert revoke(some, GRANTEE_ANN, [READ], ((0, 9),)).grants == (every.grants[1],)


def test_a_revocation_of_a_permission_that_is_not_granted_is_an_error():
    old = changes.grant(EMPTY, GRANTEE_ANN, [READ], ((0, 3),))
    for grantee, verbs, partitions in (
        (GRANTEE_ANN, [APPEND], None),
        (GRANTEE_ANN, [READ], ((4, 5),)),
        (Grantee("bob", is_group=False), [READ], None),
    ):
        with pytest.raises(BadRequest, match=r"has no grant of \w+ for partitions"):
            revoke(old, grantee, verbs, partitions)
    # One of several verbs is enough.
    assert revoke(old, GRANTEE_ANN, [READ, APPEND], None).grants == ()


partition_sets = st.sets(st.integers(0, COUNT - 1), min_size=1)


@given(st.lists(st.tuples(st.booleans(), partition_sets), max_size=8))
def test_grants_add_partitions_and_revocations_remove_them(steps):
    found, expected = EMPTY, set()
    for is_grant, numbers in steps:
        ranges = changes.ranges_of(numbers)
        if is_grant:
            found, expected = changes.grant(found, GRANTEE_ANN, [READ], ranges), expected | numbers
        elif expected & numbers:
            found, expected = revoke(found, GRANTEE_ANN, [READ], ranges), expected - numbers
        assert changes.granted_partitions(found, "ann", READ, COUNT) == expected
        assert len(found.grants) <= 1
        access_node.encode_permissions(found)  # asserts that it decodes


@pytest.mark.parametrize("name", ["", "a b", "other", "x" * 129, "ä"])
def test_a_principal_is_checked_before_it_is_encoded(name):
    for change in (
        lambda: changes.grant(EMPTY, Grantee(name, is_group=False), [READ], None),
        lambda: changes.add_to_group(EMPTY, "g", [name]),
        lambda: changes.set_limits(EMPTY, name, PrincipalLimits(feeds=1)),
        lambda: changes.add_token(EMPTY, "ab" * 32, StoredToken("t", name, 1)),
    ):
        with pytest.raises(BadConfig, match="expected a principal name of 1 to 128 characters"):
            change()


def test_principal_anonymous_may_have_grants_but_no_token():
    changed = changes.grant(EMPTY, Grantee("anonymous", is_group=False), [READ], None)
    assert changes.granted_partitions(changed, "anonymous", READ, 1) == {0}
    with pytest.raises(BadConfig, match="not reserved, found 'anonymous'"):
        changes.add_token(EMPTY, "ab" * 32, StoredToken("t", "anonymous", 1))


@pytest.mark.parametrize("text", ["", "write", "read,", "READ", "read append"])
def test_unknown_verbs_are_rejected(text):
    with pytest.raises(
        BadConfig, match="verbs: expected one or more of read, append, administer, replicate"
    ):
        changes.parse_verbs(text)


def test_parsed_verbs_are_in_order_and_without_duplicates():
    assert changes.parse_verbs("append, read,append") == (APPEND, READ)


# --- the last principal with `replicate`


def test_the_last_grant_of_replicate_for_a_partition_is_kept():
    group = changes.add_to_group(EMPTY, "servers", ["s1", "s2"])
    old = changes.grant(group, GROUP_SERVERS, [REPLICATE], None)

    def check_change_is_rejected(after):
        with pytest.raises(
            BadRequest,
            match="no principal would have the verb `replicate` for partitions",
        ):
            changes.check_replicate_remains(old, after, COUNT)

    check_change_is_rejected(revoke(old, GROUP_SERVERS, [REPLICATE], None))
    check_change_is_rejected(revoke(old, GROUP_SERVERS, [REPLICATE], ((3, 3),)))
    check_change_is_rejected(changes.delete_group(old, "servers"))
    check_change_is_rejected(changes.remove_from_group(old, "servers", ["s1", "s2"]))
    changes.check_replicate_remains(old, changes.remove_from_group(old, "servers", ["s1"]), COUNT)
    other = changes.grant(old, Grantee("s3", is_group=False), [REPLICATE], ((0, 9),))
    changes.check_replicate_remains(other, changes.delete_group(other, "servers"), COUNT)


def test_permissions_without_replicate_can_be_changed():
    changes.check_replicate_remains(EMPTY, EMPTY, COUNT)


# --- groups, limits, tokens


def test_a_group_gets_and_loses_members():
    changed = changes.add_to_group(EMPTY, "g", ["a", "b", "a"])
    assert changed.groups == {"g": ("a", "b")}
    more = changes.add_to_group(changed, "g", ["c", "a"])
    assert more.groups == {"g": ("a", "b", "c")}
    assert changes.remove_from_group(more, "g", ["a", "c"]).groups == {"g": ("b",)}
    with pytest.raises(BadRequest, match="d is not a member of group g"):
        changes.remove_from_group(more, "g", ["a", "d"])


def test_a_deleted_group_loses_its_grants():
    old = changes.add_to_group(EMPTY, "g", ["a"])
    old = changes.grant(old, Grantee("g", is_group=True), [READ], None)
    old = changes.grant(old, Grantee("g", is_group=False), [READ], None)
    changed = changes.delete_group(old, "g")
    assert changed.groups == {}
    assert changed.grants == (Grant("g", False, READ, None),)
    access_node.encode_permissions(changed)


def test_the_error_names_a_missing_group():
    for change in (
        lambda: changes.grant(EMPTY, GROUP_SERVERS, [READ], None),
        lambda: revoke(EMPTY, GROUP_SERVERS, [READ], None),
        lambda: changes.delete_group(EMPTY, "servers"),
        lambda: changes.remove_from_group(EMPTY, "servers", ["a"]),
    ):
        with pytest.raises(
            BadRequest, match="there is no group 'servers'; the existing groups are: none"
        ):
            change()


def test_limits_are_set_one_by_one_and_removed_together():
    change = changes.set_limits(EMPTY, "*", PrincipalLimits(connections=5))
    change = changes.set_limits(change, "*", PrincipalLimits(feeds=7))
    assert change.limits == {"*": PrincipalLimits(connections=5, feeds=7)}
    assert changes.remove_limits(change, "*").limits == {}
    with pytest.raises(BadRequest, match="ann has no limits of its own"):
        changes.remove_limits(change, "ann")
    for value in (0, -1, 1 << 63):
        with pytest.raises(BadConfig, match="feeds: expected a number from 1 to"):
            changes.set_limits(change, "*", PrincipalLimits(feeds=value))


def test_tokens_are_added_and_revoked_by_id():
    changed = changes.add_token(EMPTY, "ab" * 32, TOKEN)
    # The change is repeated after an unknown outcome.
    assert changes.add_token(changed, "ab" * 32, TOKEN) == changed
    with pytest.raises(BadRequest, match="a token with ID t1 exists already"):
        changes.add_token(changed, "cd" * 32, TOKEN)
    with pytest.raises(BadRequest, match="a token with ID t2 exists already"):
        changes.add_token(changed, "ab" * 32, replace(TOKEN, token_id="t2"))
    assert changes.revoke_token(changed, "t1").tokens == {}
    with pytest.raises(BadRequest, match="there is no token with ID 't2'"):
        changes.revoke_token(changed, "t2")
    assert changes.remove_expired_tokens(changed, 4) == changed
    assert changes.remove_expired_tokens(changed, 5).tokens == {}


def test_a_revision_has_a_printable_author():
    changed = changes.with_revision(EMPTY, 7, "a\nb\udc80" + 500 * "x", 9)
    assert (changed.revision, changed.changed_ms) == (7, 9)
    assert changed.changed_by == ("a?b?" + 500 * "x")[: changes.AUTHOR_CHARACTERS_MAX]
    access_node.encode_permissions(changed)
    with pytest.raises(
        BadRequest, match="expected a revision number of at most 9223372036854775807"
    ):
        changes.with_revision(EMPTY, 1 << 63, "ops", 9)
