"""The documented table of nodes agrees with the paths."""

from waltz_core.cluster.znodes.paths import ZNODES, ClusterPaths


def test_the_table_names_every_path():
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
        paths.restored_from,
        paths.access,
        paths.every_applied,
        paths.applied("NAME"),
        paths.loads,
        paths.load("ID"),
        paths.reaches,
        paths.reach("ID"),
        paths.audit,
        paths.audit_prefix + "N",
    }
    reserved = {"/R/store/adminLock"}
    assert found | reserved == {f"/{znode.path}" for znode in ZNODES}
