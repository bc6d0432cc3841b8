"""Each fault fires its alert and no other alert, on generated time series of a cluster."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.dashboards import DAYS_LEFT, dashboards
from scripts.reference.alerts import RULES, alert_rules
from tests.promtool import (
    INTERVAL_MIN,
    FaultSeries,
    FiringAlert,
    LinearValues,
    find_promtool,
    firing_alerts,
)

BEFORE_MIN, LONG_BEFORE_MIN = 80, 13 * 60  # longer than the ranges of the rules
BUCKETS = (0.001, 0.005, 0.01, 0.1, 0.25, 1.0)
SERVERS, STORAGES, PARTITIONS = ("s1", "s2"), ("a", "b", "c"), (0, 1)
MIB = 1 << 20


class Cluster:
    """The series of a cluster before and after a fault."""

    def __init__(self, before_min: int) -> None:
        self.before: dict[str, LinearValues] = {}
        for server in SERVERS:
            self._add_server(server)
        for storage in STORAGES:
            self._add_storage(storage)
        self.during = {name: each.after(before_min) for name, each in self.before.items()}

    def _add_server(self, server: str) -> None:
        at = f'job="waltz-server",instance="{server}"'
        own = PARTITIONS[SERVERS.index(server)]
        self.before |= {
            f"up{{{at}}}": LinearValues(1),
            f"process_start_time_seconds{{{at}}}": LinearValues(1_000),
            f"waltz_server_zookeeper_connected{{{at}}}": LinearValues(1),
            f"waltz_server_queued_bytes{{{at}}}": LinearValues(MIB),
            f"waltz_server_denied_requests_total{{{at}}}": LinearValues(0, 1),
            f'waltz_server_rejected_transactions_total{{{at},reason="lock"}}': LinearValues(0, 10),
            **owned(server, own),
        }
        for replica in STORAGES:
            self.before |= append_times(server, replica, 0.004)

    def _add_storage(self, storage: str) -> None:
        at = f'job="waltz-storage",instance="{storage}:15282"'
        self.before |= {
            f"up{{{at}}}": LinearValues(1),
            f"process_start_time_seconds{{{at}}}": LinearValues(1_000),
            f'waltz_storage_info{{{at},replica="{storage}:15280"}}': LinearValues(1),
            f"waltz_storage_full_disks{{{at}}}": LinearValues(0),
            f"waltz_storage_free_bytes{{{at}}}": LinearValues(1_000_000 * MIB, -MIB),
            f"waltz_storage_disk_bytes{{{at}}}": LinearValues(2_000_000 * MIB),
            f"waltz_storage_suspect_replicas{{{at}}}": LinearValues(0),
            f"waltz_storage_failed_writes_total{{{at}}}": LinearValues(0),
            f"waltz_storage_running_upload_seconds{{{at}}}": LinearValues(20),
            f"waltz_storage_denied_requests_total{{{at}}}": LinearValues(0),
        }
        for partition in PARTITIONS:
            labels = f'{{{at},partition="{partition}"}}'
            self.before |= {
                f"waltz_storage_last_transaction{labels}": LinearValues(0, 600),
                f"waltz_storage_damaged_transactions{labels}": LinearValues(0),
            }

    def set(self, pattern: str, value: float, growth: float = 0) -> None:
        """Let the series whose names match have other values."""
        names = [name for name in self.during if re.search(pattern, name)]
        assert names, pattern
        self.during |= dict.fromkeys(names, LinearValues(value, growth))

    def grow(self, pattern: str, growth: float) -> None:
        """Let the series whose names match grow."""
        names = [name for name in self.during if re.search(pattern, name)]
        assert names, pattern
        self.during |= {name: LinearValues(self.during[name].start, growth) for name in names}

    def end(self, pattern: str) -> None:
        """End the series whose names match."""
        names = [name for name in self.during if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            del self.during[name]

    def kill(self, *instances: str) -> None:
        """Let the scrapes of some daemons fail."""
        for instance in instances:
            self.set(rf'^up{{.*instance="{instance}', 0)
            self.end(rf'^(waltz|process)_.*instance="{instance}')

    def series(self) -> dict[str, FaultSeries]:
        """Return all series."""
        names = {**self.before, **self.during}
        return {name: FaultSeries(self.before.get(name), self.during.get(name)) for name in names}


def owned(server: str, partition: int) -> dict[str, LinearValues]:
    """Return the series of a partition that a server owns."""
    at = f'job="waltz-server",instance="{server}",partition="{partition}"'
    return {
        f"waltz_server_store_session{{{at}}}": LinearValues(0),
        f"waltz_server_feed_lag_transactions{{{at}}}": LinearValues(0),
        f"waltz_server_unarchived_seconds{{{at}}}": LinearValues(700),
        **{
            f'waltz_server_replica_in_sync{{{at},replica="{storage}:15280"}}': LinearValues(1)
            for storage in STORAGES
        },
    }


def append_times(server: str, replica: str, median_s: float) -> dict[str, LinearValues]:
    """Return the histogram of a server's appends to a replica, 600 per minute."""
    at = f'job="waltz-server",instance="{server}",replica="{replica}:15280"'
    name = "waltz_server_replica_append_seconds_bucket"
    return {
        f'{name}{{{at},le="{each}"}}': LinearValues(
            0, 600 * (each == "+Inf" or median_s <= float(each))
        )
        for each in (*map(str, BUCKETS), "+Inf")
    }


