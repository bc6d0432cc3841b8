"""The diagnosis: no findings for a healthy cluster, and one finding for each fault."""

from dataclasses import replace

import pytest

from tests.unit.ops.printed_commands import check_understood
from waltz_core.cluster.coordinator import Ownership
from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.ops import diagnosis
from waltz_core.ops.diagnosis import LAG_TRANSACTIONS_MAX, cluster_summary
from waltz_core.ops.facts import (
    ArchiveFacts,
    ClusterFacts,
    DiskFacts,
    Facts,
    LocalFacts,
    MemberFacts,
    PartitionFacts,
    ReplicaFacts,
    ServerFacts,
    StorageFacts,
    ZooKeeperServerFacts,
)
from waltz_core.ops.findings import FINDING_KINDS
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION

A, B, C, SPARE = "10.0.0.1:5280", "10.0.0.2:5280", "10.0.0.3:5280", "10.0.0.4:5280"
ONE, TWO = "10.0.1.1:5180", "10.0.1.2:5180"
NODES = ("zk1:2181", "zk2:2181", "zk3:2181")
CONNECT = "zk1:2181,zk2:2181,zk3:2181/waltz/payments"
ROOMY, OPEN, NEW = (
    DiskFacts(1 << 40, False),
    PartitionMarker(MarkerState.OPEN),
    PartitionMarker(MarkerState.NEW),
)
ENGAGED = ReplicaState(7, UNRESOLVED)


def diagnose(facts):
    """Return the findings; every printed command must be valid."""
    findings = diagnosis.diagnose(facts)
    for finding in findings:
        check_understood(finding.command)
    return findings


def storage(address, partitions=(0, 1)):
    return StorageFacts(
        address,
        address.replace("5280", "5281"),
        registered_storage_id="aa",
        storage_id="aa",
        disk=ROOMY,
        clock_ahead_ms=3.0,
        replicas={
            partition: ReplicaFacts(last_session_id=7, last_id=90) for partition in partitions
        },
    )


def partition():
    return PartitionFacts(
        PartitionMetadata(1, 7, dict.fromkeys((A, B, C), ENGAGED)),
        OPEN,
        90,
        commit_stamp_ahead_ms=-5.0,
    )


def healthy():
    cluster = ClusterFacts(
        partition_count=2,
        is_assignment_settled=True,
        owners={0: Ownership(1, 4), 1: Ownership(2, 4)},
        servers={
            1: ServerFacts(ONE, served_partitions={0: True}),
            2: ServerFacts(TWO, served_partitions={1: True}),
        },
        storages={each: storage(each) for each in (A, B, C)} | {SPARE: storage(SPARE, ())},
        assigned_replicas={0: (A, B, C), 1: (A, B, C)},
        storage_groups={A: 0, B: 1, C: 2, SPARE: 2},
        partitions={0: partition(), 1: partition()},
    )
    zookeepers = tuple(ZooKeeperServerFacts(node, mode="follower") for node in NODES)
    return Facts(CONNECT, zookeepers, cluster=cluster)


class Case:
    """A cluster that is healthy until a test changes something."""

    def __init__(self):
        self.facts = healthy()

    def cluster(self, **changed):
        self.facts = replace(self.facts, cluster=replace(self.facts.cluster, **changed))

    def storage(self, address, **changed):
        storages = self.facts.cluster.storages
        self.cluster(storages={**storages, address: replace(storages[address], **changed)})

    def replica(self, address, number=0, **changed):
        replicas = dict(self.facts.cluster.storages[address].replicas)
        replicas[number] = replace(replicas.get(number, ReplicaFacts()), **changed)
        self.storage(address, replicas=replicas)

    def server(self, number, **changed):
        servers = self.facts.cluster.servers
        self.cluster(servers={**servers, number: replace(servers[number], **changed)})

    def partition(self, number=0, **changed):
        partitions = self.facts.cluster.partitions
        self.cluster(partitions={**partitions, number: replace(partitions[number], **changed)})

    def states(self, states, number=0):
        self.partition(number, metadata=PartitionMetadata(1, 7, states))

    def node(self, **changed):
        first, *others = self.facts.zookeeper_servers
        self.facts = replace(self.facts, zookeeper_servers=(replace(first, **changed), *others))

    def local(self, *members):
        self.facts = replace(self.facts, local=LocalFacts("here/.waltz", members))

    def found(self):
        return [(finding.name, finding.subject) for finding in diagnose(self.facts)]

    def only_finding(self, name):
        (finding,) = diagnose(self.facts)
        assert finding.name == name
        return finding


@pytest.fixture
def case():
    return Case()


def test_a_healthy_cluster_has_no_findings(case):
    assert case.found() == []
    assert cluster_summary(case.facts) == (
        "2 servers, 4 storages, 2 partitions with 3 replicas each, 3 ZooKeeper servers"
    )


# --- ZooKeeper, and the processes of a cluster on this machine


