"""Auth files: valid and invalid content, and errors that never quote a secret."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.security import make_digest_acl_credential

from waltz_core.cluster.znodes.paths import ABOVE_ROOT_ZNODE, UNKNOWN_ZNODE, ZNODES
from waltz_core.cluster.zookeeper.credentials import (
    Credentials,
    NodePermission,
    User,
    parse_credentials,
)
from waltz_core.cluster.zookeeper.zookeeper_session import connect
from waltz_core.errors import BadConfig

WORDS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1).filter(
    lambda word: word == word.strip() and len(word.splitlines()) == 1
)


def test_the_user_the_password_and_further_permissions_are_parsed():
    other_permissions = " world:anyone:r\nip:10.0.0.0/8:cdrwa\ndigest:b:aGFzaA==:rw\n"
    credentials = parse_credentials(f"# ours\n\ndigest:waltz:se:cret \n{other_permissions}", "f")
    assert credentials.user == User("waltz", "se:cret")
    assert credentials.grants == (
        NodePermission("world", "anyone", "r"),
        NodePermission("ip", "10.0.0.0/8", "cdrwa"),
        NodePermission("digest", "b:aGFzaA==", "rw"),
    )
    assert "cret" not in repr(credentials)


@given(WORDS.filter(lambda user: ":" not in user), WORDS)
def test_every_user_and_password_of_one_line_is_parsed(user, password):
    credentials = parse_credentials(f"digest:{user}:{password}\n", "f")
    assert credentials == Credentials(User(user, password))
    assert credentials.user.identity == make_digest_acl_credential(user, password)


# --- two users

MEMBER = make_digest_acl_credential("waltz", "secret:1")
ADMINISTRATOR = make_digest_acl_credential("admin", "secret:2")
NEW_CREDENTIAL = make_digest_acl_credential("admin", "secret:3")
ADMINISTRATOR_FILE = "digest:admin:secret:2\nmembers:digest:waltz:secret:1\n"
MEMBER_FILE = f"digest:waltz:secret:1\nadministrators:digest:{ADMINISTRATOR}\n"
ROWS = {each.path: each for each in (*ZNODES, ABOVE_ROOT_ZNODE, UNKNOWN_ZNODE)}


def test_parsed_credentials_state_the_role_and_hide_the_passwords():
    administrator = parse_credentials(ADMINISTRATOR_FILE, "f")
    member = parse_credentials(MEMBER_FILE, "f")
    assert (administrator.is_member, member.is_member) == (False, True)
    users = User("admin", "secret:2"), User("waltz", "secret:1")
    assert administrator.users == users
    assert member.users == users[1:]
    assert "secret" not in repr(administrator) + repr(member)


@pytest.mark.parametrize(
    ("path", "members", "is_public"),
    [
        ("R", "crwd", True),
        ("R/store/partition/P", "crwd", False),
        ("R/x", "cr", True),
        ("R/x/access", "r", False),
        ("R/x/audit", "", False),
        (ABOVE_ROOT_ZNODE.path, "r", True),
        (UNKNOWN_ZNODE.path, "crwd", False),
    ],
)
@pytest.mark.parametrize("text", [ADMINISTRATOR_FILE, MEMBER_FILE])
def test_both_users_create_nodes_with_the_same_permissions(text, path, members, is_public):
    access_list = parse_credentials(text, "f").access_list_of(ROWS[path])
    expected = [NodePermission("digest", ADMINISTRATOR, "cdrwa")]
    expected += [NodePermission("digest", MEMBER, members)] if members else []
    expected += [NodePermission("world", "anyone", "r")] if is_public else []
    assert list(access_list) == expected


@pytest.mark.parametrize("text", [ADMINISTRATOR_FILE, MEMBER_FILE])
def test_further_lines_add_administrators_or_grant_at_most_the_permissions_of_members(text):
    lines = f"world:anyone:cdrwa\nip:10.0.0.1:rw\ndigest:{NEW_CREDENTIAL}:cdrwa\n"
    credentials = parse_credentials(f"{text}{lines}", "f")

    def other_permissions(path: str) -> list[NodePermission]:
        granted = credentials.access_list_of(ROWS[path])
        return [each for each in granted if each.identity not in {MEMBER, ADMINISTRATOR}]

    world, host, administrator = "anyone", "10.0.0.1", ("digest", NEW_CREDENTIAL, "cdrwa")
    parent = [("world", world, "cdrw"), ("ip", host, "rw"), administrator]
    assert other_permissions("R/store/partition") == parent
    assert other_permissions("R/x/access") == [("ip", host, "r"), administrator]
    assert other_permissions("R/x/audit") == [administrator]


def test_the_documented_auth_files_define_an_administrator_and_a_member():
    """The command for the hash is tested, too."""
    page = Path(__file__).resolve().parents[3] / "docs" / "zookeeper.md"
    blocks = re.findall(r"^```(\w*)\n(.+?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (command,) = [text for language, text in blocks if language == "bash" and "sha1" in text]
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    files = [text for _, text in blocks if text.startswith("digest:") and text.count("\n") == 2]
    texts = [text.replace("HASH", result.stdout.strip()) for text in files]
    administrator, member = (parse_credentials(text, "f") for text in texts)
    row = ROWS["R/store/partition"]
    assert not administrator.is_member
    assert member.is_member
    assert member.access_list_of(row) == administrator.access_list_of(row)


@pytest.mark.parametrize("path", ROWS)
def test_one_user_has_all_permissions_of_every_node(path):
    credentials = parse_credentials("digest:waltz:secret\nworld:anyone:cdrwa\n", "f")
    expected = [("auth", "", "cdrwa")]
    if path not in {"R/x/access", "R/x/audit", "R/x/audit/e_N"}:
        expected.append(("world", "anyone", "cdrwa"))
    assert list(credentials.access_list_of(ROWS[path])) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected digest:USER:PASSWORD, found an"),
        ("# digest:a:b\n", "expected digest:USER:PASSWORD, found an"),
        ("hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("digest:hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("digest::hunter2", "line 1: expected digest:USER:PASSWORD"),
        ("#\nsasl:a:hunter2", "line 2: expected digest:USER:PASSWORD"),
        (
            "digest:a:b\nhunter2",
            "line 2: expected DIGEST_SCHEME:ID:PERMISSIONS, such as world:anyone:r",
        ),
        ("digest:a:b\nworld:hunter2:r", "line 2: expected DIGEST_SCHEME"),
        ("digest:a:b\nworld:anyone:", "line 2: expected DIGEST_SCHEME"),
        ("digest:a:b\nworld:anyone:rx", "permissions of cdrwa"),
        ("digest:a:b\nword:anyone:r", "a scheme of world, digest"),
        ("digest:a:b\nmembers:digest:hunter2", "line 2: expected members:digest:USER:PASSWORD"),
        ("digest:a:b\nmembers:hunter2", "line 2: expected members:digest:USER:PASSWORD"),
        (
            "digest:a:b\nmembers:digest:a:hunter2",
            "line 2: expected a different user in the second line, found",
        ),
        (
            "digest:a:b\nadministrators:digest:c:hunter2",
            "line 2: expected administrators:digest:USER:HASH, with the base64 text of the SHA-1",
        ),
        (f"digest:a:b\nadministrators:sasl:{ADMINISTRATOR}", "line 2: expected administrators:"),
        (
            f"digest:admin:hunter2\nadministrators:digest:{ADMINISTRATOR}",
            (
                "line 2: expected a different user in the second line, found the user of the "
                "first line"
            ),
        ),
        (f"{MEMBER_FILE}members:digest:c:hunter2", "line 3: expected one line with members or"),
        (f"{ADMINISTRATOR_FILE}members:digest:c:hunter2", "line 3: expected one line with members"),
    ],
)
def test_an_invalid_auth_file_is_reported_without_its_content(text, problem):
    with pytest.raises(BadConfig) as caught:
        parse_credentials(text, "/etc/waltz/auth")
    assert problem in str(caught.value)
    assert "/etc/waltz/auth" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, " cannot be read: No such file or directory. Hint: "),
        (bytes([0x80]), " cannot be read: the file is not UTF-8 text. Hint: "),
        (b"0" * 64, ", line 1: expected digest:USER:PASSWORD. Hint: "),
    ],
    ids=["missing", "bytes", "token"],
)
def test_an_error_names_the_file_and_states_which_file_is_expected(tmp_path, content, problem):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadConfig) as caught:
        asyncio.run(connect(f"zk1:2181/waltz/payments?auth={file}"))
    assert str(caught.value).startswith(f"the auth file '{file}' of the connect string{problem}")
    assert "an auth file has users of ZooKeeper, not a token" in str(caught.value)
