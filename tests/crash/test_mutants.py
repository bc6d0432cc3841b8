"""A storage that omits or delays one sync fails at least one crash test.

So the matrix tests the purpose of each sync. Each exception is listed with its reason. If a crash
test fails without a sync, this sync must not be listed.
"""

import pytest

from tests.crash.matrix import Matrix
from tests.crash.mutants import (
    ANY_ORDER,
    MUTATIONS,
    NOT_NEEDED,
    first_violation,
    occurrences,
    reason,
)

SITES_MIN = 55


@pytest.fixture(scope="module")
def matrix():
    return Matrix("a storage that is wrong")


@pytest.fixture(scope="module")
def recorded_syncs(matrix):
    return occurrences(matrix)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_omitted_or_delayed_sync_is_detected(
    matrix, recorded_syncs, mutation, record_property
):
    wrong, number = [], 0
    for (site, how), syncs in recorded_syncs.items():
        if how != mutation:
            continue
        listed = reason(site, mutation)
        violation = first_violation(matrix, mutation, syncs, is_thorough=listed is None)
        if listed is None:
            number += 1
            if violation is None:
                wrong.append(f"{site}: the sync was {mutation}, but no crash test detects this")
        elif violation is not None and mutation == "forgotten":
            wrong.append(f"{site} is listed, but a crash test detects its omission: {violation}")
    record_property(f"crash: syncs {mutation} and detected", number)
    assert not wrong, "\n".join(wrong)
    assert number >= {"forgotten": 40, "made late": 20}[mutation]


def test_listed_mutants_exist(recorded_syncs):
    sites = {site for site, _ in recorded_syncs}
    assert len(sites) >= SITES_MIN
    for end in (*NOT_NEEDED, *ANY_ORDER):
        assert any(site.endswith(end) for site in sites), end
