"""TLS trust settings and handshake errors: from settings to the contexts that `net.py` uses.

Daemons, clients and commands use this file. This file uses only `ssl` of the standard library.
Section "TLS" of docs/operations.md describes the certificate files.

Rules:
    1. `tls = "off"` disables TLS, whatever else is set. With any other value, an explicit setting
       overrides `?tls=` of the connect string, and `?tls=` overrides the defaults. So explicit
       authorities verify peers even with `?tls=unverified`.
    2. ?tls=FILE names a file with the authorities. ?tls=FILE.toml names a file with settings of
       kind "tls"; file names in it are relative to this file. ?tls=on trusts the system's
       authorities, and ?tls=unverified trusts any peer.
    3. TLS 1.2 is the minimum: Waltz 0.13 supports nothing newer.
    4. On a non-loopback address, a daemon starts only if its ports require TLS and check
       permissions. With the setting `insecure_network = true`, other daemons start, too; the
       setting is logged.
    5. A daemon reads its files again on SIGHUP (`reload_files`). A reload adds new authorities;
       only a restart removes authorities.
    6. The same failure of the same peer is logged once in `LOG_INTERVAL_S`. Without this rule, a
       peer that connects again and again could fill the disk.
    7. A token is sent only over TLS, to a peer whose certificate was verified. The token is also
       read once when the context is created, so that a missing file or variable is reported
       immediately.
    8. A port that identifies its peers verifies the certificate of each peer that presents one. If
       no authorities are set explicitly, the port requests no certificate, because the system's
       authorities sign certificates for any host.
    9. When a daemon reads its files, it checks its own certificate as its peers would. It checks
       the advertised host and the dates. It logs a mismatch as an error.
    10. With `tls_transition` a port accepts plain TCP as well. A setting determines whether a
        daemon connects with TLS or plain TCP. A daemon never falls back from TLS to plain TCP after
        a failure.
"""

import contextlib
import logging
import os
import re
import ssl
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from waltz_core.config.connect_string import parse_connect_string
from waltz_core.config.declarations import ServerConfig, StorageConfig, TlsConfig
from waltz_core.config.host_names import is_loopback
from waltz_core.config.settings import load_config
from waltz_core.errors import BadConfig
from waltz_core.transport.admission.port_access import PortAccess
from waltz_core.transport.admission.port_limits import network_of
from waltz_core.transport.token_source import ForwardedToken, TokenSource, token_source_in

_log = logging.getLogger(__name__)

ON: Final = "on"
UNVERIFIED: Final = "unverified"
# The first byte of a TLS record: a handshake message, or the alert that ends a handshake.
HANDSHAKE_RECORD: Final = 0x16
ALERT_RECORD: Final = 0x15
# The bytes that answer a peer that has not begun a handshake: the fatal alert unexpected_message.
UNEXPECTED_MESSAGE_ALERT: Final = bytes((ALERT_RECORD, 3, 3, 0, 2, 2, 10))
# The bytes that answer a ClientHello that must not be processed: alert handshake_failure.
HANDSHAKE_FAILURE_ALERT: Final = bytes((ALERT_RECORD, 3, 3, 0, 2, 2, 40))

LOG_INTERVAL_S: Final = 60.0
_LAST_LOGGED_MAX: Final = 1_024
_LAST_LOGGED: Final[
    dict[tuple[str, str], float]
] = {}  # (peer, failure) -> when this process logged it
_VALUE_PATTERN: Final = re.compile(r"-?\d+|'[^']*'|\"[^\"]*\"")
_KIND_CHARACTERS_MAX: Final = 40
_FILE_SETTINGS: Final = ("tls_certificate", "tls_key", "tls_authorities")
_PLAIN_TCP_TEXT: Final = "expected TLS, found plain TCP"
_NO_VERSION_TEXT: Final = "no common version: expected TLS 1.2 or 1.3"
_REASON_TEXTS: Final = {
    "WRONG_VERSION_NUMBER": _PLAIN_TCP_TEXT,
    "HTTP_REQUEST": _PLAIN_TCP_TEXT,
    "UNSUPPORTED_PROTOCOL": _NO_VERSION_TEXT,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_VERSION_TEXT,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "expected a certificate of the peer, found none",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer expects a certificate of this process, which "
    "has none",
    # TLS 1.2 uses this alert for a missing certificate and for other failures.
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer rejects the handshake: it may expect a "
    "certificate, or a key exchange with X25519 or P-256",
}
_CERTIFICATE_ALERTS: Final = ("CERTIFICATE", "UNKNOWN_CA")


