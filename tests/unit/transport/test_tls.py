"""TLS settings in files and connect strings, and errors for invalid ones."""

import contextlib
import datetime
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.certificates import Certificates, create_certificates
from waltz_core.config import ClientConfig, ServerConfig, StorageConfig, render_toml
from waltz_core.errors import BadConfig
from waltz_core.transport import tls

CONNECT = "zk1:2181/waltz/payments"
PLAIN = ClientConfig()


def storage(**settings: object) -> StorageConfig:
    return StorageConfig(**{"connect": CONNECT, "directory": "d"} | settings)  # type: ignore[arg-type]


def server(**settings: object) -> ServerConfig:
    return ServerConfig(**{"connect": CONNECT} | settings)  # type: ignore[arg-type]


def test_tls_is_off_by_default():
    assert tls.dial_context(PLAIN, "") is None
    assert tls.dial_context(PLAIN, CONNECT) is None
    assert tls.dial_context(PLAIN, f"{CONNECT}?auth=/etc/tls=on") is None
    assert tls.listen_context(server()) is None
    assert tls.listen_context(storage()) is None
    assert tls.listen_context(storage(connect="none at all")) is None


@pytest.mark.parametrize(
    ("verify", "mode", "is_name_checked"),
    [
        ("name", ssl.CERT_REQUIRED, True),
        ("chain", ssl.CERT_REQUIRED, False),
        ("nothing", ssl.CERT_NONE, False),
    ],
)
def test_a_dial_verifies_the_configured_properties(files, verify, mode, is_name_checked):
    config = ClientConfig(tls="on", tls_authorities=files.authorities, tls_verify=verify)
    context = tls.dial_context(config, "")
    assert context is not None
    assert context.verify_mode is mode
    assert context.check_hostname is is_name_checked
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == (verify != "nothing")


