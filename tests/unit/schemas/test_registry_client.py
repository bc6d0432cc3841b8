"""The client of a schema registry: requests, and errors for each failure of a registry."""

import json
import logging
import ssl
import time
from collections.abc import Iterator

import pytest
import trustme

from tests.schema_registry import InProcessRegistry, run_schema_registry
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_core.schemas.registered_schemas import NamedSchema, SchemaType
from waltz_core.schemas.registry_client import REFERENCES_MAX, SchemaRegistry
from waltz_core.schemas.registry_http import ANSWER_BYTES_MAX
from waltz_core.schemas.registry_urls import addresses_of

AVRO = SchemaType.AVRO
TEXT = '{"type":"record","name":"R","fields":[{"name":"id","type":"long"}]}'
SHORT_S = 0.3


@pytest.fixture
def registry() -> Iterator[InProcessRegistry]:
    with run_schema_registry() as registry:
        yield registry


def test_schemas_are_found_by_id_and_by_version(registry):
    first, second = registry.put("a/b c", TEXT), registry.put("a/b c", '"string"')
    client = SchemaRegistry(registry.url + "/")
    assert client.schema(first, AVRO).text == TEXT
    assert client.subject_schema("a/b c", None, AVRO)[:3] == (second, AVRO, '"string"')
    assert client.subject_schema("a/b c", 1, AVRO).schema_id == first
    assert registry.requests[0] == ("GET", f"/schemas/ids/{first}")
    assert registry.requests[1] == ("GET", "/subjects/a%2Fb%20c/versions/latest")


def test_a_protobuf_schema_is_requested_as_a_descriptor(registry):
    schema_id = registry.put("p", "AAAA", "PROTOBUF")
    client = SchemaRegistry(registry.url)
    assert client.schema(schema_id, SchemaType.PROTOBUF).text == "AAAA"
    assert registry.requests == [("GET", f"/schemas/ids/{schema_id}?format=serialized")]


def test_registering_a_known_schema_returns_its_id_and_an_incompatible_one_is_rejected(registry):
    client = SchemaRegistry(registry.url)
    schema_id = client.register("orders-value", AVRO, TEXT)
    assert client.register("orders-value", AVRO, TEXT).schema_id == schema_id.schema_id
    nullable = json.loads(TEXT)
    nullable["fields"].append({"name": "owner", "type": ["null", "string"], "default": None})
    assert (
        client.register("orders-value", AVRO, json.dumps(nullable)).schema_id != schema_id.schema_id
    )
    needed = json.loads(TEXT)
    needed["fields"].append({"name": "price", "type": "double"})
    with pytest.raises(BadRequest, match=r"not compatible.*must be nullable"):
        client.register("orders-value", AVRO, json.dumps(needed))
    with pytest.raises(BadRequest, match=r"status 422: .Invalid schema"):
        client.register("orders-value", AVRO, '{"type":"nothing"}')
    assert len(registry.subjects["orders-value"]) == 2


def test_references_precede_the_schemas_that_use_them(registry):
    registry.put("x", '"first"')
    registry.put("y", '"second"', references=[{"name": "X", "subject": "x", "version": 1}])
    both = [
        {"name": "Y", "subject": "y", "version": 1},
        {"name": "X", "subject": "x", "version": 1},
    ]
    schema_id = registry.add('"main"', references=both)
    found = SchemaRegistry(registry.url).schema(schema_id, AVRO)
    assert found.references == (NamedSchema("X", '"first"'), NamedSchema("Y", '"second"'))
    assert len(registry.requests) == 3


def test_the_number_of_references_is_limited_and_a_cycle_is_followed_only_once(registry):
    registry.put("self", TEXT, references=[{"name": "S", "subject": "self", "version": 1}])
    client = SchemaRegistry(registry.url)
    assert len(client.schema(1, AVRO).references) == 1
    for number in range(REFERENCES_MAX + 1):
        more = [{"name": "n", "subject": f"s{number + 1}", "version": 1}]
        registry.put(f"s{number}", f'"{number}"', references=more)
    with pytest.raises(BadFormat, match=f"expected at most {REFERENCES_MAX} referenced schemas"):
        client.subject_schema("s0", None, AVRO)


@pytest.mark.parametrize("references", [7, [7], [{"name": "n"}], [{"name": 1, "subject": "s"}]])
def test_references_that_are_not_valid_are_an_error(registry, references):
    registry.by_id[1] = {"schema": TEXT, "references": references}
    with pytest.raises(BadFormat, match=r"schema 1 of .*expected .*references"):
        SchemaRegistry(registry.url).schema(1, AVRO)


def test_a_missing_schema_is_not_an_outage(registry):
    client = SchemaRegistry(registry.url)
    with pytest.raises(BadFormat, match=rf"schema 7 does not exist .* {registry.url}"):
        client.schema(7, AVRO)
    with pytest.raises(BadConfig, match="no version latest of subject 'orders'"):
        client.subject_schema("orders", None, AVRO)


