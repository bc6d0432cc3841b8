"""Auth files: what they may contain, and errors that never quote a secret."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.cluster.zookeeper.credentials import Credentials, NodePermission, parse_credentials
from waltz_core.errors import BadConfig

WORD = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1).filter(
    lambda word: word == word.strip() and len(word.splitlines()) == 1
)


def test_user_password_and_further_permissions_are_parsed():
    others = " world:anyone:r\nip:10.0.0.0/8:cdrwa\ndigest:b:aGFzaA==:rw\n"
    found = parse_credentials(f"# ours\n\ndigest:waltz:se:cret \n{others}", "f")
    assert (found.user, found.password) == ("waltz", "se:cret")
    assert found.grants == (
        NodePermission("world", "anyone", "r"),
        NodePermission("ip", "10.0.0.0/8", "cdrwa"),
        NodePermission("digest", "b:aGFzaA==", "rw"),
    )
    assert "cret" not in repr(found)


@given(WORD.filter(lambda user: ":" not in user), WORD)
def test_every_user_and_password_of_one_line(user, password):
    assert parse_credentials(f"digest:{user}:{password}\n", "f") == Credentials(user, password)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected digest:USER:PASSWORD, found nothing"),
        ("# digest:a:b\n", "expected digest:USER:PASSWORD, found nothing"),
        ("hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("digest:hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("digest::hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("#\nsasl:a:hunter2", "line 2: expected digest:USER:PASSWORD"),
        ("digest:a:b\nhunter2", "line 2: expected SCHEME:ID:PERMISSIONS, such as world:anyone:r"),
        ("digest:a:b\nworld:hunter2:r", "line 2: expected SCHEME"),
        ("digest:a:b\nworld:anyone:", "line 2: expected SCHEME"),
        ("digest:a:b\nworld:anyone:rx", "permissions of cdrwa"),
        ("digest:a:b\nword:anyone:r", "a scheme of world, digest"),
    ],
)
def test_a_bad_file_is_reported_in_a_sentence_without_its_content(text, said):
    with pytest.raises(BadConfig) as caught:
        parse_credentials(text, "/etc/waltz/auth")
    assert said in str(caught.value)
    assert "/etc/waltz/auth" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
