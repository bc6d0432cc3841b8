"""TLS: from settings and a connect string to what `net.py` wraps connections in.

Daemons, clients and commands decide in one place whether they speak TLS, whom they believe, and
what is said when two ends do not fit. Only the standard library's `ssl` is used; certificates are
files that somebody has made (docs/operations.md, "TLS").

Rules:
    1. `tls = "off"` wins over everything, the connect string's ?tls= over a default, and each
       setting that is given over what ?tls= says of it. Who names authorities means them: a
       ?tls=unverified that a whole cluster has does not keep him from asking them.
    2. ?tls=FILE names the authorities; a FILE.toml has settings of kind "tls", with file names
       beside it. ?tls=on believes the system's authorities, ?tls=unverified anybody.
    3. TLS 1.2 is the least: an original speaks nothing newer.
    4. Whoever listens beyond this machine in the clear is told so once, unless `tls = "off"` says
       that it is meant.
    5. A daemon reads its files again on SIGHUP (`renew`). Authorities are added, and leave at a
       restart only.
    6. The same failure of the same peer is news once in `NEWS_AGAIN_S`: whoever dials again and
       again fills no disk.
    7. A daemon checks its own certificate as its peers will: for the host that it advertises, and
       for its dates. What does not fit is logged as an error when its files are read.
"""

import contextlib
import ipaddress
import logging
import ssl
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from waltz_core.config.connect_string import parse_connect_string
from waltz_core.config.declarations import ServerConfig, StorageConfig, TlsConfig
from waltz_core.config.settings import load
from waltz_core.errors import BadConfig

_log = logging.getLogger(__name__)

ON: Final = "on"
UNVERIFIED: Final = "unverified"
# The first byte of a record: a handshake, or the alert that ends one.
HANDSHAKE: Final = 0x16
ALERT: Final = 0x15
# What we say to somebody who has not begun a handshake: a fatal alert, unexpected_message.
REFUSAL: Final = bytes((ALERT, 3, 3, 0, 2, 2, 10))

NEWS_AGAIN_S: Final = 60.0
_NEWS_MAX: Final = 1_024
_NEWS: Final[dict[tuple[str, str], float]] = {}  # when what was told of whom, by this process
_FILES: Final = ("tls_certificate", "tls_key", "tls_authorities")
_FOUND_PLAIN: Final = "expected TLS, found plain TCP"
_NO_VERSION: Final = "no common version: expected TLS 1.2 or 1.3"
_SENTENCES: Final = {
    "WRONG_VERSION_NUMBER": _FOUND_PLAIN,
    "HTTP_REQUEST": _FOUND_PLAIN,
    "UNSUPPORTED_PROTOCOL": _NO_VERSION,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_VERSION,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "expected a certificate of the peer, found none",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer expects a certificate, and we showed none",
    # What TLS 1.2 has for that, and for more.
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer refuses us: perhaps it expects a certificate",
}
_REFUSED_BY_PEER: Final = ("CERTIFICATE", "UNKNOWN_CA")


def dialling(config: TlsConfig, connect: str) -> ssl.SSLContext | None:
    """Return what to wrap connections in that we make; None: they are plain.

    Raises:
        BadConfig: the connect string, a setting or a file of them is wrong.
    """
    chosen = _effective(config, place_in(connect))
    return None if chosen is None else _client_context(chosen)


def renew(config: ServerConfig | StorageConfig, *contexts: ssl.SSLContext | None) -> None:
    """Read a daemon's files again; connections that are made from now on go by them.

    Where they are wrong the log says so, and what was read before goes on to hold.
    """
    try:
        listening(config)  # a new one: half of a pair of files must not get into those in use
        chosen = _effective(config, place_in(config.connect))
    except BadConfig as error:
        _log.error("tls.not_renewed error=%s", error)
        return
    if chosen is None:
        _log.error("tls.not_renewed error=tls: expected it to be on, as it was at the start")
        return
    for context in filter(None, contexts):
        _load_certificate(context, chosen)
        if chosen.tls_authorities and context.verify_mode is not ssl.CERT_NONE:
            _load_authorities(context, chosen)
    _log.info("tls.renewed certificate=%s", chosen.tls_certificate)