def test_without_zookeeper_only_its_outage_is_reported(case):
    case.facts = Facts(CONNECT, zookeeper_failure="no answer")
    finding = case.only_finding("zookeeper-unavailable")
    assert finding.sentence.endswith("of the cluster is unknown: no answer")
    assert finding.command == "waltz-core zookeeper run --config zoo.cfg"
    case.facts = Facts(CONNECT, access_error="unknown peer")
    assert case.only_finding("zookeeper-access-denied").command.endswith(
        f"--connect '{CONNECT}?auth=FILE'"
    )
    case.facts = Facts(CONNECT, is_cluster_missing=True)
    assert case.only_finding("no-cluster").sentence.startswith(
        f"there is no cluster at {CONNECT}. Hint: "
    )


def test_a_zookeeper_server_that_does_not_answer_or_has_no_quorum_is_reported(case):
    case.node(failure="refused", mode="")
    assert case.only_finding("zookeeper-server-unavailable").sentence == (
        "ZooKeeper server zk1:2181 does not answer: refused"
    )
    case.node(failure="", mode="")
    assert (
        "is not part of a quorum" in case.only_finding("zookeeper-server-without-quorum").sentence
    )


def test_a_process_that_does_not_run_is_reported_once_and_by_name(case):
    case.local(MemberFacts("storage-1", A, "down"), MemberFacts("server-2", TWO, "up", 77))
    case.storage(A, failure="refused", replicas={})
    finding = case.only_finding("process-down")
    assert finding.sentence == "storage-1 of the cluster in here/.waltz does not run"
    assert finding.command == "waltz-core local up --directory here/.waltz"
    case.local(MemberFacts("storage-1", A, "stopped", 78))
    finding = case.only_finding("process-stopped")
    assert finding.command == "kill -CONT 78"
    # A running process that does not answer is stopped first.
    case.local(MemberFacts("storage-1", A, "up", 79))
    case.storage(A, is_silent=True)
    assert case.only_finding("storage-silent").command == (
        "kill -9 79; waltz-core local up --directory here/.waltz"
    )


def test_local_up_does_not_start_added_storages(case):
    case.local(MemberFacts("storage-1", A, "up", 77), MemberFacts("storage-2", B, "up", 78))
    case.storage(C, failure="refused", replicas={})
    found = next(
        finding for finding in diagnose(case.facts) if finding.name == "storage-unavailable"
    )
    assert found.command == "waltz-core storage run --config storage.toml"


# --- servers


def test_a_server_that_does_not_answer_is_reported(case):
    case.server(1, failure="refused", served_partitions={})
    assert case.only_finding("server-unavailable").command == (
        f"waltz-core cluster remove-server {ONE} --connect {CONNECT}"
    )
    case.server(1, is_silent=True)
    finding = case.only_finding("server-silent")
    assert finding.command == "waltz-core server run --config server.toml"
    case.cluster(servers={}, owners={}, is_assignment_settled=False)
    assert case.only_finding("no-server").sentence.startswith("no server is registered")


def test_a_doctor_without_tls_reports_a_cluster_with_tls(case):
    """No process must be stopped, and the state of the partitions is unknown."""
    mismatch = "expected plain TCP, found TLS"
    for number in (1, 2):
        case.server(number, failure=mismatch, is_tls_mismatch=True, served_partitions={})
    for address in (A, B, C, SPARE):
        case.storage(address, failure=mismatch, is_tls_mismatch=True, replicas={})
    case.facts = replace(case.facts, connect=f"{CONNECT}?auth=/etc/zk")
    findings = diagnose(case.facts)
    assert [finding.name for finding in findings] == ["server-tls-failed"] * 2 + [
        "storage-tls-failed"
    ] * 4
    assert all(mismatch in finding.sentence for finding in findings)
    command = f"waltz-core doctor --connect '{CONNECT}?auth=/etc/zk&tls=FILE'"
    assert {finding.command for finding in findings} == {command}


def test_a_doctor_without_a_permitted_token_suggests_no_change_of_the_cluster(case):
    for number in (1, 2):
        case.server(
            number, failure="token t1 of ann is revoked", is_denied=True, served_partitions={}
        )
    for address in (A, B):
        case.storage(address, failure="token t1 of ann is revoked", is_denied=True, replicas={})
    for address in (C, SPARE):
        case.storage(address, admin_failure="ann is not granted administer", is_denied=True)
    case.facts = replace(case.facts, connect=f"{CONNECT}?tls=/ca.pem&token_env=TOKEN")
    findings = diagnose(case.facts)
    names = ["server-access-denied"] * 2 + ["storage-access-denied"] * 4
    assert [finding.name for finding in findings] == names
    command = f"waltz-core doctor --connect '{CONNECT}?tls=/ca.pem&token_file=FILE'"
    assert {finding.command for finding in findings} == {command}


