"""Runs a storage daemon of a static cluster in a separate process: `python FILE DIRECTORY`."""

import sys
from uuid import UUID

from waltz_core.config import StorageConfig
from waltz_core.errors import WaltzError
from waltz_core.records.record import PartitionId
from waltz_core.storage.process.storage_daemon import StaticCluster, serve
from waltz_core.transport import net

KEY = UUID(int=0x0E6BFD32BDC64CE187FB950915C99D24)
PARTITION_COUNT = 4


def main(directory: str, key: str = str(KEY), admin_port: str = "0", port: str = "0") -> int:
    config = StorageConfig(
        connect="nowhere:1/none",
        directory=directory,
        port=int(port),
        admin_port=int(admin_port),
        reserve_bytes=0,
    )
    cluster = StaticCluster(UUID(key), PARTITION_COUNT, (PartitionId(0), PartitionId(2)))

    def print_address(address: str) -> None:
        print(f"storage ready {address}", flush=True)  # noqa: T201 - its parent waits for it

    try:
        net.run(serve(config, cluster=cluster, on_ready=print_address))
    except WaltzError as error:
        print(f"refused: {type(error).__name__}: {error}", flush=True)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
