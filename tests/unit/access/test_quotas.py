"""The quotas of principals, with a clock of the test."""

import dataclasses

import pytest

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits
from waltz_core.access.quotas import (
    IDS_PER_BURST,
    IDS_PER_S,
    METRIC_LABELS_MAX,
    OTHER_LABEL,
    QUOTAS_MAX,
    SECOND_NS,
    IssuedIdLimit,
    Quota,
    Quotas,
    Usage,
)
from waltz_core.access.requirements import APPEND, READ, REPLICATE
from waltz_core.errors import Overloaded

MS = SECOND_NS // 1_000
START_NS = 5 * SECOND_NS


def quota_of(**limits):
    return Quota("etl", PrincipalLimits(**limits), Usage())


def begin(quota, at_ns, size_bytes=0, waited_ns=0):
    return quota.begin_request(at_ns, size_bytes=size_bytes, is_append=True, waited_ns=waited_ns)


def apply_limits(quotas, limits, grants=(), revision=1, groups=None):
    permissions = Permissions(
        revision, "ops", 0, bytes(32), groups=groups or {}, grants=tuple(grants), limits=limits
    )
    quotas.apply_permissions(permissions, Grants(permissions))
    return quotas


# ---- requests


def test_requests_after_the_burst_wait_at_most_a_second_or_are_rejected():
    quota = quota_of(appends_per_s=10)
    waits = [begin(quota, START_NS) for _ in range(21)]
    assert waits == [max(0, number - 10) * 100 * MS for number in range(21)]
    # A request waits for at most a second; the next request would wait longer.
    error = begin(quota, START_NS)
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms == 1_100
    assert str(error) == (
        "etl exceeds its limit of 10 appends per second at this daemon. Hint: "
        "`waltz-core access limit` changes the limit."
    )
    # A rejected request is not charged.
    assert begin(quota, START_NS + 1_100 * MS) == 0


def test_the_time_that_a_request_has_waited_counts_towards_its_maximum_wait():
    quota = quota_of(appends_per_s=1)
    for _ in range(2):
        begin(quota, START_NS)
    half = START_NS + 500 * MS
    assert isinstance(begin(quota, half, waited_ns=500 * MS + 1), Overloaded)
    assert begin(quota, half, waited_ns=500 * MS) == 500 * MS
    assert begin(quota, START_NS + 2 * SECOND_NS, waited_ns=9 * SECOND_NS) == 0  # waited enough


def test_a_request_over_the_limit_begins_at_once_and_delays_later_ones():
    quota = quota_of(bytes_per_s=1_000)
    assert begin(quota, START_NS, size_bytes=5_000) == 0
    error = begin(quota, START_NS + SECOND_NS)
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms == 3_000
    assert "exceeds its limit of 1000 bytes per second" in str(error)
    assert begin(quota, START_NS + 4 * SECOND_NS) == 0


def test_the_retry_pause_fits_into_an_int32():
    quota = quota_of(bytes_per_s=1)
    begin(quota, START_NS, size_bytes=16_000_000)
    error = begin(quota, START_NS)
    assert isinstance(error, Overloaded)
    assert 0 < error.retry_after_ms < 1 << 31


def test_each_request_is_charged_at_least_512_bytes_and_a_range_by_its_sent_bytes():
    quota = quota_of(bytes_per_s=512)
    assert [begin(quota, START_NS) for _ in range(2)] == [0, 0]
    assert begin(quota, START_NS) == SECOND_NS
    quota.charge_sent_bytes(1_024, START_NS)
    assert begin(quota, START_NS + 3 * SECOND_NS) == SECOND_NS
    assert dataclasses.astuple(quota.usage.take()) == (4 * 512 + 1_024, 4, 2, 0)
    assert quota.usage == Usage()