def test_a_storage_with_an_expired_certificate_is_reported(case):
    case.storage(A, failure="certificate has expired", is_tls_mismatch=True, replicas={})
    case.storage(B, failure="certificate has expired", is_tls_mismatch=True, replicas={})
    assert case.found() == [
        ("storage-tls-failed", A),
        ("storage-tls-failed", B),
        ("no-quorum", "0"),
        ("no-quorum", "1"),
    ]


def test_an_outdated_assignment_and_a_partition_without_an_owner_are_reported(case):
    case.cluster(is_assignment_settled=False)
    assert f"the leader {ONE}" in case.only_finding("assignment-stale").sentence
    case.server(1, failure="connection refused", served_partitions={})
    assert [name for name, _ in case.found()] == ["server-unavailable"]
    case.server(1, failure="", served_partitions={0: True})
    case.cluster(is_assignment_settled=True, owners={1: Ownership(2, 4)})
    case.server(1, served_partitions={})
    assert case.only_finding("partition-without-server").sentence == "partition 0 has no owner"


def test_two_preferred_owners_of_one_partition_are_reported(case):
    case.server(1, preferred_partitions=(0,))
    assert case.found() == []
    case.server(2, preferred_partitions=(0, 1))
    finding = case.only_finding("preference-not-granted")
    assert (
        f"{TWO} and {ONE} are both preferred owners; {ONE} owns the partition" in finding.sentence
    )
    assert finding.command == f"waltz-core cluster unprefer 0 {TWO} --connect {CONNECT}"


def test_a_storage_that_one_server_cannot_reach_is_reported_if_the_doctor_can_reach_it(case):
    case.server(1, unreachable_storages=(C,))
    assert case.found() == [("storage-out-of-reach", f"{ONE} {C}")]
    case.storage(C, failure="refused", replicas={})
    assert case.found() == [("storage-unavailable", C)]


# --- storages


def test_a_storage_that_does_not_answer_is_reported(case):
    case.storage(A, failure="refused", replicas={})
    assert (
        case.only_finding("storage-unavailable").command
        == "waltz-core storage run --config storage.toml"
    )
    case.storage(A, is_silent=True)
    assert case.only_finding("storage-silent").subject == A
    case.storage(A, registered_storage_id=None)
    assert "has never started" in case.only_finding("storage-never-started").sentence


def test_the_doctor_waits_for_a_storage_that_is_starting(case):
    """After a crash, a storage reads its logs before it has a port; a restart would repeat this."""
    again = f"waltz-core doctor --connect {CONNECT}"
    case.local(MemberFacts("storage-1", A, "up", 79), MemberFacts("storage-2", B, "up", 80))
    case.storage(A, failure="refused", replicas={})
    finding = case.only_finding("storage-starting")
    assert "Hint: wait, and do not stop" in finding.sentence
    assert finding.command == again
    # The storage is not stopped to restore a quorum either.
    case.storage(B, failure="refused", replicas={})
    case.server(1, served_partitions={0: False})
    case.server(2, served_partitions={1: False})
    assert {each.name for each in diagnose(case.facts)} == {"storage-starting", "no-quorum"}
    assert {each.command for each in diagnose(case.facts)} == {again}
    # On another machine, the doctor does not know that the storage is starting. Starting the
    # process a second time is harmless.
    case.facts = replace(case.facts, local=None)
    assert {each.name for each in diagnose(case.facts)} == {"storage-unavailable", "no-quorum"}
    assert "then wait" in diagnose(case.facts)[0].sentence


def test_the_command_for_a_hanging_storage_kills_it_and_does_not_change_its_port(case):
    case.local(MemberFacts("storage-1", A, "up", 79))
    case.storage(A, admin_failure="no answer within 3 s", found_admin_port=5281, is_hanging=True)
    finding = case.only_finding("storage-unresponsive")
    assert "them (no answer within 3 s); its disk may hang." in finding.sentence
    assert finding.command == "kill -9 79; waltz-core local up --directory here/.waltz"
    case.storage(A, admin_failure="", is_hanging=False)
    case.replica(A, is_stuck=True)
    case.states({A: ReplicaState(6, 50), B: ENGAGED, C: ENGAGED})
    finding = case.only_finding("replica-stuck")
    assert (finding.subject, finding.command[:10]) == (f"0 {A}", "kill -9 79")


def test_no_command_deletes_a_log_that_is_being_opened(case):
    case.replica(A, is_opening=True, last_id=-1, last_session_id=-1)
    case.states({A: ReplicaState(6, 50), B: ENGAGED, C: ENGAGED})
    finding = case.only_finding("replica-opening")
    assert (finding.subject, finding.command) == (
        f"0 {A}",
        f"waltz-core doctor --connect {CONNECT}",
    )


def test_a_storage_with_another_identity_at_the_address_is_reported(case):
    case.storage(A, storage_id="bb")
    finding = case.only_finding("storage-id-mismatch")
    assert "but ZooKeeper has the ID aa for" in finding.sentence
    assert finding.command == f"waltz-core cluster replace-storage {A} {A} --connect {CONNECT}"
    case.storage(A, belongs_to_cluster=False)
    assert case.only_finding("storage-cluster-mismatch").subject == A
    # The storage rejects all servers of this cluster; the network is not the cause.
    case.server(1, unreachable_storages=(A,))
    assert case.only_finding("storage-cluster-mismatch").subject == A


