"""Every node that a running 0.13 cluster wrote is decoded and encoded again."""

import json
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from waltz_core.cluster.znodes import model
from waltz_core.records.record import (
    Generation,
    PartitionId,
    ReplicaId,
    ServerId,
    SessionId,
    TransactionId,
)

ENTRIES = json.loads((Path(__file__).parent / "zookeeper" / "zookeeper.json").read_text())
CAPTURED = [entry for entry in ENTRIES if entry.get("decoded")]
EMPTY = [entry for entry in ENTRIES if "decoded" in entry and entry["decoded"] is None]
VECTORS = {entry["name"]: bytes.fromhex(entry["hex"]) for entry in ENTRIES if "path" not in entry}


def partition_of(path: str) -> PartitionId:
    return PartitionId(int(path.rpartition("/")[2]))


def cluster_params(meaning: dict, _path: str) -> model.ClusterParams:
    return model.ClusterParams(meaning["name"], meaning["numPartitions"])


def partition_assignment(meaning: dict, _path: str) -> model.PartitionAssignment:
    servers = {
        server["serverId"]: {p["partitionId"]: p["generation"] for p in server["partitions"]}
        for server in meaning["servers"]
    }
    return model.PartitionAssignment(meaning["cversion"], meaning["numPartitions"], servers)


def server_descriptor(meaning: dict, _path: str) -> model.ServerDescriptor:
    preferred = tuple(meaning["preferred"])
    return model.ServerDescriptor(meaning["serverId"], meaning["host"], meaning["port"], preferred)


def store_params(meaning: dict, _path: str) -> model.StoreParams:
    return model.StoreParams(UUID(meaning["key"]), meaning["numPartitions"])


def replica_assignments(meaning: dict, _path: str) -> model.ReplicaAssignments:
    return model.ReplicaAssignments(
        {replica["storage"]: tuple(replica["partitions"]) for replica in meaning["replicas"]}
    )


def group_descriptor(meaning: dict, _path: str) -> model.GroupDescriptor:
    return model.GroupDescriptor(dict(meaning["entries"]))


def connection_metadata(meaning: dict, _path: str) -> model.ConnectionMetadata:
    return model.ConnectionMetadata(dict(meaning["entries"]))


def partition_metadata(meaning: dict, path: str) -> model.PartitionMetadata:
    states = {}
    for state in meaning["replicaStates"]:
        assert state["replicaId"]["partitionId"] == partition_of(path)
        states[state["replicaId"]["storage"]] = model.ReplicaState(
            state["sessionId"], state["closingHighWaterMark"]
        )
    return model.PartitionMetadata(meaning["generation"], meaning["sessionId"], states)


MEANINGS: dict[str, Callable[[dict, str], object]] = {
    "ClusterParams": cluster_params,
    "PartitionAssignment": partition_assignment,
    "ServerDescriptor": server_descriptor,
    "StoreParams": store_params,
    "ReplicaAssignments": replica_assignments,
    "GroupDescriptor": group_descriptor,
    "ConnectionMetadata": connection_metadata,
    "PartitionMetadata": partition_metadata,
    "int": lambda meaning, _path: meaning["value"],
}


def decode(kind: str, data: bytes, path: str) -> object:
    if kind == "int":
        return model.decode_id_counter(data)
    if kind == "PartitionMetadata":
        return model.PartitionMetadata.from_bytes(data, partition_of(path))
    return getattr(model, kind).from_bytes(data)


def encode(value: object, path: str) -> bytes:
    if isinstance(value, int):
        return model.encode_id_counter(value)
    if isinstance(value, model.PartitionMetadata):
        return value.to_bytes(partition_of(path))
    return value.to_bytes()


def test_the_golden_file_has_znodes_of_every_kind():
    assert len(CAPTURED) == 35
    assert len(VECTORS) == 12
    assert {entry["decoded"]["kind"] for entry in CAPTURED} == set(MEANINGS)
    assert all(entry["hex"] is None for entry in EMPTY)


@pytest.mark.parametrize("entry", CAPTURED, ids=lambda entry: entry["name"])
def test_captured_nodes_are_decoded_correctly_and_encoded_to_the_same_bytes(entry):
    data, path, meaning = bytes.fromhex(entry["hex"]), entry["path"], entry["decoded"]
    value = decode(meaning["kind"], data, path)
    expected = MEANINGS[meaning["kind"]](meaning, path)
    assert value == expected
    assert encode(expected, path) == data
    assert encode(value, path) == data


P = PartitionId
H = ReplicaId("h:1")
VALUES: dict[str, object] = {
    "ClusterParams(name=jwcluster,numPartitions=4)": model.ClusterParams("jwcluster", 4),
    "PartitionAssignment empty": model.PartitionAssignment(),
    "PartitionAssignment(cversion=5,np=3,{1:[(0,1),(2,3)],2:[(1,4)]})": model.PartitionAssignment(
        5,
        3,
        {
            ServerId(1): {P(0): Generation(1), P(2): Generation(3)},
            ServerId(2): {P(1): Generation(4)},
        },
    ),
    "ServerDescriptor(7,host-a:8000,[1,2])": model.ServerDescriptor(
        ServerId(7), "host-a", 8000, (P(1), P(2))
    ),
    "StoreParams(key=00112233-4455-6677-8899-aabbccddeeff,np=4)": model.StoreParams(
        UUID("00112233-4455-6677-8899-aabbccddeeff"), 4
    ),
    "ReplicaAssignments({h:1 -> [0,2]})": model.ReplicaAssignments({H: (P(0), P(2))}),
    "ReplicaAssignments empty": model.ReplicaAssignments(),
    "GroupDescriptor({h:1 -> 5})": model.GroupDescriptor({H: 5}),
    "ConnectionMetadata({h:1 -> 55281})": model.ConnectionMetadata({H: 55281}),
    "PartitionMetadata EMPTY": model.EMPTY_METADATA,
    "PartitionMetadata(gen=3,session=9,{(2,h:1): session 9 UNRESOLVED})": model.PartitionMetadata(
        Generation(3), SessionId(9), {H: model.ReplicaState(SessionId(9))}
    ),
    "PartitionMetadata(gen=3,session=9,{(2,h:1): session 8 closing 77})": model.PartitionMetadata(
        Generation(3), SessionId(9), {H: model.ReplicaState(SessionId(8), TransactionId(77))}
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_decode_and_encode_to_their_bytes(name):
    value, data = VALUES[name], VECTORS[name]
    assert encode(value, "/r/store/partition/2") == data
    assert decode(type(value).__name__, data, "/r/store/partition/2") == value


# Nodes of this version: released bytes, which must never be edited.
CURRENT_NODES = {
    "0101ffffffffffffffff00000000000000000000000000000000": model.PartitionMarker(
        model.MarkerState.NEW
    ),
    "01020000000000000005000102030405060708090a0b0c0d0e0f": model.PartitionMarker(
        model.MarkerState.OPEN, SessionId(5), bytes(range(16))
    ),
    "0100112233445566778899aabbccddeeff": model.StorageRegistration(
        UUID("00112233-4455-6677-8899-aabbccddeeff")
    ),
}


@pytest.mark.parametrize("text", CURRENT_NODES)
def test_nodes_of_this_version_keep_their_bytes(text):
    value = CURRENT_NODES[text]
    assert value.to_bytes() == bytes.fromhex(text)
    assert type(value).from_bytes(bytes.fromhex(text)) == value
