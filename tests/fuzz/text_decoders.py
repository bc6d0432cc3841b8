"""Decoders of settings, addresses, secrets, payloads, and pages of daemons."""

import atexit
import json
import shutil
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import msgpack
import pyarrow as pa

from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import TEXT_WORDS
from waltz_core.access.tokens import Token
from waltz_core.cli import http_pages
from waltz_core.client.model.compression import Zstd
from waltz_core.client.model.serializers import BytesSerializer, JsonSerializer, MsgpackSerializer
from waltz_core.cluster.zookeeper.credentials import parse_credentials
from waltz_core.config import CONFIG_TYPES_BY_KIND
from waltz_core.config.connect_string import check_address, parse_connect_string
from waltz_core.config.settings import fields, load_config, sample_toml
from waltz_core.encryption.envelopes import Encryption
from waltz_core.encryption.keys import KeyCache
from waltz_core.errors import BadConfig, BadFormat, BadRequest, RemoteProtocolError, TooLarge
from waltz_core.records import strict_json
from waltz_core.records.unpacking import Unpacker
from waltz_core.server.process.registry_requests import RegistryArguments
from waltz_spark import offsets

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def _settings_file() -> Path:
    # In memory if possible, because each input writes this file.
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="waltz-fuzz-", dir=parent))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory / "settings.toml"


def text_of(data: bytes) -> str:
    """Return bytes as a command line or the environment gives them."""
    return data.decode(errors="surrogateescape")


def settings_files(config_type) -> list[bytes]:
    sample = sample_toml(config_type)
    lines = [line for line in sample.splitlines() if " = " in line and not line.startswith("# #")]
    setting_lines = [line.removeprefix("# ") for line in lines]
    small = [line for line in lines if not line.startswith("#")]
    return ["\n".join(small).encode(), "\n".join(small + setting_lines[-12:]).encode()]


def load_settings(config_type, data: bytes) -> None:
    """Load a settings file, and also use its lines as environment variables."""
    path = _settings_file()
    path.write_bytes(data)
    prefix = f"WALTZ_{config_type.kind.upper()}_"
    names = [field.name for field in fields(config_type)]
    try:
        load_config(config_type, path=path)
    finally:
        # One variable has these bytes as its value; the bytes also choose the variable.
        variable = prefix + names[sum(data) % len(names)].upper()
        with suppress(BadConfig):
            load_config(config_type, environment={variable: text_of(data)})


CONNECT_STRINGS = (
    "zk1:2181,zk2:2181/waltz/payments",
    "[::1]:2181/w?auth=/etc/zk&tls=/etc/ca.pem&token_file=/etc/tok",
    "zk1:2181/waltz?tls=/etc/ca.pem&token_env=TOKEN",
    "bücher.example:2181/w",
)


def parse_connect(data: bytes) -> None:
    parsed = parse_connect_string(text_of(data))
    assert parse_connect_string(str(parsed)) == parsed


def parse_token(data: bytes) -> None:
    text = text_of(data)
    assert Token.parse(text, "f").text == text.strip()


def parse_auth_file(data: bytes) -> None:
    parse_credentials(text_of(data), "f")


# ---------------------------------------------------------------------------------------------
# payloads


def envelopes() -> list[bytes]:
    examples = json.loads((GOLDEN / "envelopes.json").read_text(encoding="utf-8"))
    return [bytes.fromhex(example["envelope"]) for example in examples]


@cache
def _encryption() -> Encryption:
    examples = json.loads((GOLDEN / "envelopes.json").read_text(encoding="utf-8"))
    keys = {example["key_id"]: bytes.fromhex(example["key"]) for example in examples}
    return Encryption(KeyCache(keys.get, "a test"))


def decrypt(data: bytes) -> None:
    """Decrypt a payload; it is a payload, or null with a reason."""
    encryption = _encryption()
    encryption.has_cached_key(data)
    decrypted = encryption.decrypt(data, partition=3, header=7)
    assert (decrypted.data is None) is (decrypted.error is not None)


SPARK_KINDS = (
    *(pa.bool_(), pa.int8(), pa.int64(), pa.float32(), pa.decimal128(10, 2), pa.string()),
    *(pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.list_(pa.int32())),
    *(pa.struct([("x", pa.int32())]), pa.map_(pa.string(), pa.int32())),
)


def spark_payloads(data_format: str) -> list[bytes]:
    """Return payloads with a value for each kind of column."""
    values = [True, 7, -7, 1.5, "12.50", "ü", b"abc", 20_000, 1_700_000_000_000_000]
    values += [[1, None], {"x": 1}, {"k": 2}]
    if data_format == "json":
        values[6:9] = ["YWJj", "2026-01-02", "2026-01-02T03:04:05+00:00"]
        values[11] = [["k", 2]]
        return [json.dumps({f"c{index}": value for index, value in enumerate(values)}).encode()]
    return [msgpack.packb({f"c{index}": value for index, value in enumerate(values)})]