@pytest.mark.parametrize("per_s", [3, 700])
def test_a_principal_that_retries_constantly_does_not_exceed_its_limit(per_s):
    quota, granted = quota_of(appends_per_s=per_s), 0
    for now_ms in range(10_000):  # the principal retries each millisecond
        answer = begin(quota, START_NS + now_ms * MS)
        granted += not isinstance(answer, Overloaded)
    # The requests of ten seconds, the burst, and the requests that still wait.
    assert 11 * per_s <= granted <= 12 * per_s + 1


# ---- connections and feeds


def test_connections_and_feeds_over_the_limit_are_rejected():
    quota = quota_of(connections=2, feeds=1)
    for each in ("a", "b"):
        quota.add_connection(each)
    with pytest.raises(Overloaded, match="etl exceeds its limit of 2 connections at") as caught:
        quota.add_connection("c")
    assert caught.value.retry_after_ms > 0
    assert quota.begin_feed((1, 7), "a") is None
    assert quota.begin_feed((1, 7), "b") is None  # the same feed moves to connection b
    assert "exceeds its limit of 1 feed at" in str(quota.begin_feed((2, 7), "a"))
    quota.end_feed((1, 7), "a")  # no effect: the feed belongs to connection b
    assert quota.begin_feed((2, 7), "a") is not None
    quota.remove_connection("b")
    quota.add_connection("c")
    assert quota.begin_feed((2, 7), "a") is None
    quota.end_feed((2, 7), "a")
    assert quota.begin_feed((3, 7), "a") is None


def test_after_a_limit_is_lowered_the_newest_connections_are_over_the_limit():
    quota = quota_of(connections=3, feeds=3)
    for number, each in enumerate(("a", "b", "c")):
        quota.add_connection(each)
        quota.begin_feed((number, 7), each)
    assert list(quota.connections_over_limit()) == []
    quota.set_limits(PrincipalLimits(connections=2))
    assert list(quota.connections_over_limit()) == ["c"]
    quota.set_limits(PrincipalLimits(feeds=1))
    assert list(quota.connections_over_limit()) == ["b", "c"]


# ---- revisions


def test_the_limits_of_principal_asterisk_are_the_defaults():
    limits = {
        "*": PrincipalLimits(bytes_per_s=7, connections=5),
        "etl": PrincipalLimits(bytes_per_s=9, feeds=2),
    }
    quotas = apply_limits(Quotas(), limits)
    assert quotas.quota_of("etl", 0).limits == PrincipalLimits(9, None, 5, 2)
    assert quotas.quota_of("anonymous", 0).limits == PrincipalLimits(7, None, 5, None)
    only = apply_limits(Quotas(), {"etl": PrincipalLimits(feeds=2)})
    assert only.quota_of("ann", 0) is None
    assert Quotas().quota_of("etl", 0) is None  # before the first revision


def test_servers_have_no_quota():
    limits, groups = {"*": PrincipalLimits(1), "s1": PrincipalLimits(1)}, {"servers": ("s1",)}
    grants = (Grant("servers", True, REPLICATE, ((0, 0),)),)
    quotas = apply_limits(Quotas(), limits, grants, groups=groups)
    assert quotas.quota_of("s1", 0) is None
    assert quotas.quota_of("s2", 0) is not None


def test_a_new_revision_changes_only_the_quotas_whose_limits_differ():
    quotas = apply_limits(Quotas(), {"etl": PrincipalLimits(512, 1)})
    quota = quotas.quota_of("etl", START_NS)
    for _ in range(2):
        begin(quota, START_NS)
    apply_limits(quotas, {"etl": PrincipalLimits(512, 1)}, revision=2)
    assert quotas.quota_of("etl", START_NS) is quota
    assert begin(quota, START_NS, waited_ns=1) is not None
    assert isinstance(begin(quota, START_NS, waited_ns=1), Overloaded)
    apply_limits(quotas, {"etl": PrincipalLimits(512, 100)}, revision=3)
    error = begin(quota, START_NS, waited_ns=1)
    assert "512 bytes per second" in str(error)
    apply_limits(quotas, {"etl": PrincipalLimits(1_000_000, 100)}, revision=4)
    assert begin(quota, START_NS) == 0
    apply_limits(quotas, {}, revision=5)
    assert quotas.quota_of("etl", START_NS) is None


