"""A modeled cluster for stream readers."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from pyspark.sql.types import StructType

from waltz_core.client import ReplicaSet
from waltz_core.client.links.directory import ClusterInfo, ClusterLayout
from waltz_core.client.read.ranges import ArchivedRange
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
from waltz_core.records.record import TransactionId
from waltz_spark.datasource import stream_read
from waltz_spark.datasource.batch_read import ReadTask
from waltz_spark.datasource.stream_read import WaltzStreamReader
from waltz_spark.options import parse_read

CONNECT = "zk:2181/w/x"


class Cluster:
    """The cluster at the connect string; a test replaces it."""

    def __init__(self) -> None:
        self.set_cluster(1, 10, 10)

    def set_cluster(
        self, key: int, *marks: int, restore_sources: RestoreSources = NO_RESTORE_SOURCES
    ) -> None:
        self.info = ClusterInfo("x", bytes([key]) * 16, len(marks), restore_sources)
        self.marks = marks
        self.firsts: dict[int, int] = {}  # the first available IDs of partitions with an archive

    def client(self, _connect: str = CONNECT) -> SimpleNamespace:
        info = self.info
        return SimpleNamespace(
            partition_count=info.partition_count,
            cluster=lambda: info,
            layout=lambda: ClusterLayout(CONNECT, info, {}),
        )

    def sources(
        self,
        _connect: str,
        choose: Callable[[int], Sequence[int]],
        *,
        linearizable: bool,
        group: int | None,
    ) -> tuple[SimpleNamespace, dict[int, ReplicaSet]]:
        del linearizable
        assert group is None
        count = len(self.marks)
        chosen = choose(count)
        return self.client(), {
            n: ReplicaSet(
                self.info.key, count, 1, self.marks[n], ("s:1",), archived=self.archived(n)
            )
            for n in chosen
        }

    def archived(self, partition: int) -> ArchivedRange | None:
        first = self.firsts.get(partition)
        if first is None:
            return None
        return ArchivedRange(TransactionId(first), TransactionId(self.marks[partition]), "m", 0)


def reader_of(**options: str) -> WaltzStreamReader:
    chosen = {"path": CONNECT, "startingHighWaterMarks": "earliest", **options}
    return WaltzStreamReader(parse_read(chosen), StructType())


def read(reader: WaltzStreamReader, start: stream_read.Offset, end: stream_read.Offset) -> set[int]:
    """Return the partitions from which a micro-batch reads."""
    tasks = reader.partitions(start, end)
    assert all(isinstance(task, ReadTask) for task in tasks)
    return {task.partition for task in tasks if isinstance(task, ReadTask)}
