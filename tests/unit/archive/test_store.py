"""Files in a directory and in an object store: durable, complete, never overwritten."""

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pyarrow.fs import LocalFileSystem

from waltz_core.archive import store as store_module
from waltz_core.archive.store import ArchiveStore, StoreFile
from waltz_core.errors import ArchiveUnavailable, BadConfig, ObjectMissing

NAME = "7/objects/0-9.parquet"


@pytest.fixture
def store(tmp_path):
    return ArchiveStore(f"file://{tmp_path}/archive")


def test_files_are_written_read_listed_and_deleted(store):
    assert store.list_names("7") == []
    store.write(NAME, b"abc")
    with store.open_sink("7/manifests/1") as sink:
        sink.write(b"d")
        sink.write(memoryview(b"ef"))
    assert store.read(NAME) == b"abc"
    assert store.read("7/manifests/1") == b"def"
    with store.open(NAME) as source:
        source.seek(1)
        assert source.read() == b"bc"
    assert store.list_names("7") == ["7/manifests/1", NAME]
    assert store.list_names("7/objects") == [NAME]
    store.delete(NAME)
    store.delete(NAME)
    assert store.list_names("7") == ["7/manifests/1"]


@pytest.mark.parametrize("call", ["read", "open"])
def test_the_error_names_a_missing_file(store, call):
    store.write("7/other", b"")
    with pytest.raises(
        ObjectMissing, match=f"cannot {call} .*/archive/{NAME}, because it does not exist"
    ):
        getattr(store, call)(NAME)


@pytest.mark.parametrize("call", ["read", "open"])
def test_a_store_without_files_of_the_cluster_is_unavailable_and_not_damaged(store, call):
    """For example, its directory is not mounted yet."""
    store.write("8/other", b"")
    with pytest.raises(
        ArchiveUnavailable,
        match=r"archive/7 has no files\. Hint: check that "
        r"the directory is",
    ):
        getattr(store, call)(NAME)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("abfss://account:hidden@host/waltz", "abfss://account@host/waltz"),
        ("s3://key:hidden@bucket/waltz?nope=1", "s3://key@bucket/waltz?nope=1"),
    ],
)
def test_a_password_in_a_url_is_rejected_and_not_shown(url, shown):
    with pytest.raises(BadConfig, match="expected a URL without a password") as caught:
        ArchiveStore(url)
    assert f"archive {shown}: " in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_nothing_is_overwritten(store):
    store.write(NAME, b"first")
    with pytest.raises(ArchiveUnavailable, match=f"cannot write .*{NAME}: File exists"):
        store.write(NAME, b"second")
    assert store.read(NAME) == b"first"
    assert store.list_names("") == [NAME]


def test_a_failed_write_leaves_no_file(store):
    with suppress(ZeroDivisionError), store.open_sink(NAME) as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert store.list_names("") == []


def test_an_error_in_the_callers_block_is_not_reported_as_an_error_of_the_store(store):
    with pytest.raises(OSError, match=r"^the disk of the caller$"), store.open_sink(NAME):
        raise OSError("the disk of the caller")
    with pytest.raises(FileNotFoundError), store.open_sink(NAME):
        raise FileNotFoundError
    assert store.list_names("") == []


def test_an_error_while_a_file_is_open_names_the_file(store):
    with store.open_sink(NAME) as sink, Path("/dev/full").open("wb", buffering=0) as full:
        sink._file, file = full, sink._file
        with pytest.raises(ArchiveUnavailable, match=f"write .*{NAME}: No space left on device"):
            sink.write(b"abc")
        sink._file = file
    store.delete(NAME)
    store.write(NAME, b"abc")
    reason = f"cannot read .*{NAME}: "
    with store.open(NAME) as source:
        source.seek(-1)
        with pytest.raises(ArchiveUnavailable, match=reason):
            source.read()
    assert source.closed


class CountingFile(io.BytesIO):
    """A file that rejects reads at its end, as Google Cloud Storage does."""

    def __init__(self, data):
        super().__init__(data)
        self.requested = 0

    def size(self):
        return len(self.getvalue())

    def read_at(self, byte_count, offset):
        if offset >= self.size():
            raise OSError("Received HTTP status code: 416")
        self.requested += byte_count
        return self.getvalue()[offset : offset + byte_count]


def test_a_read_requests_only_its_bytes_and_none_after_the_end():
    file = CountingFile(b"abcdef")
    with StoreFile(file, NAME) as source:
        assert source.seek(-4, os.SEEK_END) == 2
        assert source.read(1) == b"c"
        assert source.seek(1, os.SEEK_CUR) == source.tell() == 4
        assert source.read(9) == b"ef"
        assert file.requested == 3
        assert source.read() == source.read(1) == b""
        source.seek(7)
        assert source.read() == b""
        source.seek(1)
        assert source.read(-1) == b"bcdef"
    assert source.closed


