"""How a command finds out that the cluster uses TLS."""

import contextvars
import ssl

import pytest

from tests.certificates import create_certificates
from waltz_core.administration import member_connections
from waltz_core.errors import BadConfig

PLACE = "zk1:2181/waltz/payments"


@pytest.fixture
def dialed_with(monkeypatch):
    """Gives what is dialed in after some words of a command, and of the environment."""
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)

    def ssl_of(**words):
        def begin():
            member_connections.select_settings(**words)
            return member_connections.ssl_context()

        return contextvars.copy_context().run(begin)

    return ssl_of


def test_the_scheme_is_read_from_the_connect_string_only(dialed_with, monkeypatch):
    assert dialed_with() is None
    assert dialed_with(connect=None) is None
    assert dialed_with(connect=PLACE) is None
    assert dialed_with(connect=f"{PLACE}?tls=unverified").verify_mode is ssl.CERT_NONE
    monkeypatch.setenv("WALTZ_CONNECT", f"{PLACE}?tls=on")
    assert dialed_with(connect=None).verify_mode is ssl.CERT_REQUIRED
    assert dialed_with(connect=PLACE) is None


def test_the_tls_option_overrides_the_connect_string(dialed_with, tmp_path):
    file = create_certificates(tmp_path).authorities
    assert len(dialed_with(tls=file, connect=None).get_ca_certs()) == 1
    assert dialed_with(tls="unverified", connect=f"{PLACE}?tls={file}").verify_mode is ssl.CERT_NONE
    assert len(dialed_with(tls=None, connect=f"{PLACE}?tls={file}").get_ca_certs()) == 1


def test_a_wrong_cluster_that_is_detected_later_is_reported(dialed_with):
    def find_out():
        member_connections.use_settings_of(f"{PLACE}?tls=unverified")
        return member_connections.ssl_context()

    def command():
        member_connections.select_settings()  # an earlier command of this process may have had TLS
        return contextvars.copy_context().run(find_out), member_connections.ssl_context()

    found, before = contextvars.copy_context().run(command)
    assert found.verify_mode is ssl.CERT_NONE
    assert before is None


def test_a_missing_tls_file_is_named(dialed_with, tmp_path):
    with pytest.raises(BadConfig, match=r"tls_authorities: '.*absent.pem' cannot be read"):
        dialed_with(tls=str(tmp_path / "absent.pem"))


def test_the_transport_checks_a_connect_string_only_if_it_names_tls(dialed_with):
    assert dialed_with(connect="nonsense") is None
    with pytest.raises(BadConfig, match="the connect string"):
        dialed_with(connect="nonsense?tls=on")