class _Handshake(ssl.SSLObject):
    """One end of a TLS connection; if the handshake fails, the error contains the alert.

    When a handshake fails, the event loops (uvloop and asyncio's own) drop unsent bytes, so the
    peer would not receive the alert. Therefore the error contains the alert.
    """

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        """Continue the handshake; raises SSLError, with the alert as its note (`alert_of`)."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.add_note(self.outgoing.read().hex())
            raise


class ListenContext(ssl.SSLContext):
    """The TLS context of a listening port; `access` is None without access control.

    `plain_peers` is the setting `tls_transition`. If this setting is not empty, the port also
    accepts plain TCP (rule 10). `handshake_burst_max` and `handshakes_per_s_max` are the limits for
    one host.
    """

    access: PortAccess | None = None
    plain_peers: str = ""
    handshake_burst_max: int = 2_000
    handshakes_per_s_max: int = 100

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        *arguments: Any,  # noqa: ANN401 - passed on
        **options: Any,  # noqa: ANN401 - passed on
    ) -> ssl.SSLObject:
        """Return the TLS object that the event loop requests, with its outgoing buffer."""
        ssl_object = super().wrap_bio(incoming, outgoing, *arguments, **options)
        assert isinstance(ssl_object, _Handshake)
        ssl_object.outgoing = outgoing
        return ssl_object


class DialContext(ssl.SSLContext):
    """The TLS context of a dialer; `token` is the source of its token, if it has one (rule 7)."""

    token: TokenSource | ForwardedToken | None = None


def dial_context(
    config: TlsConfig, connect: str, token: ForwardedToken | None = None
) -> DialContext | None:
    """Return the context for outgoing connections; None if they do not use TLS.

    A `token` replaces the token of the connect string.

    Raises:
        BadConfig: the connect string, a setting or a file is not valid; or there is a token, but no
            TLS that verifies the peer.
    """
    if isinstance(config, ServerConfig) and config.tls_transition == "accept":
        return None
    source = token or token_source_in(connect)
    return _client_context(_effective_settings(config, tls_value_in(connect)), source)


def has_certificate(config: TlsConfig, connect: str) -> bool:
    """Whether this process presents a certificate to the peers that it connects to."""
    settings = _effective_settings(config, tls_value_in(connect))
    return settings is not None and bool(settings.tls_certificate)


def reload_files(config: ServerConfig | StorageConfig, *contexts: ssl.SSLContext | None) -> None:
    """Read the certificate files of a daemon again; new connections use them.

    If the files are not valid, the error is logged, and the previous files stay in use.
    """
    try:
        listen_context(
            config
        )  # into a new context first: a certificate must not be used without its key
        settings = _effective_settings(config, tls_value_in(config.connect))
    except BadConfig as error:
        _log.error("tls.reload_failed error=%s", error)
        return
    if settings is None:
        _log.error(
            "tls.reload_failed error=%s",
            'setting tls: expected "on", because it was "on" when the process started; found "off"',
        )
        return
    for context in filter(None, contexts):
        _load_certificate(context, settings)
        if settings.tls_authorities and context.verify_mode is not ssl.CERT_NONE:
            _load_authorities(context, settings)
    _log.info("tls.reloaded certificate=%s", settings.tls_certificate)


def dial_context_for(tls_value: str, token: TokenSource | None = None) -> DialContext | None:
    """Return the context for a value of ?tls= and a token, for callers without a connect string.

    Raises:
        BadConfig: as for `dial_context`.
    """
    return _client_context(_effective_settings(TlsConfig(), tls_value), token)


def listen_context(config: ServerConfig | StorageConfig) -> ListenContext | None:
    """Return the context for a daemon's incoming connections; None if they do not use TLS.

    Raises:
        BadConfig: as for `dial_context`; or `tls_certificate` is missing; or `tls_authorities` is
            missing although peers must have certificates; or TLS is off although another setting
            requires TLS.
    """
    settings = _effective_settings(config, tls_value_in(config.connect))
    if settings is None:
        _check_without_tls(config)
        return None
    if not settings.tls_certificate:
        raise BadConfig(
            "setting tls_certificate: expected a file, because a daemon needs a certificate for TLS"
        )
    if config.tls_require_certificate and not settings.tls_authorities:
        raise BadConfig(
            "setting tls_authorities: expected a file, because tls_require_certificate = "
            "true verifies peers with it. Hint: name the authorities, or set "
            "tls_require_certificate = false."
        )
    context = ListenContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _Handshake
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # no client resumes sessions
    _load_certificate(context, settings)
    _check_own_certificate(settings, config.advertised_host or config.listen_host)
    if config.tls_require_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
    elif config.access != "off" and settings.tls_authorities:  # rule 8
        context.verify_mode = ssl.CERT_OPTIONAL
    if context.verify_mode is not ssl.CERT_NONE:
        _load_authorities(context, settings)
    context.plain_peers = config.tls_transition
    context.handshake_burst_max = config.handshake_burst_max
    context.handshakes_per_s_max = config.handshakes_per_s_max
    if config.access != "off":
        is_enforced = config.access == "on"
        context.access = PortAccess(config.principal_pattern, is_enforced=is_enforced)
    return context


def check_network(config: ServerConfig | StorageConfig) -> None:
    """Check that a daemon on a non-loopback address has TLS and access control (rule 4).

    Log a warning if every process that reaches ZooKeeper can change the permissions.

    Raises:
        BadConfig: the address is not protected, and `insecure_network` does not permit it; or as
            for `dial_context`.
    """
    if config.access == "on" and not parse_connect_string(config.connect).auth_file:
        _log.warning(
            "access.znodes_unprotected hint=%r",
            "every process that can connect to ZooKeeper can grant permissions to itself: "
            "see docs/zookeeper.md, section 'Access control'",
        )
    if is_loopback(config.listen_host):
        return
    has_tls = _effective_settings(config, tls_value_in(config.connect)) is not None
    required = {
        'tls = "on"': has_tls,
        'access = "on"': config.access == "on",
        'tls_transition = ""': not config.tls_transition,
    }
    missing = " and ".join(
        setting for setting, is_fulfilled in required.items() if not is_fulfilled
    )
    if not missing:
        return
    if not config.insecure_network:
        raise BadConfig(
            f"setting listen_host: {config.listen_host!r} is not a loopback address, so the "
            f"daemon requires {missing}. Hint: docs/security.md describes how to protect a "
            "cluster. In a private network, insecure_network = true permits this address without "
            "the protection."
        )
    _log.warning(
        "network.insecure host=%s missing=%r hint=%r",
        config.listen_host,
        missing,
        "every host that can connect may read and write: see docs/security.md",
    )


def _check_without_tls(config: ServerConfig | StorageConfig) -> None:
    is_explicitly_off = config.tls == "off"
    if (
        isinstance(config, ServerConfig)
        and config.tls_require_certificate
        and not is_explicitly_off
    ):
        raise BadConfig('setting tls: tls_require_certificate = true requires tls = "on"')
    if config.tls_transition:
        raise BadConfig('setting tls: tls_transition requires tls = "on"')
    if config.access == "on":
        raise BadConfig(
            'setting tls: access = "on" requires tls = "on", because TLS identifies the peers'
        )
    if config.audit_log:
        raise BadConfig(
            'setting tls: audit_log requires tls = "on", because access control needs it'
        )


def log_failure(peer: str, failure: str) -> None:
    """Log why a handshake with a peer failed (rule 6); if ports vary, `peer` is only the host."""
    if is_new_failure(peer, failure):
        _log.warning("tls.handshake_failed peer=%s error=%s", peer, failure)


def log_plain_peer(peer: str) -> None:
    """Log that a peer was accepted without TLS, because of `tls_transition` (rule 6)."""
    if is_new_failure(peer, "plain TCP"):
        _log.warning("tls.plain_tcp_accepted peer=%s", peer)


def error_kind(error: str) -> str:
    """Return the beginning of an error without its values, as the key for `is_new_failure`.

    If the key contained the values, a peer could make each of its errors a new one.
    """
    return _VALUE_PATTERN.sub("", error)[:_KIND_CHARACTERS_MAX]


def is_new_failure(peer: str, failure: str) -> bool:
    """Whether the caller must log a failure now (rule 6); the failure then counts as logged.

    All addresses of an IPv6 network count as one peer. If they counted separately, one peer could
    fill the log.
    """
    peer, now_s = network_of(peer), time.monotonic()
    if now_s < _LAST_LOGGED.get((peer, failure), -LOG_INTERVAL_S) + LOG_INTERVAL_S:
        return False
    if len(_LAST_LOGGED) >= _LAST_LOGGED_MAX:
        _LAST_LOGGED.clear()
    _LAST_LOGGED[peer, failure] = now_s
    return True


def alert_of(error: Exception) -> bytes:
    """Return the alert to send to a peer after this handshake error; empty if there is none."""
    notes = getattr(error, "__notes__", [])
    return bytes.fromhex(notes[-1]) if isinstance(error, ssl.SSLError) and notes else b""


def tls_value_in(connect: str) -> str:
    """Return the value of ?tls= in a connect string; empty if it has none.

    A connect string without ?tls= is not checked. A storage without ZooKeeper may have any text as
    its connect string, and an attempt to connect reports errors in the text.
    """
    return parse_connect_string(connect).tls if "tls=" in connect else ""


def failure_text(error: Exception) -> str:
    """Return the text of a connection error, without the error number."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the peer is not valid: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        if isinstance(error, OSError) and (error.errno or 0) > 0:  # not an error of getaddrinfo
            return os.strerror(error.errno or 0)
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = error.reason or ""
    if "ALERT" in reason and any(alert in reason for alert in _CERTIFICATE_ALERTS):
        sentence = f"the peer rejects the certificate of this process: {_readable_reason(reason)}"
        return _REASON_TEXTS.get(reason, sentence)
    return _REASON_TEXTS.get(reason) or f"TLS has failed: {_readable_reason(reason) or error}"


