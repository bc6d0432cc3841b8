"""The output of `check-connectivity` and `server list`."""

from waltz_core.cli.cluster.cluster_connectivity import THIS_COMMAND, connection_checks_of_server
from waltz_core.cluster.change.replica_steps import ranges_of_numbers

A, B, C = "a:1", "b:1", "c:1"


def test_a_storage_that_a_server_does_not_know_yet_counts_as_unreachable():
    found = connection_checks_of_server("s:1", [A, B], {A: True, C: False})
    assert [(each.origin, each.target, each.is_reached) for each in found] == [
        (THIS_COMMAND, "server s:1", True),
        ("server s:1", f"storage {A}", True),
        ("server s:1", f"storage {B}", False),
        ("server s:1", f"storage {C}", False),
    ]
    assert found[2].reason == "the server does not connect to this storage yet"


def test_numbers_are_printed_in_the_form_that_commands_accept():
    assert ranges_of_numbers([]) == "-"
    assert ranges_of_numbers([3]) == "3"
    assert ranges_of_numbers([9, 0, 1, 2, 4, 5]) == "0-2,4-5,9"