# --- the faults


class Fault(NamedTuple):
    """The alerts that a fault fires, and the changes of the series."""

    alerts: set[str]
    inject: Callable[[Cluster], None]
    before_min: int = BEFORE_MIN
    during_min: int = 40


def nothing(_cluster: Cluster) -> None:
    pass


def kill_a_server(cluster: Cluster) -> None:
    cluster.kill("s1")
    cluster.during |= owned("s2", 0)


def kill_a_storage(cluster: Cluster) -> None:
    cluster.kill("a")
    cluster.set('in_sync.*replica="a:', 0)


def kill_a_quorum(cluster: Cluster) -> None:
    cluster.kill("a", "b")
    cluster.set("in_sync", 0)
    cluster.set("store_session", -1)
    cluster.set("queued_bytes", 900 * MIB)


def restart_repeatedly(cluster: Cluster) -> None:
    cluster.grow("process_start.*storage.*a:", 60)


def lose_zookeeper(cluster: Cluster) -> None:
    cluster.set("zookeeper_connected", 0)


def reject_appends(cluster: Cluster) -> None:
    at = '{job="waltz-server",instance="s1",partition="0",reason="overloaded"}'
    cluster.during[f"waltz_server_rejected_transactions_total{at}"] = LinearValues(5, 60)


def fill_memory(cluster: Cluster) -> None:
    cluster.set("queued_bytes.*s1", 900 * MIB)


def close_a_session(cluster: Cluster) -> None:
    cluster.set('in_sync.*partition="0"', 0)
    cluster.set('store_session.*partition="0"', -1)
    cluster.set('feed_lag.*partition="0"', 500_000)


def fill_a_quorum(cluster: Cluster) -> None:
    """Fill two disks; sessions open and close again, and clients retry."""
    cluster.set("full_disks.*(a|b):", 1)
    cluster.set("free_bytes.*(a|b):", 0)
    cluster.set("in_sync", 0)
    cluster.set("store_session", -1)
    at = '{job="waltz-server",instance="s1",partition="0",reason="no_space"}'
    other = at.replace("s1", "s2").replace('"0"', '"1"')
    for each in (at, other):
        cluster.during[f"waltz_server_rejected_transactions_total{each}"] = LinearValues(5, 1)


def stop_reading(cluster: Cluster) -> None:
    cluster.set('feed_lag.*partition="0"', 200_000, 600)


def catch_up(cluster: Cluster) -> None:
    cluster.set('feed_lag.*partition="0"', 100_000_000, -10_000)


def leave_the_session(cluster: Cluster) -> None:
    cluster.set('in_sync.*replica="a:', 0)


def leave_unrepaired(cluster: Cluster) -> None:
    cluster.set('in_sync.*replica="a:', 0)
    cluster.set("suspect.*a:", 2)


def trust_no_quorum(cluster: Cluster) -> None:
    cluster.set("suspect.*(a|b):", 1)
    cluster.set('in_sync.*partition="0"', 0)
    cluster.set('store_session.*partition="0"', -1)


def hang(cluster: Cluster) -> None:
    at = 'job="waltz-server",instance="s1",partition="0",replica="a:15280"'
    cluster.during[f"waltz_server_replica_wait_seconds{{{at}}}"] = LinearValues(0, 60)


def slow_down(cluster: Cluster) -> None:
    for server in SERVERS:
        slow = append_times(server, "a", 0.2)
        cluster.during |= {
            name: LinearValues(cluster.during[name].start, each.growth)
            for name, each in slow.items()
        }