def _readable_reason(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _effective_settings(config: TlsConfig, tls_value: str) -> TlsConfig | None:
    """Return the effective TLS settings (rule 1); None if they disable TLS."""
    value = _read_settings(ON if tls_value == UNVERIFIED and config.tls_authorities else tls_value)
    overrides = {
        setting_field.name: getattr(config, setting_field.name)
        for setting_field in fields(TlsConfig)
        if getattr(config, setting_field.name) != setting_field.default
    }
    settings = replace(value, **overrides)
    if settings.tls == ON:
        return settings
    if not settings.tls and overrides:
        raise BadConfig(
            f'setting tls: expected "on" or "off", because {next(iter(overrides))} is set; found '
            "neither"
        )
    return None


def _read_settings(tls_value: str) -> TlsConfig:
    """Return the settings that the value of ?tls= names (rule 2)."""
    if not tls_value:
        return TlsConfig()
    if tls_value in (ON, UNVERIFIED):
        return TlsConfig(tls=ON, tls_verify="nothing" if tls_value == UNVERIFIED else "")
    if not tls_value.endswith(".toml"):
        return TlsConfig(tls=ON, tls_authorities=tls_value)
    settings = load_config(TlsConfig, path=tls_value).config
    folder = Path(tls_value).parent
    names = {name: getattr(settings, name) for name in _FILE_SETTINGS}
    paths = {name: str(folder / value) for name, value in names.items() if value}
    return replace(settings, tls=settings.tls or ON, **paths)


def _client_context(
    settings: TlsConfig | None, token: TokenSource | ForwardedToken | None
) -> DialContext | None:
    is_verified = settings is not None and settings.tls_verify != "nothing"
    if token is not None and not is_verified:
        raise BadConfig(
            f"{token}: a token requires TLS that verifies the peer. Hint: add ?tls=FILE to "
            "the connect string, where FILE names the trusted authorities."
        )
    if settings is None:
        return None
    context = DialContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = settings.tls_verify in ("", "name")
    if settings.tls_verify == "nothing":
        context.verify_mode = ssl.CERT_NONE
    elif settings.tls_authorities:
        _load_authorities(context, settings)
    else:
        context.load_default_certs()
    if settings.tls_certificate:
        _load_certificate(context, settings)
    if token is not None:
        token.read()
        context.token = token
    return context


def _check_own_certificate(settings: TlsConfig, host: str) -> None:
    """Log an error if peers will reject the daemon's certificate for `host` (rule 9)."""
    if settings.tls_verify == "nothing":
        return
    host = host.removeprefix("[").removesuffix("]")
    dial_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dial_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # this check trusts the issuer
    dial_side.check_hostname = settings.tls_verify in ("", "name")
    dial_side.load_verify_locations(settings.tls_certificate)
    accept_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(accept_side, settings)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = dial_side.wrap_bio(to_client, to_server, server_hostname=host)
    server = accept_side.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:  # also for a key of a kind that peers do not accept
        reason = failure_text(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message
        _log.error(
            "tls.certificate_mismatch certificate=%s host=%s error=%r",
            settings.tls_certificate,
            host,
            reason,
        )


def _load_authorities(context: ssl.SSLContext, settings: TlsConfig) -> None:
    file = settings.tls_authorities
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise _bad_file_error("tls_authorities", file, "certificates", error) from None
    except OSError as error:
        raise _unreadable_file_error("tls_authorities", file, error) from None


def _load_certificate(context: ssl.SSLContext, settings: TlsConfig) -> None:
    load_certificate(context, "tls", settings.tls_certificate, settings.tls_key)


def load_certificate(context: ssl.SSLContext, kind: str, file: str, key_file: str) -> None:
    """Load the files of the settings `kind`_certificate and `kind`_key; raises BadConfig.

    NB: after an error, the context may have a certificate without its key.
    """
    key = key_file or file
    for name, path in ((f"{kind}_certificate", file), (f"{kind}_key", key)):
        try:
            Path(path).read_bytes()  # the errors of `ssl` do not name the file
        except OSError as error:
            raise _unreadable_file_error(name, path, error) from None

    def no_password() -> NoReturn:
        raise BadConfig(
            f"setting {kind}_key: expected a private key without a password, found one with a "
            f"password in {key!r}"
        )

    try:
        context.load_cert_chain(file, key, no_password)
    except ssl.SSLError as error:
        files = file if key == file else f"{file} and {key}"
        raise _bad_file_error(
            f"{kind}_certificate", files, "a certificate and its private key", error
        ) from None


def _bad_file_error(name: str, file: str, expected: str, error: ssl.SSLError) -> BadConfig:
    reason = _readable_reason(error.reason or "") or str(error)
    return BadConfig(
        f"setting {name}: expected a PEM file with {expected}, found {file} ({reason})"
    )


def _unreadable_file_error(name: str, file: str, error: OSError) -> BadConfig:
    return BadConfig(f"setting {name}: {file!r} cannot be read ({error.strerror or error})")
