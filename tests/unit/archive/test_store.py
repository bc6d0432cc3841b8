"""Files in a directory and in an object store: durable, complete, never overwritten."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from waltz_core.archive import store as store_module
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import ArchiveUnavailable, BadConfig, ObjectMissing

NAME = "7/objects/0-9.parquet"


@pytest.fixture
def store(tmp_path):
    return ArchiveStore(f"file://{tmp_path}/archive")


def test_files_are_written_read_listed_and_deleted(store):
    assert store.names("7") == []
    store.write(NAME, b"abc")
    with store.writing("7/manifests/1") as sink:
        sink.write(b"d")
        sink.write(memoryview(b"ef"))
    assert store.read(NAME) == b"abc"
    assert store.read("7/manifests/1") == b"def"
    with store.open(NAME) as source:
        source.seek(1)
        assert source.read() == b"bc"
    assert store.names("7") == ["7/manifests/1", NAME]
    assert store.names("7/objects") == [NAME]
    store.delete(NAME)
    store.delete(NAME)
    assert store.names("7") == ["7/manifests/1"]


@pytest.mark.parametrize("call", ["read", "open"])
def test_a_missing_file_is_named(store, call):
    with pytest.raises(ObjectMissing, match=f"cannot {call} .*/archive/{NAME}: it does not exist"):
        getattr(store, call)(NAME)


def test_nothing_is_overwritten(store):
    store.write(NAME, b"first")
    with pytest.raises(ArchiveUnavailable, match=f"cannot write .*{NAME}: File exists"):
        store.write(NAME, b"second")
    assert store.read(NAME) == b"first"
    assert store.names("") == [NAME]


def test_a_write_that_fails_leaves_no_file(store):
    with suppress(ZeroDivisionError), store.writing(NAME) as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert store.names("") == []


def test_an_error_of_the_callers_block_is_not_reported_as_one_of_the_store(store):
    with pytest.raises(OSError, match=r"^the disk of the caller$"), store.writing(NAME):
        raise OSError("the disk of the caller")
    with pytest.raises(FileNotFoundError), store.writing(NAME):
        raise FileNotFoundError
    assert store.names("") == []


def test_an_error_of_an_open_file_is_reported_with_its_name(store):
    with store.writing(NAME) as sink, Path("/dev/full").open("wb", buffering=0) as full:
        sink._file, file = full, sink._file
        with pytest.raises(ArchiveUnavailable, match=f"write .*{NAME}: No space left on device"):
            sink.write(b"abc")
        sink._file = file
    store.delete(NAME)
    store.write(NAME, b"abc")
    reason = f"cannot read .*{NAME}: "
    with store.open(NAME) as source, pytest.raises(ArchiveUnavailable, match=reason):
        source.seek(-1)
    assert source.closed


def test_a_file_gets_its_name_after_its_sync_and_the_names_are_synced(store, monkeypatch):
    """Of the file, and of each new folder."""
    steps = []
    sync, link = os.fsync, os.link

    def noted_sync(descriptor):
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def noted_link(source, target):
        steps.append(("link", str(target)))
        link(source, target)

    monkeypatch.setattr(store_module.os, "fsync", noted_sync)
    monkeypatch.setattr(store_module.os, "link", noted_link)
    store.write(NAME, b"abc")
    base = store.url.removeprefix("file://")
    assert steps == [
        ("sync", base.removesuffix("/archive")),
        ("sync", base),
        ("sync", f"{base}/7"),
        ("sync", f"{base}/{NAME}.tmp"),
        ("link", f"{base}/{NAME}"),
        ("sync", f"{base}/7/objects"),
    ]
    # Another process cannot know that the folders are durable, and syncs their names once.
    names = [("sync", each) for each in (str(Path(base).parent), base, f"{base}/7")]
    other = ArchiveStore(store.url)
    for name, synced in (("7/objects/2", names), ("7/objects/3", [])):
        steps.clear()
        other.write(name, b"abc")
        assert steps == [
            *synced,
            ("sync", f"{base}/{name}.tmp"),
            ("link", f"{base}/{name}"),
            ("sync", f"{base}/7/objects"),
        ]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/folder?regoin=eu", "expected the options region, endpoint_override, scheme"),
        ("nowhere://bucket", "Hint: expected a URL such as file:///srv/archive"),
        ("archive", "Hint: expected a URL such as file:///srv/archive"),
    ],
)
def test_a_wrong_url_is_reported(url, said):
    with pytest.raises(BadConfig, match=said):
        ArchiveStore(url)
