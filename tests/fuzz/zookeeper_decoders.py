"""Decoders of znodes, and of backup files, which contain znodes."""

import json
from functools import partial
from pathlib import Path
from uuid import UUID

from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import TEXT_WORDS
from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry, encode_with_crc
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.cluster.change.audit import AuditEntry
from waltz_core.cluster.change.backup import Backup, PartitionBackup
from waltz_core.cluster.membership.loads import PartitionLoad, decode_loads, encode_loads
from waltz_core.cluster.membership.reachability import ReachReport
from waltz_core.cluster.write_registry import TaskState, WriteState, WriteWithTasks
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.restore_sources import RestoreSources
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records import strict_json
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN

GOLDEN = Path(__file__).parents[1] / "golden" / "zookeeper" / "zookeeper.json"
KEY = UUID(int=7)
PARTITION = 2
CHAIN = b"c" * 16


def captured_nodes(kind: str) -> list[bytes]:
    """Return the nodes of a kind that Waltz 0.13 has written."""
    entries = json.loads(GOLDEN.read_text())
    return [
        bytes.fromhex(entry["hex"])
        for entry in entries
        if (entry.get("decoded") or {}).get("kind") == kind
    ]


def decode_node(value_class, data: bytes) -> None:
    """Decode a binary znode, and check that it is encoded to the same bytes."""
    found = value_class.from_bytes(data)
    assert value_class.from_bytes(found.to_bytes()) == found


def decode_metadata(data: bytes) -> None:
    found = model.PartitionMetadata.from_bytes(data, PARTITION)
    again = found.to_bytes(PARTITION)
    assert model.PartitionMetadata.from_bytes(again, PARTITION) == found


def decode_id(data: bytes) -> None:
    assert model.encode_id_counter(model.decode_id_counter(data)) == data


def metadata() -> list[bytes]:
    states = {"h:1": model.ReplicaState(9), "h:2": model.ReplicaState(8, 77)}
    return [
        model.PartitionMetadata(3, 9, states).to_bytes(PARTITION),
        model.EMPTY_METADATA.to_bytes(PARTITION),
    ]


def markers() -> list[bytes]:
    archived = model.ArchivedMark(9, CHAIN, 1_700_000_000_000, 0, 0xFFFFFFFF, "k/0/manifests/1")
    nonce = bytes(range(16))
    return [
        model.PartitionMarker(model.MarkerState.NEW).to_bytes(),
        model.PartitionMarker(model.MarkerState.OPEN, 5, nonce, archived).to_bytes(),
    ]


def decode_json_node(from_bytes, to_bytes, data: bytes) -> None:
    """Decode a JSON znode, and check that the value is the same after a round trip."""
    found = from_bytes(data)
    try:
        again = to_bytes(found)
    except ValueError:  # a lone surrogate, which is valid in JSON but not in UTF-8
        return
    found = from_bytes(again)
    assert from_bytes(to_bytes(found)) == found


def permissions() -> list[bytes]:
    full = Permissions(
        revision=17,
        changed_by="ops-anna",
        changed_ms=1_795_867_200_000,
        client_key=bytes(range(32)),
        accepts_0_13=True,
        groups={"servers": ("s1.example", "s2.example"), "empty": ()},
        grants=(
            Grant("servers", True, AccessVerb.REPLICATE, None),
            Grant("spark-etl", False, AccessVerb.APPEND, ((0, 3), (7, 7))),
            Grant("anonymous", False, AccessVerb.READ, ((5, 5),)),
        ),
        limits={
            "spark-etl": PrincipalLimits(50_000_000, 20_000, 200, 50),
            "*": PrincipalLimits(connections=100),
        },
        tokens={"ab" * 32: StoredToken("t3", "spark-etl", 1_803_643_200_000)},
    )
    return [
        access_node.encode_permissions(full),
        access_node.encode_permissions(Permissions(1, "a", 0, bytes(32))),
    ]


# ---------------------------------------------------------------------------------------------
# backups


def saved_manifest() -> SavedManifest:
    entries = [
        ObjectEntry(f"k/0/objects/{first}", first, first + 4, CHAIN, 1, 2, 3, 4, 5)
        for first in (0, 5)
    ]
    manifest = Manifest(KEY.bytes, 0, 0, 0, -1, GENESIS_CHAIN)
    for entry in entries:
        manifest = manifest.with_object(entry)
    page = ManifestPage(tuple(entries[:1]))
    data = manifest.with_page("k/0/manifests/page", page).to_bytes()
    return SavedManifest("m", crc32(data), data, (page.to_bytes(),))


