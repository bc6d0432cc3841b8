"""The proof that a client ID belongs to a principal."""

import hashlib
import hmac

from waltz_core.access.client_ids import (
    FIRST_ISSUED_ID,
    NO_PROOF,
    ClientIdentity,
    is_valid_proof,
    proof_of,
)

KEY = bytes(range(32))


def test_a_proof_is_an_hmac_of_label_id_and_principal():
    """Decision 048: every server must compute the same bytes, also one of a later version."""
    signed = b"waltz client id" + b"\x40\x00\x00\x07" + b"spark-etl"
    expected = hmac.new(KEY, signed, hashlib.sha256).digest()[:16]
    assert FIRST_ISSUED_ID == 0x40000000
    assert proof_of(KEY, FIRST_ISSUED_ID + 7, "spark-etl") == expected
    assert is_valid_proof(expected, KEY, FIRST_ISSUED_ID + 7, "spark-etl")


def test_a_proof_is_valid_for_one_key_one_id_and_one_principal():
    proof = proof_of(KEY, 7, "spark-etl")
    assert is_valid_proof(proof, KEY, 7, "spark-etl")
    assert not is_valid_proof(proof, bytes(32), 7, "spark-etl")
    assert not is_valid_proof(proof, KEY, 8, "spark-etl")
    assert not is_valid_proof(proof, KEY, 7, "spark-et")
    assert not is_valid_proof(NO_PROOF, KEY, 7, "spark-etl")
    assert not is_valid_proof(b"", KEY, 7, "spark-etl")


def test_the_text_of_a_client_identity_does_not_show_its_proof():
    identity = ClientIdentity(7, proof_of(KEY, 7, "spark-etl"))
    assert repr(identity) == str(identity) == "ClientIdentity(7)"
