"""Client IDs that servers issue, each with a proof (an HMAC) of its principal (AC 9).

A server stores nothing for an ID that it issues, because every server can verify the proof, in
every generation. Clients have allocated the IDs below `FIRST_ISSUED_ID` in ZooKeeper themselves.

If a cluster is rebuilt or restored, the counter of issued IDs may be reset, and servers may issue
IDs a second time. Therefore the permissions get a new signing key, which makes the proofs of the
earlier IDs invalid.
"""

import hmac
from struct import Struct
from typing import Final, NamedTuple

from waltz_core.records.record import ClientId

# Servers issue IDs from this number upwards. Clients that allocate their IDs in ZooKeeper use lower
# numbers, so the two ranges do not overlap.
FIRST_ISSUED_ID: Final = ClientId(1 << 30)
BEFORE_FIRST_ISSUED_ID: Final = ClientId(FIRST_ISSUED_ID - 1)
PROOF_BYTES: Final = 16
CLIENT_KEY_BYTES: Final = 32
# The value for an ID that has no proof, because the ID comes from ZooKeeper, or from a server
# without permissions.
NO_PROOF: Final = bytes(PROOF_BYTES)
# The bytes at the beginning of each signed text.
_SIGNED_LABEL: Final = b"waltz client id"
_CLIENT_ID: Final = Struct(">i")


class ClientIdentity(NamedTuple):
    """A client ID and its proof. NB: a log line must not contain the proof."""

    client_id: int
    proof: bytes = NO_PROOF

    def __repr__(self) -> str:
        return f"ClientIdentity({self.client_id})"


def proof_of(client_key: bytes, client_id: int, principal: str) -> bytes:
    """Return the proof that a client ID belongs to a principal: an HMAC of `PROOF_BYTES` bytes."""
    # The label and the ID have fixed lengths, so the signed bytes of two different IDs or
    # principals differ.
    signed = _SIGNED_LABEL + _CLIENT_ID.pack(client_id) + principal.encode()
    return hmac.digest(client_key, signed, "sha256")[:PROOF_BYTES]


def is_valid_proof(proof: bytes, client_key: bytes, client_id: int, principal: str) -> bool:
    """Whether `proof` is the proof that the client ID belongs to the principal."""
    return hmac.compare_digest(proof, proof_of(client_key, client_id, principal))
