"""Connections that come before a storage knows its partitions."""

import asyncio
import itertools

from waltz_core.storage.process.storage_daemon import StorageDaemon


class Link:
    """A connection; notes when it is admitted."""

    def __init__(self, name, admitted, *, is_closed=False):
        self.name = name
        self.is_closed = is_closed
        self._admitted = admitted

    def start(self, *_):
        self._admitted.append(self.name)


def test_early_connections_are_admitted_in_order_and_closed_ones_never():
    """A later connection of one server has the higher number, and supersedes the earlier one."""
    admitted = []
    daemon = StorageDaemon.__new__(StorageDaemon)
    daemon._is_assigned = asyncio.Event()
    daemon._early, daemon._links, daemon._numbers = [], {}, itertools.count(1)
    first, dead, second = (
        Link("first", admitted),
        Link("dead", admitted, is_closed=True),
        Link("second", admitted),
    )
    for link in (first, dead, second):
        daemon._accept(link)
    assert admitted == []
    daemon._looked()
    assert admitted == ["first", "second"]
    assert list(daemon._links.values()) == [first, second]