def test_a_file_is_synced_before_it_gets_its_name_and_its_folders_are_synced_afterwards(
    store, monkeypatch
):
    """The name of the file and the names of new folders are synced."""
    steps = []
    sync, link = os.fsync, os.link

    def record_sync(descriptor):
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def record_link(source, target):
        steps.append(("link", str(target)))
        link(source, target)

    monkeypatch.setattr(store_module.os, "fsync", record_sync)
    monkeypatch.setattr(store_module.os, "link", record_link)
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
    # Another process has no information that the folders are durable, so it syncs their names once.
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
    ("url", "problem"),
    [
        (
            "s3://bucket/folder?regoin=eu",
            "expected only the URL options region, endpoint_override, scheme",
        ),
        ("nowhere://bucket", "Hint: use a URL such as file:///srv/archive"),
        ("archive", "Hint: use a URL such as file:///srv/archive"),
    ],
)
def test_a_wrong_url_is_reported(url, problem):
    with pytest.raises(BadConfig, match=problem):
        ArchiveStore(url)


@pytest.mark.parametrize(("options", "seconds"), [("", 60), ("?retry_limit_seconds=5", 5)])
def test_a_request_to_google_is_repeated_for_a_minute_by_default(options, seconds):
    """PyArrow's default is 15 minutes."""
    store = ArchiveStore(f"gs://anonymous@bucket/folder{options}")
    _, (pickled,) = store._files.__reduce__()
    assert pickled["retry_time_limit"] == timedelta(seconds=seconds)


class RejectingHandler(BaseHTTPRequestHandler):
    """Answers every request with the server's `status`; appends the path to its `paths`."""

    def do_request(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = do_request  # noqa: N815 - the names of the base class

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def rejecting_server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), RejectingHandler) as server:
        server.paths, server.status = [], 403
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("call", ["read", "list_names"])
def test_a_sas_token_of_the_environment_is_sent_to_azure_and_not_shown(
    rejecting_server, monkeypatch, call
):
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2021-12-02&sp=rwdl&sig=top%2Fsecret%3D")
    url = (
        f"abfs://account@127.0.0.1:{rejecting_server.server_port}/container/folder?enable_tls=false"
    )
    store = ArchiveStore(url)
    assert store.url == url
    with pytest.raises(ArchiveUnavailable, match=f"container/folder/{NAME}: .*403") as caught:
        getattr(store, call)(NAME)
    assert rejecting_server.paths
    assert all("sig=top%2Fsecret%3D" in path for path in rejecting_server.paths)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_bucket_is_not_reported_as_a_missing_object(rejecting_server):
    """A write to Google Cloud Storage reports a missing object in this case."""
    rejecting_server.status = 404
    options = f"endpoint_override=127.0.0.1:{rejecting_server.server_port}&scheme=http"
    store = ArchiveStore(f"gs://anonymous@bucket/folder?{options}")
    with pytest.raises(
        ArchiveUnavailable, match=f"write .*{NAME}: the bucket or the folder does not exist"
    ):
        store.write(NAME, b"abc")
    with pytest.raises(ArchiveUnavailable, match="folder bucket/folder/7 has"):
        store.read(NAME)


@pytest.mark.parametrize("secret", ["sig", "client_secret"])
def test_a_secret_in_a_url_is_rejected_and_not_shown(secret):
    with pytest.raises(
        BadConfig, match=f"expected a URL without secrets, found {secret}."
    ) as caught:
        ArchiveStore(f"abfss://c@account.dfs.core.windows.net/folder?{secret}=hidden")
    assert "AZURE_STORAGE_SAS_TOKEN" in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("known", [None, "AWS_REGION", "AWS_DEFAULT_REGION"])
def test_the_region_in_an_s3_url_is_passed_to_the_sdk_in_its_environment(known, monkeypatch):
    """Without a region, the SDK blocks all threads while it waits for EC2's metadata service."""
    calls = []

    def create_file_system(**options):
        calls.append((options["region"], [os.environ.get(variable) for variable in variables]))
        return LocalFileSystem()

    variables = ("AWS_REGION", "AWS_DEFAULT_REGION")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    if known:
        monkeypatch.setenv(known, "eu-central-1")
    monkeypatch.setattr(store_module.arrow_fs, "S3FileSystem", create_file_system)
    ArchiveStore("s3://bucket/folder?region=eu-west-3")
    own = [known and ("eu-central-1" if variable == known else None) for variable in variables]
    assert calls == [("eu-west-3", own if known else ["eu-west-3", None])]
    assert [os.environ.get(variable) for variable in variables] == (own if known else [None, None])
