"""Which replica `accept-replicas` takes, and in which order it makes the decision durable."""

import asyncio
from types import SimpleNamespace

import pytest

from waltz_core.cli import cluster_rescue
from waltz_core.cli.cluster_rescue import _chosen
from waltz_core.cluster.rebuilding import Log
from waltz_core.errors import BadConfig, Unavailable

A, B, C = "10.0.0.1:5280", "10.0.0.2:5280", "10.0.0.3:5280"


def log(session=7, last=90, *, is_suspect=False, is_damaged=False):
    return Log(session, last, is_suspect, is_damaged)


@pytest.mark.parametrize("first", [A, B])
def test_of_equal_logs_the_one_that_can_be_believed_is_taken(first):
    logs = {A: log(is_suspect=True), B: log(), C: log(last=50)}
    ordered = {each: logs[each] for each in (first, *logs)}
    assert _chosen(None, 0, ordered) == B


def test_the_one_that_has_most_is_taken_and_a_damaged_one_last():
    assert _chosen(None, 0, {A: log(8, 10, is_suspect=True), B: log(7, 90)}) == A
    assert _chosen(None, 0, {A: log(7, 91, is_suspect=True), B: log(7, 90)}) == A
    assert _chosen(None, 0, {A: log(8, 99, is_damaged=True), B: log(7, 90)}) == B


def test_who_is_named_is_taken_if_he_was_heard():
    assert _chosen(B, 0, {A: log(), B: log(last=1)}) == B
    with pytest.raises(BadConfig, match="was not heard"):
        _chosen(C, 0, {A: log()})
    with pytest.raises(Unavailable, match="no replica answers"):
        _chosen(None, 0, {})


class Died(Exception):
    """The command ends here."""


def test_a_command_that_dies_at_zookeeper_has_marked_no_replica():
    """A marked replica is trusted: under the old metadata it would count with what it has lost."""
    marked = []

    class Link:
        async def set_mark(self, *_):
            marked.append(A)

    class Coordinator:
        async def write_partition(self, *_):
            assert not marked
            raise Died

    metadata = SimpleNamespace(generation=1)
    heard = SimpleNamespace(
        session=cluster_rescue.Session(8, bytes(16)),
        view=SimpleNamespace(metadata=metadata, versions=None),
        told={A: None},
        links={A: Link()},
        logs={A: log()},
    )
    command = SimpleNamespace(coordinator=Coordinator())
    with pytest.raises(Died):
        asyncio.run(cluster_rescue._declare(command, 0, heard, A))
    assert not marked