def test_a_wrong_admin_port_in_zookeeper_is_reported(case):
    case.storage(A, admin_failure="refused", replicas={})
    assert case.only_finding("admin-port-wrong").command == (
        f"waltz-core cluster set-admin-port {A} ADMIN_PORT --connect {CONNECT}"
    )
    case.storage(A, found_admin_port=5299)
    assert f"set-admin-port {A} 5299" in case.only_finding("admin-port-wrong").command


def test_replicas_move_from_a_full_disk_to_a_disk_with_space(case):
    case.storage(A, disk=DiskFacts(5 << 20, True))
    finding = case.only_finding("disk-full")
    assert finding.sentence.endswith("5 MiB are free, and the storage rejects appends")
    assert finding.command == (
        f"waltz-core cluster move-replica 0-1 {A} {SPARE} --connect {CONNECT}"
    )
    case.storage(A, disk=DiskFacts(900 << 20, False))
    assert case.only_finding("disk-nearly-full").sentence.endswith("900 MiB are free")
    for size_mib, free_mib, is_found in (
        (100_000, 4_999, True),  # less than a twentieth is free
        (100_000, 5_000, False),
        (2_000, 255, True),  # less than the minimum is free
        (2_000, 256, False),
    ):
        case.storage(A, disk=DiskFacts(free_mib << 20, False, size_mib << 20))
        assert (case.found() != []) == is_found
    case.storage(A, disk=DiskFacts(900 << 20, False))
    case.storage(SPARE, failure="refused")
    assert ("disk-nearly-full", A) in case.found()
    assert any("cluster add-storage HOST:PORT" in each.command for each in diagnose(case.facts))
    # A full disk of a storage without replicas is not a finding.
    case.facts = healthy()
    case.storage(SPARE, disk=DiskFacts(0, True))
    assert case.found() == []


@pytest.mark.parametrize(
    ("free_mib", "mib_per_day", "days"),
    [(70_000, 10_001, "7.0"), (70_000, 10_000, None), (70_000, 0, None), (70_000, None, None)],
)
def test_a_disk_that_will_be_full_soon_is_reported(case, free_mib, mib_per_day, days):
    rate = None if mib_per_day is None else mib_per_day << 20
    case.storage(A, disk=DiskFacts(free_mib << 20, False, 100_000 << 20, rate))
    if days is None:
        assert case.found() == []
        return
    finding = case.only_finding("disk-full-soon")
    assert f"will be full in {days} days: 70000 MiB are free, and in the last day" in (
        finding.sentence
    )
    assert finding.command.startswith("waltz-core cluster move-replica 0-1 ")
    # Only the more urgent finding is reported.
    case.storage(A, disk=DiskFacts(900 << 20, False, 100_000 << 20, rate))
    assert case.only_finding("disk-nearly-full")


def test_clocks_that_differ_are_reported(case):
    case.storage(A, clock_ahead_ms=-4_200.0)
    finding = case.only_finding("storage-clock-skew")
    assert f"storage {A} is 4.2 s behind the clock of this" in finding.sentence
    case.storage(A, clock_ahead_ms=None)
    case.partition(commit_stamp_ahead_ms=61_000.0)
    finding = case.only_finding("server-clock-skew")
    assert "61.0 s in the future, so the clock" in finding.sentence
    assert ONE in finding.sentence


# --- replicas


def test_a_replica_that_is_not_served_is_reported(case):
    at = f"--connect {CONNECT} --storage {B} --partition 0"
    for changed, name, command in (
        ({"is_online": False}, "replica-offline", f"availability {at} --online true"),
        ({"is_present": False}, "replica-not-held", f"add-partition {at}"),
        ({"open_error": "no slot"}, "replica-unreadable", f"re-seed {at}"),
        ({"damaged_count": 3}, "replica-damaged", f"scrub {at}"),
    ):
        case.facts = healthy()
        case.replica(B, **changed)
        assert case.only_finding(name).command == f"waltz-core storage {command}"


def test_files_of_a_partition_that_is_assigned_elsewhere_are_reported(case):
    case.replica(SPARE, last_id=90, last_session_id=6)
    remove = f"waltz-core storage remove-partition --connect {CONNECT} --storage {SPARE}"
    assert (
        case.only_finding("replica-left-over").command == f"{remove} --partition 0 --delete-files"
    )
    # All leftover partitions of a storage share one finding and one command.
    case.replica(SPARE, number=1, last_id=90, last_session_id=6)
    finding = case.only_finding("replica-left-over")
    assert (finding.subject, finding.partition) == (SPARE, None)
    assert finding.command == f"{remove} --partition 0-1 --delete-files"
    case.storage(SPARE, replicas={0: ReplicaFacts(last_id=90, last_session_id=6)})
    # Until its owner excludes the replica, the replica is being moved.
    case.states({A: ENGAGED, B: ENGAGED, C: ENGAGED, SPARE: ENGAGED})
    assert case.found() == [("session-replicas-outdated", "0")]


