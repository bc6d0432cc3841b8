"""The TLS settings of a command: from the connect string, options and the environment."""

import contextvars
import ssl

import pytest

from tests.certificates import create_certificates
from waltz_core.administration import member_connections
from waltz_core.errors import BadConfig

CONNECT_STRING = "zk1:2181/waltz/payments"


@pytest.fixture
def command_ssl_context(monkeypatch):
    """Return a function that returns the SSL context of a command with these options."""
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)

    def ssl_context_of(**options):
        def select_and_read():
            member_connections.select_settings(**options)
            return member_connections.ssl_context()

        return contextvars.copy_context().run(select_and_read)

    return ssl_context_of


def test_the_scheme_is_read_from_the_connect_string_only(command_ssl_context, monkeypatch):
    assert command_ssl_context() is None
    assert command_ssl_context(connect=None) is None
    assert command_ssl_context(connect=CONNECT_STRING) is None
    assert (
        command_ssl_context(connect=f"{CONNECT_STRING}?tls=unverified").verify_mode is ssl.CERT_NONE
    )
    monkeypatch.setenv("WALTZ_CONNECT", f"{CONNECT_STRING}?tls=on")
    assert command_ssl_context(connect=None).verify_mode is ssl.CERT_REQUIRED
    assert command_ssl_context(connect=CONNECT_STRING) is None


def test_the_tls_option_overrides_the_connect_string(command_ssl_context, tmp_path):
    file = create_certificates(tmp_path).authorities
    assert len(command_ssl_context(tls=file, connect=None).get_ca_certs()) == 1
    assert (
        command_ssl_context(tls="unverified", connect=f"{CONNECT_STRING}?tls={file}").verify_mode
        is ssl.CERT_NONE
    )
    assert (
        len(command_ssl_context(tls=None, connect=f"{CONNECT_STRING}?tls={file}").get_ca_certs())
        == 1
    )


def test_tls_settings_selected_in_a_context_do_not_apply_outside_of_it(command_ssl_context):
    def detect_cluster():
        member_connections.use_settings_of(f"{CONNECT_STRING}?tls=unverified")
        return member_connections.ssl_context()

    def command():
        member_connections.select_settings()  # an earlier command of this process may have had TLS
        return contextvars.copy_context().run(detect_cluster), member_connections.ssl_context()

    found, before = contextvars.copy_context().run(command)
    assert found.verify_mode is ssl.CERT_NONE
    assert before is None


def test_the_error_names_a_missing_tls_file(command_ssl_context, tmp_path):
    with pytest.raises(BadConfig, match=r"tls_authorities: '.*absent.pem' cannot be read"):
        command_ssl_context(tls=str(tmp_path / "absent.pem"))


def test_the_transport_checks_a_connect_string_only_if_it_names_tls(command_ssl_context):
    assert command_ssl_context(connect="nonsense") is None
    with pytest.raises(BadConfig, match="the connect string"):
        command_ssl_context(connect="nonsense?tls=on")
