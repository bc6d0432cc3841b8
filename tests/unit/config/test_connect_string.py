"""Connect strings: valid forms, and errors for invalid ones."""

import pytest

from waltz_core.config.connect_string import ConnectString, parse_connect_string, split_address
from waltz_core.errors import BadConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zk1:2181,zk2:2181/waltz/payments", (("zk1:2181", "zk2:2181"), "/waltz/payments")),
        ("localhost:2181/w", (("localhost:2181",), "/w")),
        (" 10.0.0.1:1/w/ ", (("10.0.0.1:1",), "/w")),
        ("a:1, b:65535/w", (("a:1", "b:65535"), "/w")),
        ("[::1]:2181,[fe80::2]:9/w/x y", (("[::1]:2181", "[fe80::2]:9"), "/w/x y")),
        ("a:1,b:2/w?auth=/etc/waltz/auth", (("a:1", "b:2"), "/w", "/etc/waltz/auth")),
        ("a:1/w?auth=relative file", (("a:1",), "/w", "relative file")),
        ("a:1/w?auth=/a?b&c=d", (("a:1",), "/w", "/a?b&c=d")),
        ("a:1/w?auth=auth=", (("a:1",), "/w", "auth=")),
        ("a:1/w?tls=on", (("a:1",), "/w", "", "on")),
        ("a:1/w?tls=/etc/waltz/ca.pem", (("a:1",), "/w", "", "/etc/waltz/ca.pem")),
        ("a:1/w?auth=/etc/zk&tls=tls.toml", (("a:1",), "/w", "/etc/zk", "tls.toml")),
        ("a:1/w?tls=a&b=c&auth=/etc/zk?d", (("a:1",), "/w", "/etc/zk?d", "a&b=c")),
        ("a:1/w?tls=on&token_file=/a?b&c", (("a:1",), "/w", "", "on", "/a?b&c")),
        ("a:1/w?token_env=_T1&tls=on", (("a:1",), "/w", "", "on", "", "_T1")),
        ("a:1/w?tls=a&token=b", (("a:1",), "/w", "", "a&token=b")),
    ],
)
def test_a_connect_string_sets_hosts_root_authentication_and_tls(text, expected):
    parsed = parse_connect_string(text)
    assert parsed == ConnectString(*expected)
    assert parse_connect_string(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the connect string is empty"),
        ("  ", "the connect string is empty"),
        ("zk1:2181", "names no cluster root"),
        ("zk1:2181/", "names no cluster root"),
        ("zk1:2181,zk2:2181", "names no cluster root"),
        ("zk1:2181//a", "has the component '' in its cluster root:"),
        ("zk1:2181/a//b", "has the component '' in its cluster root:"),
        ("zk1:2181/a/../b", "has the component '..' in its cluster root:"),
        ("zk1:2181/a\0", "in its cluster root"),
        ("zk1/waltz", "'zk1' has no port"),
        ("zookeeper://zk1:2181/waltz", "is a URL"),
        ("zk1:2181,zk2/waltz", "'zk2' has no port"),
        ("/waltz", "has an empty host"),
        ("zk1:2181,/waltz", "has an empty host"),
        (",zk1:2181/waltz", "has an empty host"),
        (":2181/waltz", "':2181' has no host"),
        ("zk1:/waltz", "has the port '':"),
        ("zk1:zk/waltz", "has the port 'zk':"),
        ("zk1:0/waltz", "has the port '0':"),
        ("zk1:65536/waltz", "has the port '65536':"),
        ("zk1:-1/waltz", "has the port '-1':"),
        ("zk1:٢/waltz", "has the port '٢':"),
        ("zk1:000001999999/waltz", "has the port '000001999999':"),
        ("zk..1:2181/waltz", "has the host 'zk..1', which is not a valid host name:"),
        ("::1:2181/waltz", "IPv6 host without brackets"),
        ("[::1]/waltz", "'[::1]' has no port"),
        (
            "zk1:2181/waltz?",
            (
                "'?': expected none, or one or more of auth=FILE, tls=FILE and a token "
                "(token_file=FILE or token_env=VARIABLE), separated by &, as in"
            ),
        ),
        ("zk1:2181/waltz?auth=", "the options '?auth=':"),
        ("zk1:2181/waltz?auth", "the options '?auth':"),
        ("zk1:2181/waltz?user=a", "the options '?user=a':"),
        ("zk1:2181/waltz?tls=", "the options '?tls=':"),
        ("zk1:2181/waltz?tls=a&tls=b", "the options '?tls=a&tls=b'"),
        ("zk1:2181/waltz?tls=a\x00", "the options '?tls=a"),
        ("zk1:2181/waltz?token=secret", "the options '?token=secret'"),
        ("zk1:2181/waltz?tls=a&token_file=", "the options '?tls=a&token_file='"),
        ("zk1:2181/waltz?token_env=a-b", "the options '?token_env=a-b'"),
        ("zk1:2181/waltz?token_env=A&token_file=f", "the options '?token_env=A&token_file=f'"),
        ("zk1:2181?auth=f", "names no cluster root"),
        ("?auth=f", "the connect string is empty"),
    ],
)
def test_an_invalid_connect_string_is_reported_with_a_valid_example(text, problem):
    with pytest.raises(BadConfig) as caught:
        parse_connect_string(text)
    assert problem in str(caught.value)
    assert "zk1:2181,zk2:2181/waltz/payments" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_is_split_into_host_and_port():
    assert split_address("storage-1:5280") == ("storage-1", 5280)
    assert split_address("[::1]:80") == ("[::1]", 80)
    with pytest.raises(BadConfig, match="has no host"):
        split_address("a/b:80")