@pytest.mark.parametrize(
    "doubt",
    [
        lambda case: case.server(1, served_partitions={0: False}),
        lambda case: case.states({A: ENGAGED, B: ENGAGED, C: ReplicaState(6, 50)}),
        lambda case: case.partition(metadata=PartitionMetadata()),
        lambda case: case.cluster(assigned_replicas={0: (), 1: (A, B, C)}),
        lambda case: case.replica(SPARE, last_id=91),  # ZooKeeper's data is older than this log
        lambda case: case.replica(SPARE, last_session_id=8),
    ],
)
def test_no_command_deletes_records_that_other_replicas_may_lack(case, doubt):
    case.replica(SPARE, last_id=90, last_session_id=6)
    doubt(case)
    assert [
        finding.name for finding in diagnose(case.facts) if "--delete-files" in finding.command
    ] == []


def test_a_replica_that_is_not_in_sync_is_reported(case):
    case.states({A: ENGAGED, B: ENGAGED, C: ReplicaState(6, 50)})
    case.replica(C, last_id=50)
    finding = case.only_finding("replica-not-engaged")
    assert finding.sentence.endswith("its log ends at transaction 50")
    assert "--online false && waltz-core storage availability" in finding.command
    case.storage(C, failure="refused")
    assert case.found() == [("storage-unavailable", C)]


def test_a_replica_that_lags_is_reported(case):
    case.replica(A, last_id=91 + LAG_TRANSACTIONS_MAX)
    case.replica(B, last_id=91 + LAG_TRANSACTIONS_MAX)
    finding = case.only_finding("replica-lagging")
    assert finding.subject == f"0 {C}"
    assert f"{LAG_TRANSACTIONS_MAX + 1} transactions, because" in finding.sentence
    assert f"move-replica 0 {C} {SPARE}" in finding.command


def test_a_suspect_quorum_requires_a_decision_of_the_operator(case):
    case.replica(A, is_suspect=True)
    assert case.found() == [("replica-suspect", f"0 {A}")]
    case.replica(B, is_suspect=True)
    case.server(1, served_partitions={0: False})
    finding = case.only_finding("no-trusted-quorum")
    assert "only 1 of 3 replicas have a trusted log" in finding.sentence
    assert finding.command == f"waltz-core cluster accept-replicas 0 --connect {CONNECT}"


def test_command_accept_replicas_is_not_suggested_while_a_storage_may_return(case):
    case.server(1, served_partitions={0: False})
    case.replica(A, is_suspect=True)
    case.storage(B, failure="refused", replicas={})
    names = [finding.name for finding in diagnose(case.facts)]
    assert names == ["storage-unavailable", "replica-suspect"]


# --- partitions


def test_a_lost_quorum_is_reported_for_every_cause(case):
    for address in (A, B):
        case.storage(address, failure="refused", replicas={})
    case.server(1, served_partitions={0: False})
    case.server(2, served_partitions={1: False})
    assert case.found() == [
        ("storage-unavailable", A),
        ("storage-unavailable", B),
        ("no-quorum", "0"),
        ("no-quorum", "1"),
    ]
    findings = diagnose(case.facts)[2]
    assert "only 1 of 3 replicas answer, and a quorum of 2 is required" in findings.sentence
    assert findings.command == "waltz-core storage run --config storage.toml"


def test_no_command_stops_a_healthy_storage_to_restore_a_quorum(case):
    members = [
        MemberFacts(f"storage-{index}", each, "up", 77 + index)
        for index, each in enumerate((A, B, C))
    ]
    case.local(*members)
    case.server(1, served_partitions={0: False})
    case.replica(A, is_online=False)
    case.replica(B, is_online=False)
    assert [finding.name for finding in diagnose(case.facts)] == [
        "replica-offline",
        "replica-offline",
        "no-quorum",
    ]
    assert not any("kill" in finding.command for finding in diagnose(case.facts))
    case.storage(C, failure="silent", is_silent=True, replicas={})
    (found,) = [finding for finding in diagnose(case.facts) if finding.name == "no-quorum"][:1]
    assert found.command.startswith("kill -9 79; ")


def test_a_session_that_is_not_open_despite_a_quorum_is_reported(case):
    case.server(1, served_partitions={0: False})
    assert case.only_finding("session-not-open").command == (
        f"waltz-core cluster prefer 0 {TWO} --connect {CONNECT}"
    )
    case.server(2, failure="refused", served_partitions={})
    opened = next(finding for finding in diagnose(case.facts) if finding.name == "session-not-open")
    assert opened.command == "waltz-core server run --config server.toml"


def test_a_partition_that_was_never_opened_is_reported(case):
    case.server(1, served_partitions={0: False})
    case.partition(metadata=None, marker=NEW)
    assert case.only_finding("never-opened").subject == "0"