def named(place: str) -> ssl.SSLContext | None:
    """Return what to dial in, as ?tls= names it, for whoever has no connect string.

    Raises:
        BadConfig: as `dialling`.
    """
    chosen = _effective(TlsConfig(), place)
    return None if chosen is None else _client_context(chosen)


def listening(config: ServerConfig | StorageConfig) -> ssl.SSLContext | None:
    """Return what to wrap connections in that come to a daemon; None: they are plain (rule 4).

    Raises:
        BadConfig: as `dialling`; or there is no certificate, or nothing to check a peer's against.
    """
    chosen = _effective(config, place_in(config.connect))
    if chosen is None:
        is_meant = config.tls == "off"
        if isinstance(config, ServerConfig) and config.tls_require_certificate and not is_meant:
            raise BadConfig('tls: expected "on" beside tls_require_certificate = true')
        if not is_meant and not _is_loopback(config.listen_host):
            _log.warning(
                "tls.off host=%s: every host that can connect may read and write, without "
                'authentication; expected tls = "on" with tls_certificate, or tls = "off" in a '
                "private network",
                config.listen_host,
            )
        return None
    if not chosen.tls_certificate:
        raise BadConfig("tls_certificate: expected a file, which a daemon needs for TLS")
    if config.tls_require_certificate and not chosen.tls_authorities:
        raise BadConfig(
            "tls_authorities: expected a file, to check those certificates against that "
            "tls_require_certificate asks for; or tls_require_certificate = false"
        )
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _Handshake
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # nobody resumes
    _load_certificate(context, chosen)
    _check_own_certificate(chosen, config.advertised_host or config.listen_host)
    if config.tls_require_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, chosen)
    return context


def tell(peer: str, failure: str) -> None:
    """Log why we and a peer do not come to speak (rule 6); a host, where its ports are any."""
    now_s = time.monotonic()
    if now_s < _NEWS.get((peer, failure), -NEWS_AGAIN_S) + NEWS_AGAIN_S:
        return
    if len(_NEWS) >= _NEWS_MAX:
        _NEWS.clear()
    _NEWS[peer, failure] = now_s
    _log.warning("tls.failed peer=%s error=%s", peer, failure)


def alert_of(error: Exception) -> bytes:
    """Return what a peer has to be sent whose handshake has failed with this; may be nothing."""
    notes = getattr(error, "__notes__", [])
    return bytes.fromhex(notes[-1]) if isinstance(error, ssl.SSLError) and notes else b""


def place_in(connect: str) -> str:
    """Return what stands behind ?tls= of a connect string.

    One without is not looked at: a storage without ZooKeeper may have any, and what is wrong with
    it is told by who connects.
    """
    return parse_connect_string(connect).tls if "tls=" in connect else ""


def told(error: Exception) -> str:
    """Return an error of a handshake, or after it, as the end of a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    reason = error.reason or ""
    if "ALERT" in reason and any(each in reason for each in _REFUSED_BY_PEER):
        sentence = f"our certificate is not accepted by the peer: {_words(reason)}"
        return _SENTENCES.get(reason, sentence)
    return _SENTENCES.get(reason) or f"TLS has failed: {_words(reason) or error}"


class _Handshake(ssl.SSLObject):
    """One end of a connection, which keeps the alert that a failure would have sent.

    Both loops drop what is unsent when a handshake fails, so that the peer would never learn why.
    """

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        """Go on; raises SSLError, with the alert as its note (`alert_of`)."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.add_note(self.outgoing.read().hex())
            raise