def test_without_authorities_the_system_authorities_are_trusted(files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", files.authorities)
    context = tls.dial_context(ClientConfig(tls="on"), "")
    assert context is not None
    assert len(context.get_ca_certs()) >= 1


def test_the_tls_value_of_a_connect_string_is_a_file_or_a_mode(files):
    for location, count, mode in (
        (files.authorities, 1, ssl.CERT_REQUIRED),
        ("unverified", 0, ssl.CERT_NONE),
        ("on", None, ssl.CERT_REQUIRED),
    ):
        for context in (
            tls.dial_context(PLAIN, f"{CONNECT}?tls={location}"),
            tls.dial_context_for(location),
        ):
            assert context is not None
            assert context.verify_mode is mode
            assert count in (None, len(context.get_ca_certs()))


def test_a_settings_file_names_files_in_its_own_directory(tmp_path: Path):
    create_certificates(tmp_path)
    names = {
        "tls_certificate": "ours-cert.pem",
        "tls_key": "ours-key.pem",
        "tls_authorities": "ours-ca.pem",
        "tls_verify": "chain",
    }
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", names))
    context = tls.dial_context_for(str(file))
    assert context is not None
    assert not context.check_hostname
    assert len(context.get_ca_certs()) == 1
    connect = f"{CONNECT}?tls={file}"
    listening = tls.listen_context(storage(connect=connect))
    assert listening is not None
    assert listening.verify_mode is ssl.CERT_REQUIRED
    assert tls.dial_context(server(connect=connect), connect) is not None
    file.write_text('tls = "off"\n')
    assert tls.dial_context_for(str(file)) is None
    file.write_text('tls_authority = "ca.pem"\n')
    with pytest.raises(BadConfig, match=r"tls\.toml: unknown setting 'tls_authority'"):
        tls.dial_context_for(str(file))


def test_settings_override_the_connect_string(files, tmp_path):
    connect = f"{CONNECT}?tls={tmp_path / 'absent.pem'}"
    assert tls.dial_context(ClientConfig(tls="off"), connect) is None
    config = ClientConfig(tls_authorities=files.authorities, tls_verify="chain")
    context = tls.dial_context(config, connect)
    assert context is not None
    assert not context.check_hostname
    # The connect string supplies settings that the daemon does not have.
    both = server(
        connect=f"{CONNECT}?tls={files.authorities}",
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_require_certificate=True,
    )
    listening = tls.listen_context(both)
    assert listening is not None
    assert len(listening.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("settings", "mode", "is_name_checked"),
    [
        ({}, ssl.CERT_NONE, False),
        ({"tls": "on"}, ssl.CERT_NONE, False),
        ({"tls_verify": "name"}, ssl.CERT_REQUIRED, True),
        ({"tls_verify": "chain"}, ssl.CERT_REQUIRED, False),
        ({"tls_authorities": "{authorities}"}, ssl.CERT_REQUIRED, True),
        ({"tls_authorities": "{authorities}", "tls_verify": "nothing"}, ssl.CERT_NONE, False),
    ],
)
def test_an_unverified_connect_string_does_not_weaken_settings(
    files, settings, mode, is_name_checked
):
    given = {
        name: setting.format(authorities=files.authorities) for name, setting in settings.items()
    }
    context = tls.dial_context(ClientConfig(**given), f"{CONNECT}?tls=unverified")
    assert context is not None
    assert context.verify_mode is mode
    assert context.check_hostname is is_name_checked


def test_a_tls_file_does_not_weaken_settings(tmp_path):
    file = tmp_path / "tls.toml"
    file.write_text('tls_verify = "nothing"\n')
    context = tls.dial_context(ClientConfig(tls_verify="name"), f"{CONNECT}?tls={file}")
    assert context is not None
    assert context.check_hostname


def test_a_server_accepts_any_client_and_a_storage_requires_a_certificate(files):
    open_to_all = tls.listen_context(server(**files.settings))
    assert open_to_all is not None
    assert open_to_all.verify_mode is ssl.CERT_NONE
    assert open_to_all.minimum_version is ssl.TLSVersion.TLSv1_2
    closed = tls.listen_context(storage(**files.settings))
    assert closed is not None
    assert closed.verify_mode is ssl.CERT_REQUIRED
    without = {name: value for name, value in files.settings.items() if name != "tls_authorities"}
    with pytest.raises(BadConfig, match="or set tls_require_certificate = false"):
        tls.listen_context(storage(**without))
    assert tls.listen_context(storage(**without, tls_require_certificate=False)) is not None


def test_a_port_with_certificates_never_listens_in_plain_text():
    with pytest.raises(BadConfig, match='tls_require_certificate = true requires tls = "on"'):
        tls.listen_context(server(tls_require_certificate=True))
    assert tls.listen_context(server(tls="off", tls_require_certificate=True)) is None


def test_a_reload_that_would_turn_tls_off_is_rejected_and_logged(files, tmp_path, caplog):
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", files.settings))
    config = server(connect=f"{CONNECT}?tls={file}")
    context = tls.listen_context(config)
    file.write_text('tls = "off"\n')
    tls.reload_files(config, context)
    assert 'tls.reload_failed error=setting tls: expected "on"' in caplog.text


def test_the_key_may_be_in_the_file_of_the_certificate(files, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(Path(files.key).read_text() + Path(files.certificate).read_text())
    assert tls.listen_context(server(tls="on", tls_certificate=str(both))) is not None


def test_a_daemon_with_tls_requires_a_certificate(files):
    with pytest.raises(BadConfig, match="tls_certificate: expected a file"):
        tls.listen_context(server(tls="on"))
    with pytest.raises(BadConfig, match="tls_certificate: expected a file"):
        tls.listen_context(server(connect=f"{CONNECT}?tls={files.authorities}"))


def test_tls_files_without_the_tls_setting_are_an_error(files):
    with pytest.raises(BadConfig, match='tls: expected "on" or "off", because tls_authorities'):
        tls.dial_context(ClientConfig(tls_authorities=files.authorities), CONNECT)
    assert (
        tls.dial_context(ClientConfig(tls="off", tls_authorities=files.authorities), CONNECT)
        is None
    )


def test_the_error_names_unusable_files(files, tmp_path):
    for name in ("tls_certificate", "tls_key", "tls_authorities"):
        settings = files.settings | {name: str(tmp_path / "absent.pem")}
        with pytest.raises(
            BadConfig, match=f"setting {name}: '.*absent.pem' cannot be read \\(No such"
        ):
            tls.dial_context(ClientConfig(**settings), "")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing\n")
    for name in ("tls_certificate", "tls_authorities"):
        settings = files.settings | {name: str(nothing)}
        with pytest.raises(
            BadConfig, match=rf"{name}: expected a PEM file with .*, found .*nothing.pem"
        ):
            tls.dial_context(ClientConfig(**settings), "")
    other = create_certificates(tmp_path, name="other")
    settings = files.settings | {"tls_key": other.key}
    with pytest.raises(BadConfig, match=r"its private key, found .* \(key values mismatch"):
        tls.dial_context(ClientConfig(**settings), "")


def test_a_key_with_a_password_is_rejected_without_a_prompt(files, tmp_path):
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    settings = files.settings | {"tls_key": str(locked)}
    with pytest.raises(BadConfig, match="expected a private key without a password"):
        tls.dial_context(ClientConfig(**settings), "")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_the_documented_commands_create_valid_files(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    script = page.partition("## TLS")[2].split("```")[1]
    environment = os.environ | {"HOST": "storage1.example"}
    subprocess.run(
        ["/bin/sh", "-ec", script], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    files = Certificates(*(str(tmp_path / f"{name}.pem") for name in ("ca", "certificate", "key")))
    listens = tls.listen_context(storage(**files.settings))
    dials = tls.dial_context(ClientConfig(**files.settings), "")
    assert listens is not None
    assert dials is not None
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    dialler = dials.wrap_bio(*ends[0], server_hostname="storage1.example")
    listener = listens.wrap_bio(*ends[1], server_side=True)
    for _ in range(3):
        for each, (_, outgoing), (incoming, _) in (
            (dialler, ends[0], ends[1]),
            (listener, ends[1], ends[0]),
        ):
            with contextlib.suppress(ssl.SSLWantReadError):
                each.do_handshake()
            incoming.write(outgoing.read())
    assert dialler.version() == listener.version() == "TLSv1.3"
    assert listener.getpeercert()["subject"] == ((("commonName", "storage1.example"),),)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls": "yes"}, "setting tls: expected one of nothing, on, off, found 'yes'"),
        (
            {"tls_verify": "host"},
            "setting tls_verify: expected one of name, chain, nothing, found 'host'",
        ),
        ({"tls": "on", "tls_key": "k"}, "tls_key requires setting tls_certificate"),
    ],
)
def test_invalid_tls_values_are_rejected(settings, problem):
    with pytest.raises(BadConfig, match=problem):
        ClientConfig(**settings)


NETWORK_ADDRESS = {"listen_host": "10.1.2.3"}
PROTECTED = {"tls": "on", "access": "on"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1"])
def test_a_daemon_on_a_loopback_address_needs_no_protection(caplog, host):
    for make_config in (server, storage):
        tls.check_network(make_config(listen_host=host))
    assert caplog.text == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "storage1"])
def test_a_daemon_on_a_network_address_requires_protection(caplog, host):
    settings = {"listen_host": host, "advertised_host": "here"}
    both = 'tls = "on" and access = "on"'
    for make_config in (server, storage):
        with pytest.raises(BadConfig, match=f"{host}.* requires {both}. Hint: docs/security.md"):
            tls.check_network(make_config(**settings))
        assert caplog.text == ""
        tls.check_network(make_config(**settings, insecure_network=True))
        assert f"network.insecure host={host} missing='{both}'" in caplog.text
        caplog.clear()
        auth = f"{CONNECT}?auth=a"
        tls.check_network(make_config(**settings, **PROTECTED, connect=auth))
        tls.check_network(make_config(**settings, access="on", connect=f"{auth}&tls=on"))
        assert caplog.text == ""


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"tls": "on"}, 'access = "on"'),
        ({"tls": "on", "access": "report"}, 'access = "on"'),
        ({"access": "on"}, 'tls = "on"'),
        ({"access": "on", "tls": "off"}, 'tls = "on"'),
        (
            {"tls": "on", "access": "report", "tls_transition": "dial"},
            'access = "on" and tls_transition = ""',
        ),
    ],
)
def test_the_error_names_each_missing_setting(settings, missing):
    with pytest.raises(BadConfig, match=f"requires {missing}. Hint:.* insecure_network = true"):
        tls.check_network(server(**NETWORK_ADDRESS, **settings))


