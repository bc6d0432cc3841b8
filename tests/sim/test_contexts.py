"""Contexts of an application that unsubscribes and subscribes again use no outdated view."""

import pytest

from tests.sim.broken_client import log_mark_claimed_while_unsubscribed
from tests.sim.switches import broken
from waltz_sim.cluster.simulated_contexts import ContextClient
from waltz_sim.run import run
from waltz_sim.schedule import Schedule, Setup

pytestmark = pytest.mark.sim
SETUP = Setup(clients=1, context_clients=2, think_ms=5, keys=2, steps_max=5_000)


def schedule(seed):
    return Schedule(seed, SETUP)


def test_contexts_with_unsubscribed_feeds_and_restarts_break_no_guarantee():
    result = run(schedule(4))
    assert result.is_good, result.text
    assert result.counts["feed unsubscribed"] > 2
    assert result.counts["context client restarted"] > 0
    assert result.counts["checked transactions"] > 50


def test_a_claimed_mark_above_the_mark_of_the_view_is_detected():
    with broken(log_mark_claimed_while_unsubscribed.__name__):
        assert run(schedule(3)).rule == "ClaimedMark"


def test_double_spending_is_detected_from_the_log_alone(monkeypatch):
    """Decisions from an old view are visible in the log, even if the claimed mark is correct."""
    monkeypatch.setattr(ContextClient, "check_claimed_mark", lambda *_: None)
    with broken(log_mark_claimed_while_unsubscribed.__name__):
        rules = {run(schedule(seed)).rule for seed in range(4)}
    assert rules & {"LockSerial", "Serializable"}
    assert rules <= {"LockSerial", "Serializable", None}