def test_a_partition_served_by_a_server_other_than_its_owner_is_reported(case):
    case.server(1, served_partitions={})
    assert case.only_finding("partition-not-served").subject == "0"
    case.server(1, served_partitions={0: True})
    case.server(2, served_partitions={0: True, 1: True})
    finding = case.only_finding("partition-served-by-another")
    assert f"server {TWO} answers requests for it, but {ONE} owns it." in finding.sentence


def test_an_outdated_list_of_session_replicas_and_an_unknown_mark_are_reported(case):
    case.states({A: ENGAGED, B: ENGAGED})
    case.partition(high_water_mark=None, high_water_mark_error="no answer")
    assert case.found() == [("session-replicas-outdated", "0"), ("high-water-mark-unknown", "0")]


def test_replicas_that_are_too_few_or_in_the_wrong_groups_are_reported(case):
    case.cluster(
        assigned_replicas={0: (A, B), 1: (A, B, C)},
        storage_groups=dict.fromkeys((A, B, C, SPARE), 0),
    )
    case.states({A: ENGAGED, B: ENGAGED})
    case.storage(C, replicas={1: ReplicaFacts(last_id=90)})
    assert case.only_finding("too-few-replicas").command == (
        f"waltz-core cluster auto-assign --replicas 3 --connect {CONNECT}"
    )
    case.facts = healthy()
    case.cluster(storage_groups={A: 0, B: 0, C: 2, SPARE: 3})
    assert case.found() == [("replicas-share-group", "0"), ("replicas-share-group", "1")]
    assert {finding.command for finding in diagnose(case.facts)} == {
        f"waltz-core cluster auto-assign --connect {CONNECT}"
    }
    # If the full storage is the only storage of its group, its replicas would return to it.
    case.storage(SPARE, disk=DiskFacts(5 << 20, True))
    assert {finding.command for finding in diagnose(case.facts)} == {
        f"waltz-core cluster add-storage HOST:PORT --group 3 --connect {CONNECT}"
    }
    case.facts = healthy()
    case.cluster(assigned_replicas={0: (), 1: ()})
    for address in (A, B, C):
        case.storage(address, replicas={})
    assert case.found() == [("no-replicas", "0"), ("no-replicas", "1")]


KEY = "191568e5-8d82-421b-82d3-20ab46b03e4e"
REBUILD = (
    f"waltz-core cluster rebuild-metadata --connect {CONNECT} --name pay --cluster-key {KEY} "
    "--partitions 2 --replicas 3 "
    + " ".join(f"--storage {each[:-5]}:5280:5281:{at}" for at, each in enumerate((A, B, C)))
    + f" --storage {SPARE[:-5]}:5280:5281:2"
)


def test_lost_metadata_is_reported(case):
    case.cluster(cluster_key=KEY, name="pay")
    case.partition(metadata=PartitionMetadata())
    finding = case.only_finding("metadata-lost")
    # The remaining old znodes must be deleted first: they prevent a rebuild.
    delete = f"waltz-core cluster delete pay --connect {CONNECT}"
    assert finding.command == f"{delete} && {REBUILD}"
    for step in ("stop all servers and storages", "delete the old znodes", "start all storages"):
        assert step in finding.sentence
    # For a cluster on this machine, all steps are known.
    case.local(MemberFacts("storage-1", A, "up", 79, 5281))
    assert case.only_finding("metadata-lost").command == (
        f"waltz-core local down --keep-zookeeper --directory here/.waltz && {delete} && "
        f"{REBUILD} --only-znodes && {{ {REBUILD} & waltz-core local up --directory here/.waltz; "
        "wait $!; }"
    )


def test_an_interrupted_rebuild_is_reported_with_the_command_that_continues_it(case):
    case.cluster(cluster_key=KEY, name="pay")
    case.states(dict.fromkeys((A, B, C), ReplicaState(NO_SESSION, BEFORE_FIRST)))
    finding = case.only_finding("rebuilding-unfinished")
    assert finding.subject == "0"
    assert finding.command == REBUILD.replace("--replicas 3", "--replicas COUNT")
    # The finding is reported even if no partition is assigned, as right after the creation.
    case.cluster(assigned_replicas={0: (), 1: (A, B, C)})
    case.storage(A, replicas={1: ReplicaFacts(last_session_id=7, last_id=90)})
    assert " --replicas COUNT --storage " in case.only_finding("rebuilding-unfinished").command


def test_a_cluster_on_this_machine_that_zookeeper_has_lost_is_not_created_again(case):
    case.facts = Facts(CONNECT, is_cluster_missing=True)
    case.local(
        MemberFacts("zookeeper", NODES[0], "up", 78), MemberFacts("storage-1", A, "up", 79, 5281)
    )
    finding = case.only_finding("cluster-lost")
    assert "cluster create" not in finding.command
    rebuild = (
        f"waltz-core cluster rebuild-metadata --connect {CONNECT} --name local "
        f"--from-directory here/.waltz/storage-1 --replicas COUNT --storage {A}:5281"
    )
    assert f" && {rebuild} --only-znodes && {{ {rebuild} & " in finding.command
    # This finding also covers the processes that have ended.
    case.local(MemberFacts("zookeeper", NODES[0], "up", 78), MemberFacts("storage-1", A, "down"))
    assert case.only_finding("cluster-lost")


