"""Runs the state machine that translates the streams of one connection to a 0.13 server.

The state machine is in `legacy/legacy_server_link.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from waltz_core.driver import Driver
from waltz_core.legacy import legacy_server_stream
from waltz_core.legacy.legacy_server_link import (
    Event,
    LegacyServerLink,
    OwnershipChecked,
    ReceivedFromLegacyServer,
    SendToLegacyServer,
)
from waltz_core.records.record import PartitionId
from waltz_core.transport import net
from waltz_core.wire.messages import ClientMessage

# Checks whether the server still owns a partition, and calls back with the result.
PartitionOwnershipCheck = Callable[[PartitionId, Callable[[bool], None]], None]


class LegacyServer:
    """The translator for all streams of one connection; `deliver` receives messages for streams."""

    def __init__(
        self,
        link: net.Link,
        deliver: Callable[[ClientMessage], None],
        check_ownership: PartitionOwnershipCheck,
    ) -> None:
        self._link = link
        self._deliver = deliver
        self._check_ownership = check_ownership
        self._driver: Driver[Event, legacy_server_stream.Effect] = Driver(
            LegacyServerLink(),
            self._perform,
            on_failure=lambda error: link.abort(
                f"the message cannot be translated for a Waltz 0.13 server: {error}"
            ),
        )

    def send(self, message: ClientMessage) -> None:
        """Translate and send a message of a stream."""
        self._driver.post(SendToLegacyServer(message))

    def on_received(self, received: Sequence[ClientMessage]) -> None:
        """Process messages from the server that are not answers to requests."""
        self._driver.post(ReceivedFromLegacyServer(received))

    def stop(self) -> None:
        """Stop the state machine: the connection is closed."""
        self._driver.stop()

    def _perform(self, effect: legacy_server_stream.Effect) -> None:
        if self._link.is_closed:
            return
        match effect:
            case legacy_server_stream.SendToServer():
                self._link.send_all(effect.messages)
            case legacy_server_stream.SendToStream():
                self._deliver(effect.message)
            case legacy_server_stream.CheckOwnership():
                self._check_ownership(
                    effect.partition_id, partial(self._on_ownership_proven, effect)
                )
            case legacy_server_stream.CloseLink():
                self._link.abort(effect.reason)

    def _on_ownership_proven(
        self,
        request: legacy_server_stream.CheckOwnership,
        is_owner: bool,  # noqa: FBT001 - as `PartitionOwnershipCheck` has it
    ) -> None:
        self._driver.post(OwnershipChecked(request.partition_id, request.number, is_owner))
