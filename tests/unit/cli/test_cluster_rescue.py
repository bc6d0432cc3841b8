"""Which replica `accept-replicas` takes, and in which order it makes the decision durable."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from waltz_core.cli import cluster_rescue
from waltz_core.cli.cluster_rescue import _chosen
from waltz_core.cluster.model import (
    UNRESOLVED,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.cluster.rebuilding import Log
from waltz_core.errors import BadConfig, BadRequest, Unavailable
from waltz_core.record import BEFORE_FIRST, NO_SESSION

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


@pytest.mark.parametrize(
    ("logs", "is_rolled_back", "is_refused"),
    [
        ({A: log(), B: log(), C: log()}, False, True),
        ({A: log(), B: log(last=50)}, False, True),
        ({A: log(), B: log(), C: log()}, True, False),
        ({A: log(), B: log(is_suspect=True), C: log(is_suspect=True)}, False, False),
        ({A: log(), B: log(is_damaged=True)}, False, False),
        ({A: log()}, False, False),
    ],
)
def test_nothing_is_accepted_where_a_quorum_is_trusted(logs, is_rolled_back, is_refused):
    states = dict.fromkeys((A, B, C), ReplicaState(7, UNRESOLVED))
    view = SimpleNamespace(
        metadata=PartitionMetadata(1, 8, states), marker=PartitionMarker(MarkerState.OPEN)
    )
    heard = SimpleNamespace(view=view, logs=logs, is_rolled_back=is_rolled_back)
    refusal = pytest.raises(BadRequest, match="expected fewer than 2 of 3") if is_refused else None
    with refusal or contextlib.nullcontext():
        cluster_rescue._check_needed(0, heard)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_rebuilding_that_waits_may_be_decided(is_waiting):
    state = ReplicaState(NO_SESSION if is_waiting else 7, BEFORE_FIRST)
    metadata = PartitionMetadata(1, 8, dict.fromkeys((A, B, C), state))
    view = SimpleNamespace(metadata=metadata, marker=PartitionMarker(MarkerState.OPEN))
    heard = SimpleNamespace(view=view, logs={A: log(), B: log(last=50)}, is_rolled_back=False)
    if is_waiting:
        assert cluster_rescue._check_needed(0, heard) is None
    else:
        with pytest.raises(BadRequest, match="nothing was changed"):
            cluster_rescue._check_needed(0, heard)


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
