"""`bench --access-rounds` runs a workload on two clusters in turn, and compares their CPU."""

from contextlib import contextmanager

import pytest

from waltz_bench import measuring
from waltz_bench.compared import access_cost
from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.cli.main import main

LOAD = BenchLoad("", 512, 1, batch=None, seconds=1.0, in_flight=2, rows=10)
ROWS = 100


class Cluster:
    """A cluster whose runs use the given seconds of CPU time."""

    def __init__(self, seconds):
        self.members = []
        self.seconds = seconds
        self.runs = 0

    def cpu_seconds(self):
        return {"server-1": sum(self.seconds[: self.runs]), "storage-1": 5.0, "zookeeper": 9.0}


def test_the_clusters_run_in_turn_and_the_cost_is_the_median_of_the_rounds(monkeypatch):
    clusters = {"off": Cluster([1.0, 2.0, 1.0]), "on": Cluster([1.5, 2.2, 1.1])}
    order = []

    @contextmanager
    def running(_tls, access):
        yield access_cost._ComparedCluster(clusters[access], f"connect of {access}")

    def workload(load, meter):
        order.append(load.connect.split()[-1])
        meter.start()
        meter.cluster.runs += 1
        meter.stop()
        return WorkloadResult(rows=ROWS, seconds=1.0, bytes=7, lost=1, errors=2)

    monkeypatch.setattr(access_cost, "_run_cluster", running)
    monkeypatch.setattr(measuring, "_client_cpu_seconds", lambda _daemons: 0.0)
    verdict = access_cost.compare(workload, LOAD, None, 3)
    assert order == ["off", "on", "on", "off", "off", "on"]
    assert verdict.access_ratio == 1.1  # of 1.5, 1.1 and 1.1
    assert verdict.extra["cpu_us_per_tx_off"] == [10_000, 20_000, 10_000]
    assert (verdict.rows, verdict.bytes) == (3 * ROWS, 21)
    assert (verdict.lost, verdict.errors) == (6, 12)
    assert verdict.cpu_seconds["server"] == pytest.approx(4.8)


def test_a_meter_sums_the_cpu_time_of_the_parts_of_a_load(monkeypatch):
    cluster, client = Cluster([1.0, 10.0, 100.0]), iter([0.0, 0.5, 2.0, 2.25])
    monkeypatch.setattr(measuring, "_client_cpu_seconds", lambda _daemons: next(client))
    meter = Meter(cluster)
    assert meter.cpu_seconds_by_role() is None
    meter.start()
    cluster.runs = 1
    meter.stop()
    cluster.runs = 2  # between the parts
    meter.start()
    cluster.runs = 3
    meter.stop()
    assert meter.cpu_seconds_by_role() == {
        "server": 101.0,
        "storage": 0.0,
        "zookeeper": 0.0,
        "client": 0.75,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["append-one", "--access-rounds", "2"], "--access-rounds needs --tls"),
        (
            ["append-one", "--tls", "t", "--connect", "zk/w"],
            "--tls needs a workload with a temporary",
        ),
        (["storage-open", "--tls", "t"], "--tls needs a workload with a temporary"),
    ],
)
def test_incompatible_options_are_rejected(capsys, arguments, expected):
    assert main(["bench", *arguments]) == 1
    assert expected in capsys.readouterr().err
