"""A pytest fixture for applications' own tests: `waltz_cluster`, a real cluster for the session.

Why it stands alone: it is the only file that names pytest, and it is loaded by pytest itself.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def waltz_cluster() -> Iterator[str]:
    """Give the connect string of a cluster on this machine; it ends with the test session."""
    import waltz_core.local  # noqa: PLC0415 - a session without this fixture pays nothing

    with waltz_core.local.cluster() as connect:
        yield connect