def test_a_schema_of_another_kind_is_an_error(registry):
    with pytest.raises(BadFormat, match="kind PROTOBUF, found 'AVRO'"):
        SchemaRegistry(registry.url).schema(registry.add(TEXT), SchemaType.PROTOBUF)
    with pytest.raises(BadFormat, match="kind AVRO, found 'JSON'"):
        SchemaRegistry(registry.url).schema(registry.add(TEXT, "JSON"), AVRO)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ((401, b'{"error_code":401,"message":"who?"}'), BadConfig, "credentials with status 401"),
        ((403, b""), BadConfig, "credentials with status 403.*schemaRegistryAuthFile"),
        ((404, b"<html>"), BadConfig, "expected Confluent's HTTP API.*404.*<html>"),
        ((200, b"<html>"), BadConfig, "expected Confluent's HTTP API"),
        ((200, b"[1]"), BadConfig, "expected Confluent's HTTP API"),
        ((200, b"\xff" * 1000), BadConfig, "expected Confluent's HTTP API"),
        ((200, b'{"a":' * 100_000), BadConfig, "expected Confluent's HTTP API"),
        ((200, b"{}"), BadFormat, "expected a text of up to"),
        ((200, b'{"schema":7}'), BadFormat, "expected a text of up to"),
        ((200, b'{"schema":"%s"}' % (b"x" * 1_100_000)), BadFormat, "expected a text of up to"),
        ((302, b""), BadConfig, "answers with a redirect, which Waltz does not follow"),
        ((500, b"sorry"), Unavailable, "status 500: 'sorry'"),
        ((503, b""), Unavailable, "status 503"),
        ((429, b""), Unavailable, "status 429"),
        ((200, b"x" * (ANSWER_BYTES_MAX + 1)), Unavailable, "over 4194304 bytes"),
        ("reset", Unavailable, "cannot be read: "),
    ],
)
def test_an_answer_without_a_schema_is_a_clear_error(registry, fault, kind, text):
    registry.fault = fault
    with pytest.raises(kind, match=text) as caught:
        SchemaRegistry(registry.url).schema(1, AVRO)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("fault", ["silent", "drip"])
def test_a_registry_that_does_not_finish_its_answer_is_abandoned(registry, fault):
    registry.fault = fault
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match="no answer in time"):
        SchemaRegistry(registry.url, timeout_s=SHORT_S).schema(1, AVRO)
    assert SHORT_S <= time.monotonic() - began_s < TEST_TIMEOUT_S


def test_the_next_registry_is_used_if_the_first_registry_is_down(registry):
    schema_id = registry.add(TEXT)
    down = "http://127.0.0.1:1"
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be read: Connection refused"):
        SchemaRegistry(down).schema(schema_id, AVRO)
    assert SchemaRegistry(f"{down}, {registry.url}").schema(schema_id, AVRO).text == TEXT


def test_with_tls_the_certificate_must_be_valid_for_the_host(tmp_path, monkeypatch):
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for host, is_valid in (("127.0.0.1", True), ("registry.example", False)):
        authority.issue_cert(host).configure_cert(tls)
        with run_schema_registry(tls) as registry:
            client = SchemaRegistry(registry.url)
            schema_id = registry.add(TEXT)
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                client.schema(schema_id, AVRO)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            if is_valid:
                assert client.schema(schema_id, AVRO).text == TEXT
            else:
                with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                    client.schema(schema_id, AVRO)


def test_credentials_from_a_file_do_not_appear_in_errors(registry, tmp_path, caplog):
    registry.user = "waltz:a secret:with colons"
    schema_id = registry.add(TEXT)
    file = tmp_path / "auth"
    file.write_text(registry.user + "\n")
    client = SchemaRegistry(registry.url, str(file))
    with caplog.at_level(logging.DEBUG):
        assert client.schema(schema_id, AVRO).text == TEXT
        file.write_text("waltz:another secret")  # read again
        with pytest.raises(BadConfig, match="rejects the credentials") as caught:
            client.schema(schema_id, AVRO)
    assert "secret" not in f"{caught.value}{caplog.text}{client}{vars(client)}"
    for wrong in ("", "no colon", "a:b\nc:d", "a:" + "b" * 5_000):
        file.write_text(wrong)
        with pytest.raises(BadConfig, match="expected one line, user:password") as caught:
            client.schema(schema_id, AVRO)
        assert "b" * 10 not in str(caught.value)
    file.unlink()
    with pytest.raises(BadConfig, match="No such file"):
        client.schema(schema_id, AVRO)


@pytest.mark.parametrize(
    "url",
    ["", ",", "registry:8081", "file:///etc/passwd", "ftp://a/b", "http://", "http://a:b:c/",
     "http://a:99999", "http://a/?x=1", "http://a/#x", "http://a b/", "http://bücher/", 7],
)  # fmt: skip
def test_an_invalid_url_is_rejected(url):
    with pytest.raises(BadConfig, match="schema registry: expected a URL"):
        SchemaRegistry(url)


def test_a_url_with_a_password_is_rejected_without_showing_it():
    with pytest.raises(BadConfig, match=r"without a user and a password.*file") as caught:
        SchemaRegistry("https://waltz:secret@registry:8081")
    assert "secret" not in str(caught.value)


def test_the_port_and_the_path_of_a_url_are_used():
    assert [str(each) for each in addresses_of("https://r, http://[::1]:81/apis/v7/")] == [
        "https://r:443",
        "http://[::1]:81/apis/v7",
    ]