def test_unprotected_znodes_of_permissions_are_logged(caplog):
    tls.check_network(server(**PROTECTED))
    assert "access.znodes_unprotected" in caplog.text


def test_dials_use_tls_if_tls_transition_is_dial_and_plain_tcp_if_it_is_accept(files):
    settings = files.settings
    for transition, has_tls in (("", True), ("accept", False), ("dial", True)):
        config = server(**settings, tls_transition=transition)
        assert (tls.dial_context(config, CONNECT) is not None) == has_tls
        assert tls.listen_context(config).plain_peers == transition


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"tls_transition": "accept"}, 'setting tls: tls_transition requires tls = "on"'),
        ({"tls_transition": "both"}, "tls_transition: expected one of nothing, accept, dial"),
        (
            {"tls_transition": "dial", "access": "on"},
            'tls_transition must be empty with access = "on"',
        ),
    ],
)
def test_an_invalid_transition_setting_is_an_error(settings, found):
    for make_config in (server, storage):
        with pytest.raises(BadConfig, match=found):
            tls.listen_context(make_config(**settings))


def failure(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        ("WRONG_VERSION_NUMBER", "expected TLS, found plain TCP"),
        ("UNSUPPORTED_PROTOCOL", "no common version: expected TLS 1.2 or 1.3"),
        ("TLSV1_ALERT_UNKNOWN_CA", "the peer rejects the certificate of this process: tlsv1"),
        (
            "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            "the peer rejects the certificate of this process: sslv3",
        ),
        (
            "TLSV13_ALERT_CERTIFICATE_REQUIRED",
            "the peer expects a certificate of this process, which has none",
        ),
        ("BAD_SIGNATURE", "TLS has failed: bad signature"),
    ],
)
def test_handshake_errors_are_described(reason, problem):
    assert tls.failure_text(failure(reason)).startswith(problem)


