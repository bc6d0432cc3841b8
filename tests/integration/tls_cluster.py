"""A cluster of real processes with TLS: one storage and one server."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.certificates import Certificates
from waltz_core.config import render_toml
from waltz_core.local import LocalCluster, running_cluster


@contextmanager
def tls_cluster(
    directories: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[LocalCluster]:
    """Run the cluster; its daemons and clients present the same certificate."""
    file = directories.mktemp("tls") / "tls.toml"
    file.write_text(render_toml("tls", certificates.settings))
    directory = directories.mktemp("cluster") / "local"
    with running_cluster(directory, tls=file, storage_count=1, server_count=1) as cluster:
        yield cluster


@contextmanager
def daemons_with_access(access: str, **settings: str) -> Iterator[pytest.MonkeyPatch]:
    """Set `access` of the daemons that start meanwhile, and settings of both kinds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALTZ_STORAGE_TLS_REQUIRE_CERTIFICATE", "false")
        for kind in ("SERVER", "STORAGE"):
            for name, value in {"access": access, **settings}.items():
                patch.setenv(f"WALTZ_{kind}_{name.upper()}", value)
        yield patch
