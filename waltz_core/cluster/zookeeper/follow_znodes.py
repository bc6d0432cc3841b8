"""Follows znodes, even if some of them cannot be decoded or contradict each other.

Rule:
    1. One damaged node must not end every server or storage. So a process that has read valid data
       before keeps this data, logs the error, and reads again after a pause. A process that has
       never read valid data cannot work, and exits with the error.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Never, TypeVar

from waltz_core.access.permissions import Permissions
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.errors import BadConfig, BadFormat, BadRequest, WaltzError
from waltz_core.transport.tls import ListenContext

_log = logging.getLogger(__name__)

UNREADABLE_PAUSE_S: Final = 10.0
ViewT = TypeVar("ViewT")


async def follow_despite_bad_nodes(
    follow: Callable[[Callable[[ViewT], None]], Coroutine[Any, Any, Never]],
    callback: Callable[[ViewT], None],
) -> Never:
    """Follow nodes in ZooKeeper like `follow`, but continue after unreadable nodes (rule 1).

    Raises:
        BadFormat, BadRequest: the process has no valid data yet.
    """
    is_known = False

    def on_view(view: ViewT) -> None:
        nonlocal is_known
        is_known = True
        callback(view)

    while True:
        try:
            await follow(on_view)
        except (BadFormat, BadRequest) as error:
            if not is_known:
                raise
            _log.error("zookeeper.znode_unreadable error=%s", error)
        await asyncio.sleep(UNREADABLE_PAUSE_S)


async def follow_permissions(
    coordinator: Coordinator, port: ListenContext | None, name: str
) -> None:
    """Keep a port's permissions up to date; return at once if the port does not identify peers.

    The daemon publishes the revision that it uses under `name` (`membership/applied_revisions.py`).
    While the node is missing, cannot be decoded, or may not be read, the daemon keeps its
    permissions.
    """
    if port is None or port.access is None:
        return
    access = port.access

    def take(permissions: Permissions | None) -> None:
        access.apply(permissions)
        if access.permissions is not None:
            coordinator.set_applied_revision(name, access.permissions.revision)

    while True:  # A daemon without permissions also continues: it rejects all requests (AC 6).
        try:
            await coordinator.follow_permissions(take, _log_publish_error)
        except (BadConfig, BadFormat, BadRequest) as error:
            _log.error("access.permissions_unreadable error=%s", error)
        await asyncio.sleep(UNREADABLE_PAUSE_S)


def _log_publish_error(error: WaltzError) -> None:
    _log.error("access.revision_publish_failed error=%s", error)
