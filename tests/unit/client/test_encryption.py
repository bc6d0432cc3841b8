"""Encrypted payloads in the client: appends, contexts, feeds, ranges, predecessors."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.archived_log import CLUSTER_KEY, FIRST_COMMIT_MS, PARTITION_ID, encode_object
from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.client import (
    BYTES,
    JSON,
    ArchivedObjects,
    AsyncCallbacks,
    AsyncTransaction,
    Callbacks,
    Encryption,
    RangeForm,
    Transaction,
    TransactionBuilder,
    WaltzClient,
    lock,
    read_archived,
    transactional,
)
from waltz_core.encryption import keys
from waltz_core.memory_waltz import IN_MEMORY_CONFIG, MemoryWaltz
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, ReqId, next_chain

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for key_id in ("a", "b"):
        (tmp_path / key_id).write_text(key_id.encode().hex() * 32)
    return tmp_path


@contextmanager
def waltz_and_client(directory: Path) -> Iterator[tuple[MemoryWaltz, WaltzClient]]:
    """A Waltz, and a client that encrypts with key a."""
    with MemoryWaltz(1) as waltz:
        yield waltz, waltz.client(config(directory, key="a"))


def config(directory: Path, *, key: str = "", **others: object):
    given = {"encryption_keys": str(directory), "encryption_key_id": key, **others}
    return replace(IN_MEMORY_CONFIG, **given)


class RecordingCallbacks(Callbacks):
    """Records the data of a feed until it has received `count` transactions."""

    def __init__(self, count: int) -> None:
        self.rows: list[tuple[object, str | None]] = []
        self._count = count
        self.is_done = threading.Event()

    def apply_transaction(self, transaction: Transaction) -> None:
        assert transaction.data_error is None  # the data was not read yet
        data = transaction.data()
        if data is None:
            assert transaction.value() is None
        self.rows.append((data, transaction.data_error))
        if len(self.rows) == self._count:
            self.is_done.set()


class AsyncRecordingCallbacks(AsyncCallbacks):
    def __init__(self, callbacks: RecordingCallbacks) -> None:
        self._seen = callbacks

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        value, data = await transaction.value(BYTES), await transaction.data()
        assert value == data
        self._seen.rows.append((data, transaction.data_error))
        if len(self._seen.rows) == self._seen._count:
            self._seen.is_done.set()


def stored_payloads(waltz: MemoryWaltz) -> list[bytes]:
    return [transaction.data for transaction in waltz.transactions(0)]


def test_the_log_contains_envelopes_but_feeds_and_reads_return_payloads(directory: Path) -> None:
    with waltz_and_client(directory) as (waltz, client):
        client.append(b"one", header=7).result()
        client.append(b"two", encryption_key_id="b").result()
        waltz.client().append(b"plain").result()
        assert [stored_payload[:6] for stored_payload in stored_payloads(waltz)] == [
            b"WZE\x01\x01a",
            b"WZE\x01\x01b",
            b"plain",
        ]
        callbacks = RecordingCallbacks(3)
        client.subscribe(callbacks)
        assert callbacks.is_done.wait(TEST_TIMEOUT_S)
        assert callbacks.rows == [(b"one", None), (b"two", None), (b"plain", None)]
        (chunk,) = client.read_range(0, 0, 2)
        assert [(row.data, row.data_error) for row in chunk.rows()] == callbacks.rows
        # A client without keys returns the envelopes.
        (chunk,) = waltz.client().read_range(0, 0, 2)
        assert [row.data for row in chunk.rows()] == stored_payloads(waltz)


def test_data_is_none_with_a_reason_if_the_key_is_missing(directory: Path) -> None:
    with waltz_and_client(directory) as (waltz, client):
        client.append(b"one").result()
        client.append(b"two", encryption_key_id="b").result()
        waltz.client().append(b"plain").result()
        (directory / "b").unlink()
        keys.key_cache_for.cache_clear()  # another process would have an empty cache
        expected = [
            (b"one", None),
            (None, "the key 'b' does not exist"),
            (None, "the payload is not encrypted"),
        ]
        reader = waltz.client(config(directory, encryption_required=True))
        callbacks = RecordingCallbacks(3)
        reader.subscribe(callbacks)
        assert callbacks.is_done.wait(TEST_TIMEOUT_S)
        assert callbacks.rows == expected
        (chunk,) = reader.read_range(0, 0, 2)
        assert [(row.data, row.data_error) for row in chunk.rows()] == expected


@run_on_loop
async def test_an_async_client_encrypts_payloads_and_reports_lost_keys(directory: Path) -> None:
    with MemoryWaltz(1) as waltz:
        async with waltz.async_client(config(directory, key="a")) as client:
            await (await client.append(b"one"))
            await (await client.append(b"two", encryption_key_id="b"))
            (directory / "b").unlink()
            keys.key_cache_for.cache_clear()
        async with waltz.async_client(config(directory)) as reader:
            callbacks = RecordingCallbacks(2)
            await reader.subscribe(AsyncRecordingCallbacks(callbacks))
            await poll_until(callbacks.is_done.is_set)
            assert callbacks.rows == [(b"one", None), (None, "the key 'b' does not exist")]


@transactional(partition=0)
def pay(builder: TransactionBuilder, value: int, key: str | None) -> bool:
    builder.set_header(9)
    builder.set_transaction_data(value, JSON, encryption_key_id=key)
    return True


def test_contexts_encrypt_their_transactions(directory: Path) -> None:
    with waltz_and_client(directory) as (waltz, client):
        client.submit(pay(1, None)).result()
        client.submit(pay(2, "b")).result()
        assert [stored_payload[:6] for stored_payload in stored_payloads(waltz)] == [
            b"WZE\x01\x01a",
            b"WZE\x01\x01b",
        ]
        (chunk,) = client.read_range(0, 0, 1)
        assert [(row.header, row.data) for row in chunk.rows()] == [(9, b"1"), (9, b"2")]


def test_predecessors_are_decrypted(directory: Path) -> None:
    hot = {"write_locks": [lock("hot")], "client_high_water_mark": 0, "pipelined": True}
    with waltz_and_client(directory) as (waltz, client):
        client.append(b"before").result()
        client.append(b"first", header=3, **hot).result()
        with pytest.raises(errors.LockFailed) as failed:
            client.append(b"second", **hot).result()
        pipelined_state = failed.value.pipelined_state
        (predecessor,) = pipelined_state.predecessors
        assert (predecessor.data, predecessor.value(BYTES), predecessor.data_error) == (
            b"first",
            b"first",
            None,
        )
        client.append(b"second", **hot | {"pipelined": pipelined_state}).result()

        @transactional(partition=0, pipelined=True)
        def third(builder: TransactionBuilder) -> bool:
            predecessor_data.append([predecessor.data for predecessor in builder.predecessors(0)])
            builder.set_write_locks(hot["write_locks"])
            builder.set_transaction_data(b"third", BYTES)
            return True

        predecessor_data: list[list[bytes]] = []
        client.submit(third()).result()
        assert predecessor_data[-1] == [b"first", b"second"]
        (directory / "a").unlink()
        keys.key_cache_for.cache_clear()
        with pytest.raises(errors.LockFailed) as failed:
            waltz.client(config(directory, key="b")).append(b"x", **hot).result()
        found = failed.value.pipelined_state.predecessors_above(2)[0]
        assert (found.data, found.value(), found.data_error) == (
            None,
            None,
            "the key 'a' does not exist",
        )


def test_an_append_with_an_unusable_key_is_rejected(directory: Path) -> None:
    with waltz_and_client(directory) as (waltz, client):
        for key, text in (("c", "has no such key."), ("../a", "expected a key ID")):
            with pytest.raises(errors.BadConfig, match=text):
                client.append(b"x", encryption_key_id=key)
            with pytest.raises(errors.BadConfig, match=text):
                client.submit(pay(1, key)).result()
        plain = waltz.client()
        with pytest.raises(errors.BadConfig, match="setting encryption_keys, which locates the"):
            plain.append(b"x", encryption_key_id="a")
        with pytest.raises(errors.BadConfig, match="setting encryption_keys, which locates the"):
            plain.submit(pay(1, "a")).result()
        assert stored_payloads(waltz) == []


def archive_payloads(url: Path, payloads: list[bytes]) -> ArchivedObjects:
    """Return an archive with an object that has some payloads."""
    records, crcs = [], b""
    for number, data in enumerate(payloads):
        req_id = ReqId(7, 1, PARTITION_ID, number)
        records.append(raw_records.encode_record(number, req_id, 5, data, crc32(data)))
        crcs += records[-1][-4:]
    last = len(payloads) - 1
    chain = next_chain(GENESIS_CHAIN, 0, last, 1, crcs)
    written = encode_object(records, [LineageEntry(0, last, 1, FIRST_COMMIT_MS, chain)])
    entry = ObjectEntry(
        name="0.parquet",
        first=0,
        last=last,
        chain=chain,
        file_bytes=len(written),
        file_crc=crc32(written),
        record_bytes=sum(map(len, records)),
        commit_ms_min=FIRST_COMMIT_MS,
        commit_ms_max=FIRST_COMMIT_MS,
    )
    (url / entry.name).write_bytes(written)
    manifest = Manifest(CLUSTER_KEY, PARTITION_ID, 0, 0, -1, GENESIS_CHAIN).with_object(entry)
    return ArchivedObjects(f"file://{url}", manifest)


def test_archived_payloads_are_envelopes_and_are_decrypted_only_with_their_keys(
    directory: Path, tmp_path: Path
) -> None:
    encryption = Encryption.from_reference(str(directory), key_id="a")
    options_of_row = {"partition": PARTITION_ID, "header": 5}
    payloads = [
        encryption.encrypt(b"one", **options_of_row),
        encryption.encrypt(b"two", **options_of_row, key_id="b"),
        b"plain",
    ]
    (tmp_path / "archive").mkdir()
    objects = archive_payloads(tmp_path / "archive", payloads)
    (directory / "b").unlink()
    keys.key_cache_for.cache_clear()
    encryption = Encryption.from_reference(str(directory))
    whole = {"form": RangeForm.WHOLE}
    (chunk,) = read_archived(objects, 0, 2, **whole, encryption=encryption)
    assert [row.data for row in chunk.rows()] == [b"one", None, b"plain"]
    (chunk,) = read_archived(objects, 0, 2, **whole)
    assert [row.data for row in chunk.rows()] == payloads
    # Other programs read the columns of the objects, and decrypt column `data`.
    table = pq.read_table(tmp_path / "archive" / "0.parquet").combine_chunks()
    decrypted = encryption.decrypt_column(
        table["data"].combine_chunks(),
        partition=PARTITION_ID,
        headers=table["header"].to_pylist(),
    )
    assert decrypted.data.to_pylist() == [b"one", None, b"plain"]
    assert decrypted.errors.to_pylist() == [None, "the key 'b' does not exist", None]


def test_the_snippets_of_the_encryption_page_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/encryption.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    of_client, _of_spark, of_readers = (
        snippet.replace("/etc/waltz/keys", str(directory)) for snippet in snippets
    )
    (directory / "payments-2026").write_text("11" * 32)
    (directory / "customer-7").write_text("22" * 32)
    with MemoryWaltz(1) as waltz:
        names: dict[str, Any] = {"__name__": "snippets"}
        start, end = of_client.split("with WaltzClient", 1)
        exec(start, names)
        names["WaltzClient"] = lambda _connect, config: waltz.client(config)
        exec("with WaltzClient" + end, names)
        column = pa.array(stored_payloads(waltz), pa.binary())
    names |= {"data": column, "headers": [0, 0]}
    exec(of_readers, names)
    assert names["payloads"].data.to_pylist() == [b"100 for rent", b"20 for books"]


@pytest.mark.parametrize("name", ["encryption_key_id", "encryption_required"])
def test_settings_that_need_keys_are_rejected_without_keys(name: str) -> None:
    with pytest.raises(errors.BadConfig, match=f"{name} requires setting encryption_keys"):
        replace(IN_MEMORY_CONFIG, **{name: "a" if name == "encryption_key_id" else True})


def test_a_client_with_invalid_encryption_settings_does_not_open(directory: Path) -> None:
    with MemoryWaltz(1) as waltz:
        with pytest.raises(errors.BadConfig, match="encryption keys: the directory"):
            waltz.client(config(directory / "none"))
        with pytest.raises(errors.BadConfig, match="expected a key ID"):
            waltz.client(config(directory, key="a b"))
