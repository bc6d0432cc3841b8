"""A partition's directory is deleted or replaced while its storage runs."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.changing import address, check_level, does, refuses
from tests.fault.doctor import await_findings, doctor, from_elsewhere, run_as_printed
from tests.fault.load import Story, wait_until
from tests.patience import HANG_S
from waltz_core.errors import Unreachable
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.fault


def delete(directory: Path) -> None:
    def is_deleted() -> bool:
        shutil.rmtree(directory, ignore_errors=True)  # new files may come meanwhile
        return not directory.exists()

    wait_until("it is deleted", is_deleted)


def put_copy_back(directory: Path) -> None:
    """Put what the directory holds back as other files of the same names."""
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    directory.rename(directory.with_name("moved"))
    copy.rename(directory)


def health(cluster: LocalCluster, name: str) -> dict[str, object]:
    """Return the details of a page that says that it is not well."""
    page = f"http://127.0.0.1:{cluster.member(name).http_port}/health"
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(page, timeout=HANG_S)
    with found.value as answer:
        details: dict[str, object] = json.loads(answer.read())
    return details


@pytest.mark.parametrize("change", [delete, put_copy_back])
def test_the_replica_is_out_until_it_is_re_seeded_as_printed(
    story: Story, change: Callable[[Path], None]
):
    cluster, storage = story.cluster, address(story.cluster, "storage-2")
    elsewhere = from_elsewhere(cluster.connect)
    log = cluster.log_path("storage-2")
    before = log.read_text(encoding="utf-8").count("storage.files_replaced")
    with story.load() as load:
        load.await_commits()
        change(cluster.directory / "storage-2" / "1")
        load.await_commits()
        wait_until(
            "the storage has noticed",
            lambda: log.read_text(encoding="utf-8").count("storage.files_replaced") > before,
        )
        (found,) = await_findings({"replica-unreadable"}, *elsewhere)
        assert found["about"] == f"1 {storage}"
        assert "deleted or replaced" in found["sentence"]
        why_not = health(cluster, "storage-2")["not_served_reasons"]
        assert isinstance(why_not, dict)
        assert "deleted or replaced" in why_not["1"]
        load.await_commits()
        said = run_as_printed(found["command"])
        wait_until(f"nothing is wrong any more; {said}", lambda: not doctor(*elsewhere))
        load.await_commits()
    assert log.read_text(encoding="utf-8").count("storage.files_replaced") == before + 1
    shutil.rmtree(cluster.directory / "storage-2" / "moved", ignore_errors=True)
    story.check_whole()
    story.check_agrees()


def test_a_storage_ends_without_its_directory_and_an_empty_one_takes_its_place(story: Story):
    cluster, storage = story.cluster, address(story.cluster, "storage-2")
    with story.load() as load:
        load.await_commits()
        delete(cluster.directory / "storage-2")
        load.await_commits()
        wait_until("it has ended", lambda: cluster.member("storage-2").process() is None)
        log = cluster.log_path("storage-2").read_text(encoding="utf-8")
        assert "waltz-storage.ctl: expected the file that this process has opened" in log
        replace = f"cluster replace-storage {storage} {storage}"
        with pytest.raises(Unreachable, match=rf"(?s)storage-2 ended while .*{replace}"):
            cluster.up()
        words = ("replace-storage", storage, storage)
        waited = refuses(cluster, *words, "--timeout-s", "5")
        last = cluster.partition_count - 1
        assert f"start at {storage}, which then gets partitions 0-{last}" in waited
        cluster.up()
        assert "cluster add-replica" in does(cluster, *words)["summary"]
        does(cluster, "add-replica", "all", storage)
        load.await_commits()
    wait_until("nothing is wrong any more", lambda: not doctor(*from_elsewhere(cluster.connect)))
    check_level(story)
    story.check_whole()
    story.check_agrees()
