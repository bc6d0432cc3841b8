"""The messages that only Waltz 0.13 has: the answer to a mount up to L 2.

Nodes of this version never send them to each other. The rules are those of `messages.py`; layout
and meaning are those of interop.md 2.
"""

from typing import ClassVar

from waltz_core.values import value
from waltz_core.wire.messages import Bool, ClientMessage


@value(frozen=True, slots=True)
class MountOutcome(ClientMessage):
    """As `MountResponse`, before it could tell why not."""

    code = 1
    until: ClassVar[int | None] = 2
    is_ready: Bool
