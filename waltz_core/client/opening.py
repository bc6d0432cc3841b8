"""A client that is being opened: `await` it, or use it as `async with`.

Why it stands alone: a coroutine cannot be entered and a context manager cannot be awaited; users
expect both of `AsyncWaltzClient.connect`.
"""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Openable(Protocol):
    """What is opened and closed."""

    async def open(self) -> Any:  # noqa: ANN401 - itself
        """Connect; return itself."""

    async def close(self) -> None:
        """End."""


ClientT = TypeVar("ClientT", bound=Openable)


class Opening(Generic[ClientT]):
    """See the module."""

    def __init__(self, client: ClientT) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, ClientT]:
        return self._opened().__await__()

    async def __aenter__(self) -> ClientT:
        return await self._opened()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def _opened(self) -> ClientT:
        await self._client.open()
        return self._client
