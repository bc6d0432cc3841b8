"""Fixtures for applications' tests: `waltz_cluster`, a real cluster, and `waltz_memory`.

pytest loads this plugin.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from waltz_core.memory_waltz import MemoryWaltz


@pytest.fixture(scope="session")
def waltz_cluster() -> Iterator[str]:
    """The connect string of a local cluster. The cluster stops with the test session."""
    import waltz_core.local  # noqa: PLC0415 - only this fixture needs the import

    with waltz_core.local.cluster() as connect:
        yield connect


@pytest.fixture
def waltz_memory() -> Iterator["MemoryWaltz"]:
    """An empty in-process Waltz with four partitions and injected faults."""
    import waltz_core.memory_waltz  # noqa: PLC0415 - as above

    with waltz_core.memory_waltz.MemoryWaltz() as waltz:
        yield waltz
