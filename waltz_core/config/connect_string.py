"""Parses connect strings: the hosts of ZooKeeper and the root of one cluster, in one text.

Users type connect strings in Spark, in a shell and in configuration files. Each error in a connect
string is reported in one sentence.

    zk1:2181,zk2:2181/waltz/payments        hosts with their ports, then the cluster's root
    zk1:2181/waltz/payments?auth=/etc/zk    and, if ZooKeeper requires authentication, an auth file
    zk1:2181/waltz/payments?tls=/etc/ca.pem and, if the cluster uses TLS, the trusted CAs
    ...?tls=/etc/ca.pem&token_file=/etc/tok  and, if servers identify clients by tokens, the token
    ...?tls=/etc/ca.pem&token_env=TOKEN      or an environment variable with the token

Rules:
    1. Each host has a port; an IPv6 address is in brackets: [::1]:2181.
    2. The root is never "/": a cluster does not share ZooKeeper's own root.
    3. A connect string contains no secret. It names files, and the connecting process reads these
       files.
    4. A file name may contain "&". So the value of an option ends only at an "&" before the name of
       another option.
"""

import re
from dataclasses import dataclass

from waltz_core import errors
from waltz_core.config.host_names import check_host

EXPECTED_FORM = "expected host:port[,host:port]/root, such as zk1:2181,zk2:2181/waltz/payments"

_OPTION_NAMES = ("auth", "tls", "token_file", "token_env")
_OPTION_SEPARATOR = re.compile("&(?=auth=|tls=|token_file=|token_env=)")
_VARIABLE_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ConnectString:
    """The address of a cluster: ZooKeeper's hosts, each "host:port", and the cluster's root.

    `tls` is a file with TLS settings or trusted CAs for connections to servers and storages
    (`waltz_core.transport.tls`); empty: not specified. `token_file` or `token_env` names the file
    or the environment variable that contains a token.
    """

    hosts: tuple[str, ...]
    root: str
    auth_file: str = ""
    tls: str = ""
    token_file: str = ""
    token_env: str = ""

    def __str__(self) -> str:
        values = (self.auth_file, self.tls, self.token_file, self.token_env)
        values_by_option = dict(zip(_OPTION_NAMES, values, strict=True))
        options = "&".join(f"{name}={value}" for name, value in values_by_option.items() if value)
        return ",".join(self.hosts) + self.root + (f"?{options}" if options else "")


def parse_connect_string(text: str) -> ConnectString:
    """Return the parts of a connect string; raises BadConfig with the expected form."""
    if not isinstance(text, str):
        raise errors.BadConfig(f"the connect string {text!r} is not a string: {EXPECTED_FORM}")
    address, question, query = text.strip().partition("?")
    options = _parse_options(query) if question else {}
    if options is None:
        raise errors.BadConfig(
            f"the connect string {text!r} has the options {question + query!r}: expected "
            "none, or one or more of auth=FILE, tls=FILE and a token (token_file=FILE or "
            "token_env=VARIABLE), separated by &, as in "
            "zk1:2181,zk2:2181/waltz/payments?auth=FILE&tls=FILE"
        )
    hosts, slash, root = address.partition("/")
    if not hosts and not slash:
        raise errors.BadConfig(f"the connect string is empty: {EXPECTED_FORM}")
    if "://" in text:
        raise errors.BadConfig(f"the connect string {text!r} is a URL: {EXPECTED_FORM}")
    names = root.removesuffix("/").split("/")
    if names == [""]:
        raise errors.BadConfig(
            f"the connect string {text!r} names no cluster root: {EXPECTED_FORM}"
        )
    for name in names:
        if name in ("", ".", "..") or name != name.strip() or not name.isprintable():
            raise errors.BadConfig(
                f"the connect string {text!r} has the component {name!r} in its cluster "
                f"root: {EXPECTED_FORM}"
            )
    checked_hosts = tuple(_checked_host(host.strip(), text) for host in hosts.split(","))
    root = "/" + "/".join(names)
    return ConnectString(checked_hosts, root, *(options.get(name, "") for name in _OPTION_NAMES))


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port; an IPv6 host keeps its brackets. Raises BadConfig."""
    host, colon, digits = address.rpartition(":")
    if not colon or (host.startswith("[") and not host.endswith("]")):
        raise errors.BadConfig(f"{address!r} has no port: expected host:port")
    unbracketed_host = host[1:-1] if host.startswith("[") else host
    if (
        not unbracketed_host
        or unbracketed_host != unbracketed_host.strip()
        or "/" in unbracketed_host
    ):
        raise errors.BadConfig(f"{address!r} has no host: expected host:port")
    if ":" in unbracketed_host and not host.startswith("["):
        raise errors.BadConfig(
            f"{address!r} has an IPv6 host without brackets: expected [::1]:port"
        )
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 5
    if not (is_number and 1 <= int(digits) <= 65535):
        raise errors.BadConfig(f"{address!r} has the port {digits!r}: expected a port in 1..65535")
    return host, int(digits)


def check_address(address: str) -> None:
    """Raise BadConfig unless a text is "host:port" with a valid host and port."""
    host, _ = split_address(address)
    try:
        check_host(host[1:-1] if host.startswith("[") else host)
    except ValueError as error:
        raise errors.BadConfig(
            f"{address!r} has the host {host!r}, which is not a valid host name: {error}. "
            "Hint: use the name or the IP address at which that process listens."
        ) from error


def _parse_options(query: str) -> dict[str, str] | None:
    """Return the options after the question mark, by name; None if one is invalid."""
    value_by_option: dict[str, str] = {}
    for option in _OPTION_SEPARATOR.split(query):
        name, _, value = option.partition("=")
        if (
            name not in _OPTION_NAMES
            or name in value_by_option
            or not value
            or not value.isprintable()
        ):
            return None
        if name == "token_env" and not _VARIABLE_NAME.fullmatch(value):
            return None
        value_by_option[name] = value
    return None if {"token_file", "token_env"} <= value_by_option.keys() else value_by_option


def _checked_host(host: str, text: str) -> str:
    if not host:
        raise errors.BadConfig(f"the connect string {text!r} has an empty host: {EXPECTED_FORM}")
    try:
        check_address(host)
        name, port = split_address(host)
    except errors.BadConfig as error:
        raise errors.BadConfig(
            f"in the connect string {text!r}, {error}; {EXPECTED_FORM}"
        ) from error
    return f"{name}:{port}"
