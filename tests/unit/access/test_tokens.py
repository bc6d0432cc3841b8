"""Tokens: the text of a file; their bytes never appear in texts (rule 1 of tokens.py)."""

import copy
import hashlib

import pytest

from waltz_core.access.tokens import Token, hash_of
from waltz_core.errors import BadConfig

TOKEN_TEXT = "c0ffee" + "0123456789" * 5 + "abcdef00"


def test_a_token_is_64_hexadecimal_digits_with_an_optional_line_end():
    assert Token.parse(f"{TOKEN_TEXT}\n", "file").secret == bytes.fromhex(TOKEN_TEXT)
    assert Token.parse(TOKEN_TEXT, "file").text == TOKEN_TEXT


@pytest.mark.parametrize(
    "text",
    [
        "",
        TOKEN_TEXT[:-1],
        TOKEN_TEXT + "0",
        TOKEN_TEXT.upper(),
        f"{TOKEN_TEXT[:32]} {TOKEN_TEXT[32:]}",
        "\uff43" + TOKEN_TEXT[1:],
    ],
)
def test_the_error_about_a_truncated_or_changed_token_does_not_show_the_token(text):
    with pytest.raises(BadConfig, match=r"file: expected a token of 64 .*, found ") as caught:
        Token.parse(text, "file")
    assert "ffee" not in str(caught.value).lower()


def test_the_bytes_of_a_token_are_in_no_repr_and_no_pickle():
    token = Token.parse(TOKEN_TEXT, "file")
    texts_of_token = f"{token!r} {token}"
    assert (
        TOKEN_TEXT[:16] not in texts_of_token
    )  # a shorter part could be in the address of the object
    assert repr(token.secret) not in texts_of_token
    for store in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a token is a secret and cannot be pickled"):
            store(token)


def test_zookeeper_stores_the_sha_256_hash_of_a_token():
    assert (
        hash_of(bytes.fromhex(TOKEN_TEXT)) == hashlib.sha256(bytes.fromhex(TOKEN_TEXT)).hexdigest()
    )
