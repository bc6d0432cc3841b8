"""The znodes of a cluster of Waltz 0.13, byte by byte (docs/zookeeper.md)."""

import struct

from kazoo.client import KazooClient

from tests.original_server_for_clients import OriginalCluster

ROOT = "/original"


def utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


class Nodes:
    """The znodes of a 0.13 cluster, and the session of its servers."""

    def __init__(self, host: str, cluster: OriginalCluster, root: str = ROOT) -> None:
        self.root = root
        self.zookeeper = KazooClient(host)
        self.zookeeper.start()
        self.cluster = cluster
        count = cluster.partition_count
        key = bytes.fromhex("0e6bfd32bdc64ce187fb950915c99d24")
        for path, data in {
            "": struct.pack(">IB", 0xB4E87347, 1) + utf("original") + struct.pack(">i", count),
            "/serverDescriptors": struct.pack(">Biii", 3, -1, 0, 0),
            "/ids": b"",
            "/ids/client": struct.pack(">i", 0),
            "/ids/server": struct.pack(">i", 0),
            "/store": b"\x01" + key + struct.pack(">i", count),
            "/store/partition": b"",
            "/store/group": struct.pack(">Bi", 1, 0),
            "/store/assignment": struct.pack(">Bi", 1, 0),
            "/store/connection": struct.pack(">Bi", 1, 0),
        }.items():
            self.zookeeper.create(root + path, data)
        for number in range(count):
            self.zookeeper.create(
                f"{root}/store/partition/{number}", struct.pack(">Biqi", 1, 1, 0, 0)
            )
        for server_id, server in enumerate(cluster.servers, 1):
            descriptor = struct.pack(">Bi", 1, server_id) + utf("127.0.0.1")
            descriptor += struct.pack(">ii", server.port, 0)
            path = f"{root}/serverDescriptors/s_"
            self.zookeeper.create(path, descriptor, ephemeral=True, sequence=True)
        self.assign()

    def assign(self) -> None:
        """Write the assignment of partitions to servers."""
        path = f"{self.root}/serverDescriptors"
        cversion = self.zookeeper.exists(path).children_version
        data = struct.pack(
            ">Biii", 3, cversion, self.cluster.partition_count, len(self.cluster.servers)
        )
        for server_index in range(len(self.cluster.servers)):
            owned = [
                (number, generation)
                for number, (server, generation) in self.cluster.owners.items()
                if server == server_index
            ]
            data += struct.pack(">ii", server_index + 1, len(owned))
            data += b"".join(struct.pack(">ii", *each) for each in owned)
        self.zookeeper.set(path, data)

    def paths(self, path: str = "") -> set[str]:
        path = path or self.root
        found = {path}
        for name in self.zookeeper.get_children(path):
            found |= self.paths(f"{path}/{name}")
        return found

    def close(self) -> None:
        self.zookeeper.delete(self.root, recursive=True)
        self.zookeeper.stop()
        self.zookeeper.close()
