"""Opening a client, and the errors for invalid uses."""

import asyncio
import copy

import pytest

from waltz_core import errors
from waltz_core.client import AsyncWaltzClient, Callbacks, Transaction, WaltzClient
from waltz_core.memory_waltz import MemoryWaltz


class _Callbacks(Callbacks):
    def apply_transaction(self, transaction: Transaction) -> None:
        pass


CONNECT = "127.0.0.1:1/waltz/never_asked"


@pytest.mark.parametrize("given", [(), (CONNECT,)])
def test_calling_the_client_class_raises_an_error_with_a_hint(given):
    with pytest.raises(errors.UsageError, match=r"async with AsyncWaltzClient\.connect"):
        AsyncWaltzClient(*given)


async def use_without_await():
    client = AsyncWaltzClient.connect(CONNECT)
    with pytest.raises(
        errors.UsageError,
        match=r"^cannot use append: the client is not "
        r"open yet. Hint: use `async",
    ):
        await client.append(b"x")
    assert not hasattr(client, "__len__")
    # Tools that inspect any object, such as debuggers and numpy, get an AttributeError and
    # continue.
    assert not hasattr(client, "shape")
    assert getattr(client, "dtype", None) is None


def test_a_forgotten_await_is_reported_at_the_first_use():
    asyncio.run(use_without_await())


@pytest.mark.parametrize("opened", [WaltzClient, AsyncWaltzClient.connect])
def test_settings_of_a_wrong_type_are_rejected_with_the_expected_type(opened):
    async def opening():
        opened(CONNECT, {"request_timeout_ms": 1})

    with pytest.raises(errors.UsageError, match=r"expected a ClientConfig of .*, found {'request"):
        asyncio.run(opening())


def test_a_client_cannot_be_copied_or_pickled():
    with MemoryWaltz() as waltz, waltz.client() as client:
        with pytest.raises(
            errors.UsageError, match="open a client in that process, with the same connect string"
        ):
            copy.copy(client)
        with pytest.raises(
            errors.UsageError, match="open a client in that process, with the same connect string"
        ):
            copy.copy(client._client)


def failing_iterator():
    yield 0
    yield int([])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda c: c.subscribe(_Callbacks(), failing_iterator()), TypeError, "argument must be"),
        (
            lambda c: c.subscribe(_Callbacks(), headers=failing_iterator()),
            TypeError,
            "argument must be",
        ),
        (
            lambda c: c.subscribe(_Callbacks(), 0),
            errors.BadRequest,
            r"partitions: expected a list such as \[0\], found 0",
        ),
        (
            lambda c: c.set_partitions(1),
            errors.BadRequest,
            r"partitions: expected a list such as \[1\], found 1",
        ),
        (
            lambda c: c.subscribe(_Callbacks(), headers=7),
            errors.BadRequest,
            r"headers: expected a list such as \[7\]",
        ),
    ],
)
def test_an_invalid_list_argument_or_a_failing_iterator_is_reported_to_the_caller(
    call, error, sentence
):
    expected = pytest.raises(error, match=sentence)
    with MemoryWaltz() as waltz, waltz.client() as client, expected:
        call(client)
