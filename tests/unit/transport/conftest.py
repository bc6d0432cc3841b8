"""Certificates for the tests of links."""

import pytest

from tests.certificates import Certificates, create_certificates


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return create_certificates(tmp_path_factory.mktemp("certificates"))
