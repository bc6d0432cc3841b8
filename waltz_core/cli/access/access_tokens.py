"""`waltz-core access token create | revoke`.

Rules:
    1. The token's file is written before its hash is stored in ZooKeeper. If the process dies
       between these steps, the file contains a token that no daemon accepts. In the opposite order,
       the cluster would accept a token that is in no file.
    2. If the write to ZooKeeper has certainly failed, the file is deleted. If the outcome is
       unknown, the file is kept.
    3. ZooKeeper, the audit entry and the output contain the token's ID, but never its secret.
"""

import re
import secrets
from pathlib import Path
from typing import Final

import click

from waltz_core.access import permission_changes as changes
from waltz_core.access.permissions import Permissions, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.access.tokens import TOKEN_BYTES, Token, hash_of
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import AccessCommand, AccessResult, access_change_command
from waltz_core.cli.access.private_files import remove_private_file, write_private_file
from waltz_core.cli.output import time_text
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change.stored_permissions import PermissionsChange
from waltz_core.errors import BadConfig, CoordinatorOutcomeUnknown, WaltzError

TOKEN_ID_BYTES: Final = 4
_UNITS_MS: Final = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION_PATTERN: Final = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_DAYS_MAX: Final = 3_650


def parse_duration_ms(text: str) -> int:
    """Parse a duration such as 90d, 12h or 30m into milliseconds; raises BadConfig."""
    match = _DURATION_PATTERN.fullmatch(text)
    duration_ms = int(match[1]) * _UNITS_MS[match[2]] if match else 0
    if not 0 < duration_ms <= _DAYS_MAX * _UNITS_MS["d"]:
        raise BadConfig(
            f"--expires: expected a duration such as 90d, 12h or 30m, and {_DAYS_MAX}d at "
            f"most, found {text!r}"
        )
    return duration_ms


@subcommand
@options.argument("principal", "PRINCIPAL", "the principal that the token identifies")
@click.option(
    "--file",
    "file",
    type=options.PATH_TYPE,
    required=True,
    metavar="FILE",
    help="the file to create for the token; its mode is 600",
)
@click.option(
    "--expires",
    default="90d",
    metavar="DURATION",
    help="time after which the token expires, such as 90d, 12h or 30m [default: 90d]",
)
@access_change_command
async def token_create(
    command: AccessCommand, *, principal: str, file: Path, expires: str
) -> AccessResult:
    """Create a token for a principal, and write it to a new file."""
    expires_ms = command.author.now_ms + parse_duration_ms(expires)
    changes.check_token_principal(principal)
    await command.coordinator.permissions.read_existing()  # fails before the file is written
    token = StoredToken(f"t{secrets.token_hex(TOKEN_ID_BYTES)}", principal, expires_ms)
    change = await _create_token(command, token, file)
    notes = (
        () if _has_grant(change.after, principal, command.partition_count) else (_NO_GRANT_NOTE,)
    )
    summary = (
        f"created token {token.token_id} of {principal} in {file}; it expires at "
        f"{time_text(expires_ms)}"
    )
    values = {"token_id": token.token_id, "principal": principal, "expires_ms": expires_ms}
    return AccessResult(change, summary, tuple(note.format(principal) for note in notes), values)


token_create.help_details = (
    "A client presents the token in FILE if its connect string has ?token_file=FILE. To "
    "replace a token, first create another one, then replace the client's file, and then "
    "revoke the old token."
)
_NO_GRANT_NOTE: Final = "principal {} has no grant yet. Hint: `access grant` adds one."


async def _create_token(
    command: AccessCommand, stored_token: StoredToken, file: Path
) -> PermissionsChange:
    """Write the token's file, then its hash to ZooKeeper (rules 1 and 2)."""
    token = Token(secrets.token_bytes(TOKEN_BYTES))
    write_private_file(file, f"{token.text}\n".encode())
    token_hash = hash_of(token.secret)
    try:
        return await command.change(lambda old: changes.add_token(old, token_hash, stored_token))
    except CoordinatorOutcomeUnknown as error:
        raise CoordinatorOutcomeUnknown(
            f"the token could not be stored: {error}. Hint: `access list` shows whether token "
            f"{stored_token.token_id} exists; if not, delete {file}."
        ) from error
    except WaltzError:
        remove_private_file(file)
        raise


def _has_grant(permissions: Permissions, principal: str, count: int) -> bool:
    return any(
        changes.granted_partitions(permissions, principal, verb, count) for verb in AccessVerb
    )


@subcommand
@options.argument(
    "token_id", "ID", "the ID of the token, as `access list` prints it", required=False
)
@click.option("--expired", is_flag=True, help="remove all tokens that have expired")
@access_change_command
async def token_revoke(
    command: AccessCommand, *, token_id: str | None, expired: bool
) -> AccessResult:
    """Revoke one token, or remove all expired tokens."""
    if expired == (token_id is not None):
        raise BadConfig("expected the ID of a token, or --expired; found neither")
    if token_id is not None:
        change = await command.change(lambda old: changes.revoke_token(old, token_id))
        return AccessResult(change, f"token {token_id} was revoked", values={"token_id": token_id})
    now_ms = command.author.now_ms
    change = await command.change(lambda old: changes.remove_expired_tokens(old, now_ms))
    tokens_before = change.before.tokens if change.before else {}
    return AccessResult(
        change, f"expired tokens removed: {len(tokens_before) - len(change.after.tokens)}"
    )
