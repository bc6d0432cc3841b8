"""The table of all nodes in ZooKeeper, and the path of each for a given root R.

All processes of a cluster use these paths, including processes of other versions, so the paths must
not change.

Rules:
    1. Extensions are below `R/x`, which Waltz 0.13 ignores.
    2. The name of a partition's node is the number of the partition, in decimal. The name of a
       storage's node is the address of the storage, which has no "/".
    3. For a cluster with two users of ZooKeeper, each row declares the readers of the node and the
       permissions of members (`zookeeper/credentials.py`; decision 048, AC 13).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from waltz_core.records.record import PartitionId, ReplicaId, ServerId

DESCRIPTOR_PREFIX = "s_"
MEMBER_PERMISSIONS: Final = "crwd"


class NodeReaders(StrEnum):
    """The readers of a znode; each value includes the readers of all following values."""

    PUBLIC = "public"
    MEMBERS = "members"
    ADMINISTRATORS = "administrators"


class Znode(NamedTuple):
    """One row of the znode table (`docs/zookeeper.md`).

    `members` are the permissions of servers and storages, in ZooKeeper's letters: create and delete
    (of children), read, write.
    """

    path: str
    kind: str
    content: str
    written_by: str
    readers: NodeReaders
    members: str = MEMBER_PERMISSIONS

    @property
    def is_restricted(self) -> bool:
        """Whether a line for "world" in the auth file has no effect on this node.

        True for R/x/access and R/x/audit. These nodes contain secrets: the key that signs client
        IDs, the hashes of tokens, and the commands that administrators have run.
        """
        return self.readers is not NodeReaders.PUBLIC and self.members != MEMBER_PERMISSIONS


_PUBLIC, _MEMBERS, _ADMINISTRATORS = NodeReaders

ZNODES = (
    Znode("R", "persistent", "ClusterParams", "cluster create", _PUBLIC),
    Znode("R/ids", "persistent", "nothing", "cluster create", _PUBLIC),
    Znode(
        "R/ids/client",
        "persistent",
        "int32, last allocated ID",
        "each client of an earlier version, once",
        _MEMBERS,
    ),
    Znode("R/ids/server", "persistent", "int32, last allocated ID", "each server, once", _MEMBERS),
    Znode("R/serverDescriptors", "persistent", "PartitionAssignment", "the leader", _PUBLIC),
    Znode(
        "R/serverDescriptors/s_N", "ephemeral sequential", "ServerDescriptor", "its server", _PUBLIC
    ),
    Znode("R/store", "persistent", "StoreParams", "cluster create", _PUBLIC),
    Znode("R/store/partition", "persistent", "nothing", "cluster create", _MEMBERS),
    Znode("R/store/partition/P", "persistent", "PartitionMetadata", "the owner of P", _MEMBERS),
    Znode("R/store/assignment", "persistent", "ReplicaAssignments", "cluster commands", _MEMBERS),
    Znode("R/store/group", "persistent", "GroupDescriptor", "cluster commands", _PUBLIC),
    Znode("R/store/connection", "persistent", "ConnectionMetadata", "cluster commands", _MEMBERS),
    Znode("R/store/adminLock", "ephemeral", "nothing", "the cluster commands of 0.13", _MEMBERS),
    Znode("R/x", "persistent", "nothing", "cluster create, or adoption", _PUBLIC, "cr"),
    Znode("R/x/partition", "persistent", "nothing", "cluster create, or adoption", _MEMBERS),
    Znode(
        "R/x/partition/P",
        "persistent",
        "PartitionMarker",
        "the owner of P, together with its PartitionMetadata",
        _MEMBERS,
    ),
    Znode("R/x/storage", "persistent", "nothing", "cluster create, or the first storage", _MEMBERS),
    Znode(
        "R/x/storage/HOST:PORT", "persistent", "StorageRegistration", "its storage, once", _MEMBERS
    ),
    Znode("R/x/writes", "persistent", "nothing", "each write that begins or ends", _MEMBERS),
    Znode(
        "R/x/writes/W",
        "persistent",
        "WriteState (JSON)",
        "servers, for the client that begins and ends write W",
        _MEMBERS,
    ),
    Znode(
        "R/x/writes/W/T",
        "persistent",
        "TaskState (JSON)",
        "servers, at each attempt of task T",
        _MEMBERS,
    ),
    Znode(
        "R/x/client",
        "persistent",
        "int32, last issued ID",
        "servers, at the request of clients",
        _MEMBERS,
    ),
    Znode("R/x/restored", "persistent", "RestoreSources (JSON)", "restore", _PUBLIC),
    Znode(
        "R/x/access",
        "persistent",
        "Permissions (JSON)",
        "the access commands, and restore",
        _MEMBERS,
        "r",
    ),
    Znode("R/x/applied", "persistent", "nothing", "the first daemon with access control", _MEMBERS),
    Znode(
        "R/x/applied/NAME",
        "ephemeral",
        "applied revision (JSON)",
        "the daemon, for each revision",
        _MEMBERS,
    ),
    Znode("R/x/load", "persistent", "nothing", "the first server that balances by load", _MEMBERS),
    Znode(
        "R/x/load/ID",
        "ephemeral",
        "loads (JSON)",
        "the server with this ID, every few seconds",
        _MEMBERS,
    ),
    Znode(
        "R/x/reach", "persistent", "nothing", "the first server with an open partition", _MEMBERS
    ),
    Znode(
        "R/x/reach/ID",
        "ephemeral",
        "reach report (JSON)",
        "the server with this ID, in each ZooKeeper session",
        _MEMBERS,
    ),
    Znode(
        "R/x/audit",
        "persistent",
        "nothing",
        "the first change by a cluster command",
        _ADMINISTRATORS,
        "",
    ),
    Znode(
        "R/x/audit/e_N",
        "persistent sequential",
        "AuditEntry (JSON)",
        "cluster commands",
        _ADMINISTRATORS,
        "",
    ),
)
# The row for the nodes above R, below which there may also be other clusters.
ABOVE_ROOT_ZNODE: Final = Znode("/", "persistent", "nothing", "cluster create", _PUBLIC, "r")
# The row for nodes below R that a later version of Waltz has created.
UNKNOWN_ZNODE: Final = Znode("R/...", "any", "unknown", "a later version", _MEMBERS)


def znode_at(root: str, path: str) -> Znode:
    """Return the table row of a node of the cluster at `root`.

    `path` may also be the prefix of sequential nodes. A node outside of the root has the row
    `ABOVE_ROOT_ZNODE`, and an unknown node below the root has the row `UNKNOWN_ZNODE`.
    """
    if path != root and not path.startswith(f"{root}/"):
        return ABOVE_ROOT_ZNODE
    names = f"R{path.removeprefix(root)}".split("/")
    return next((row for row in ZNODES if _matches(row.path.split("/"), names)), UNKNOWN_ZNODE)


def _matches(row: list[str], names: list[str]) -> bool:
    return len(row) == len(names) and all(map(_is_name_of, row, names))


def _is_name_of(part: str, name: str) -> bool:
    prefix, is_sequential, _ = part.partition("_N")
    return part.isupper() or part == name or (bool(is_sequential) and name.startswith(f"{prefix}_"))


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    """The paths of the nodes of the cluster with this root."""

    root: str

    def __post_init__(self) -> None:
        assert self.root.startswith("/")
        assert not self.root.endswith("/")

    @property
    def ids(self) -> str:
        """Parent of the two ID counters."""
        return f"{self.root}/ids"

    @property
    def client_ids(self) -> str:
        """Counter of client IDs."""
        return f"{self.root}/ids/client"

    @property
    def server_ids(self) -> str:
        """Counter of server IDs."""
        return f"{self.root}/ids/server"

    @property
    def servers(self) -> str:
        """Assignment of partitions, and parent of the live servers' descriptors."""
        return f"{self.root}/serverDescriptors"

    @property
    def descriptor_prefix(self) -> str:
        """The prefix to which ZooKeeper appends a sequence number when a server registers."""
        return f"{self.servers}/{DESCRIPTOR_PREFIX}"

    @property
    def store(self) -> str:
        """Cluster key; parent of the nodes for storages."""
        return f"{self.root}/store"

    @property
    def partitions(self) -> str:
        """Parent of the partitions' metadata."""
        return f"{self.root}/store/partition"

    def partition(self, partition_id: PartitionId) -> str:
        """Metadata of one partition."""
        return f"{self.partitions}/{partition_id}"

    @property
    def replica_assignment(self) -> str:
        """The replica assignment: the partitions of each storage."""
        return f"{self.root}/store/assignment"

    @property
    def groups(self) -> str:
        """Storages by group."""
        return f"{self.root}/store/group"

    @property
    def connections(self) -> str:
        """Storages' admin ports."""
        return f"{self.root}/store/connection"

    @property
    def extensions(self) -> str:
        """Parent of the nodes that Waltz 0.13 ignores."""
        return f"{self.root}/x"

    @property
    def markers(self) -> str:
        """Parent of the partition markers."""
        return f"{self.root}/x/partition"

    def marker(self, partition_id: PartitionId) -> str:
        """Marker of one partition."""
        return f"{self.markers}/{partition_id}"

    @property
    def storage_ids(self) -> str:
        """Parent of the registered storage IDs."""
        return f"{self.root}/x/storage"

    def storage_id(self, address: ReplicaId) -> str:
        """ID of the storage that is registered at `address`."""
        return f"{self.storage_ids}/{address}"

    @property
    def writes(self) -> str:
        """Parent of the exactly-once writes."""
        return f"{self.root}/x/writes"

    def write(self, name: str) -> str:
        """One write, and parent of its tasks."""
        return f"{self.writes}/{name}"

    @property
    def issued_client_ids(self) -> str:
        """Counter of the client IDs that servers issue."""
        return f"{self.root}/x/client"

    @property
    def restore_sources(self) -> str:
        """The clusters from whose backups this one was restored."""
        return f"{self.root}/x/restored"

    @property
    def access(self) -> str:
        """The permissions and tokens of principals."""
        return f"{self.root}/x/access"

    @property
    def applied_revisions(self) -> str:
        """Parent of the revisions of the permissions that daemons use."""
        return f"{self.root}/x/applied"

    def applied_revision(self, name: str) -> str:
        """Revision of one daemon; `membership/applied_revisions.py` describes the name."""
        return f"{self.applied_revisions}/{name}"

    @property
    def loads(self) -> str:
        """Parent of the loads that servers publish."""
        return f"{self.root}/x/load"

    def load(self, server_id: ServerId) -> str:
        """Loads of one server's partitions."""
        return f"{self.loads}/{server_id}"

    @property
    def reach_reports(self) -> str:
        """Parent of the servers' reports about the servers that they can connect to."""
        return f"{self.root}/x/reach"

    def reach_report(self, server_id: ServerId) -> str:
        """Report of one server."""
        return f"{self.reach_reports}/{server_id}"

    @property
    def audit(self) -> str:
        """Parent of the audit entries."""
        return f"{self.root}/x/audit"

    @property
    def audit_prefix(self) -> str:
        """The prefix to which ZooKeeper appends a sequence number for an audit entry."""
        return f"{self.audit}/e_"
