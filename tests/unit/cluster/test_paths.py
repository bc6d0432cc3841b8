"""The documented table of nodes agrees with the paths."""

import pytest

from waltz_core.cluster.znodes.paths import (
    ABOVE_ROOT_ZNODE,
    UNKNOWN_ZNODE,
    ZNODES,
    ClusterPaths,
    NodeReaders,
    znode_at,
)


def test_every_path_is_in_the_table():
    paths = ClusterPaths("/R")
    found = {
        paths.root,
        paths.ids,
        paths.client_ids,
        paths.server_ids,
        paths.servers,
        paths.descriptor_prefix + "N",
        paths.store,
        paths.partitions,
        paths.partition("P"),
        paths.replica_assignment,
        paths.groups,
        paths.connections,
        paths.extensions,
        paths.markers,
        paths.marker("P"),
        paths.storage_ids,
        paths.storage_id("HOST:PORT"),
        paths.writes,
        paths.write("W"),
        f"{paths.write('W')}/T",
        paths.issued_client_ids,
        paths.restore_sources,
        paths.access,
        paths.applied_revisions,
        paths.applied_revision("NAME"),
        paths.loads,
        paths.load("ID"),
        paths.reach_reports,
        paths.reach_report("ID"),
        paths.audit,
        paths.audit_prefix + "N",
    }
    reserved = {"/R/store/adminLock"}
    assert found | reserved == {f"/{znode.path}" for znode in ZNODES}


def test_the_readers_of_znodes_match_decision_048():
    """Decision 048, "ZooKeeper"."""
    public = {"R", "R/ids", "R/serverDescriptors", "R/serverDescriptors/s_N", "R/store"}
    public |= {"R/store/group", "R/x", "R/x/restored"}
    administrators = {"R/x/audit", "R/x/audit/e_N"}
    members = {"R/x": "cr", "R/x/access": "r"} | dict.fromkeys(administrators, "")
    for row in ZNODES:
        expected = NodeReaders.PUBLIC if row.path in public else NodeReaders.MEMBERS
        if row.path in administrators:
            expected = NodeReaders.ADMINISTRATORS
        assert row.readers is expected, row.path
        assert row.members == members.get(row.path, "crwd"), row.path


@pytest.mark.parametrize("root", ["/waltz", "/R", "/x/audit", "/store"])
def test_each_path_is_found_in_the_table(root):
    """The root may have the name of another node."""
    names = {"s_N": "s_0000000012", "e_N": "e_0000000012", "P": "7", "ID": "3", "W": "nightly-4"}
    names |= {"T": "12", "HOST:PORT": "[::1]:5280"}
    for row in ZNODES:
        path = "/".join(names.get(part, part) for part in row.path.split("/")[1:])
        assert znode_at(root, f"{root}/{path}".rstrip("/")) is row
    paths = ClusterPaths(root)
    assert znode_at(root, paths.audit_prefix).path == "R/x/audit/e_N"
    assert znode_at(root, paths.descriptor_prefix).path == "R/serverDescriptors/s_N"


@pytest.mark.parametrize("path", ["R/x/later", "R/x/later/s_1", "R/later", "R/x/restored/1"])
def test_an_unknown_node_is_readable_by_members_only(path):
    assert znode_at("/R", f"/{path}") is UNKNOWN_ZNODE


@pytest.mark.parametrize("path", ["/", "/waltz", "/waltz/pay", "/waltz/payments2"])
def test_a_node_outside_the_root_does_not_belong_to_the_cluster(path):
    assert znode_at("/waltz/payments", path) is ABOVE_ROOT_ZNODE