def backups() -> list[bytes]:
    task = TaskState(5, 2, ("run",))
    write = WriteWithTasks(WriteState({0: 3}, 1_000, {"rows": 1}), {4: task})
    restored = RestoreSources({"ab" * 16: {0: 5, 1: -1}})
    nothing = PartitionBackup(-1, -1, -1, None)
    full = (PartitionBackup(7, 60, 3, saved_manifest()), nothing)
    return [
        Backup("shop", KEY, 1, 41, full, {"monday": write}, restored).to_bytes(),
        Backup("shop", KEY, 1, 41, (nothing,)).to_bytes(),
    ]


def sealed_frame(data: bytes) -> bytes:
    """Return the bytes of `manifest.encode_with_crc` with the CRC of their rest."""
    _, _, body = data.partition(b"\n")
    return b"%08x\n%s" % (crc32(body), body)


def sealed_backup(data: bytes) -> bytes:
    """Return a backup with the CRCs of its manifests and their pages, and of itself."""
    try:
        values = strict_json.from_json(data.partition(b"\n")[2])
        for partition in values["partitions"]:
            files = partition.get("manifest") or {"pages": [], "head": ""}
            pages = [sealed_frame(page.encode()) for page in files["pages"]]
            head = strict_json.from_json(files["head"].encode().partition(b"\n")[2])
            for stated, page in zip(head["pages"], pages, strict=False):
                stated["file_crc"] = crc32(page)
            files["pages"] = [page.decode() for page in pages]
            files["head"] = encode_with_crc(head).decode()
            files["crc"] = crc32(files["head"].encode())
        return encode_with_crc(values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return sealed_frame(data)


def decode_backup(data: bytes) -> None:
    found = Backup.from_bytes(data, "f")
    assert Backup.from_bytes(found.to_bytes(), "f") == found


def _binary(name: str, value_class, *values) -> Decoder:
    def seeds() -> list[bytes]:
        return [value.to_bytes() for value in values] + captured_nodes(value_class.__name__)

    return Decoder(name, partial(decode_node, value_class), (BadFormat,), seeds)


def _json(name: str, value_class, *values) -> Decoder:
    decode = partial(decode_json_node, value_class.from_bytes, value_class.to_bytes)
    return Decoder(
        name, decode, (BadFormat,), lambda: [value.to_bytes() for value in values], words=TEXT_WORDS
    )


DECODERS = (
    _binary("cluster-params", model.ClusterParams, model.ClusterParams("shop", 4)),
    _binary(
        "server-descriptor", model.ServerDescriptor, model.ServerDescriptor(7, "h", 80, (1, 2))
    ),
    _binary(
        "partition-assignment",
        model.PartitionAssignment,
        model.PartitionAssignment(5, 3, {1: {0: 1, 2: 3}, 2: {1: 4}}),
    ),
    _binary("store-params", model.StoreParams, model.StoreParams(KEY, 4)),
    _binary(
        "replica-assignments", model.ReplicaAssignments, model.ReplicaAssignments({"h:1": (0, 2)})
    ),
    _binary("group-descriptor", model.GroupDescriptor, model.GroupDescriptor({"h:1": 5})),
    _binary("connection-metadata", model.ConnectionMetadata, model.ConnectionMetadata({"h:1": 9})),
    _binary("storage-registration", model.StorageRegistration, model.StorageRegistration(KEY)),
    Decoder("partition-marker", partial(decode_node, model.PartitionMarker), (BadFormat,), markers),
    Decoder("partition-metadata", decode_metadata, (BadFormat,), metadata),
    Decoder("id-counter", decode_id, (BadFormat,), lambda: [model.encode_id_counter(70_000)]),
    _json("audit-entry", AuditEntry, AuditEntry("ann", 1, "move", "done", 2)),
    _json(
        "reach-report",
        ReachReport,
        ReachReport(frozenset((1, 2)), {3: "no route"}),
        ReachReport(is_witness=False),
    ),
    _json("write-state", WriteState, WriteState({0: 3, 1: -1}, 1_000, {"rows": 1})),
    _json("task-state", TaskState, TaskState(5, 2, ("run", "other"))),
    _json("restored-from", RestoreSources, RestoreSources({"ab" * 16: {0: 5, 1: -1}})),
    Decoder(
        "loads",
        partial(decode_json_node, decode_loads, encode_loads),
        (BadFormat,),
        lambda: [encode_loads({0: PartitionLoad(12.5, 1_000), 3: PartitionLoad(0.0, 0)})],
        words=TEXT_WORDS,
    ),
    Decoder(
        "permissions",
        partial(decode_json_node, access_node.decode_permissions, access_node.encode_permissions),
        (BadFormat,),
        permissions,
        words=TEXT_WORDS,
    ),
    Decoder(
        "backup",
        decode_backup,
        (BadFormat, ChecksumMismatch),
        backups,
        sealed_backup,
        words=TEXT_WORDS,
    ),
)
