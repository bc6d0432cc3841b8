"""Replication's machines over the real storage service, its files, and a crash now and then."""

import pytest

from tests.sim.real_storage import RealStorage
from tests.sim.replication_world import FAULTS, Sim

pytestmark = pytest.mark.sim
# What the files may lose is not this test's business; their processes may die at any time.
OUT = ("roll_back", "rot", "fsync", "power", "all_power")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_the_real_storage_is_what_replication_takes_it_for(seed, tmp_path):
    storage_class = type("Here", (RealStorage,), {"directory": tmp_path})
    faults = {name: name not in OUT for name in FAULTS}
    sim = Sim(seed, faults=faults, storage_class=storage_class)
    sim.run(duration_ms=1500)
    logs = {tuple(sim.storages[name].records()) for name in sim.assigned}
    assert len(logs) == 1
    assert list(logs.pop()) == sim.storages[sim.assigned[0]].model.payloads()
    for storage in sim.storages.values():
        storage.engine.abandon()
