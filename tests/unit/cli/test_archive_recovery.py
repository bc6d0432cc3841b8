"""Recovery of the archived mark from the archive, when ZooKeeper's data is lost."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.archive.test_upload import KEY, job_after
from waltz_core.archive import manifest
from waltz_core.archive.manifest import RecordedManifest
from waltz_core.archive.manifest_jobs import ExpiryJob
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import expire, upload
from waltz_core.cli.cluster.archive_recovery import ArchiveRecovery, RecoveredLog
from waltz_core.errors import BadRequest, ChecksumMismatch
from waltz_core.records.record import GENESIS_CHAIN

PARTITION, OTHER = 3, bytes([1] * 16)
STORAGE_A, STORAGE_B = "10.0.0.1:5280", "10.0.0.2:5280"


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Return an archive with three objects of 10 IDs each, one of them in a page."""
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 1)
    store, manifests = ArchiveStore(f"file://{tmp_path}"), []
    for attempt in range(3):
        manifests.append(
            upload(store, KEY, job_after(manifests[-1] if manifests else None, attempt=attempt))
        )
    chains = {each.last: each.chain for each in manifests} | {-1: GENESIS_CHAIN}
    return SimpleNamespace(store=store, manifests=manifests, chains=chains, root=tmp_path)


def find(archive, *, start=-1, last=29, starts=None, chains=None, url=None):
    """Return the mark that is found for a log, and the manifests that were skipped."""
    known_chains, skipped = archive.chains if chains is None else chains, []

    async def chain_at(at):
        assert start <= at <= last, "a storage rejects other IDs"
        return known_chains.get(at)

    log = RecoveredLog(PARTITION, start, last, chain_at, {STORAGE_A: start, **(starts or {})})
    recovery = ArchiveRecovery(archive.store.url if url is None else url, KEY, skipped.append)
    return asyncio.run(recovery.find_archived_mark(log)), skipped


@pytest.mark.parametrize("start", [-1, 9, 19, 29])
def test_the_newest_manifest_that_ends_in_the_log_is_found(archive, start):
    newest = archive.manifests[-1]
    found, skipped = find(archive, start=start, last=35)
    assert found == (29, newest.chain, newest.stamp_ms, 0, newest.file_crc, newest.name)
    assert found.stamp_ms > 0
    assert not skipped


def test_a_manifest_that_was_never_recorded_is_used_if_the_log_continues_it(archive):
    """The newest manifest is that of the latest session, even if an older one has higher IDs."""
    later = upload(
        archive.store,
        KEY,
        job_after(archive.manifests[0], counts=(1, 1), session_id=10, nonce=OTHER, attempt=0),
    )
    chains = archive.chains | {later.last: later.chain}
    found, _ = find(archive, chains=chains)
    assert (found.last, found.manifest) == (later.last, later.name)
    # The log continues with the batches of the first owner instead.
    found, (skipped,) = find(archive)
    assert found.manifest == archive.manifests[-1].name
    assert f"{later.name}: it ends at transaction {later.last} with chain hash" in skipped
    assert skipped.endswith("the log has no batch that ends there")


def test_the_recovered_mark_has_the_first_id_of_the_last_expiry(archive):
    newest = archive.manifests[-1]
    recorded = RecordedManifest(PARTITION, newest.last, newest.chain, newest.name, newest.file_crc)
    job = ExpiryJob(9, bytes(16), 3, recorded, before=25, before_ms=0, retention_ms=0)
    expired = expire(archive.store, KEY, job, now_ms=1)
    assert find(archive)[0].first == 20
    # The grace period is over, and a collection has deleted the objects.
    for path in (archive.root / archive.manifests[0].name).parents[1].glob("objects/*"):
        if not path.name.startswith("20-"):
            path.unlink()
    found, _ = find(archive)
    assert (found.first, found.manifest) == (20, expired.name)


def test_an_archive_without_manifests_counts_as_empty_if_all_logs_begin_at_0(archive):
    assert find(archive, url=f"{archive.store.url}/elsewhere") == (None, [])
    assert find(archive, url="") == (None, [])


