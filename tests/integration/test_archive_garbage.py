"""Storages that are killed during uploads leave garbage, which the next session collects."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from tests.fault.load import wait_until
from tests.integration.archiving import (
    STORAGES,
    ClusterArchive,
    ListedFiles,
    append_rows,
    archiving_cluster,
    read_archived_mark,
)
from waltz_core.archive.file_names import manifest_version_of
from waltz_core.archive.garbage_collection import REPLACED_GRACE_MS
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster

KILLS: Final = 4
AGE_S: Final = 2 * REPLACED_GRACE_MS / 1_000
REGION: Final = "us-east-1"


@pytest.fixture
def s3_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the URL of a folder in a server of S3; the credentials are in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"{host}:{port}"
        s3 = fs.S3FileSystem(
            endpoint_override=address, scheme="http", region=REGION, allow_bucket_creation=True
        )
        s3.create_dir("bucket")
        yield f"s3://bucket/folder?endpoint_override={address}&scheme=http&region={REGION}"
    finally:
        server.stop()


def kill_during_uploads(
    cluster: LocalCluster, archive: ClusterArchive, client: WaltzClient, written: list[bytes]
) -> None:
    """Append, and kill storages while they write objects, until some of these are garbage."""
    for count, storage in enumerate(cycle(STORAGES), 1):
        known = {*archive.store.list_names("")}
        append_rows(client, written)

        def is_uploading(known: set[str] = known) -> bool:
            return any("/objects/" in each for each in {*archive.store.list_names("")} - known)

        wait_until("an upload has begun", is_uploading)
        cluster.kill(storage)
        cluster.start(storage)
        mark = read_archived_mark(cluster)
        if count >= KILLS and mark is not None and ListedFiles(archive, mark).garbage_objects:
            return


def check_kills_leave_no_garbage(
    directory: Path, url: str, age: Callable[[ClusterArchive], None] | None
) -> None:
    """Kill storages during uploads, then check that a collection keeps exactly the listed files.

    `age` makes files older than the grace period of replaced manifests.
    """
    archive, written = ClusterArchive(url), list[bytes]()
    with archiving_cluster(directory, url, removes_segments=False) as cluster:
        with WaltzClient(cluster.connect) as client:
            client.mount()
            kill_during_uploads(cluster, archive, client, written)
            mark = read_archived_mark(cluster)
            assert mark is not None
            first_kept = 0
            if age is not None:
                first_kept = int(mark.manifest.rpartition("/")[2].partition("-")[0])
                age(archive)
            cluster.kill(STORAGES[0])
            cluster.start(STORAGES[0])
            append_rows(client, written)

            def is_clean() -> bool:
                mark = read_archived_mark(cluster)
                if mark is None or mark.last < len(written) - 1:
                    return False
                versions = [
                    manifest_version_of(each.name) for each in ListedFiles(archive, mark).garbage
                ]
                return all(version is not None and version >= first_kept for version in versions)

            wait_until("only recently replaced manifests remain", is_clean)
        mark = read_archived_mark(cluster)
        assert mark is not None
        assert archive.payloads_of(ListedFiles(archive, mark).objects) == written
    members = (*STORAGES, "server-1")
    logs = "".join(cluster.log_path(member).read_text(errors="replace") for member in members)
    assert "storage.garbage_collected" in logs
    assert "collection_failed" not in logs


@pytest.mark.slow
def test_kills_during_uploads_leave_no_garbage_in_a_directory(tmp_path: Path) -> None:
    def age(archive: ClusterArchive) -> None:
        for file in archive.store.list_files(""):
            aged_s = file.modified_ms / 1_000 - AGE_S
            with suppress(FileNotFoundError):  # an upload has ended meanwhile
                os.utime(tmp_path / "archive" / file.name, (aged_s, aged_s))

    check_kills_leave_no_garbage(tmp_path, f"file://{tmp_path}/archive", age)


@pytest.mark.slow
def test_kills_during_uploads_leave_no_garbage_in_s3(tmp_path: Path, s3_url: str) -> None:
    check_kills_leave_no_garbage(tmp_path, s3_url, None)
