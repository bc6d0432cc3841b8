"""The cluster with access control of `bench --access-rounds` denies what is not granted."""

from pathlib import Path

import pytest

from tests.certificates import Certificates
from waltz_bench.batch_appends import append_batch
from waltz_bench.compared import access_cost
from waltz_bench.measuring import BenchLoad, Meter
from waltz_core.client import WaltzClient
from waltz_core.config import render_toml
from waltz_core.errors import PermissionDenied


def test_only_the_client_with_the_token_may_append(tmp_path: Path, certificates: Certificates):
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", certificates.settings))
    with access_cost._running(file, "on") as side:
        with WaltzClient(side.cluster.connect) as client, pytest.raises(PermissionDenied):
            client.append(b"without a token", partition=0).result()
        load = BenchLoad(side.connect, 64, 1, batch=10, seconds=0.1, in_flight=1, rows=0)
        meter = Meter(side.cluster)
        measured = append_batch(load, meter)
        assert measured.rows > 0
        assert (measured.lost, measured.duplicated, measured.errors) == (0, 0, 0)
        assert meter.spent().keys() == {"zookeeper", "storage", "server", "client"}
