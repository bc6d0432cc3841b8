"""The output of commands that show replicas."""

import struct

import pytest

from waltz_core.administration.member_queries import damaged_record_count
from waltz_core.cli.storage.storage_views import _replica_row, replica_state_text
from waltz_core.wire.admin_messages import ReplicaResponse

LARGE_ID = 1 << 40  # larger than an int32


def replica(**changed):
    fields = {
        "sequence": 1,
        "partition_id": 3,
        "is_held": True,
        "is_available": True,
        "is_served": True,
        "reason": "",
        "is_suspect": False,
        "promised": LARGE_ID + 2,
        "last_session": LARGE_ID + 1,
        "low_water_mark": LARGE_ID,
        "synced_max": LARGE_ID + 9,
        "chain": bytes(16),
        "damaged": struct.pack(">4q", 5, 7, LARGE_ID, LARGE_ID),
    }
    return ReplicaResponse(**(fields | changed))


def test_marks_of_any_length_are_not_truncated():
    row = _replica_row("a:1", replica())
    assert (row.low_water_mark, row.last) == (LARGE_ID, LARGE_ID + 9)
    assert (row.session, row.promised) == (LARGE_ID + 1, LARGE_ID + 2)
    assert row.damaged == damaged_record_count(replica()) == 4


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "online"),
        ({"is_held": False}, "not held"),
        ({"is_served": False}, "not served"),
        ({"is_available": False, "is_suspect": True}, "offline, suspect"),
        ({"reason": "no slot"}, "online, unreadable: no slot"),
    ],
)
def test_the_state_of_a_replica_is_described(changed, state):
    assert replica_state_text(replica(**changed)) == state
