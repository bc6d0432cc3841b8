"""Grants of principals and of their groups: permitted partitions and missing verbs."""

import pytest

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Grant, Permissions
from waltz_core.access.requirements import (
    ADMINISTER,
    APPEND,
    READ,
    REPLICATE,
    Scope,
    require_all,
    require_one,
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
        ("ann", require_all(APPEND), {0, 1, 2, 3, 7}),
        ("ann", require_all(READ), {2, 3, 4, 5, 9}),  # grants of the group and of the principal
        ("ann", require_all(READ, APPEND), {2, 3}),
        ("ann", require_one(READ, APPEND), {0, 1, 2, 3, 4, 5, 7, 9}),
        ("bob", require_all(READ), {2, 3, 4, 5}),
        ("bob", require_all(ADMINISTER), {*range(-1, 12)}),  # one grant has all partitions
        ("eve", require_all(REPLICATE), {*range(12)}),
        ("eve", require_one(READ, APPEND), set()),
        ("team", require_all(READ), set()),  # the name of a group is not a principal
        ("anonymous", require_all(READ), set()),
    ],
)
def test_a_partition_is_permitted_if_the_verbs_are_granted_for_it(
    principal, requirement, permitted
):
    numbers = {
        number
        for number in range(-1, 12)
        if not GRANTS.for_principal(principal).missing_verb(requirement, number)
    }
    assert numbers == permitted


@pytest.mark.parametrize(
    ("principal", "requirement", "missing"),
    [
        ("ann", require_all(APPEND, scope=Scope.ANY), None),
        ("ann", require_all(REPLICATE, scope=Scope.ANY), REPLICATE),
        ("eve", require_one(READ, REPLICATE, scope=Scope.ANY), None),
        ("eve", require_all(READ, REPLICATE, scope=Scope.ANY), READ),
        ("eve", require_all(REPLICATE, scope=Scope.ALL), REPLICATE),  # a range is not "all"
        ("ann", require_all(ADMINISTER, scope=Scope.ALL), None),
        ("ann", require_all(APPEND), None),  # the request names no partition: rule 2
        ("eve", require_all(APPEND), APPEND),
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
        (None, ((0, 1 << 30),), False),  # partitions that may be added later
        (((0, 3),), ((0, 1), (3, 3)), False),
        (((0, 3),), (), False),
    ],
)
def test_a_grant_covers_an_earlier_grant_only_if_it_has_all_of_its_partitions(
    earlier, now, is_covered
):
    assert granted(READ, now).includes(granted(READ, earlier)) is is_covered
    assert not granted(APPEND, now).includes(granted(READ, earlier))
    assert granted(READ, now).includes(GRANTS.for_principal("stranger"))


def test_a_grant_for_all_partitions_skips_the_check_of_each_partition():
    """A request can name four million partitions."""
    granted = GRANTS.for_principal("ann")
    assert list(granted.partitions_to_check(require_all(ADMINISTER, APPEND), (3, 1, 3, 3))) == [
        3,
        1,
    ]
    assert list(granted.partitions_to_check(require_all(ADMINISTER), (3, 1, 2))) == [3]
    assert list(
        GRANTS.for_principal("stranger").partitions_to_check(require_all(READ), (3, 3))
    ) == [3]


def test_grants_of_a_principal_and_its_groups_are_joined():
    grants = [Grant("ann", False, READ, ((4, 6),)), Grant("team", True, READ, ((0, 3), (8, 9)))]
    permissions = Permissions(1, "o", 0, bytes(32), groups={"team": ("ann",)}, grants=(*grants,))
    assert Grants(permissions).for_principal("ann").ranges_by_verb == {READ: ((0, 6), (8, 9))}