def test_findings_come_in_the_order_of_the_table(case):
    case.replica(A, is_online=False)
    case.node(failure="refused")
    case.server(2, failure="refused", served_partitions={})
    names = [finding.name for finding in diagnose(case.facts)]
    assert names == sorted(names, key=list(FINDING_KINDS).index)
    assert len(names) == 3


def test_a_connect_string_is_quoted_for_a_shell(case):
    case.facts = replace(case.facts, connect=f"{CONNECT}?auth=/etc/my file")
    case.server(1, failure="refused", served_partitions={})
    assert case.only_finding("server-unavailable").command.endswith(
        f"'{CONNECT}?auth=/etc/my file'"
    )


def test_a_server_to_which_other_servers_cannot_connect_is_reported():
    case = Case()
    case.server(2, is_excluded_as_unreachable=True, connection_errors=(f"{ONE}: refused",))
    finding = case.only_finding("server-unreachable")
    assert finding.subject == TWO
    assert f"cannot connect to it ({ONE}: refused)." in finding.sentence
    case.server(2, connection_errors=())
    assert "none has connected to it yet" in case.only_finding("server-unreachable").sentence


# --- Speed


def test_a_storage_that_answers_appends_much_later_than_the_others_is_reported(case):
    other_latencies = {B: (30, 2_000), C: (30, 3_000)}
    case.server(1, append_latencies={A: (30, 180_000), **other_latencies})
    case.server(2, append_latencies={A: (10, 100_000)})
    assert case.only_finding("storage-slow").sentence.startswith(
        f"storage {A} takes 160 ms to answer an append, 64 times as long as the other "
        "storages. Hint: "
    )
    for times in (
        {A: (30, 180_000)},  # no other storage to compare with
        {A: (30, 49_000), **other_latencies},  # not much slower
        {A: (9, 180_000), **other_latencies},  # too few seconds
        {A: (30, 180_000), B: (30, 60_000), C: (30, 40_000)},
        other_latencies,
    ):
        case.server(1, append_latencies=times)
        case.server(2, append_latencies={})
        assert case.found() == []


# --- The archive

URL = "s3://bucket/waltz"
HOUR_S = 3_600.0
INTERVAL_MS = 10_000


def marker_archived_to(last):
    mark = ArchivedMark(last, bytes(16), 5, 0, 1, "manifest")
    return PartitionMarker(MarkerState.OPEN, 7, bytes(16), mark)


@pytest.fixture
def archive():
    """A cluster that archives, and has archived everything."""
    case = Case()
    for address in (A, B, C, SPARE):
        case.storage(address, archive=ArchiveFacts(URL, 600_000))
    for number in (0, 1):
        case.partition(
            number,
            marker=marker_archived_to(90),
            oldest_unarchived_age_s=0.0,
            archive_interval_ms=INTERVAL_MS,
        )
    assert case.found() == []
    return case


def test_storages_with_different_archives_are_reported(archive):
    archive.storage(B, archive=ArchiveFacts("s3://other/waltz", 600_000))
    finding = archive.only_finding("archive-settings-differ")
    assert (
        f"storage {B} archives to s3://other/waltz, but the other storages archive to {URL}. "
        "Hint: set the"
    ) in (finding.sentence)
    assert finding.command == f"waltz-core storage run --config storage.toml --archive-url {URL}"
    for address in (A, B):
        archive.storage(address, archive=None)
    assert archive.found() == [("archive-settings-differ", A), ("archive-settings-differ", B)]
    assert (
        f"(none), but the other storages archive to {URL}. Hint: set the"
        in diagnose(archive.facts)[0].sentence
    )
    # The doctor cannot check a storage that does not answer.
    archive.storage(A, failure="refused", replicas={})
    archive.storage(B, archive=ArchiveFacts(URL))
    assert ("archive-settings-differ", A) not in archive.found()


def test_storages_without_the_archive_of_the_cluster_are_reported(archive):
    archive.partition(0, marker=OPEN)
    for address in (A, B, C, SPARE):
        archive.storage(address, archive=None)
    finding = archive.only_finding("archive-url-missing")
    assert "transactions of partitions 1 are archived, but no storage" in finding.sentence
    assert finding.command == "waltz-core storage run --config storage.toml --archive-url URL"
    archive.local()
    directory = "--directory here/.waltz"
    assert archive.only_finding("archive-url-missing").command == (
        f"waltz-core local down {directory} && waltz-core local up {directory} --archive URL"
    )
    # The doctor cannot check this if no storage answers.
    for address in (A, B, C, SPARE):
        archive.storage(address, admin_failure="refused")
    assert "archive-url-missing" not in [name for name, _ in archive.found()]
    for address in (A, B, C, SPARE):
        archive.storage(address, admin_failure="")
    archive.partition(1, marker=OPEN)
    assert archive.found() == []