class _Context(ssl.SSLContext):
    """A listener's context."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        *arguments: Any,  # noqa: ANN401 - handed on
        **options: Any,  # noqa: ANN401 - handed on
    ) -> ssl.SSLObject:
        """As the loop asks for it."""
        made = super().wrap_bio(incoming, outgoing, *arguments, **options)
        assert isinstance(made, _Handshake)
        made.outgoing = outgoing
        return made


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _effective(config: TlsConfig, place: str) -> TlsConfig | None:
    """Return the settings that hold (rule 1); None: no TLS."""
    said = _read(ON if place == UNVERIFIED and config.tls_authorities else place)
    given = {
        each.name: getattr(config, each.name)
        for each in fields(TlsConfig)
        if getattr(config, each.name) != each.default
    }
    chosen = replace(said, **given)
    if chosen.tls == ON:
        return chosen
    if not chosen.tls and given:
        raise BadConfig(f'tls: expected "on" or "off" beside {next(iter(given))}, found neither')
    return None


def _read(place: str) -> TlsConfig:
    """Return the settings that ?tls= names (rule 2)."""
    if not place:
        return TlsConfig()
    if place in (ON, UNVERIFIED):
        return TlsConfig(tls=ON, tls_verify="nothing" if place == UNVERIFIED else "")
    if not place.endswith(".toml"):
        return TlsConfig(tls=ON, tls_authorities=place)
    found = load(TlsConfig, path=place).config
    folder = Path(place).parent
    names = {name: getattr(found, name) for name in _FILES}
    beside = {name: str(folder / value) for name, value in names.items() if value}
    return replace(found, tls=found.tls or ON, **beside)


def _client_context(chosen: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = chosen.tls_verify in ("", "name")
    if chosen.tls_verify == "nothing":
        context.verify_mode = ssl.CERT_NONE
    elif chosen.tls_authorities:
        _load_authorities(context, chosen)
    else:
        context.load_default_certs()
    if chosen.tls_certificate:
        _load_certificate(context, chosen)
    return context


def _check_own_certificate(chosen: TlsConfig, host: str) -> None:
    """Log why peers will not accept our certificate at the host that we advertise (rule 7)."""
    if chosen.tls_verify == "nothing":
        return
    host = host.removeprefix("[").removesuffix("]")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it is trusted here
    theirs.check_hostname = chosen.tls_verify in ("", "name")
    theirs.load_verify_locations(chosen.tls_certificate)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(ours, chosen)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = theirs.wrap_bio(down, up, server_hostname=host)
    server = ours.wrap_bio(up, down, server_side=True)
    try:
        for end in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:  # also for a key of a kind that peers do not accept
        reason = told(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message
        _log.error(
            "tls.certificate_does_not_fit certificate=%s host=%s error=%r",
            chosen.tls_certificate,
            host,
            reason,
        )


def _load_authorities(context: ssl.SSLContext, chosen: TlsConfig) -> None:
    file = chosen.tls_authorities
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise _bad("tls_authorities", file, "certificates", error) from None
    except OSError as error:
        raise _unreadable("tls_authorities", file, error) from None


def _load_certificate(context: ssl.SSLContext, chosen: TlsConfig) -> None:
    file, key = chosen.tls_certificate, chosen.tls_key or chosen.tls_certificate
    for name, each in (("tls_certificate", file), ("tls_key", key)):
        try:
            Path(each).read_bytes()  # `ssl` does not say which one it is
        except OSError as error:
            raise _unreadable(name, each, error) from None

    def no_password() -> NoReturn:
        raise BadConfig(f"tls_key: {key!r}: expected a key without a password")

    try:
        context.load_cert_chain(file, key, no_password)
    except ssl.SSLError as error:
        where = file if key == file else f"{file} and {key}"
        raise _bad("tls_certificate", where, "a certificate and its private key", error) from None


def _bad(name: str, file: str, expected: str, error: ssl.SSLError) -> BadConfig:
    reason = _words(error.reason or "") or str(error)
    return BadConfig(f"{name}: {file}: expected a PEM file with {expected}: {reason}")


def _unreadable(name: str, file: str, error: OSError) -> BadConfig:
    return BadConfig(f"{name}: {file!r} cannot be read: {error.strerror or error}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
