"""The creation of a cluster: invalid clusters, and the order of the writes."""

from uuid import UUID

import pytest

from waltz_core.cluster.change.creation import (
    STEP_OPERATIONS_MAX,
    NewCluster,
    NewStorage,
    creation_steps,
)
from waltz_core.cluster.znodes.interface import NO_NODE, CreateNode, SetNode
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.errors import BadConfig

KEY = UUID(int=1)
STORAGE = NewStorage("a:1", 2, 0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "name of the cluster is empty"),
        ({"partition_count": 0}, "of at least 1, found 0"),
        ({"partition_count": 2**31}, "of at least 1"),
        ({"storages": (STORAGE, STORAGE)}, "a:1 is named twice"),
        ({"storages": (NewStorage("a", 2, 0),)}, "'a' has no port"),
        ({"storages": (NewStorage("a:1", 0, 0),)}, "admin port in 1..65535, found 0"),
        ({"storages": (NewStorage(".a:1", 2, 0),)}, "'.a', which is not a valid host.* Hint: "),
        ({"assignment": {"b:1": (0,)}}, "b:1, which is not a storage"),
        ({"storages": (STORAGE,), "assignment": {"a:1": (4,)}}, "expected partitions in 0..3"),
        ({"storages": (STORAGE,), "assignment": {"a:1": (-1,)}}, "expected partitions in 0..3"),
    ],
)
def test_an_invalid_cluster_is_rejected(fields, problem):
    good = {"name": "n", "partition_count": 4, "cluster_key": KEY}
    with pytest.raises(BadConfig, match=problem.replace("..", r"\.\.")):
        NewCluster(**{**good, **fields})


def test_a_new_cluster_may_have_a_given_replica_assignment():
    storages = (STORAGE, NewStorage("b:1", 2, 1))
    new = NewCluster("n", 4, KEY, storages, {"b:1": (1, 3)})
    assert new.replica_assignments.partitions == {"a:1": (), "b:1": (1, 3)}


@pytest.mark.parametrize(
    ("partition_count", "root_version"),
    [(1, NO_NODE), (985, NO_NODE), (986, 0), (987, NO_NODE), (988, 7), (2000, NO_NODE)],
)
def test_the_root_znode_gets_its_data_last_and_the_operations_of_each_step_are_limited(
    partition_count, root_version
):
    paths = ClusterPaths("/w")
    steps = creation_steps(paths, NewCluster("n", partition_count, KEY), root_version=root_version)
    assert all(0 < len(step) <= STEP_OPERATIONS_MAX for step in steps)
    operations = [operation for step in steps for operation in step]
    assert isinstance(operations[-1], SetNode)
    assert (operations[-1].path, operations[-1].version) == ("/w", max(root_version, 0))
    created_paths = [
        operation.path for operation in operations if isinstance(operation, CreateNode)
    ]
    assert ("/w" in created_paths) == (root_version == NO_NODE)
    assert len(created_paths) == len(set(created_paths)) == len(operations) - 1
    assert sum(path.startswith("/w/x/partition/") for path in created_paths) == partition_count
    for path in created_paths:
        parent = path.rpartition("/")[0]
        assert parent in ("", "/w") or created_paths.index(parent) < created_paths.index(path)
