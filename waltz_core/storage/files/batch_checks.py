"""Checks of batches: their records, their bounds, and the hash chain through them.

An append, a repair and the opening of a log check bytes from different sources. All of them use
these checks, so that a batch is valid for all of them or for none.

Rules:
    1. A batch is valid if all its records exist and are valid, and if the chain hash in its entry
       is right. This chain hash must follow from the previous chain hash and the CRCs of the
       records.
    2. This code changes nothing. The caller decides what to do with an invalid batch.
    3. A batch with the session `RECONSTRUCTED` replaces a batch whose entry was lost. Its chain
       hash and the chain hash of the next batch prove nothing about the records of these batches.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ReadFailed
from waltz_core.records import raw_records
from waltz_core.records.record import (
    NO_SESSION,
    RECONSTRUCTED,
    Chain,
    LineageEntry,
    TransactionId,
    next_chain,
)
from waltz_core.storage.files.format import IdRange
from waltz_core.storage.files.segments import Segments

I64 = npt.NDArray[np.int64]


def check_chain(
    entries: Sequence[LineageEntry], first: TransactionId, chain: Chain, record_crcs: bytes
) -> int | None:
    """Return the index of the first batch that does not continue the previous one.

    `first` and `chain` are the ID and the chain hash with which the first batch must begin;
    `record_crcs` has the CRCs of all records. Return None if all batches are valid.
    """
    next_id = first
    for index, entry in enumerate(entries):
        crcs = record_crcs[4 * (entry.first - first) : 4 * (entry.last - first + 1)]
        if entry.first != next_id or len(crcs) != 4 * (entry.last - entry.first + 1):
            return index
        chain = next_chain(chain, entry.first, entry.last, entry.session_id, crcs)
        if chain != entry.chain:
            return index
        next_id = TransactionId(entry.last + 1)
    return None


def check_batches(
    first: TransactionId,
    lengths: I64,
    records: bytes | memoryview,
    chain_before: Chain,
    entries: Sequence[LineageEntry],
    records_crc: int | None = None,
) -> None:
    """Check that consecutive records are valid, and that their batches match them.

    `records_crc` is the CRC of all bytes, if the caller has already computed it.

    Raises:
        BadRequest: the IDs, the batches or their chain hashes do not match the records.
        ChecksumMismatch: a record's CRC does not match.
    """
    where = f"append from transaction {first} on"
    expected_bytes = raw_records.total_bytes(lengths)
    if not entries or not lengths.size or expected_bytes != len(records):
        raise BadRequest(
            f"{where}: expected one or more batches and records, and {expected_bytes} bytes of "
            f"records, found {len(entries)} batches, {lengths.size} records and {len(records)} "
            "bytes. Hint: the sender has a defect; report it as a bug."
        )
    crcs = raw_records.verified_crcs(records, lengths, first, records_crc=records_crc)
    if crcs is None:
        bad_index = raw_records.first_bad_record(records, lengths)
        if bad_index is not None:
            raise ChecksumMismatch(
                f"{where}: the CRC or the length of record {first + bad_index} is wrong"
            )
        gap_index = raw_records.first_gap(records, lengths, first)
        assert gap_index is not None
        found = raw_records.ids_of(records, lengths)[gap_index]
        raise BadRequest(f"{where}: expected transaction ID {first + gap_index}, found {found}")
    last = first + lengths.size - 1
    if entries[-1].last != last:
        raise BadRequest(
            f"{where}: expected batches up to transaction {last}, found batches up to "
            f"{entries[-1].last}"
        )
    wrong_index = check_chain(entries, first, chain_before, crcs)
    if wrong_index is not None:
        entry = entries[wrong_index]
        raise BadRequest(
            f"{where}: batch {entry.first}..{entry.last} does not continue the previous batch, or "
            "its chain hash does not match the records"
        )


def check_repaired_batches(
    segments: Segments, repaired: IdRange, damaged: Sequence[IdRange]
) -> tuple[IdRange, ...]:
    """Check the chain hashes of the repaired batches that have no damage left; return new damage.

    New damage is a wrong record in the batch of a repaired record. This wrong record is repaired
    separately.

    Raises:
        ChecksumMismatch: the records do not belong to the batch.
    """
    new_damage: list[IdRange] = []
    for chain, entry in _readable_batches(segments, repaired):
        is_damaged = any(ids.first <= entry.last and entry.first <= ids.last for ids in damaged)
        if is_damaged or entry.first > repaired.last:  # damaged, or after the repaired batches
            continue
        previous = entry_before(segments, entry.first)
        if RECONSTRUCTED in {
            entry.session_id,
            NO_SESSION if previous is None else previous.session_id,
        }:
            continue  # rule 3: the chain hash proves nothing
        crcs = _readable_crcs(segments, entry.first, entry.last)
        wrong_ids = () if crcs is not None else _wrong_ids(segments, entry, repaired)
        new_damage += wrong_ids
        if wrong_ids:
            continue
        if crcs is None or check_chain([entry], entry.first, chain, crcs) is not None:
            raise ChecksumMismatch(
                f"records {repaired.first}..{repaired.last} do not match the chain hash of "
                f"batch {entry.first}..{entry.last}"
            )
    return tuple(new_damage)


def _readable_batches(segments: Segments, ids: IdRange) -> list[tuple[Chain, LineageEntry]]:
    """Return the readable batches that overlap a range, each with the chain hash before it."""
    try:
        entries = segments.entries(*ids, ids.last - ids.first + 1)[1]
        return [(segments.entries(entry.last, entry.last, 1)[0], entry) for entry in entries]
    except (BadFormat, ChecksumMismatch, ReadFailed):
        return segments.readable_batches(*ids)


def _readable_crcs(segments: Segments, first: TransactionId, last: TransactionId) -> bytes | None:
    """Return the CRCs of the records; None if a record is wrong or unreadable."""
    with suppress(ReadFailed):
        return segments.record_crcs(first, last)
    return None


def _wrong_ids(segments: Segments, entry: LineageEntry, repaired: IdRange) -> tuple[IdRange, ...]:
    """Return the IDs of the wrong records of a batch, except the repaired records."""
    batch_ids = map(TransactionId, range(entry.first, entry.last + 1))
    other_ids = [
        transaction_id
        for transaction_id in batch_ids
        if not repaired.first <= transaction_id <= repaired.last
    ]
    return tuple(
        IdRange(transaction_id, transaction_id)
        for transaction_id in other_ids
        if _readable_crcs(segments, transaction_id, transaction_id) is None
    )


def entry_before(segments: Segments, first: TransactionId) -> LineageEntry | None:
    """Return the batch that ends before an ID; None if there is no readable one."""
    with suppress(BadFormat, ChecksumMismatch):
        entry = segments.entry_of(TransactionId(first - 1)) if first else None
        return entry if entry is not None and entry.last < first else None
    return None