def test_an_archive_that_cannot_be_written_is_reported(archive):
    failed = ArchiveFacts(URL, 600_000, 1, "archive: cannot write x: ACCESS_DENIED")
    archive.partition(0, oldest_unarchived_age_s=1.0, marker=marker_archived_to(89))
    archive.storage(A, archive=failed)
    assert archive.found() == []  # A throttled request is no finding.
    archive.storage(A, archive=replace(failed, failure_count=2))
    finding = archive.only_finding("archive-unavailable")
    assert "failures: 2): archive: cannot write x: ACCESS_DENIED. Hint" in finding.sentence
    assert finding.command == f"waltz-core archive status --connect {CONNECT}"
    # If each storage has failed, even once, the lag of the archive is a consequence of this, and no
    # finding.
    archive.partition(0, oldest_unarchived_age_s=100 * HOUR_S)
    assert archive.only_finding("archive-unavailable")
    archive.storage(A, archive=failed)
    archive.storage(B, archive=replace(failed, error="archive: cannot write y: ACCESS_DENIED"))
    finding = archive.only_finding("archive-unavailable")
    assert f"storages {A}, {B} have failed to write to the archive" in finding.sentence
    assert "failures: 1): archive: cannot write" in finding.sentence
    archive.storage(B, archive=ArchiveFacts(URL, 600_000))
    # In the meantime, another storage has archived everything.
    archive.partition(0, oldest_unarchived_age_s=0.0, marker=marker_archived_to(90))
    assert archive.found() == []


def test_a_damaged_file_of_the_archive_is_reported(archive):
    failed = ArchiveFacts(URL, 600_000, 1, "object 7: expected CRC 1, found 2", is_damaged=True)
    archive.storage(A, archive=failed)
    archive.partition(0, oldest_unarchived_age_s=1.0, marker=marker_archived_to(89))
    finding = archive.only_finding("archive-damaged")
    assert "missing or corrupt (object 7: expected CRC 1, found 2). Hint:" in finding.sentence
    assert finding.command == f"waltz-core archive verify --repair --connect {CONNECT}"
    # Damage that a read has found stays, even if everything is archived.
    archive.partition(0, oldest_unarchived_age_s=0.0, marker=marker_archived_to(90))
    damaged = ArchiveFacts(URL, 600_000, read_damage="object 8: bad")
    archive.storage(A, archive=damaged)
    assert "object 8: bad" in archive.only_finding("archive-damaged").sentence
    # Another storage has found damage in the same file.
    archive.storage(C, archive=damaged)
    assert (
        f"storages {A}, {C} found that a file" in archive.only_finding("archive-damaged").sentence
    )
    archive.storage(B, archive=replace(damaged, read_damage="object 9: bad"))
    assert [about for _, about in archive.found()] == [f"{A}, {C}", B]


def test_an_archive_that_lags_is_reported(archive):
    archive.partition(0, marker=marker_archived_to(20), oldest_unarchived_age_s=HOUR_S + 1_210)
    assert archive.found() == []
    archive.partition(0, oldest_unarchived_age_s=HOUR_S + 1_211)
    finding = archive.only_finding("archive-lagging")
    assert "partition 0: 70 committed transactions are not archived" in finding.sentence
    assert "the oldest was committed 1.3 h ago." in finding.sentence
    archive.storage(B, archive=ArchiveFacts(URL, 3_600_000))
    assert archive.found() == []  # not if `archive_age_ms` is greater
    # A partition without any archived transaction.
    archive.partition(1, marker=OPEN, oldest_unarchived_age_s=4 * HOUR_S)
    assert "partition 1: 91 committed" in archive.only_finding("archive-lagging").sentence
    archive.partition(1, oldest_unarchived_age_s=None)
    assert archive.found() == []  # rule 2


def test_an_archive_is_reported_as_lagging_only_if_an_owner_archives(archive):
    archive.partition(
        0,
        marker=marker_archived_to(20),
        oldest_unarchived_age_s=100 * HOUR_S,
        archive_interval_ms=0,
    )
    assert archive.only_finding("archive-lagging"), "another owner archives"
    archive.partition(1, archive_interval_ms=0)
    assert archive.found() == []


def test_an_archive_without_an_interval_is_reported(archive):
    for number in (0, 1):
        archive.partition(number, marker=OPEN, oldest_unarchived_age_s=None)
    finding = archive.only_finding("archive-idle")
    assert finding.command == (
        "waltz-core server run --config server.toml --archive-interval-ms 10000"
    )
    assert "set archive_interval_ms in the settings of the servers" in finding.sentence
    for number in (0, 1):
        archive.partition(number, high_water_mark=-1)
    assert archive.found() == []  # There is nothing to archive.
