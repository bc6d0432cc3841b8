"""The audit record: encoding, order, outcomes, and the size limit."""

import asyncio
import re
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster_contract import CLUSTER_KEY
from waltz_core import errors
from waltz_core.cluster.change import audit
from waltz_core.cluster.change.audit import AuditEntry
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault

ROOT = "/w"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
times = st.integers(0, 2**53)


def entry(number=1):
    return AuditEntry("ann@host", 1_700_000_000_000 + number, f"cluster verb {number}")


def run_in_cluster(scenario):
    async def run():
        coordinator = MemoryZooKeeper(asyncio.Event).coordinator(ROOT)
        await coordinator.create_cluster(NewCluster("w", 1, CLUSTER_KEY))
        await scenario(coordinator)

    return lambda: asyncio.run(run())


@given(st.builds(AuditEntry, texts, times, texts, texts, st.none() | times))
def test_an_audit_entry_survives_a_round_trip(audit_entry):
    assert AuditEntry.from_bytes(audit_entry.to_bytes()) == audit_entry


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "not valid JSON"),
        (b'{"format":2}', "expected format 1"),
        (b"[]", "expected format 1"),
        (b'{"format":1,"user":1,"begun_ms":1,"command":"","outcome":""}', "'user': expected str"),
        (
            b'{"format":1,"user":"","begun_ms":true,"command":"","outcome":""}',
            "'begun_ms': expected int",
        ),
        (
            b'{"format":1,"user":"","begun_ms":1,"command":"","outcome":"","ended_ms":"x"}',
            "ended_ms",
        ),
    ],
)
def test_invalid_bytes_are_rejected_as_an_entry(data, problem):
    with pytest.raises(errors.BadFormat, match=re.escape(problem)):
        AuditEntry.from_bytes(data)


@given(st.binary(max_size=60))
def test_any_bytes_decode_to_an_entry_or_raise_bad_format(data):
    with pytest.raises(errors.BadFormat):
        AuditEntry.from_bytes(data)


def test_long_texts_are_cut():
    found = AuditEntry.from_bytes(AuditEntry("x" * 9_000, 1, "y" * 9_000).to_bytes())
    assert len(found.user) == len(found.command) == audit.TEXT_CHARACTERS_MAX


@run_in_cluster
async def test_a_change_is_recorded_when_it_begins_and_when_it_ends(coordinator):
    assert await coordinator.audit.read() == []
    first = await coordinator.audit.begin(entry(1))
    second = await coordinator.audit.begin(entry(2))
    assert await coordinator.audit.read() == [entry(1), entry(2)]
    await coordinator.audit.end(first, entry(1), audit.OUTCOME_DONE, 99)
    done, unfinished = await coordinator.audit.read()
    assert (done.command, done.outcome, done.ended_ms) == ("cluster verb 1", "done", 99)
    assert (unfinished.outcome, unfinished.ended_ms) == ("begun", None)
    assert first != second


@run_in_cluster
async def test_only_the_newest_audit_entries_are_kept(coordinator):
    with mock.patch.object(audit, "ENTRIES_MAX", 20):
        for number in range(23):
            await coordinator.audit.begin(entry(number))
        found = await coordinator.audit.read()
    assert found == [entry(number) for number in range(3, 23)]


@run_in_cluster
async def test_a_change_succeeds_although_its_outcome_cannot_be_recorded(coordinator):
    path = await coordinator.audit.begin(entry())
    coordinator._znodes.faults.append(WriteFault.REQUEST_LOST)
    await coordinator.audit.end(path, entry(), audit.OUTCOME_DONE, 5)
    assert await coordinator.audit.read() == [entry()]
