"""Keys by ID: directories, functions, and how long a key is cached."""

import copy
import sys
from pathlib import Path

import pytest

from waltz_core import errors
from waltz_core.encryption import keys
from waltz_core.encryption.envelopes import Encryption
from waltz_core.encryption.key_ids import check_key_id
from waltz_core.encryption.keys import KEY_LIFETIME_S, KeyCache, KeyDirectory, key_cache_for

SECRET = bytes(range(32))


class CountingProvider:
    """A provider with one key, which counts its calls."""

    def __init__(self) -> None:
        self.keys: dict[str, object] = {"a": SECRET}
        self.calls: list[str] = []
        self.now_s = 0.0

    def __call__(self, key_id: str) -> object:
        self.calls.append(key_id)
        return self.keys.get(key_id)

    def cache(self) -> KeyCache:
        return KeyCache(self, "a test", clock=lambda: self.now_s)


def test_found_and_missing_keys_are_cached_for_key_seconds() -> None:
    provider = CountingProvider()
    cache = provider.cache()
    assert not cache.is_cached("a")
    for _ in range(3):
        assert cache.find("a") is not None
        assert cache.find("b") is None
    assert provider.calls == ["a", "b"]
    provider.now_s = KEY_LIFETIME_S - 0.1
    assert cache.is_cached("a")
    assert cache.is_cached("b")
    provider.keys = {"b": SECRET}  # a is destroyed, b is created
    provider.now_s = KEY_LIFETIME_S
    assert not cache.is_cached("a")
    assert cache.find("a") is None
    assert cache.find("b") is not None


def test_keys_cannot_be_sent_to_another_process() -> None:
    cache = CountingProvider().cache()
    cache.find("a")
    with pytest.raises(errors.UsageError, match="encryption keys cannot be sent"):
        copy.deepcopy(Encryption(cache))  # `deepcopy` uses the interface of pickle


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "CACHED_KEYS_MAX", 3)
    provider = CountingProvider()
    cache = provider.cache()
    for key_id in ("a", "b", "c", "d"):
        cache.find(key_id)
    assert [cache.is_cached(each) for each in "abcd"] == [False, True, True, True]


def test_a_limited_number_of_derived_keys_is_cached_by_salt() -> None:
    key = keys.Key(SECRET)
    first = key.derive_key(bytes(16))
    assert key.derive_key(bytes(16)) is first
    for number in range(1, 40):
        key.derive_key(number.to_bytes(16, "big"))
    assert key.derive_key(bytes(16)) is not first


@pytest.mark.parametrize(("secret", "found"), [(b"short", "5"), ("text" * 8, "str")])
def test_the_error_for_an_invalid_provider_result_does_not_show_the_result(
    secret: object, found: str
) -> None:
    provider = CountingProvider()
    provider.keys = {"a": secret}
    with pytest.raises(errors.BadConfig, match=f"a test, key 'a': expected .* found {found}") as it:
        provider.cache().find("a")
    assert str(secret) not in str(it.value)
    assert "short" not in str(it.value)


@pytest.mark.parametrize("key_id", ["", ".", "..", "a/b", "ä", "a" * 65, ".a", "-a", "a\n", 7])
def test_a_key_id_is_checked(key_id: object) -> None:
    with pytest.raises(errors.BadConfig, match="here: expected a key ID"):
        check_key_id(key_id, "here")


def test_a_key_id_may_have_64_characters() -> None:
    assert check_key_id("0" + "._-Az" * 12 + "end", "here")


def test_a_directory_has_a_file_for_each_key(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(SECRET.hex() + "\n")
    (tmp_path / "B.2").write_text(bytes(32).hex().upper())
    provider = KeyDirectory(tmp_path)
    assert provider("a") == SECRET
    assert provider("B.2") == bytes(32)
    assert provider("c") is None
    (tmp_path / "a").unlink()
    assert provider("a") is None


@pytest.mark.parametrize("content", [b"\xff" * 32, b"0x" + b"00" * 31, "é".encode()])
def test_the_error_for_an_invalid_key_file_does_not_show_its_content(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(errors.BadConfig, match="expected 64 hexadecimal digits") as it:
        KeyDirectory(tmp_path)("a")
    assert content.decode("latin1")[:4] not in str(it.value)


def test_an_unavailable_directory_is_not_reported_as_a_destroyed_key(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    (directory / "a").mkdir(parents=True)  # a file that cannot be read
    provider = KeyDirectory(directory)
    with pytest.raises(errors.Unavailable, match=r"'.*/keys/a'"):
        provider("a")
    (directory / "a").rmdir()
    directory.rmdir()
    with pytest.raises(errors.Unavailable, match="no longer exists"):
        provider("a")


def test_a_key_reference_is_a_directory_or_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys_of_a_test.py").write_text(
        "def find(key_id): return {'a': bytes(32)}.get(key_id)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    key_cache = key_cache_for("keys_of_a_test:find")
    assert key_cache.find("a") is not None
    assert key_cache.find("b") is None
    assert key_cache_for("keys_of_a_test:find") is key_cache
    (tmp_path / "c").write_text(SECRET.hex())
    assert key_cache_for(str(tmp_path)).find("c") is not None


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("/no/such/directory", "encryption keys: the directory '/no/such/directory'"),
        ("no_such_module:find", "'no_such_module:find' cannot be imported"),
        ("json:no_such_name", "cannot be imported"),
        ("json:__doc__", "to be a function"),
    ],
)
def test_an_invalid_key_reference_is_an_error(reference: str, text: str) -> None:
    with pytest.raises(errors.BadConfig, match=text):
        key_cache_for(reference)


def test_the_error_names_the_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(errors.BadConfig, match=r"pip install 'waltz-spark\[encryption\]'"):
        key_cache_for(str(tmp_path))
