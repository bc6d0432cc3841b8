"""Schedules of seeds that found a fault of ours which no told story shows: kept, and shortened."""

from pathlib import Path

import pytest

from waltz_core.replication.recovery import Recovery
from waltz_core.sim.run import run
from waltz_core.sim.schedule import Schedule

pytestmark = pytest.mark.sim
KEPT = Path(__file__).parent / "kept"


def test_a_session_that_zookeeper_has_forgotten_is_not_overruled_by_an_older_log(monkeypatch):
    """What was told as lost in it lies on a replica that it had left out, and stays lost."""
    schedule = Schedule.from_json((KEPT / "510002228.json").read_text(encoding="utf-8"))
    assert run(schedule).is_good
    monkeypatch.setattr(Recovery, "objection", lambda _self, _replica, _answer: None)
    assert run(schedule).rule == "OutcomeTruth"
