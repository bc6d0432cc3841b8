"""Which requirements the grants of a principal and of its groups meet."""

import pytest

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Grant, Permissions
from waltz_core.access.requirements import (
    ADMINISTER,
    APPEND,
    READ,
    REPLICATE,
    Scope,
    all_of,
    one_of,
)

GRANTS = Grants(
    Permissions(
        1,
        "ops",
        0,
        bytes(32),
        groups={"team": ("ann", "bob")},
        grants=(
            Grant("ann", False, APPEND, ((0, 3), (7, 7))),
            Grant("team", True, READ, ((2, 5),)),
            Grant("ann", False, READ, ((9, 9),)),
            Grant("eve", False, REPLICATE, ((0, 100),)),
            Grant("bob", False, APPEND, ((1, 1),)),
            Grant("team", True, ADMINISTER, None),
            Grant("bob", False, ADMINISTER, ((1, 1),)),
        ),
    )
)


@pytest.mark.parametrize(
    ("principal", "requirement", "permitted"),
    [
        ("ann", all_of(APPEND), {0, 1, 2, 3, 7}),
        ("ann", all_of(READ), {2, 3, 4, 5, 9}),  # of the group, and its own
        ("ann", all_of(READ, APPEND), {2, 3}),
        ("ann", one_of(READ, APPEND), {0, 1, 2, 3, 4, 5, 7, 9}),
        ("bob", all_of(READ), {2, 3, 4, 5}),
        ("bob", all_of(ADMINISTER), {*range(-1, 12)}),  # all, although one grant has less
        ("eve", all_of(REPLICATE), {*range(12)}),
        ("eve", one_of(READ, APPEND), set()),
        ("team", all_of(READ), set()),  # a group is no principal
        ("anonymous", all_of(READ), set()),
    ],
)
def test_a_partition_is_permitted_if_the_verbs_are_granted_for_it(
    principal, requirement, permitted
):
    found = {
        each
        for each in range(-1, 12)
        if not GRANTS.for_principal(principal).missing_verb(requirement, each)
    }
    assert found == permitted


@pytest.mark.parametrize(
    ("principal", "requirement", "missing"),
    [
        ("ann", all_of(APPEND, scope=Scope.ANY), None),
        ("ann", all_of(REPLICATE, scope=Scope.ANY), REPLICATE),
        ("eve", one_of(READ, REPLICATE, scope=Scope.ANY), None),
        ("eve", all_of(READ, REPLICATE, scope=Scope.ANY), READ),
        ("eve", all_of(REPLICATE, scope=Scope.ALL), REPLICATE),  # a range is never all
        ("ann", all_of(ADMINISTER, scope=Scope.ALL), None),
        ("ann", all_of(APPEND), None),  # of no partition: rule 2
        ("eve", all_of(APPEND), APPEND),
    ],
)
def test_each_scope_requires_the_verb_for_its_partitions(principal, requirement, missing):
    assert GRANTS.for_principal(principal).missing_verb(requirement, None) is missing


def granted(verb=READ, partitions=()):
    return Grants(
        Permissions(1, "ops", 0, bytes(32), grants=(Grant("ann", False, verb, partitions),))
    ).for_principal("ann")


@pytest.mark.parametrize(
    ("earlier", "now", "is_covered"),
    [
        (((0, 3),), ((0, 3),), True),
        (((0, 3), (7, 7)), ((0, 7),), True),
        (((0, 3),), None, True),
        (None, None, True),
        (None, ((0, 1 << 30),), False),  # of partitions that may be added
        (((0, 3),), ((0, 1), (3, 3)), False),
        (((0, 3),), (), False),
    ],
)
def test_a_later_grant_covers_an_earlier_one_only_with_all_its_partitions(earlier, now, is_covered):
    assert granted(READ, now).covers(granted(READ, earlier)) is is_covered
    assert not granted(APPEND, now).covers(granted(READ, earlier))
    assert granted(READ, now).covers(GRANTS.for_principal("stranger"))


def test_each_partition_of_a_request_is_checked_once_and_none_if_all_are_granted():
    """A request can name four million."""
    granted = GRANTS.for_principal("ann")
    assert list(granted.partitions_to_check(all_of(ADMINISTER, APPEND), (3, 1, 3, 3))) == [3, 1]
    assert list(granted.partitions_to_check(all_of(ADMINISTER), (3, 1, 2))) == [3]
    assert list(GRANTS.for_principal("stranger").partitions_to_check(all_of(READ), (3, 3))) == [3]


def test_grants_of_a_principal_and_its_groups_are_joined():
    grants = [Grant("ann", False, READ, ((4, 6),)), Grant("team", True, READ, ((0, 3), (8, 9)))]
    permissions = Permissions(1, "o", 0, bytes(32), groups={"team": ("ann",)}, grants=(*grants,))
    assert Grants(permissions).for_principal("ann").partitions == {READ: ((0, 6), (8, 9))}
