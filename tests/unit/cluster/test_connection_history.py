"""The times of the last disconnection from ZooKeeper and of the last reconnection."""

import asyncio

from waltz_core.cluster.znodes.connection_history import OUTAGE_MS_MIN, ConnectionHistory
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper


def test_the_time_since_a_disconnection_or_reconnection_is_measured():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    history = ConnectionHistory(session)
    zookeeper.advance(1_000)
    assert (history.disconnected_ms, history.reconnected_ms) == (0, None)  # rule 2
    session.suspend()
    zookeeper.advance(300)
    session.expire()  # no effect: the session is already disconnected
    zookeeper.advance(OUTAGE_MS_MIN)
    assert (history.disconnected_ms, history.reconnected_ms) == (300 + OUTAGE_MS_MIN, None)
    session.resume()
    zookeeper.advance(70)
    assert (history.disconnected_ms, history.reconnected_ms) == (0, 70)


def test_a_short_disconnection_is_not_recorded():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    history = ConnectionHistory(session)
    session.suspend()
    zookeeper.advance(OUTAGE_MS_MIN - 1)
    session.resume()
    assert (history.disconnected_ms, history.reconnected_ms) == (0, None)


def test_without_any_connection_zookeeper_counts_as_unavailable_from_the_start():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    session.suspend()
    zookeeper.advance(50)
    history = ConnectionHistory(session)
    zookeeper.advance(600)
    assert history.disconnected_ms == 600
    session.resume()
    assert history.reconnected_ms == 0