def test_errors_other_than_tls_errors_are_reported_unchanged():
    assert tls.failure_text(ConnectionRefusedError(111, "Connection refused")).endswith("refused")
    assert tls.failure_text(ConnectionResetError()) == "ConnectionResetError"
    assert tls.alert_of(ConnectionResetError()) == tls.alert_of(failure("OTHER")) == b""


@pytest.mark.parametrize(
    ("hosts", "settings", "message"),
    [
        (("127.0.0.1",), {}, ""),
        (("waltz.example",), {"advertised_host": "waltz.example"}, ""),
        (("waltz.example",), {}, "IP address mismatch"),
        (("waltz.example",), {"advertised_host": "other.example"}, "Hostname mismatch"),
        (("::1",), {"advertised_host": "[::1]"}, ""),
        (("waltz.example",), {"tls_verify": "chain"}, ""),
        (("waltz.example",), {"tls_verify": "nothing"}, ""),
    ],
)
def test_a_certificate_for_another_host_is_reported_at_the_start(
    tmp_path, caplog, hosts, settings, message
):
    shown = create_certificates(tmp_path, hosts=hosts)
    for make_config in (server, storage):
        caplog.clear()
        assert tls.listen_context(make_config(**shown.settings, **settings)) is not None
        assert ("tls.certificate_mismatch" in caplog.text) == bool(message)
        assert message in caplog.text


def test_a_certificate_that_peers_reject_is_reported_at_the_start(tmp_path, caplog):
    key = ec.generate_private_key(ec.SECP256K1())  # not a curve of TLS 1.3 or of the contexts here
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "waltz")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    file = tmp_path / "both.pem"
    file.write_bytes(
        certificate.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    settings = {"tls": "on", "tls_certificate": str(file), "tls_authorities": str(file)}
    assert tls.listen_context(server(**settings)) is not None
    assert "tls.certificate_mismatch" in caplog.text
