"""The seven checks of a partition: a healthy cluster passes all of them."""

import pytest

from tests.unit.ops.test_diagnosis import ENGAGED, ONE, TWO, A, B, C, Case
from waltz_core.cluster.membership.registration import Ownership
from waltz_core.cluster.znodes.model import PartitionMetadata, ReplicaState
from waltz_core.ops.checks import (
    CHECK_CONDITIONS,
    FailedCheck,
    check_cluster,
    names_of_failed_checks,
)

BEHIND = ReplicaState(6, 50)


@pytest.fixture
def case():
    return Case()


def failed_checks(case, chosen=(0, 1)):
    checks = check_cluster(case.facts.cluster, chosen)
    assert {check.check for check in checks} <= set(CHECK_CONDITIONS)
    return [(check.check, check.partitions) for check in checks]


def text(case):
    (check,) = check_cluster(case.facts.cluster, (0, 1))
    return check.text


def test_a_healthy_cluster_passes_all_checks(case):
    assert failed_checks(case) == []


def test_a_failure_affects_only_its_check_and_partitions():
    found = [
        FailedCheck("quorum", "x", (1,)),
        FailedCheck("storage", "y", (1, 2)),
        FailedCheck("server", "z", ()),
    ]
    assert [names_of_failed_checks(found, number) for number in range(4)] == [
        *(set(), {"quorum", "storage"}, {"storage"}, set())
    ]


def test_partitions_that_were_not_selected_are_not_checked(case):
    case.storage(A, failure="refused", replicas={})
    assert failed_checks(case, (1,)) == [("storage", (1,))]
    case.cluster(storage_groups={A: 0, B: 0, C: 2})
    assert ("assignment", (0,)) not in failed_checks(case, (1,))


def test_missing_servers_and_a_partition_without_an_owner_are_reported(case):
    case.cluster(owners={1: Ownership(2, 4)})
    assert failed_checks(case) == [("assignment", (0,))]
    assert text(case) == "partition 0 is assigned to no server"
    case.cluster(servers={}, owners={}, is_assignment_settled=False)
    assert failed_checks(case) == [("assignment", (0, 1)), ("assignment", (0, 1))]


def test_a_server_that_does_not_answer_or_serve_its_partition_is_reported(case):
    case.server(1, failure="refused", served_partitions={})
    assert failed_checks(case) == [("server", (0,))]
    assert text(case) == f"server {ONE} does not answer: refused"
    case.server(1, failure="")
    assert text(case) == (f"partition 0: server {ONE} owns it, but does not answer requests for it")
    case.server(1, served_partitions={0: False})
    assert failed_checks(case) == [("health", (0,))]
    case.server(1, served_partitions={0: True})
    case.server(2, unreachable_storages=(C,))
    assert failed_checks(case) == [("connectivity", (1,))]
    assert text(case) == f"server {TWO} cannot reach storage {C}"


def test_a_storage_that_is_not_registered_or_does_not_answer_is_reported(case):
    unregistered = (
        f"storage {A} is not registered: it has never started, or it is a Waltz 0.13 storage"
    )
    case.storage(A, registered_storage_id=None, storage_id="aa")
    assert text(case) == unregistered
    case.storage(A, storage_id=None)
    assert failed_checks(case) == []  # a 0.13 storage, and a healthy one
    case.storage(A, failure="refused")
    both = [each.text for each in check_cluster(case.facts.cluster, (0, 1))]
    assert both == [unregistered, f"storage {A} does not answer: refused"]
    case.storage(A, failure="", registered_storage_id="aa", admin_failure="refused", replicas={})
    assert text(case) == f"storage {A} does not answer at its admin port: refused"
    case.storage(A, belongs_to_cluster=False)
    assert failed_checks(case) == [("storage", (0, 1))]


def test_a_storage_that_does_not_serve_an_assigned_replica_is_reported(case):
    case.replica(A, is_present=False)
    assert text(case).endswith("Hint: run `waltz-core storage sync-partitions`.")
    case.replica(A, is_present=True, is_online=False)
    assert text(case) == (
        f"partition 0: storage {A} has taken its replica offline. Hint: run `waltz-core "
        f"storage availability --storage {A} --partition 0 --online true`."
    )
    for changed in ({"is_opening": True}, {"open_error": "rot"}, {"is_stuck": True}):
        case = Case()
        case.replica(A, **changed)
        assert failed_checks(case) == [("storage", (0,))]


def test_replicas_that_lag_or_are_too_few_are_reported(case):
    case.states({A: ENGAGED, B: ENGAGED, C: BEHIND})
    assert text(case) == f"partition 0: {C} is not in sync"
    case.states({A: ENGAGED, B: BEHIND, C: BEHIND})
    assert failed_checks(case) == [("quorum", (0,))]
    case.states({A: ENGAGED, B: ENGAGED})
    assert failed_checks(case) == [("recovery", (0,)), ("recovery", (0,))]
    case.partition(metadata=PartitionMetadata())
    assert text(case) == "partition 0 was never opened"
    case.cluster(assigned_replicas={0: (), 1: (A, B, C)})
    assert text(case) == "partition 0 has no replicas. Hint: run `waltz-core cluster auto-assign`."


def test_checks_report_an_unavailable_storage_and_its_consequences(case):
    """The doctor would report only the storage. The checks report the consequences, too."""
    case.storage(C, failure="refused", replicas={})
    case.server(1, unreachable_storages=(C,))
    case.states({A: ENGAGED, B: ENGAGED, C: BEHIND})
    assert failed_checks(case) == [("connectivity", (0,)), ("storage", (0, 1)), ("recovery", (0,))]
