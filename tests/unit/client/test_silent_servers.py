"""The log lines of a client about silent servers."""

import asyncio
import logging

import pytest

from tests.loops import run_in_virtual_time
from waltz_core.client.links.outage_log import LOG_INTERVAL_S
from waltz_core.client.links.silent_servers import SilentServers

SERVER = "host-1:15180"


class Scenario:
    """`SilentServers` with a clock of the test, and its log lines."""

    def __init__(self, caplog):
        self.zookeeper_checks = 0
        self.silent_servers = SilentServers(self._count_check)
        self.now_s = 100.0
        self._caplog = caplog
        caplog.set_level(logging.INFO, "waltz_core.client.links.silent_servers")

    def _count_check(self):
        self.zookeeper_checks += 1

    def at(self, now_s, call, *args, **named):
        """Make a call at a given time; return the log lines of the call as (level, text)."""
        self._caplog.clear()

        async def run():
            asyncio.get_running_loop().time = lambda: now_s
            call(*args, **named)

        run_in_virtual_time(run())
        return [(record.levelname, record.getMessage()) for record in self._caplog.records]


@pytest.fixture
def scenario(caplog):
    return Scenario(caplog)


def test_a_silent_server_is_reported_once_and_zookeeper_is_checked(scenario):
    silent_servers = scenario.silent_servers
    assert scenario.at(101, silent_servers.on_silence_detected, SERVER, 1, since_s=99.5) == [
        ("WARNING", f"server.silent server={SERVER} silent_s=1.5")
    ]
    for now_s in range(102, 110):
        assert (
            scenario.at(now_s, silent_servers.on_silence_detected, SERVER, 1, since_s=now_s - 1)
            == []
        )
    assert scenario.zookeeper_checks == 9
    assert scenario.at(300, silent_servers.on_data_received, SERVER, 1) == [
        ("INFO", f"server.responsive server={SERVER} after_s=200.5")
    ]
    assert scenario.at(301, silent_servers.on_data_received, SERVER, 1) == []


def test_a_closed_silent_connection_is_reported_with_the_reason(scenario):
    scenario.at(101, scenario.silent_servers.on_silence_detected, SERVER, 1, since_s=100)
    assert scenario.at(104, scenario.silent_servers.on_wait_ended, SERVER, 1, "reset by peer") == [
        ("INFO", f"server.silent_until_closed server={SERVER} after_s=4.0 reason=reset by peer")
    ]
    assert scenario.at(105, scenario.silent_servers.on_wait_ended, SERVER, 1, "reset by peer") == []


def test_a_server_that_was_not_silent_is_not_reported(scenario):
    assert scenario.at(100, scenario.silent_servers.on_data_received, SERVER, 1) == []
    assert scenario.at(100, scenario.silent_servers.on_wait_ended, SERVER, 1, "closed") == []


def test_a_server_is_silent_only_while_all_its_connections_are_silent(scenario):
    silent_servers = scenario.silent_servers
    assert scenario.at(101, silent_servers.on_silence_detected, SERVER, 1, since_s=100)
    assert scenario.at(102, silent_servers.on_silence_detected, SERVER, 2, since_s=101) == []
    assert scenario.at(103, silent_servers.on_data_received, SERVER, 3) == [], (
        "the server was not silent on this connection"
    )
    assert scenario.at(104, silent_servers.on_wait_ended, SERVER, 1, "closed") == []
    assert scenario.at(105, silent_servers.on_data_received, SERVER, 2) == [
        ("INFO", f"server.responsive server={SERVER} after_s=5.0")
    ]
    assert scenario.at(106, silent_servers.on_silence_detected, "host-2:15180", 1, since_s=105), (
        "another server"
    )


def test_repeated_failures_are_reported_at_intervals(scenario):
    reported = []
    for now_s in range(100, 100 + 2 * int(LOG_INTERVAL_S) + 1, 5):
        if scenario.at(
            now_s, scenario.silent_servers.on_silence_detected, SERVER, 0, since_s=now_s - 1
        ):
            reported.append(now_s)
        scenario.at(now_s + 1, scenario.silent_servers.on_wait_ended, SERVER, 0, "no hello")
    assert reported == [100, 100 + LOG_INTERVAL_S, 100 + 2 * LOG_INTERVAL_S]