def fill_a_disk(cluster: Cluster) -> None:
    cluster.set("full_disks.*a:", 1)
    cluster.set("free_bytes.*a:", 0)
    cluster.set('in_sync.*replica="a:', 0)


def fill_a_disk_slowly(cluster: Cluster) -> None:
    cluster.set("free_bytes.*a:", 400_000 * MIB, -100 * MIB)


def leave_little_space(cluster: Cluster) -> None:
    cluster.set("free_bytes.*a:", 99_000 * MIB)


def leave_little_space_on_a_small_disk(cluster: Cluster) -> None:
    cluster.set("free_bytes.*a:", 200 * MIB)
    cluster.set("disk_bytes.*a:", 1_000 * MIB)


def fail_a_write(cluster: Cluster) -> None:
    cluster.set("failed_writes.*a:", 1)


def fail_reads(cluster: Cluster) -> None:
    """Reads fail, and their transactions are damaged until they are repaired."""
    at = '{job="waltz-storage",instance="a:15282",partition="0"}'
    cluster.during[f"waltz_storage_failed_reads_total{at}"] = LinearValues(2)
    cluster.during[f"waltz_storage_damage_found_transactions_total{at}"] = LinearValues(2)


def rot(cluster: Cluster) -> None:
    """Damage is found and repaired."""
    at = '{job="waltz-storage",instance="a:15282",partition="0"}'
    cluster.during[f"waltz_storage_damage_found_transactions_total{at}"] = LinearValues(2)
    cluster.during[f"waltz_storage_repaired_transactions_total{at}"] = LinearValues(2)


def rot_unrepaired(cluster: Cluster) -> None:
    cluster.set('damaged_transactions.*a:.*"0"', 2)


def fail_uploads(cluster: Cluster) -> None:
    for storage in STORAGES:
        at = f'{{job="waltz-storage",instance="{storage}:15282",partition="0"}}'
        cluster.during[f"waltz_storage_failed_uploads_total{at}"] = LinearValues(1, 0.1)
        cluster.during[f"waltz_storage_failed_archive_reads_total{at}"] = LinearValues(1, 1)
    cluster.set("unarchived_seconds", 700, 200)


def hang_an_upload(cluster: Cluster) -> None:
    cluster.set("running_upload.*a:", 0, 60)


def stop_archiving(cluster: Cluster) -> None:
    cluster.set('unarchived_seconds.*"0"', 6_000, 60)


def lose_an_object(cluster: Cluster) -> None:
    at = '{job="waltz-storage",instance="a:15282",partition="0"}'
    cluster.during[f"waltz_storage_failed_archive_reads_total{at}"] = LinearValues(1)


def deny(cluster: Cluster) -> None:
    cluster.grow("denied.*s1", 600)


def exceed_limits(cluster: Cluster) -> None:
    at = '{job="waltz-server",instance="s1",principal="bob"}'
    cluster.during[f"waltz_server_principal_rejected_requests_total{at}"] = LinearValues(1, 6)


