"""All tests of this folder run in one worker, as they share what they have read."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for each in items:
        if each.path.parent == Path(__file__).parent:
            each.add_marker(pytest.mark.xdist_group("tidy"))