def unpack(data_format: str, data: bytes) -> None:
    """Unpack a payload into columns, once strictly, and once with nulls for invalid values."""
    rows = pa.array([data], pa.binary())
    fields = [pa.field(f"c{index}", kind) for index, kind in enumerate(SPARK_KINDS)]
    whole = Unpacker(fields, data_format)
    whole.readable_columns(rows)
    for field in fields:
        Unpacker([field], data_format).columns(rows, str)


VALUES = (
    {"price": 12.5, "names": ["a", "ü", None], 3: True, "bytes": b"abc", "deep": [[[{}]]]},
    [1, -1, 2**63, -(2**63), "x" * 300],
    7,
)


def packed(serializer) -> list[bytes]:
    values = VALUES if isinstance(serializer, MsgpackSerializer) else ({"a": [1, 2.5, "ü"]}, [])
    return [serializer.serialize(value) for value in values]


def compressed() -> list[bytes]:
    serializer = Zstd(BytesSerializer())
    return [serializer.serialize(each) for each in (b"abc" * 200, b"short", b"")]


def decompress(data: bytes) -> None:
    Zstd(BytesSerializer()).deserialize(data)


# ---------------------------------------------------------------------------------------------
# pages, offsets

PAGE = b"""# HELP waltz_up Whether it runs.
waltz_up 1.0
waltz_appends_total{partition="0",kind="a \\"b\\""} 12 1700000000000
waltz_seconds_sum 1.5e-3
waltz_none NaN
waltz_most +Inf
"""


def parse_page(data: bytes) -> None:
    http_pages.parse_metrics(data.decode("utf-8", "replace"), "h:1")


def decode_offset(data: bytes) -> None:
    """Decode an offset as Spark gives it: a JSON object."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict):
        offsets.decode_offset(document)


def _settings(config_type) -> Decoder:
    return Decoder(
        f"settings-{config_type.kind}",
        partial(load_settings, config_type),
        (BadConfig,),
        partial(settings_files, config_type),
        words=TEXT_WORDS,
    )


def _text(name: str, decode, *seeds: str) -> Decoder:
    return Decoder(
        name, decode, (BadConfig,), lambda: [seed.encode() for seed in seeds], words=TEXT_WORDS
    )


def _payload(name: str, serializer) -> Decoder:
    return Decoder(
        name,
        serializer.deserialize,
        (BadFormat,),
        partial(packed, serializer),
        words=TEXT_WORDS,
    )


def decode_registry_arguments(data: bytes) -> None:
    """Decode the arguments of a registry request; accepted arguments can be stored."""
    found = RegistryArguments(data)
    strict_json.to_json([found.keep_ms(), found.flag("in_series"), found.text("run")])
    strict_json.to_json(found.summary())


DECODERS = (
    *map(
        _settings,
        CONFIG_TYPES_BY_KIND.values()
        if isinstance(CONFIG_TYPES_BY_KIND, dict)
        else CONFIG_TYPES_BY_KIND,
    ),
    _text("connect-string", parse_connect, *CONNECT_STRINGS),
    _text(
        "address", lambda data: check_address(text_of(data)), "zk1:2181", "[::1]:80", "1.2.3.4:5"
    ),
    _text("token", parse_token, "0123456789abcdef" * 4 + "\n"),
    _text("auth-file", parse_auth_file, "digest:waltz:a password\n# c\nworld:anyone:r\n"),
    Decoder("envelope", decrypt, (), envelopes),
    _payload("payload-msgpack", MsgpackSerializer()),
    _payload("payload-json", JsonSerializer()),
    *(
        Decoder(
            f"payload-spark-{each}",
            partial(unpack, each),
            (BadFormat,),
            partial(spark_payloads, each),
            words=TEXT_WORDS,
            examples=10,
        )
        for each in ("json", "msgpack")
    ),
    Decoder("payload-zstd", decompress, (BadFormat,), compressed),
    Decoder("metrics-page", parse_page, (RemoteProtocolError,), lambda: [PAGE], words=TEXT_WORDS),
    Decoder(
        "registry-arguments",
        decode_registry_arguments,
        (BadRequest, TooLarge),
        lambda: [b'{"keep_ms":9,"in_series":true,"run":"r","summary":{"rows":[1,"\\u00e9"]}}'],
        words=TEXT_WORDS,
    ),
    Decoder(
        "spark-offset",
        decode_offset,
        (ValueError, TypeError),
        lambda: [json.dumps(offsets.encode_offset({0: 41, 1: -1}, bytes(16))).encode()],
        words=TEXT_WORDS,
    ),
)