@pytest.mark.parametrize(
    ("url", "location"), [("", "no archive is configured"), ("file:///nowhere", "file:///nowhere")]
)
def test_a_partition_with_removed_records_is_rejected_if_its_archive_is_not_found(
    archive, url, location
):
    with pytest.raises(BadRequest) as caught:
        find(archive, url=url, starts={STORAGE_B: 9})
    assert (
        f"partition 3: the log of {STORAGE_B} begins at transaction 10, so the archive "
        f"({location}) must have a manifest that ends at a transaction in 9..29; found none. Hint: "
    ) in str(caught.value)


def corrupt(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def page_of(archive):
    return max((archive.root / archive.manifests[-1].name).parent.glob("*-page.json"))


def object_starting_at(archive, first):
    folder = (archive.root / archive.manifests[-1].name).parents[1] / "objects"
    (found,) = folder.glob(f"{first}-*")
    return found


FAULTS = {
    "a corrupt head": (lambda each: corrupt(each.root / each.manifests[-1].name), "expected CRC"),
    "a corrupt page": (lambda each: corrupt(page_of(each)), "expected CRC"),
    "no page": (lambda each: page_of(each).unlink(), "-page.json, because it does not exist"),
    "no object": (
        lambda each: object_starting_at(each, 20).unlink(),
        "transactions 20..29. with .* found none",
    ),
    "half an object": (
        lambda each: object_starting_at(each, 20).write_bytes(b"half"),
        "found one of 4 bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_older_manifest_is_used_if_the_logs_still_have_the_later_records(archive, fault):
    apply_fault, reason = FAULTS[fault]
    apply_fault(archive)
    found, skipped = find(archive, start=9)
    assert found.last in (9, 19)
    assert found.manifest != archive.manifests[-1].name
    assert skipped
    with pytest.raises(
        BadRequest, match=f"found 3 manifests, of which the newest cannot be used: .*{reason}"
    ):
        find(archive, start=9, starts={STORAGE_B: 29})


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ({"chains": {}}, "the log has no batch that ends there"),
        ({"chains": dict.fromkeys(range(30), OTHER)}, f"the log has {OTHER.hex()}"),
        (
            {"starts": {STORAGE_B: 30}, "last": 40},
            "expected a last transaction in 30..40, found 29",
        ),
    ],
)
def test_the_archive_is_not_replaced_if_no_log_continues_it(archive, log, reason):
    """A replacement would begin again at 0, and would lack the objects that backups need."""
    with pytest.raises(
        BadRequest, match=f"found 3 manifests, of which the newest cannot be used: .*{reason}"
    ):
        find(archive, **log)


@pytest.mark.parametrize("last", [-1, 9, 23, 28])
def test_a_log_that_lacks_archived_transactions_is_rejected(archive, last):
    """With an older manifest, a collection would delete the only object with 20..29."""
    with pytest.raises(
        BadRequest,
        match=rf"ends at transaction {last}, but the archive ends at transaction 29 \(manifest",
    ):
        find(archive, last=last)


def test_a_partition_opens_without_its_archive_after_the_archive_folder_was_moved(archive):
    """An operator does this if the chain at the mark is lost (docs/archive.md, "Limits")."""
    folder = (archive.root / archive.manifests[0].name).parents[1]
    with pytest.raises(BadRequest, match="the log has no batch that ends there"):
        find(archive, chains={})
    folder.rename(archive.root / "moved")
    assert find(archive, chains={}) == (None, [])
    with pytest.raises(BadRequest, match="begins at transaction 10, so"):
        find(archive, start=9, chains={})


def test_the_manifest_of_another_cluster_or_partition_is_ignored(archive):
    folder = (archive.root / archive.manifests[0].name).parent
    foreign = upload(archive.store, OTHER, job_after(attempt=7))
    (folder / Path(foreign.name).name).write_bytes(archive.store.read(foreign.name))
    found, (skipped,) = find(archive)
    assert found.manifest == archive.manifests[-1].name
    assert "of cluster 0101" in skipped


def test_after_an_error_of_a_storage_no_older_manifest_is_used(archive):
    async def chain_at(_):
        raise ChecksumMismatch("the batches cannot be read:")

    log = RecoveredLog(PARTITION, -1, 29, chain_at, {STORAGE_A: -1})
    recovery = ArchiveRecovery(archive.store.url, KEY, lambda _: None)
    with pytest.raises(ChecksumMismatch):
        asyncio.run(recovery.find_archived_mark(log))
