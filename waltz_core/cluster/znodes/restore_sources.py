"""The clusters from whose backups a cluster was restored, in a node of ZooKeeper.

Up to the restored end, the source cluster and the restored cluster have the same log. So a position
in the source cluster, such as the offset of a Spark checkpoint, is also valid in the restored
cluster, if the position is not after this end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from waltz_core import errors
from waltz_core.cluster.znodes.node_access import is_number
from waltz_core.records import strict_json

_FORMAT = 1
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class RestoreSources:
    """The restored ends of each source cluster, by its key and by partition.

    Node `R/x/restored` contains JSON with `format` 1 and `marks`.
    """

    marks: Mapping[str, Mapping[int, int]] = field(default_factory=dict, hash=False)

    def includes(self, cluster_key: str, marks: Mapping[int, int]) -> bool:
        """Whether this cluster has the same log as a source cluster up to these marks."""
        ends = self.marks.get(cluster_key)
        return ends is not None and all(
            mark <= ends.get(partition, -1) for partition, mark in marks.items()
        )

    def with_source(self, cluster_key: str, ends: Mapping[int, int]) -> "RestoreSources":
        """Return the sources of a cluster that is restored from this cluster up to these ends."""
        earlier = {
            key: {partition: min(mark, ends[partition]) for partition, mark in marks.items()}
            for key, marks in self.marks.items()
        }
        return RestoreSources({**earlier, cluster_key: dict(ends)})

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        marks = {
            key: {str(partition): mark for partition, mark in ends.items()}
            for key, ends in self.marks.items()
        }
        return strict_json.to_json({"format": _FORMAT, "marks": marks})

    @staticmethod
    def from_bytes(data: bytes) -> "RestoreSources":
        """Decode the node's bytes; raises BadFormat."""
        try:
            values = strict_json.from_json(data)
            format_number, marks = values["format"], values["marks"]
            if format_number == _FORMAT:
                return RestoreSources(
                    {_parse_key(key): _parse_ends(ends) for key, ends in marks.items()}
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise errors.BadFormat(
                f"znode R/x/restored cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        raise errors.BadFormat(
            f"znode R/x/restored: expected format {_FORMAT}, found {format_number!r:.80}"
        )


NO_RESTORE_SOURCES = RestoreSources()


def _parse_key(text: str) -> str:
    if len(bytes.fromhex(text)) != _KEY_BYTES:
        raise ValueError(
            f"expected a cluster key (a UUID of {_KEY_BYTES} bytes in hexadecimal), found "
            f"{text!r:.80}"
        )
    return text


def _parse_ends(values: Mapping[str, object]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for name, mark in values.items():
        if not is_number(name) or not isinstance(mark, int) or mark < -1:
            raise ValueError(
                f"expected high-water marks by partition, found {name!r:.80} and {mark!r:.80}"
            )
        ends[int(name)] = mark
    return ends
