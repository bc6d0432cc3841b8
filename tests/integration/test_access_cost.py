"""The clusters with access control of `bench`: permissions, and limits of greedy tenants."""

import dataclasses
from pathlib import Path

import pytest

from tests.certificates import Certificates
from waltz_bench import flood
from waltz_bench.batch_appends import append_batch
from waltz_bench.compared import access_cost, tenant_load
from waltz_bench.measuring import BenchLoad, Meter
from waltz_core.client import WaltzClient
from waltz_core.config import render_toml
from waltz_core.errors import PermissionDenied


@pytest.mark.slow
def test_only_the_client_with_the_token_may_append(tmp_path: Path, certificates: Certificates):
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", certificates.settings))
    with access_cost._run_cluster(file, "on") as side:
        with WaltzClient(side.cluster.connect) as client, pytest.raises(PermissionDenied):
            client.append(b"without a token", partition=0).result()
        load = BenchLoad(side.connect, 64, 1, batch=10, seconds=0.1, in_flight=1, rows=0)
        meter = Meter(side.cluster)
        measured = append_batch(load, meter)
        assert measured.rows > 0
        assert (measured.lost, measured.duplicated, measured.errors) == (0, 0, 0)
        assert meter.cpu_seconds_by_role().keys() == {"zookeeper", "storage", "server", "client"}


@pytest.mark.slow
def test_a_greedy_tenant_of_any_kind_exceeds_its_limit_and_a_moderate_tenant_does_not(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", certificates.settings))
    monkeypatch.setattr(flood, "ROUNDS", 1)
    monkeypatch.setattr(flood, "START_S", 0.1)
    # The appender's first batch uses the rate of many seconds, so the next batch is over the limit.
    limits = dataclasses.replace(tenant_load.GREEDY_LIMITS, bytes_per_s=5_000)
    monkeypatch.setattr(tenant_load, "GREEDY_LIMITS", limits)
    with tenant_load.limited_tenants(file) as (cluster, moderate, greedy):
        load = BenchLoad(
            moderate, 64, 1, batch=None, seconds=0.6, in_flight=1, rows=5_000, flood_connect=greedy
        )
        measured = flood.flood(load, Meter(cluster))
        log = cluster.log_path("server-1").read_text() + cluster.log_path("server-2").read_text()
    assert measured.rows > 0
    assert list(measured.extra) == ["appender", "reader", "connections"]
    for figures in measured.extra.values():
        assert isinstance(figures, dict)
        assert figures["flooded_p99_ms"] > 0
        assert figures["flooded_cores"].keys() == {"zookeeper", "storage", "server", "client"}
    assert f"{tenant_load.GREEDY} exceeds its limit of" in log
    assert f"{tenant_load.CALM} exceeds its limit of" not in log