FAULTS = {
    "nothing": Fault(set(), nothing, LONG_BEFORE_MIN, 80),
    "a server is dead": Fault({"WaltzServerDown"}, kill_a_server),
    "a storage is dead": Fault({"WaltzStorageDown"}, kill_a_storage),
    "a quorum of the storages is dead": Fault(
        {"WaltzStorageDown", "WaltzPartitionUnavailable"}, kill_a_quorum
    ),
    "all servers are dead": Fault(
        {"WaltzServerDown", "WaltzPartitionUnavailable"}, lambda cluster: cluster.kill(*SERVERS)
    ),
    "a storage restarts repeatedly": Fault({"WaltzDaemonRestarting"}, restart_repeatedly),
    "ZooKeeper does not answer": Fault({"WaltzZooKeeperUnavailable"}, lose_zookeeper),
    "a server rejects appends": Fault({"WaltzServerOverloaded"}, reject_appends),
    "requests fill the memory": Fault({"WaltzServerOverloaded"}, fill_memory),
    "a session does not open": Fault({"WaltzPartitionUnavailable"}, close_a_session),
    "a quorum of the disks is full": Fault(
        {"WaltzDiskFull", "WaltzAppendsRejectedNoSpace"}, fill_a_quorum
    ),
    "a feed falls behind": Fault({"WaltzFeedLagging"}, stop_reading),
    "a feed catches up": Fault(set(), catch_up),
    "a replica leaves the session": Fault({"WaltzReplicaOutOfSync"}, leave_the_session),
    "a suspect replica is not repaired": Fault({"WaltzReplicaSuspect"}, leave_unrepaired),
    "no quorum is trusted": Fault({"WaltzPartitionUnavailable"}, trust_no_quorum),
    "a disk hangs": Fault({"WaltzStorageUnresponsive"}, hang),
    "a storage is slow": Fault({"WaltzStorageSlow"}, slow_down),
    "a disk is full": Fault({"WaltzDiskFull"}, fill_a_disk),
    "a disk fills": Fault({"WaltzDiskFullSoon"}, fill_a_disk_slowly, LONG_BEFORE_MIN, 80),
    "a disk is nearly full": Fault({"WaltzDiskFullSoon"}, leave_little_space, during_min=80),
    "a small disk is nearly full": Fault(
        {"WaltzDiskFullSoon"}, leave_little_space_on_a_small_disk, during_min=80
    ),
    "a write has failed": Fault({"WaltzDiskErrors"}, fail_a_write),
    "reads have failed": Fault({"WaltzDiskErrors"}, fail_reads),
    "records have rotted": Fault({"WaltzTransactionsDamaged"}, rot),
    "damage is not repaired": Fault({"WaltzTransactionsDamaged"}, rot_unrepaired),
    "uploads fail": Fault({"WaltzArchiveUploadsFailing"}, fail_uploads, during_min=80),
    "an upload does not end": Fault({"WaltzArchiveUploadsFailing"}, hang_an_upload),
    "nothing is archived": Fault({"WaltzArchiveLagging"}, stop_archiving),
    "an object is lost": Fault({"WaltzArchiveReadsFailing"}, lose_an_object),
    "many requests are denied": Fault({"WaltzAccessDenials"}, deny),
    "a principal is over its limits": Fault({"WaltzPrincipalOverLimits"}, exceed_limits),
}


@pytest.mark.parametrize("title", list(FAULTS))
def test_a_fault_fires_exactly_its_own_alerts(title: str, tmp_path: Path) -> None:
    fault = FAULTS[title]
    cluster = Cluster(fault.before_min)
    fault.inject(cluster)
    alerts = firing_alerts(
        cluster.series(), tmp_path, before_min=fault.before_min, during_min=fault.during_min
    )
    assert {alert.name for alert in alerts} == fault.alerts
    for alert in alerts:
        check_texts(alert)


def check_texts(alert: FiringAlert) -> None:
    """Check that the texts of an alert are complete, and name its subject."""
    assert "error expanding" not in str(alert.annotations)
    assert "<no value>" not in str(alert.annotations)
    subject_labels = {
        name: text for name, text in alert.labels.items() if name not in ("job", "severity")
    }
    assert subject_labels
    assert any(text in alert.annotations["summary"] for text in subject_labels.values())


def test_each_alert_has_a_fault() -> None:
    assert set().union(*(fault.alerts for fault in FAULTS.values())) == set(alert_rules())


@pytest.mark.parametrize("kind", ["rules", "config"])
def test_promtool_accepts_the_files(kind: str) -> None:
    path = RULES if kind == "rules" else RULES.with_name("prometheus.yml")
    result = subprocess.run(
        [find_promtool(), "check", kind, str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_queries_of_the_dashboards(tmp_path: Path) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "5m")
        for text in dashboards().values()
        for panel in json.loads(text)["panels"]
        for target in panel["targets"]
    ]
    rules = [{"record": f"query{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    result = subprocess.run(
        [find_promtool(), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_panel_shows_the_days_until_each_disk_is_full(tmp_path: Path) -> None:
    """One disk will be full in 99 days at its rate, and one disk does not fill."""
    minute = 1_000_000 / (24 * 60)  # a million bytes per day
    size = 24 * 60 // INTERVAL_MIN
    series = {"a": f"100000000{-minute * INTERVAL_MIN:+.6f}x{size}", "b": f"5000+0x{size}"}
    expected = (100_000_000 - 1_000_000) / 1_000_000
    test = {
        "interval": f"{INTERVAL_MIN}m",
        "input_series": [
            {"series": f'waltz_storage_free_bytes{{instance="{name}"}}', "values": values}
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({DAYS_LEFT.replace('{[[]]}', '')}, 0.01)",
                "eval_time": "1d",
                "exp_samples": [{"labels": '{instance="a"}', "value": expected}],
            }
        ],
    }
    path = tmp_path / "days.test.json"
    path.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    result = subprocess.run(
        [find_promtool(), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
