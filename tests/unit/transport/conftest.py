"""Certificates for the tests of links."""

import pytest

from tests.certificates import Certificates, make


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make(tmp_path_factory.mktemp("certificates"))
