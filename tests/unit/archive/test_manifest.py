"""A manifest lists objects without gaps; a manifest with a changed byte is rejected."""

from random import Random

import pytest

from waltz_core.archive import manifest
from waltz_core.archive.manifest import EXPIRY_GRACE_MS, Manifest, ManifestPage, ObjectEntry
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN

KEY = bytes(range(16))
EMPTY = Manifest(KEY, 3, 0, 0, -1, GENESIS_CHAIN)


def entry(number, *, rows=10, first=None):
    first = number * rows if first is None else first
    chain = number.to_bytes(16, "big")
    name = f"objects/{number}.parquet"
    times = (1_000 + number, 2_000 + number)
    return ObjectEntry(name, first, first + rows - 1, chain, 5_000, 77, 9_000, *times)


def manifest_with_objects(count):
    found = EMPTY
    for number in range(count):
        found = found.with_object(entry(number))
    return found


def read(found):
    return Manifest.from_bytes(found.to_bytes(), "m")


def test_a_manifest_round_trips():
    for count in (0, 1, 30):
        manifest = manifest_with_objects(count)
        assert read(manifest) == manifest
        assert (manifest.version, manifest.last) == (count, 10 * count - 1)
    assert manifest.chain == entry(29).chain


@pytest.mark.parametrize("first", [9, 11])
def test_an_object_that_leaves_a_gap_or_overlaps_another_is_rejected(first):
    with pytest.raises(BadFormat, match="to be 10, found an object"):
        manifest_with_objects(1).with_object(entry(1, first=first))


def test_entries_of_old_objects_move_to_pages(monkeypatch):
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 5)
    found, pages = EMPTY, {}
    for number in range(48):
        page = found.page_to_write
        if page is not None:
            name = f"page-{len(pages)}"
            pages[name] = page.to_bytes()
            found = found.with_page(name, page)
        found = read(found.with_object(entry(number)))
        assert len(found.newest_objects) <= 10
    assert len(found.pages) == 8
    entries = []
    for each in found.pages:
        assert crc32(pages[each.name]) == each.file_crc
        page = ManifestPage.from_bytes(pages[each.name], each.name)
        assert (page.entries[0].first, page.entries[-1].last) == (each.first, each.last)
        assert (each.commit_ms_min, each.commit_ms_max) == (
            page.entries[0].commit_ms_min,
            page.entries[-1].commit_ms_max,
        )
        entries += page.entries
    assert [*entries, *found.newest_objects] == [entry(number) for number in range(48)]


def test_expired_objects_stay_listed_for_the_grace_period(monkeypatch):
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    found = manifest_with_objects(4)
    found = found.with_page("p", found.page_to_write)
    for first, pages, newest in ((0, 1, 2), (19, 1, 2), (20, 0, 2), (35, 0, 1), (40, 0, 0)):
        expired = read(found.with_expiry(first, 5))
        assert (expired.first, expired.version, expired.last) == (first, found.version + 1, 39)
        assert (expired.pages, expired.newest_objects) == (found.pages, found.newest_objects)
        assert expired.deletable_below(5 + EXPIRY_GRACE_MS - 1) == 0
        assert expired.deletable_below(5 + EXPIRY_GRACE_MS) == first
        kept = read(expired.with_expiry(first, 5 + EXPIRY_GRACE_MS))
        assert (kept.first, len(kept.pages), len(kept.newest_objects)) == (first, pages, newest)
    assert read(kept.with_object(entry(4))).last == 49


def test_each_expiry_has_its_own_grace_period():
    found = manifest_with_objects(4).with_expiry(10, 0).with_expiry(30, 100)
    assert found.deletable_below(EXPIRY_GRACE_MS) == 10
    found = read(found.with_expiry(30, EXPIRY_GRACE_MS))
    assert [entry.first for entry in found.newest_objects] == [10, 20, 30]
    assert found.deletable_below(EXPIRY_GRACE_MS) == 10  # a page still lists the next objects
    assert found.deletable_below(EXPIRY_GRACE_MS + 100) == 30


def test_the_first_available_id_never_decreases():
    manifest = manifest_with_objects(4).with_expiry(20, 0)
    for first in (19, 41):
        with pytest.raises(AssertionError):
            manifest.with_expiry(first, 0)


def test_a_changed_byte_is_found():
    data = manifest_with_objects(3).to_bytes()
    rng = Random(1)
    for offset in rng.sample(range(len(data)), 100):
        changed = bytearray(data)
        changed[offset] ^= 1 << rng.randrange(8)
        with pytest.raises((BadFormat, ChecksumMismatch), match="manifest m"):
            Manifest.from_bytes(bytes(changed), "m")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"last": 40}, "expected objects up to transaction 40"),
        ({"first": 31}, r"expected a first available ID in 0\.\.30, found 31"),
        ({"first": -1}, r"expected a first available ID in 0\.\.30, found -1"),
        ({"newest_objects": (entry(0), entry(2))}, "10, found one with transactions 20..29"),
        (
            {"newest_objects": (entry(1), entry(2)), "first": 5},
            "objects from the first available ID 5 on, found objects from transaction 10 on",
        ),
        (
            {"newest_objects": (entry(0)._replace(last=-1), entry(1), entry(2))},
            "0, found one with transactions 0..-1",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_rejected(wrong, problem):
    good = manifest_with_objects(3)
    values = {
        name: getattr(good, name)
        for name in ("version", "first", "last", "chain", "newest_objects")
    }
    bad = Manifest(KEY, 3, **{**values, **wrong})
    with pytest.raises(BadFormat, match=problem):
        read(bad)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"[]", "expected file format 1, found None"),
        (b'{"format": 2}', "expected file format 1, found 2"),
        (b'{"format": 1}', "KeyError"),
        (b"{", "manifest m: "),
        (
            manifest_with_objects(1).to_bytes()[9:].replace(b'"file_crc":77', b'"file_crc":true'),
            "key file_crc of an entry of field objects: expected a number",
        ),
        (
            manifest_with_objects(1).to_bytes()[9:].replace(b'"name":"', b'"names":"'),
            "expected an entry of field objects with the keys name, first, ",
        ),
        (
            manifest_with_objects(1).to_bytes()[9:].replace(b'"pages":[]', b'"pages":{}'),
            "expected a JSON list in field pages",
        ),
    ],
)
def test_invalid_content_is_rejected_with_the_reason(body, problem):
    with pytest.raises(BadFormat, match=problem):
        Manifest.from_bytes(b"%08x\n%s" % (crc32(body), body), "m")
