"""The figures of `bench flood`, and the cluster that it starts."""

from contextlib import ExitStack, contextmanager

from waltz_bench import command
from waltz_bench.compared import tenant_load
from waltz_bench.flood import _PhaseTimes
from waltz_bench.measuring import BenchLoad


def test_the_ratio_is_the_median_of_the_rounds():
    found = _PhaseTimes(
        calm_s=[[0.001] * 100, [0.010] * 100, [0.002] * 100],
        flooded_s=[[0.001] * 99 + [0.003], [0.012] * 100, [0.002] * 99 + [0.009]],
        received_per_s=[5.0, 7.0, 6.0],
    ).figures(2.0)
    assert found["p50_ratios"] == [1.0, 1.2, 1.0]
    assert found["p50_ratio"] == 1.0
    assert found["p99_ratios"] == [3.0, 1.2, 4.5]
    assert found["p99_ratio"] == 3.0
    assert (found["calm_p99_ms"], found["flooded_p99_ms"]) == (2.0, 9.0)
    assert found["got_per_s"] == 6


def test_with_tls_each_tenant_has_its_own_connect_string(monkeypatch):
    @contextmanager
    def limited(file):
        yield f"cluster with {file}", "calm", "greedy"

    monkeypatch.setattr(tenant_load, "limited_tenants", limited)
    load = BenchLoad("", 512, 1, batch=None, seconds=1.0, in_flight=2, rows=10)
    with ExitStack() as stack:
        assert command._start_cluster(stack, "flood", "tls.toml", load) == "cluster with tls.toml"
    assert (load.connect, load.flood_connect) == ("calm", "greedy")
