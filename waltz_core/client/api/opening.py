"""A client that is being opened: `await` it, or use it in `async with`.

Users expect that `AsyncWaltzClient.connect` supports both `await` and `async with`. Neither a
coroutine nor a context manager supports both, but an `UnopenedClient` does. Any other use of an
`UnopenedClient` raises an error that explains the two ways.
"""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from waltz_core import errors
from waltz_core.config.declarations import ClientConfig

OPEN_HINT = (
    "use `async with AsyncWaltzClient.connect(...) as client`, or `client = await "
    "AsyncWaltzClient.connect(...)` and close the client at the end"
)
NOT_PICKLABLE_TEXT = (
    "a client cannot be sent to another process. Hint: open a client in that process, "
    "with the same connect string"
)


class Openable(Protocol):
    """A client with `open` and `close`."""

    async def open(self) -> Any:  # noqa: ANN401 - returns the client
        """Connect the client to its cluster; return the client."""

    async def close(self) -> None:
        """Disconnect the client."""


ClientT = TypeVar("ClientT", bound=Openable)


class UnopenedClient(Generic[ClientT]):
    """A client that is not open yet: await it, or enter it with `async with`."""

    def __init__(self, client: ClientT) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, ClientT]:
        return self._open().__await__()

    async def __aenter__(self) -> ClientT:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # no explanation: copy, pickle and shells look up such names
        raise errors.ClientNotOpen(
            f"cannot use {name}: the client is not open yet. Hint: {OPEN_HINT}"
        )

    async def _open(self) -> ClientT:
        await self._client.open()
        return self._client


class OpenedByConnect:
    """Base of clients that are created with `connect`, not by calling the class."""

    def __new__(cls, *arguments: object, **_named: object) -> Self:
        """Create a client from a directory; raises UsageError for a connect string or no value."""
        if not arguments or isinstance(arguments[0], str):
            raise errors.UsageError(f"the client was not opened by `connect`. Hint: {OPEN_HINT}")
        return super().__new__(cls)

    def __reduce__(self) -> NoReturn:
        raise errors.UsageError(NOT_PICKLABLE_TEXT)


def config_or_default(config: ClientConfig | None) -> ClientConfig:
    """Return the settings, or the defaults for None; raises UsageError for any other object."""
    settings: object = ClientConfig() if config is None else config
    if not isinstance(settings, ClientConfig):
        raise errors.UsageError(
            f"argument config: expected a ClientConfig of waltz_core.config, found {settings!r}"
        )
    return settings
