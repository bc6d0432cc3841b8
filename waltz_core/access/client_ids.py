"""Client IDs that servers issue, and the proof that an ID belongs to a principal (AC 9).

A server stores nothing for an ID that it issues: the proof is valid at every server, and in every
generation. IDs below `FIRST_ISSUED` are those that clients took from ZooKeeper themselves.

Where the counter of issued IDs begins again, after a rebuild or a restore, the permissions get a
new key. So proofs of IDs that were issued before do not match IDs that are issued again.
"""

import hmac
from struct import Struct
from typing import Final, NamedTuple

from waltz_core.records.record import ClientId

# Servers count from here on, so that no other process can make their IDs repeat.
FIRST_ISSUED: Final = ClientId(1 << 30)
NONE_ISSUED: Final = ClientId(FIRST_ISSUED - 1)
PROOF_BYTES: Final = 16
KEY_BYTES: Final = 32
# There is no proof: of an ID from ZooKeeper, or from a server without permissions.
NO_PROOF: Final = bytes(PROOF_BYTES)
_LABEL: Final = b"waltz client id"
_ID: Final = Struct(">i")


class ClientIdentity(NamedTuple):
    """A client ID and its proof. NB: the proof must not be in a log line."""

    client_id: int
    proof: bytes = NO_PROOF

    def __repr__(self) -> str:
        return f"ClientIdentity({self.client_id})"


def proof_of(client_key: bytes, client_id: int, principal: str) -> bytes:
    """Return the proof that a client ID belongs to a principal."""
    # The label and the ID have fixed lengths, so no two pairs have the same bytes.
    signed = _LABEL + _ID.pack(client_id) + principal.encode()
    return hmac.digest(client_key, signed, "sha256")[:PROOF_BYTES]


def is_proof(proof: bytes, client_key: bytes, client_id: int, principal: str) -> bool:
    """Whether a proof is that of a client ID and a principal."""
    return hmac.compare_digest(proof, proof_of(client_key, client_id, principal))
