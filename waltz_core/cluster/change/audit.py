"""The audit log in ZooKeeper: the newest changes of the cluster by commands.

The log contains the user, time, command and outcome of each change. The log is in ZooKeeper, so
that it survives the loss of the machine that ran the command.

Rules:
    1. An entry is written before a change begins; its outcome is written when the change is over.
       An entry with the outcome "begun" belongs to a change that was interrupted.
    2. Only the newest `ENTRIES_MAX` entries are kept.
    3. If the entry cannot be written, the change does not begin. If only the outcome cannot be
       written, the change remains in effect.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from waltz_core import errors
from waltz_core.cluster.znodes.interface import CreateNode, DeleteNode, SetNode
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.records import strict_json

ENTRIES_MAX = 1_000
TEXT_CHARACTERS_MAX = 2_000
OUTCOME_BEGUN = "begun"
OUTCOME_DONE = "done"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A change of the cluster by a command, with its outcome.

    Node `R/x/audit/e_N` contains JSON with `format` 1 and these fields.

    `outcome` is "begun", "done" or "failed: " and the reason.
    """

    user: str
    begun_ms: int
    command: str
    outcome: str = OUTCOME_BEGUN
    ended_ms: int | None = None

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        return strict_json.to_json(
            {
                "format": _FORMAT,
                "user": self.user[:TEXT_CHARACTERS_MAX],
                "begun_ms": self.begun_ms,
                "command": self.command[:TEXT_CHARACTERS_MAX],
                "outcome": self.outcome[:TEXT_CHARACTERS_MAX],
                "ended_ms": self.ended_ms,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> "AuditEntry":
        """Decode the node's bytes; raises BadFormat."""
        try:
            values = strict_json.from_json(data)
        except ValueError as error:
            raise errors.BadFormat(
                f"entry of the audit node is not valid JSON: {error!s:.200}"
            ) from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise errors.BadFormat(
                f"entry of the audit node: expected format 1, found {data!r:.200}"
            )
        for name, kinds in _FIELD_TYPES.items():
            if name not in values or type(values[name]) not in kinds:
                raise errors.BadFormat(
                    f"entry of the audit node, field {name!r}: expected {kinds[0].__name__}, "
                    f"found {values.get(name)!r:.200}"
                )
        return AuditEntry(**{name: values[name] for name in _FIELD_TYPES})


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "user": (str,),
    "begun_ms": (int,),
    "command": (str,),
    "outcome": (str,),
    "ended_ms": (int, type(None)),
}


class AuditLog:
    """The audit entries of one cluster, through one session."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._znodes = nodes.znodes

    async def begin(self, entry: AuditEntry) -> str:
        """Record a change that is about to begin; return the path of its entry, for `end`."""
        paths = self._nodes.paths
        await self._nodes.create_missing((paths.extensions, paths.audit))
        names_before = await self._entry_names()
        step = CreateNode(paths.audit_prefix, entry.to_bytes(), is_sequential=True)
        # ZooKeeper does not return the name of a new sequential node, so this node is found by its
        # content.
        await self._znodes.write([step])
        new_names = [name for name in await self._entry_names() if name not in names_before]
        for name in reversed(new_names):
            path = f"{paths.audit}/{name}"
            node = await self._znodes.get(path)
            if node is not None and node.data == step.data:
                await self._delete_oldest_entries()
                return path
        raise errors.CoordinatorUnavailable(
            "nothing was changed, because the command could not record the change: its entry was "
            f"written to {paths.audit}, but cannot be found there. Hint: run the command again."
        )

    async def end(self, path: str, entry: AuditEntry, outcome: str, ended_ms: int) -> None:
        """Record the outcome of a change (rule 3)."""
        ended_entry = replace(entry, outcome=outcome, ended_ms=ended_ms)
        with suppress(errors.WaltzError):
            node = await self._znodes.get(path)
            if node is not None:
                await self._znodes.write([SetNode(path, ended_entry.to_bytes(), node.stat.version)])

    async def read(self, count_max: int = ENTRIES_MAX) -> list[AuditEntry]:
        """Return the newest entries, at most `count_max`, oldest first."""
        await self._znodes.sync()
        entries: list[AuditEntry] = []
        for name in (await self._entry_names())[-count_max:]:
            path = f"{self._nodes.paths.audit}/{name}"
            node = await self._znodes.get(path)
            if node is not None:
                entries.append(decode_node(path, node, AuditEntry.from_bytes))
        return entries

    async def _entry_names(self) -> Sequence[str]:
        listing = await self._znodes.children(self._nodes.paths.audit)
        return () if listing is None else listing.names

    async def _delete_oldest_entries(self) -> None:
        names = await self._entry_names()
        for name in names[: max(0, len(names) - ENTRIES_MAX)]:
            path = f"{self._nodes.paths.audit}/{name}"
            with suppress(errors.CoordinatorConflict):
                node = await self._znodes.get(path)
                if node is not None:
                    await self._znodes.write([DeleteNode(path, node.stat.version)])
