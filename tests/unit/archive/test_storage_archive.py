"""A storage reports failed uploads until one succeeds again."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.archive.test_upload import KEY, job_after
from waltz_core.archive.manifest_jobs import NewManifest
from waltz_core.archive.storage_archive import DAMAGED_LOCATIONS_MAX, StorageArchive
from waltz_core.errors import ArchiveUnavailable, ChecksumMismatch


def test_failures_are_counted_until_an_upload_succeeds(tmp_path):
    root = tmp_path / "archive"
    calls = []
    access = StorageArchive(
        f"file://{root}", KEY, ThreadPoolExecutor(1), on_progress=lambda: calls.append(1)
    )
    access.open()
    first = access.upload(job_after())
    assert isinstance(first, NewManifest)
    assert len(calls) >= 1, "no progress was reported"
    assert (access.failure, access.failure_count) == (None, 0)
    manifest = root / first.name
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1] + b" ")
    for attempt in (2, 3):
        assert access.upload(job_after(first, attempt=attempt)) is access.failure
        assert isinstance(access.failure, ChecksumMismatch)
    assert access.failure_count == 2
    shutil.rmtree(root)
    root.touch()  # The folder is replaced by a file.
    access.upload(job_after(attempt=4))
    assert isinstance(access.failure, ArchiveUnavailable)
    assert access.failure_count == 3
    root.unlink()
    access.upload(job_after(attempt=5))
    assert (access.failure, access.failure_count) == (None, 0)


def test_damage_is_reported_until_the_damaged_location_is_read_without_error():
    access = StorageArchive("", KEY, ThreadPoolExecutor(1), on_progress=lambda: None)
    access.on_location_read((0, 7), "object 7")
    access.on_location_read((1, 7), "object 8")
    access.on_location_read((0, 8), "")
    assert access.read_damage == "object 8"
    access.on_location_read((1, 7), "")
    assert access.read_damage == "object 7"
    access.on_location_read((0, 7), "")
    assert access.read_damage == ""
    for number in range(DAMAGED_LOCATIONS_MAX + 1):
        access.on_location_read((2, number), f"object {number}")
    for number in range(1, DAMAGED_LOCATIONS_MAX + 1):
        access.on_location_read((2, number), "")
    assert access.read_damage == "", "the oldest place was dropped"


def test_opening_an_archive_imports_all_modules_that_it_needs_later(tmp_path):
    """An upgrade may replace the modules while a storage runs."""
    code = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from waltz_core.archive.storage_archive import StorageArchive\n"
        f"access = StorageArchive('file://{tmp_path}', bytes(16), ThreadPoolExecutor(1))\n"
        "assert 'pyarrow.parquet' not in sys.modules\n"
        "access.open()\n"
        "known = {each for each in sys.modules if each.startswith('waltz_core.')}\n"
        "import waltz_core.archive.upload, waltz_core.archive.reader\n"
        "assert {each for each in sys.modules if each.startswith('waltz_core.')} == known\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=TEST_TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr
