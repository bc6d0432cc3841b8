"""Following znodes: nodes that cannot be decoded, and the permissions of a daemon."""

import asyncio
import logging
import ssl

import pytest

from waltz_core import errors
from waltz_core.access.permissions import Permissions
from waltz_core.cluster.zookeeper import follow_znodes
from waltz_core.transport.admission.port_access import PortAccess
from waltz_core.transport.tls import ListenContext


def test_a_view_is_kept_while_nodes_cannot_be_decoded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error here would stop all servers or storages at once."""
    monkeypatch.setattr(follow_znodes, "UNREADABLE_PAUSE_S", 0.0)
    decode_errors = (
        errors.BadFormat("/w/s_0: rotten"),
        errors.BadRequest("the change for partitions shrink"),
    )
    outcomes, seen = [1, decode_errors[0], 2, decode_errors[1], 3, errors.BadConfig("enough")], []

    async def follow(take):
        while True:
            found = outcomes.pop(0)
            if isinstance(found, Exception):
                raise found
            take(found)

    async def raise_decode_errors(take):
        raise errors.BadFormat("/w/s_0: rotten")

    async def scenario() -> None:
        with pytest.raises(errors.BadConfig, match="enough"):
            await follow_znodes.follow_despite_bad_nodes(follow, seen.append)
        with pytest.raises(errors.BadFormat):  # no view to keep
            await follow_znodes.follow_despite_bad_nodes(raise_decode_errors, seen.append)

    asyncio.run(scenario())
    assert seen == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        f"zookeeper.znode_unreadable error={decode_error}" for decode_error in decode_errors
    ]


class _Coordinator:
    """Calls back with each of the permissions or raises the errors; then fails permanently."""

    def __init__(self, *found: Permissions | errors.WaltzError | None) -> None:
        self._found = list(found)
        self.published: list[tuple[str, int]] = []

    async def follow_permissions(self, take, on_not_published):
        while self._found:
            each = self._found.pop(0)
            if isinstance(each, errors.WaltzError):
                raise each
            take(each)
        raise errors.Unavailable("enough")

    def set_applied_revision(self, name: str, revision: int) -> None:
        self.published.append((name, revision))


def test_a_daemon_publishes_the_revision_that_it_uses() -> None:
    """A missing node and a lower revision change nothing."""
    first, second = (Permissions(each, "ops", 0, bytes(32)) for each in (4, 5))
    coordinator = _Coordinator(None, first, None, second, first, second)
    port = ListenContext(ssl.PROTOCOL_TLS_SERVER)
    port.access = PortAccess("CN=(.+)", is_enforced=False)
    with pytest.raises(errors.Unavailable, match="enough"):
        asyncio.run(follow_znodes.follow_permissions(coordinator, port, "server-1"))
    assert coordinator.published == [("server-1", each) for each in (4, 4, 5, 5, 5)]


def test_unreadable_permissions_do_not_stop_a_daemon(monkeypatch, caplog) -> None:
    """A daemon that has no permissions yet also continues to run, and rejects requests."""
    monkeypatch.setattr(follow_znodes, "UNREADABLE_PAUSE_S", 0.0)
    caplog.set_level(logging.ERROR)
    denied = errors.BadConfig("R/x/access: not permitted")
    permissions = Permissions(4, "ops", 0, bytes(32))
    coordinator = _Coordinator(
        denied, errors.BadFormat("format 2"), permissions, denied, permissions
    )
    port = ListenContext(ssl.PROTOCOL_TLS_SERVER)
    port.access = PortAccess("CN=(.+)", is_enforced=True)
    with pytest.raises(errors.Unavailable, match="enough"):
        asyncio.run(follow_znodes.follow_permissions(coordinator, port, "server-1"))
    assert coordinator.published == [("server-1", 4)] * 2
    assert [record.message for record in caplog.records] == [
        f"access.permissions_unreadable error={each}" for each in (denied, "format 2", denied)
    ]


def test_a_daemon_without_access_control_publishes_no_revision() -> None:
    coordinator = _Coordinator(Permissions(4, "ops", 0, bytes(32)))
    for port in (None, ListenContext(ssl.PROTOCOL_TLS_SERVER)):
        asyncio.run(follow_znodes.follow_permissions(coordinator, port, "server-1"))
    assert coordinator.published == []
