"""The setup of a daemon's process before it runs."""

import resource

import pytest

from waltz_core.cli import daemon_command


@pytest.mark.parametrize(
    ("hard", "connections_max", "is_logged"),
    [(64, 10_000, True), (10_050, 10_000, True), (20_000, 10_000, False), (-1, 10_000, False)],
)
def test_too_few_open_files_are_reported(monkeypatch, caplog, hard, connections_max, is_logged):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    daemon_command.raise_open_files_limit(connections_max)
    assert (f"process.open_files_limit_low limit={hard}" in caplog.text) == is_logged