def test_a_principal_cannot_refill_its_bucket_by_a_new_connection():
    quotas = apply_limits(Quotas(), {"*": PrincipalLimits(appends_per_s=1)})
    quota = quotas.quota_of("etl", START_NS)
    quota.add_connection("a")
    for _ in range(2):
        begin(quota, START_NS)
    quota.remove_connection("a")
    for number in range(QUOTAS_MAX + 1):
        quotas.quota_of(f"p{number}", START_NS + SECOND_NS)
    assert quotas.quota_of("etl", START_NS + SECOND_NS) is quota
    # When the token bucket is full again, the quota may be dropped.
    for number in range(QUOTAS_MAX + 1):
        quotas.quota_of(f"q{number}", START_NS + 2 * SECOND_NS)
    assert quotas.quota_of("etl", START_NS + 2 * SECOND_NS) is not quota


# ---- labels


def test_the_first_principals_with_a_grant_have_their_own_metric_label():
    members = tuple(f"p{number}" for number in range(1, METRIC_LABELS_MAX + 3))
    grants = (
        Grant("p0", False, READ, None),
        Grant("team", True, APPEND, None),
        Grant("last", False, READ, None),
    )
    limits = {"*": PrincipalLimits(connections=3)}
    quotas = apply_limits(Quotas(), limits, grants, groups={"team": members})
    names = ("p0", *members, "last", "without-grant")
    for name in names:
        quotas.quota_of(name, 0).add_connection(name)
    labels = [*("p0", *members)[:METRIC_LABELS_MAX], OTHER_LABEL]
    assert list(quotas.usage) == labels
    unlabeled_count = len(names) - METRIC_LABELS_MAX
    assert quotas.connection_and_feed_counts() == {
        label: ((unlabeled_count if label == OTHER_LABEL else 1), 0) for label in labels
    }


def test_a_revision_moves_a_principal_to_its_new_label():
    limits = {"*": PrincipalLimits(connections=3)}
    grants = (Grant("etl", False, READ, None),)
    quotas = apply_limits(Quotas(), limits, grants)
    quota = quotas.quota_of("etl", 0)
    begin(quota, START_NS)
    assert quotas.usage["etl"].appends == 1
    apply_limits(quotas, limits, (), revision=2)
    begin(quota, START_NS)
    assert list(quotas.usage) == [OTHER_LABEL]
    assert quotas.usage[OTHER_LABEL].appends == 1


# ---- client IDs


def test_a_principal_over_its_client_id_limit_does_not_affect_other_principals():
    limit = IssuedIdLimit()
    for _ in range(IDS_PER_BURST):
        limit.take("etl", START_NS)
    limit.take("etl", START_NS)  # this request exceeds the burst, so later requests wait
    with pytest.raises(
        Overloaded, match="client IDs faster than this server permits: 20000"
    ) as caught:
        limit.take("etl", START_NS)
    assert caught.value.retry_after_ms == 1_000 // IDS_PER_S
    limit.take("other", START_NS)
    limit.take("etl", START_NS + caught.value.retry_after_ms * MS)
    with pytest.raises(Overloaded):
        limit.take("etl", START_NS + caught.value.retry_after_ms * MS)


def test_the_quotas_of_principals_with_full_buckets_are_dropped():
    limit = IssuedIdLimit()
    for number in range(QUOTAS_MAX):
        limit.take(f"p{number}", START_NS)
    assert len(limit._buckets) == QUOTAS_MAX
    limit.take("late", START_NS + SECOND_NS)
    assert list(limit._buckets) == ["late"]
